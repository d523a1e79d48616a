"""eagle3: EAGLE-3 drafters (arXiv:2503.01840), a layer that reads what three layers of another model read."""

from __future__ import annotations

from dataclasses import dataclass

from ikpy.errors import FileFormatError, UnsupportedError
from ikpy.graph.ir import Value
from ikpy.models.base import Decoder
from ikpy.models.batch import BatchGraph
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.layer_reading import LayerReading
from ikpy.models.transformer import Layer
from ikpy.models.weights import WeightSource

N_READ = 3


@dataclass
class ReadingLayer:
    """The layer, and the norm of the states that it reads beside the embeddings."""

    layer: Layer
    state_norm: Value


class Eagle3(LayerReading):
    """The residual stream begins with the state behind the token before; attention reads the normed embedding and the
    normed state side by side.
    """

    drafts_as = "eagle3"
    rope_freqs_weight = "optional"

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

    def load_projections(
        self, weights: WeightSource, prefix: str, n_q: int, n_k: int, n_v: int
    ) -> tuple[Value, Value, Value]:
        d = 2 * self.hp.n_embd
        q, k, v = (weights.take(f"{prefix}.attn_{x}.weight", (d, n)) for x, n in (("q", n_q), ("k", n_k), ("v", n_v)))
        return q, k, v

    def load_layer(self, weights: WeightSource, il: int, prefix: str) -> ReadingLayer:  # type: ignore[override]
        norm = weights.take(f"{prefix}.attn_norm_2.weight", (self.hp.n_embd,))
        return ReadingLayer(super().load_layer(weights, il, prefix), norm)

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
