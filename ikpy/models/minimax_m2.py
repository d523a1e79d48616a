"""minimax-m2: one q/k norm over all heads together, biased expert selection."""

from __future__ import annotations

from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.routing import Routing, gating_func
from ikpy.models.transformer import Transformer


class MiniMaxM2(Transformer):
    """Every layer has experts of width feed_forward_length; RoPE on the first n_rot elements of each head."""

    selection_bias = "required"
    qk_norm = "required"
    norms_all_heads = True
    rope_neox = True
    rotates_whole_head = False

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        keys.u32("expert_feed_forward_length")  # present in every file; the experts have feed_forward_length
        gating = gating_func(keys, keys.u32("expert_gating_func", 1))
        hp.routing = Routing(hp.n_expert_used, gating, normalize=True)
        return hp
