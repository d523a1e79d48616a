"""gemma: scaled embeddings, GELU, tied output."""

from __future__ import annotations

import math
from typing import ClassVar

from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.transformer import Transformer
from ikpy.models.weights import Presence


class Gemma(Transformer):
    """Embeddings times sqrt(n_embd); norm weights in the file contain the +1 already."""

    output_weight: ClassVar[Presence] = "none"
    rope_neox = True
    rotates_whole_head = False
    activation = "gelu"

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.embedding_scale = math.sqrt(hp.n_embd)
        return hp


def scale_of_queries(arch: Gemma, layer: int, layers_27b: int) -> float:
    """By the size of heads, which files do not say; the 27B model, told by its layers, divides by the root of
    n_embd / n_head instead."""
    hp = arch.hp
    return 1.0 / math.sqrt(hp.n_embd / hp.n_head[0] if hp.n_layer == layers_27b else arch.head_sizes(layer).k)
