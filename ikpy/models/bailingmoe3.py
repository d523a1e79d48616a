"""bailingmoe3: Ling 3.0, delta attention (KDA) whose decay is bounded, between layers of gated latent attention."""

from __future__ import annotations

from dataclasses import replace

from ikpy.errors import UnsupportedError
from ikpy.graph.ir import Value
from ikpy.models.blocks import DenseFFN, Experts
from ikpy.models.feed_forward import limited, swiglu_limits
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.kimi_linear import DeltaAttention, KimiLinear
from ikpy.models.latent_attention import LatentAttention
from ikpy.models.routing import expert_groups
from ikpy.models.weights import WeightSource


class BailingMoe3(KimiLinear):
    """As kimi-linear, but layers that attend are rotated, gates are made by one matrix, and routing is limited to the
    best groups of experts."""

    has_rope = True
    output_weight = "optional"
    prediction_norms = ("layer_output_norm",)
    rates_are_negative = False

    def read_hparams(self, keys: Keys) -> HParams:
        hp, where = super().read_hparams(keys), keys.gguf.path
        if not keys.boolean("kda.safe_gate", True):
            raise UnsupportedError(f"{where}: {keys.arch}.kda.safe_gate false is not supported")
        self.read_lower_bound(keys)
        hp.n_ff_shared = keys.u32("expert_shared_feed_forward_length", 0) or hp.n_ff_shared or hp.n_ff_exp
        hp.routing = replace(hp.routing, groups=expert_groups(keys, hp.n_expert, 1), limited=True)
        n_all = hp.n_layer + self.n_predict_layers
        self.limits = swiglu_limits(keys, n_all, "swiglu_clamp_exp")
        self.shared_limits = swiglu_limits(keys, n_all, "swiglu_clamp_shexp")
        return hp

    # tensors

    def take_gate(self, weights: WeightSource, name: str) -> tuple[Value, ...]:
        return (weights.take(f"{name}_a.weight", (self.hp.n_embd, self.n_channels)),)

    def _load_attention(  # type: ignore[override]
        self, weights: WeightSource, il: int, prefix: str
    ) -> LatentAttention | DeltaAttention:
        attn = super()._load_attention(weights, il, prefix)
        if isinstance(attn, LatentAttention):
            attn.gate = weights.take(f"{prefix}.attn_gate.weight", (self.hp.n_embd, self.hp.n_head[0]))
        return attn

    def _load_ffn(self, weights: WeightSource, il: int, prefix: str) -> DenseFFN | Experts:
        return limited(super()._load_ffn(weights, il, prefix), self.limits[il], self.shared_limits[il])
