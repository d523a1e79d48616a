"""gemma3: q/k norms, five window layers for every full one, two RoPE bases."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from ikpy.models.gemma import Gemma, scale_of_queries
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.rope import RopeParams
from ikpy.models.weights import Presence

WINDOW_FREQ_BASE = 10000.0
LAYERS_27B = 62


class Gemma3(Gemma):
    """Every sixth layer attends to everything; the others rotate with a fixed base and scale."""

    output_weight: ClassVar[Presence] = "optional"
    post_norms = "required"
    qk_norm = "required"

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.n_swa = keys.u32("attention.sliding_window")
        return hp

    def window(self, layer: int) -> tuple[str, int]:
        return ("none", 0) if (layer + 1) % 6 == 0 else ("sliding", self.hp.n_swa)

    def rope_params(self, layer: int, context: RopeParams) -> RopeParams:
        if self.window(layer)[0] == "none":
            return context
        return replace(context, freq_base=WINDOW_FREQ_BASE, freq_scale=1.0)

    def attention_scale(self, layer: int) -> float:
        return scale_of_queries(self, layer, LAYERS_27B)
