"""qwen3moe: qwen3 attention with softmax-routed, renormalised experts."""

from __future__ import annotations

from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.qwen3 import Qwen3


class Qwen3Moe(Qwen3):
    """Every layer is a mixture of experts; expert width falls back to feed_forward_length / experts used."""

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.n_ff_exp = keys.u32("expert_feed_forward_length", 0) or hp.n_ff[0] // max(1, hp.n_expert_used)
        return hp
