"""gemma2: norms after both branches, sliding window on even layers, capped scores and logits."""

from __future__ import annotations

import math

from ikpy.models.gemma import Gemma
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
        hp = self.hp
        # The file does not say; the 27B model divides by sqrt(n_embd / n_head) instead of the head size.
        return 1.0 / math.sqrt(hp.n_embd / hp.n_head[0] if hp.n_layer == LAYERS_27B else self.head_sizes(layer).k)
