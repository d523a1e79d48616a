"""gemma2: norms after both branches, sliding window on even layers, capped scores and logits."""

from __future__ import annotations

from ikpy.models.gemma import Gemma, scale_of_queries
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys

LAYERS_27B = 46


class Gemma2(Gemma):
    """Gemma with sandwich norms and soft caps."""

    post_norms = "required"

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.n_swa = keys.u32("attention.sliding_window", 4096)
        hp.attn_softcap = keys.f32("attn_logit_softcapping", 50.0)
        hp.final_softcap = keys.f32("final_logit_softcapping", 30.0)
        return hp

    def window(self, layer: int) -> tuple[str, int]:
        return ("sliding", self.hp.n_swa) if layer % 2 == 0 else ("none", 0)

    def attention_scale(self, layer: int) -> float:
        return scale_of_queries(self, layer, LAYERS_27B)
