"""eagle3: EAGLE-3 drafters (arXiv:2503.01840), a layer that reads what three layers of another model read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ikpy.errors import FileFormatError, UnsupportedError, UsageError
from ikpy.graph.ir import Value
from ikpy.models.base import Decoder, LayerInputs
from ikpy.models.batch import BatchGraph
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.transformer import Layer, Transformer
from ikpy.models.weights import WeightSource
from ikpy.quants import registry

MAPPING = "d2t"
"""Tensor of the target's token for every row of the output matrix."""
JOINING = "fc.weight"
"""Matrix that joins what the layers of the target read."""
N_READ = 3
I64 = registry.by_name("i64").id


@dataclass
class ReadingLayer:
    """The layer, and the norm of the states that it reads beside the embeddings."""

    layer: Layer
    state_norm: Value


class Eagle3(Transformer):
    """The residual stream begins with the state behind the token before; attention reads the normed embedding and the
    normed state side by side. Embedding and output matrix may be the target's.
    """

    drafts_as = "eagle3"
    why_not_alone = "the drafter reads what layers of another model read"
    rope_freqs_weight = "optional"
    predicts_from_normed = False
    is_beside = False

    # hyper-parameters and tensors

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        self.target_layers = tuple(keys.integers("target_layers", N_READ))
        self.target_size = keys.u32("target_hidden_size")
        self.norms_residual = keys.boolean("norm_before_residual", False)
        if keys.boolean("norm_before_fc", False):
            raise UnsupportedError(f"{keys.gguf.path}: {keys.arch}.norm_before_fc is not supported")
        if hp.n_layer != 1:
            raise FileFormatError(f"{keys.gguf.path}: {hp.n_layer} layers; drafters of this kind have one")
        return hp

    @property
    def predicts_alone(self) -> bool:
        return not self.is_beside

    @property
    def reads_states(self) -> bool:
        return True

    def load(self, weights: WeightSource) -> None:
        hp, d = self.hp, self.hp.n_embd
        self.norm_biases, self.logit_bias = {}, None
        self.target_tokens = self._read_mapping(weights)
        embedding = weights.take("token_embd.weight", (d, hp.n_vocab), required=False)
        n_rows = hp.n_vocab if self.target_tokens is None else len(self.target_tokens)
        output = weights.take("output.weight", (d, n_rows), required=self.target_tokens is not None)
        self.own_ends = embedding, output
        self.output_norm = self.take_norm(weights, self.output_norm_name)
        self.joining = weights.take(JOINING, (N_READ * self.target_size, d))
        self.load_global(weights)
        self.layers = [self.load_layer(weights, 0, "blk.0")]

    def _read_mapping(self, weights: WeightSource) -> np.ndarray | None:
        """Token i64 of the target for every row of the output matrix; None if it has a row for each of them."""
        info = weights.gguf.tensors.get(MAPPING)
        if info is None:
            return None
        weights.skip(MAPPING)
        path, n_vocab = weights.gguf.path, self.hp.n_vocab
        if info.type_id != I64 or len(info.shape) != 1:
            raise FileFormatError(f"{path}: tensor '{MAPPING}' must be a list of i64")
        if weights.header_only:
            return np.zeros(info.shape[0], np.int64)
        tokens = weights.gguf.data(info).view("<i8")
        if not len(tokens) or tokens.min() < 0 or tokens.max() >= n_vocab:
            raise FileFormatError(f"{path}: tensor '{MAPPING}' names tokens outside the vocabulary of {n_vocab}")
        return tokens.astype(np.int64)

    def load_projections(
        self, weights: WeightSource, prefix: str, n_q: int, n_k: int, n_v: int
    ) -> tuple[Value, Value, Value]:
        d = 2 * self.hp.n_embd
        q, k, v = (weights.take(f"{prefix}.attn_{x}.weight", (d, n)) for x, n in (("q", n_q), ("k", n_k), ("v", n_v)))
        return q, k, v

    def load_layer(self, weights: WeightSource, il: int, prefix: str) -> ReadingLayer:  # type: ignore[override]
        norm = weights.take(f"{prefix}.attn_norm_2.weight", (self.hp.n_embd,))
        return ReadingLayer(super().load_layer(weights, il, prefix), norm)

    def beside(self, target: WeightSource, n_layer: int) -> LayerInputs:
        """Takes what the file leaves out from the target, and tells what that must give. UsageError if they do not
        fit.
        """
        hp, path = self.hp, target.gguf.path
        if any(il >= n_layer for il in self.target_layers):
            raise UsageError(f"{path}: the drafter reads layer {max(self.target_layers)}, the model has {n_layer}")
        size = (hp.n_embd, hp.n_vocab)
        embedding, output = self.own_ends
        self.token_embd = embedding or target.take("token_embd.weight", size)
        own = output or target.take("output.weight", size, required=False)
        self.output = own or target.take("token_embd.weight", size)
        self.is_beside = True
        return LayerInputs(self.target_layers, self.joining)

    # graph

    def embed(self, b: BatchGraph) -> Value:
        assert b.states is not None
        # Devices get a copy: what reads the states themselves runs on the CPU.
        return b.graph.copy(b.states.reshape(self.hp.n_embd, b.n_tokens), b.graph.new(self.hp.n_embd, b.n_tokens))

    def layer(self, b: BatchGraph, il: int, x: Value) -> Value:
        reading: ReadingLayer = self.layers[il]  # type: ignore[assignment]
        g, d, layer = b.graph, self.hp.n_embd, reading.layer
        token, state = self.norm(b, Decoder.embed(self, b), layer.attn_norm), self.norm(b, x, reading.state_norm)
        both = g.new(2 * d, b.n_tokens)
        g.copy(token, both.slice0(0, d))
        g.copy(state, both.slice0(d, d))
        rows = self.attention(b, il, layer.attn, both), state if self.norms_residual else x
        return self.behind_attention(b, layer, *b.keep_outputs(il, self.hp.n_layer, *rows))
