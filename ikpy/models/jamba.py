"""jamba: layers of Mamba between few that attend, dense or with experts (arXiv:2403.19887)."""

from __future__ import annotations

from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph
from ikpy.models.blocks import DenseFFN, Experts
from ikpy.models.feed_forward import take_dense, take_experts
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.mamba_layers import Mamba, MambaLayers
from ikpy.models.routing import Routing
from ikpy.models.transformer import Attention, Transformer
from ikpy.models.weights import WeightSource


class Jamba(MambaLayers, Transformer):
    """Layers without KV heads are recurrent, none knows positions; those that have a router have experts."""

    may_lack_heads = True
    has_rope = False
    rotates_whole_head = False
    inner_norms = "required"

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        self.read_mamba(keys)
        scale = keys.f32("expert_weights_scale", 0.0) or 1.0
        hp.routing = Routing(hp.n_expert_used, "softmax", normalize=False, scale=scale)
        return hp

    def load_attention(self, weights: WeightSource, il: int, prefix: str) -> Attention | Mamba:  # type: ignore[override]
        if self.has_state(il):
            return self.load_mamba(weights, prefix)
        return super().load_attention(weights, il, prefix)

    def load_ffn(self, weights: WeightSource, il: int, prefix: str) -> DenseFFN | Experts:
        hp = self.hp
        if weights.has(f"{prefix}.ffn_gate_inp.weight"):
            return take_experts(weights, prefix, hp.n_embd, hp.n_expert, hp.n_ff[il])
        return take_dense(weights, prefix, hp.n_embd, hp.n_ff[il])

    def attention(self, b: BatchGraph, il: int, attn: Attention | Mamba, h: Value) -> Value:
        if isinstance(attn, Mamba):
            return self.scan(b, il, attn, h)
        return super().attention(b, il, attn, h)
