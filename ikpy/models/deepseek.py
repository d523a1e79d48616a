"""deepseek (V1, arXiv:2401.06066), bailingmoe (Ling 1) and deepseek2-ocr (arXiv:2510.18234): softmax-routed and
shared experts."""

from __future__ import annotations

from typing import ClassVar

from ikpy.errors import UnsupportedError
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.routing import Routing
from ikpy.models.transformer import Transformer

SOFTMAX = 1


class DeepSeek(Transformer):
    """Leading dense layers; weights of the chosen experts are not renormalised."""

    normalizes_weights: ClassVar[bool] = False
    rope_freqs_weight = "optional"

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.n_dense_layers = keys.u32("leading_dense_block_count")
        hp.n_ff_exp = keys.u32("expert_feed_forward_length")
        hp.n_ff_shared = hp.n_ff_exp * keys.u32("expert_shared_count")
        hp.routing = Routing(
            hp.n_expert_used,
            "softmax",
            normalize=self.normalizes_weights and keys.boolean("expert_weights_norm", False),
            scale=self.read_scale(keys),
        )
        return hp

    def read_scale(self, keys: Keys) -> float:
        """Factor of the weights of experts."""
        return keys.f32("expert_weights_scale")


class BailingMoe(DeepSeek):
    """The file says whether weights are renormalised."""

    normalizes_weights = True
    output_weight = "required"


class DeepSeek2Ocr(DeepSeek):
    """The text part of DeepSeek-OCR: DeepSeek V2 without latent attention. Files need not say a factor."""

    normalizes_weights = True
    rope_neox = True

    def read_hparams(self, keys: Keys) -> HParams:
        gating = keys.u32("expert_gating_func", SOFTMAX)
        if gating not in (0, SOFTMAX):
            raise UnsupportedError(
                f"{keys.gguf.path}: {keys.arch}.expert_gating_func {gating} is not supported, softmax is"
            )
        return super().read_hparams(keys)

    def read_scale(self, keys: Keys) -> float:
        return keys.f32("expert_weights_scale", 1.0) or 1.0
