"""gemma3: q/k norms, five window layers for every full one, two RoPE bases."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

from ikpy.models.gemma import Gemma
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
        hp = self.hp
        # The file does not say; the 27B model divides by sqrt(n_embd / n_head) instead of the head size.
        return 1.0 / math.sqrt(hp.n_embd / hp.n_head[0] if hp.n_layer == LAYERS_27B else self.head_sizes(layer).k)
