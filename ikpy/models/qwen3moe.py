"""qwen3moe: qwen3 attention with softmax-routed, renormalised experts (model semantics 3.5)."""

from __future__ import annotations

from ikpy.models.blocks import DenseFFN, Experts
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.qwen3 import Qwen3
from ikpy.models.weights import WeightSource


class Qwen3Moe(Qwen3):
    """Every layer is a mixture of experts; expert width falls back to feed_forward_length / experts used."""

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.extra["n_ff_exp"] = keys.u32("expert_feed_forward_length", 0)
        return hp

    def load_ffn(self, weights: WeightSource, il: int, prefix: str) -> DenseFFN | Experts:
        n_ff = self.hp.extra["n_ff_exp"] or self.hp.n_ff[il] // self.hp.n_expert_used
        return self.load_experts(weights, prefix, n_ff)
