"""olmoe: q/k norms over all heads, experts in every layer (arXiv:2409.02060)."""

from __future__ import annotations

from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.routing import Routing
from ikpy.models.transformer import Transformer


class Olmoe(Transformer):
    """Softmax routing without renormalisation; experts of width feed_forward_length."""

    qk_norm = "required"
    norms_all_heads = True
    rope_neox = True

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.routing = Routing(hp.n_expert_used, "softmax")
        return hp
