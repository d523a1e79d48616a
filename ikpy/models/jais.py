"""jais: Jais 13B, 30B and their kin of 590M to 6.7B. Linear biases (ALiBi), LayerNorm, biases (arXiv:2308.16149)."""

from __future__ import annotations

from ikpy.models.alibi import LinearBiases, read_max_bias
from ikpy.models.hparams import HParams
from ikpy.models.keys import REQUIRED, Keys


class Jais(LinearBiases):
    """Scores are divided by the size of a head, not by its root; a SwiGLU with biases."""

    layer_norm = True
    norm_bias = "required"
    fused_qkv = "optional"
    qkv_bias = "required"
    out_bias = "required"
    ffn_bias = "required"

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.max_alibi_bias = read_max_bias(keys, REQUIRED)
        return hp

    def attention_scale(self, layer: int) -> float:
        return 1.0 / self.head_sizes(layer).k
