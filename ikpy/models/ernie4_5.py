"""ernie4_5, ernie4_5-moe and paddleocr: optional biases; experts in every n-th layer; pictures."""

from __future__ import annotations

from ikpy.errors import FileFormatError
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.media import ReadsPictures
from ikpy.models.transformer import Transformer


class Ernie45(Transformer):
    """The dense model."""

    qkv_bias = "optional"
    out_bias = "optional"
    ffn_bias = "optional"


class Ernie45Moe(Ernie45):
    """Layers from leading_dense_block_count on whose number is a multiple of interleave_moe_layer_step have experts."""

    selection_bias = "optional"

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.n_ff_exp = keys.u32("expert_feed_forward_length")
        hp.n_ff_shared = keys.u32("expert_shared_feed_forward_length", 0)
        hp.n_dense_layers = keys.u32("leading_dense_block_count")
        self.moe_step = keys.u32("interleave_moe_layer_step")
        if self.moe_step <= 0:
            raise FileFormatError(f"{keys.gguf.path}: interleave_moe_layer_step must be above 0")
        return hp

    def is_moe(self, layer: int) -> bool:
        return super().is_moe(layer) and (layer + 1) % self.moe_step == 0


class PaddleOcr(ReadsPictures, Ernie45):
    """The text part of PaddleOCR-VL (arXiv:2510.14528)."""

    rope_neox = True
