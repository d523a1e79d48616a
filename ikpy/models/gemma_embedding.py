"""gemma-embedding: EmbeddingGemma, Gemma 3 in which every token sees those around it (arXiv:2509.20354)."""

from __future__ import annotations

import math
from dataclasses import replace

from ikpy.models.batch import SYMMETRIC, Window
from ikpy.models.gemma3 import WINDOW_FREQ_BASE, Gemma3
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.normed_states import NormedStates
from ikpy.models.projection import Projection
from ikpy.models.rope import RopeParams
from ikpy.models.weights import WeightSource
from ikpy.models.windows import periodic_window_layers


class GemmaEmbedding(NormedStates, Gemma3):
    """Windows reach half their size to both sides. Two matrices may follow pooling."""

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        self.has_window = periodic_window_layers(keys, hp.n_layer, 6)
        return hp

    @property
    def projection(self) -> Projection | None:
        return self._projection

    def window(self, layer: int) -> Window:
        return (SYMMETRIC, self.hp.n_swa) if self.has_window[layer] else ("none", 0)

    def rope_params(self, layer: int, context: RopeParams) -> RopeParams:
        if not self.has_window[layer]:
            return context
        return replace(context, freq_base=self.hp.window_freq_base or WINDOW_FREQ_BASE, freq_scale=1.0)

    def attention_scale(self, layer: int) -> float:
        return 1.0 / math.sqrt(self.head_sizes(layer).k)

    def load_global(self, weights: WeightSource) -> None:
        super().load_global(weights)
        weights.skip("output.weight")
        self._projection = Projection.take(weights, self.hp.n_embd)
