"""qwen: Qwen 1, fused q, k and v with a bias."""

from __future__ import annotations

from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.transformer import Transformer


class Qwen(Transformer):
    """Files count the rows of gate and up together as the width of the network."""

    fused_qkv = "optional"
    qkv_bias = "required"
    output_weight = "required"
    rope_neox = True

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.n_ff = [n // 2 for n in hp.n_ff]
        return hp
