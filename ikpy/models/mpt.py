"""mpt: MPT 7B and 30B, Replit Code. Linear biases (ALiBi) or embedded positions, LayerNorm, exact GELU."""

from __future__ import annotations

from ikpy.models.alibi import LinearBiases
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.transformer import Attention
from ikpy.models.weights import WeightSource


class Mpt(LinearBiases):
    """Biases, norms of all heads of q and k, and bounds of q, k and v where the file has them."""

    layer_norm = True
    norm_bias = "optional"
    fused_qkv = "optional"
    qkv_bias = "optional"
    out_bias = "optional"
    ffn_bias = "optional"
    qk_norm = "optional"
    head_norm_bias = "optional"
    norms_all_heads = True
    activation = "gelu_erf"
    gated_ffn = False

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.qkv_clamp = keys.f32("attention.clamp_kqv", 0.0)
        return hp

    def load(self, weights: WeightSource) -> None:
        self.embeds_positions = weights.has("position_embd.weight")  # type: ignore[misc]
        super().load(weights)

    def divisible_heads(self, layer: int) -> int:
        # Without norms of all heads together, heads may lie apart.
        return 0 if self.has_head_norms else self.hp.n_head_kv[layer]

    def load_attention(self, weights: WeightSource, il: int, prefix: str) -> Attention:
        attn = super().load_attention(weights, il, prefix)
        self.has_head_norms = attn.q_norm is not None
        return attn
