"""gemma-embedding: EmbeddingGemma, Gemma 3 in which every token sees those around it (arXiv:2509.20354)."""

from __future__ import annotations

import math
from dataclasses import replace

from ikpy.graph.ir import Value
from ikpy.models.batch import SYMMETRIC, BatchGraph, GraphParams, Window
from ikpy.models.gemma3 import WINDOW_FREQ_BASE, Gemma3
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.projection import Projection
from ikpy.models.rope import RopeParams
from ikpy.models.weights import WeightSource
from ikpy.models.windows import periodic_window_layers


class GemmaEmbedding(Gemma3):
    """Windows reach half their size to both sides; the normed states of the last layer are the result. Two matrices may
    follow pooling.
    """

    output_weight = "none"

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.causal = False
        self.has_window = periodic_window_layers(keys, hp.n_layer, 6)
        return hp

    @property
    def is_encoder(self) -> bool:
        return True

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

    def shift_part(self, layer: int, params: GraphParams) -> tuple[str, int, int] | None:
        return None

    def load_global(self, weights: WeightSource) -> None:
        super().load_global(weights)
        weights.skip("output.weight")
        self._projection = Projection.take(weights, self.hp.n_embd)

    def build(self, b: BatchGraph) -> Value | None:
        x = self.embed(b)
        for il in range(self.hp.n_layer):
            x = b.steer(il, self.layer(b, il, x))
        if b.n_outputs:
            b.embeddings = self.norm(b, x, self.output_norm)
        return None
