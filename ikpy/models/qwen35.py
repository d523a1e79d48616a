"""qwen35 and qwen35moe: Qwen3.5 (text), gated delta rule and gated attention, dense or with experts."""

from __future__ import annotations

from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph
from ikpy.models.blocks import DenseFFN, Experts
from ikpy.models.delta_net import DeltaInputs, DeltaNet, GatedDeltaNet
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.media import ReadsPictures
from ikpy.models.weights import WeightSource


class Qwen35(ReadsPictures, GatedDeltaNet):
    """Attention as that of qwen3next, rotated in interleaved sections where there are pictures."""

    interleaves_sections = True

    def take_inputs(self, weights: WeightSource, prefix: str) -> dict[str, Value]:
        d, s = self.hp.n_embd, self.delta
        sizes = {"attn_qkv": s.n_channels, "attn_gate": s.n_values, "ssm_beta": s.heads, "ssm_alpha": s.heads}
        return {name: weights.take(f"{prefix}.{name}.weight", (d, n)) for name, n in sizes.items()}

    def delta_inputs(self, b: BatchGraph, net: DeltaNet, h: Value) -> DeltaInputs:
        products = {name: b.graph.mul_mat(weight, h) for name, weight in net.projections.items()}
        return DeltaInputs(*(products[name] for name in ("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha")))


class Qwen35Moe(Qwen35):
    """Softmax routing with renormalised weights; a gate value per token weighs the shared expert."""

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.n_ff_exp = keys.u32("expert_feed_forward_length", 0) or hp.n_ff[0] // max(1, hp.n_expert_used)
        hp.n_ff_shared = keys.u32("expert_shared_feed_forward_length", 0) or hp.n_ff_exp
        return hp

    def load_ffn(self, weights: WeightSource, il: int, prefix: str) -> DenseFFN | Experts:
        ffn = super().load_ffn(weights, il, prefix)
        if isinstance(ffn, Experts):
            ffn.shared_gate = weights.take(f"{prefix}.ffn_gate_inp_shexp.weight", (self.hp.n_embd,))
        return ffn
