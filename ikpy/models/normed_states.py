"""Encoders with norms before the branches: the normed states of the last layer are the result, there are no logits."""

from __future__ import annotations

from typing import ClassVar

from ikpy.graph.ir import Value
from ikpy.models.base import Decoder
from ikpy.models.batch import BatchGraph, GraphParams
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.weights import Presence


class NormedStates(Decoder):
    """Every token sees its whole text, or what a window of kind "symmetric" shows of it."""

    output_weight: ClassVar[Presence] = "none"

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.causal = False
        return hp

    @property
    def is_encoder(self) -> bool:
        return True

    def shift_part(self, layer: int, params: GraphParams) -> tuple[str, int, int] | None:
        return None

    def build(self, b: BatchGraph) -> Value | None:
        x = self.embed(b)
        for il in range(self.hp.n_layer):
            x = b.steer(il, self.layer(b, il, x))
        if b.n_outputs:
            b.embeddings = self.norm(b, x, self.output_norm)
        return None
