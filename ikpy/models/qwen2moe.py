"""qwen2moe: qwen2 attention, experts and a shared expert behind a sigmoid gate."""

from __future__ import annotations

from ikpy.models.blocks import DenseFFN, Experts
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.qwen2 import Qwen2
from ikpy.models.routing import Routing
from ikpy.models.weights import WeightSource


class Qwen2Moe(Qwen2):
    """Softmax routing without renormalisation; one gate value per token weighs the shared expert."""

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.n_ff_exp = keys.u32("expert_feed_forward_length", 0) or hp.n_ff[0] // max(1, hp.n_expert_used)
        hp.n_ff_shared = keys.u32("expert_shared_feed_forward_length", 0) or hp.n_ff[0]
        hp.routing = Routing(hp.n_expert_used, "softmax")
        return hp

    def load_ffn(self, weights: WeightSource, il: int, prefix: str) -> DenseFFN | Experts:
        ffn = super().load_ffn(weights, il, prefix)
        if isinstance(ffn, Experts):
            ffn.shared_gate = weights.take(f"{prefix}.ffn_gate_inp_shexp.weight", (self.hp.n_embd,))
        return ffn
