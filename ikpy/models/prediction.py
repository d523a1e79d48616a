"""Layers at the end of a model that predict further tokens (multi-token prediction)."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import ClassVar, TypeVar

from ikpy.errors import FileFormatError
from ikpy.gguf.reader import GGUFFile
from ikpy.graph.ir import Value
from ikpy.models.base import Architecture, Decoder
from ikpy.models.batch import BatchGraph
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.weights import WeightSource

T = TypeVar("T")


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
    prediction_norms: ClassVar[tuple[str, ...]] = ("nextn.shared_head_norm",)
    """Names of the norm behind a prediction layer that has one of its own."""
    heads_take_turns: ClassVar[bool] = False
    """Whether every further layer predicts a token more; else the first one predicts all."""
    runs_prediction_layers: ClassVar[bool] = True
    _n_heads: int = 0
    _predicts_alone: bool = False

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

    @property
    def predicts_alone(self) -> bool:
        return self._predicts_alone

    def load(self, weights: WeightSource) -> None:
        self._predicts_alone = has_heads_alone(weights.gguf)
        super().load(weights)

    def load_global(self, weights: WeightSource) -> None:
        super().load_global(weights)
        layers = range(self.hp.n_layer, self.hp.n_layer + self.n_predict_layers)
        self._n_heads = len(list(takewhile(lambda il: weights.has(f"blk.{il}.nextn.eh_proj.weight"), layers)))
        for il in layers:
            weights.skip_layer(il)

    @property
    def n_prediction_heads(self) -> int:
        if not self.runs_prediction_layers:
            return 0
        return self._n_heads if self.heads_take_turns else min(1, self._n_heads)

    @property
    def reads_states(self) -> bool:
        return self.prediction is not None

    def prediction_head(self, weights: WeightSource, number: int = 0) -> Architecture:
        if number >= self.n_prediction_heads:
            return super().prediction_head(weights, number)
        il = self.hp.n_layer + number
        d, prefix = self.hp.n_embd, f"blk.{il}.nextn"
        head = copy.copy(self)
        head._predicts_alone = False
        head.prediction = Prediction(
            weights.take(f"{prefix}.eh_proj.weight", (2 * d, d)),
            weights.take(f"{prefix}.enorm.weight", (d,)),
            self.take_state_norm(weights, f"{prefix}.hnorm.weight"),
        )
        head.layers = [self.load_prediction_layer(weights, il, f"blk.{il}")]
        head.start_at(il)
        head.take_ends(weights, f"blk.{il}")
        return head

    def take_state_norm(self, weights: WeightSource, name: str) -> Value:
        """Weights [D] of the norm of a state, or [D, n] of one of n residual streams."""
        return weights.take(name, (self.hp.n_embd,))

    def load_prediction_layer(self, weights: WeightSource, il: int, prefix: str) -> object:
        """The tensors of the layer between what joins its inputs and its ends."""
        return self.load_layer(weights, il, prefix)

    def take_ends(self, weights: WeightSource, prefix: str) -> None:
        """Embedding, norm and output matrix of this head, where it has some of its own."""
        d, n_vocab = self.hp.n_embd, self.hp.n_vocab
        own_embedding = weights.take(f"{prefix}.nextn.embed_tokens.weight", (d, n_vocab), required=False)
        own_output = weights.take(f"{prefix}.nextn.shared_head_head.weight", (d, n_vocab), required=False)
        norms = (weights.take(f"{prefix}.{name}.weight", (d,), required=False) for name in self.prediction_norms)
        self.token_embd = own_embedding or self.token_embd
        self.output = own_output or self.output
        self.output_norm = next(filter(None, norms), self.output_norm)

    def start_at(self, layer: int) -> None:
        """Makes the layers from this one on, of which only the first is kept, the model's layers."""
        hp = self.hp
        self.hp = replace(
            hp,
            n_layer=1,
            n_dense_layers=0,
            n_ff=from_layer(hp.n_ff, layer),
            n_head=from_layer(hp.n_head, layer),
            n_head_kv=from_layer(hp.n_head_kv, layer),
        )

    def embed(self, b: BatchGraph) -> Value:
        x = super().embed(b)
        return x if self.prediction is None else self.join_states(b, x, self.prediction)

    def join_states(self, b: BatchGraph, x: Value, prediction: Prediction) -> Value:
        """Embeddings x [D, T] joined with the states: [D, T], or [D, n, T] where these are of n residual streams."""
        assert b.states is not None
        g, d, n_tokens = b.graph, self.hp.n_embd, b.n_tokens
        n = self.state_size // d
        token = self.norm(b, x, prediction.token_norm)
        state = self.norm(b, b.states.reshape(d, n, n_tokens), prediction.state_norm)
        both = g.new(2 * d, n, n_tokens)
        g.copy(token.view((d, n, n_tokens), (0, token.strides[1])), both.slice0(0, d))
        g.copy(state.reshape(d, n, n_tokens), both.slice0(d, d))
        joined = g.mul_mat(prediction.joined, both.reshape(2 * d, n * n_tokens))
        return joined if n == 1 else joined.reshape(d, n, n_tokens)


def has_heads_alone(gguf: GGUFFile) -> bool:
    """Whether a file has layers that predict further tokens, but none that runs (`mtp-*.gguf`)."""
    arch = gguf.get("general.architecture")
    is_counted = bool(gguf.get(f"{arch}.nextn_predict_layers"))
    return is_counted and not any(name.startswith("blk.0.") for name in gguf.tensors)


def from_layer(values: list[T], layer: int) -> list[T]:
    """What a list of one entry per layer says from a layer on; the last entry, if it ends before."""
    return values[layer:] or values[-1:]
