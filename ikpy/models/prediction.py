"""Layers at the end of a model that predict further tokens (multi-token prediction)."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import ClassVar

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.models.base import Architecture, Decoder
from ikpy.models.batch import BatchGraph
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.weights import WeightSource


@dataclass
class Prediction:
    """How a prediction layer joins the embedding of a token with the hidden state behind the token before it."""

    joined: Value  # [2D, D], the embedding's columns first
    token_norm: Value
    state_norm: Value


class PredictionLayers(Decoder):
    """A decoder whose last n_predict_layers layers are heads that predict further tokens; they are not part of the
    model's own graph (see `prediction_head`).
    """

    prediction: Prediction | None = None
    n_predict_layers: int = 0
    prediction_norm: ClassVar[str] = "nextn.shared_head_norm"
    """Name of the norm behind a prediction layer that has one of its own."""

    @classmethod
    def n_layers(cls, keys: Keys) -> int:
        return max(0, super().n_layers(keys) - int(keys.u32("nextn_predict_layers", 0)))

    def take_off_prediction_layers(self, keys: Keys, hp: HParams) -> None:
        """Leaves the layers that run in hp.n_layer. FileFormatError if there are none."""
        self.n_predict_layers = keys.u32("nextn_predict_layers", 0)
        if self.n_predict_layers >= hp.n_layer:
            raise FileFormatError(
                f"{keys.gguf.path}: {self.n_predict_layers} prediction layers of {hp.n_layer} layers leave none to run"
            )
        hp.n_layer -= self.n_predict_layers

    def load_global(self, weights: WeightSource) -> None:
        super().load_global(weights)
        for il in range(self.hp.n_layer, self.hp.n_layer + self.n_predict_layers):
            weights.skip_layer(il)

    @property
    def reads_states(self) -> bool:
        return self.prediction is not None

    def prediction_head(self, weights: WeightSource) -> Architecture:
        il = self.hp.n_layer
        if not self.n_predict_layers or not weights.has(f"blk.{il}.nextn.eh_proj.weight"):
            return super().prediction_head(weights)
        d, n_vocab, prefix = self.hp.n_embd, self.hp.n_vocab, f"blk.{il}.nextn"
        head = copy.copy(self)
        head.layers = [self.load_layer(weights, il, f"blk.{il}")]
        head.start_at(il)
        head.prediction = Prediction(
            weights.take(f"{prefix}.eh_proj.weight", (2 * d, d)),
            weights.take(f"{prefix}.enorm.weight", (d,)),
            weights.take(f"{prefix}.hnorm.weight", (d,)),
        )
        own_embedding = weights.take(f"{prefix}.embed_tokens.weight", (d, n_vocab), required=False)
        own_output = weights.take(f"{prefix}.shared_head_head.weight", (d, n_vocab), required=False)
        own_norm = weights.take(f"blk.{il}.{self.prediction_norm}.weight", (d,), required=False)
        head.token_embd = own_embedding or self.token_embd
        head.output = own_output or self.output
        head.output_norm = own_norm or self.output_norm
        return head

    def start_at(self, layer: int) -> None:
        """Makes the layers from this one on, of which only the first is kept, the model's layers."""
        hp = self.hp
        self.hp = replace(
            hp,
            n_layer=1,
            n_dense_layers=0,
            n_ff=hp.n_ff[layer:],
            n_head=hp.n_head[layer:],
            n_head_kv=hp.n_head_kv[layer:],
        )

    def embed(self, b: BatchGraph) -> Value:
        x = super().embed(b)
        if self.prediction is None:
            return x
        assert b.states is not None
        g, d = b.graph, self.hp.n_embd
        both = g.new(2 * d, b.n_tokens)
        g.copy(self.norm(b, x, self.prediction.token_norm), both.slice0(0, d))
        g.copy(self.norm(b, b.states, self.prediction.state_norm), both.slice0(d, d))
        return g.mul_mat(self.prediction.joined, both)
