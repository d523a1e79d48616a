"""hunyuan-moe: q/k norms after RoPE, routed and shared experts."""

from __future__ import annotations

from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.transformer import Transformer


class HunyuanMoe(Transformer):
    """Experts of width feed_forward_length, renormalised softmax routing."""

    qk_norm = "required"
    norms_after_rope = True
    rope_neox = True

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        keys.u32("expert_feed_forward_length")  # present in every file; the experts have feed_forward_length
        hp.n_ff_shared = keys.u32("expert_shared_feed_forward_length")
        return hp
