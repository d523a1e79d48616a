"""t5: T5, T5 v1.1, FLAN-T5, mT5, UMT5 and MADLAD (arXiv:1910.10683), an encoder and a decoder.

The cells of a sequence's first tokens are those of the text that the encoder reads: while it does, they hold the keys
and values of its layers, and behind its last layer those that the decoder's layers attend to.
"""

from __future__ import annotations

import math

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.models.base import Decoder
from ikpy.models.batch import BatchGraph, CacheSpec, GraphParams
from ikpy.models.blocks import attend_cached, cached_attention, store_heads
from ikpy.models.hparams import HParams, read_hparams
from ikpy.models.keys import MAX_LAYERS, Keys
from ikpy.models.relative_biases import read_buckets
from ikpy.models.sparse_attention import Visible
from ikpy.models.t5_layers import Projections, heads, take_layers, with_network
from ikpy.models.weights import WeightSource


class T5(Decoder):
    """Both stacks share the token embedding; hp.n_layer counts the layers of the higher one."""

    has_rope = False

    def read_hparams(self, keys: Keys) -> HParams:
        hp = read_hparams(keys, has_rope=False)
        self.n_buckets = read_buckets(keys)
        self.n_encoder, self.n_decoder = hp.n_layer, decoder_layers(keys)
        extra = self.n_layers(keys) - hp.n_layer
        hp.n_layer += extra
        hp.n_ff, hp.n_head, hp.n_head_kv = ([*x, *x[-1:] * extra] for x in (hp.n_ff, hp.n_head, hp.n_head_kv))
        self._start = keys.u32("decoder_start_token_id", 0)
        if self._start >= hp.n_vocab:
            raise FileFormatError(
                f"{keys.gguf.path}: {keys.arch}.decoder_start_token_id is {self._start}; there are {hp.n_vocab} tokens"
            )
        return hp

    @classmethod
    def n_layers(cls, keys: Keys) -> int:
        return max(super().n_layers(keys), decoder_layers(keys))

    @property
    def decoder_start(self) -> int | None:
        return int(self._start)

    def shift_part(self, layer: int, params: GraphParams) -> tuple[str, int, int] | None:
        return None

    def cache_specs(self, layer: int, params: GraphParams) -> list[CacheSpec]:
        hp = self.hp
        return [
            CacheSpec("k", hp.n_embd_head_k, hp.n_head[0], params.types_k[layer]),
            CacheSpec("v", hp.n_embd_head_v, hp.n_head[0], params.types_v[layer]),
        ]

    # tensors

    def load(self, weights: WeightSource) -> None:
        hp = self.hp
        self.norm_biases = {}
        self.token_embd = weights.take("token_embd.weight", (hp.n_embd, hp.n_vocab))
        self.encoder = take_layers(weights, hp, "enc", self.n_encoder, self.n_buckets)
        self.encoder_norm = self.take_norm(weights, "enc.output_norm")
        self.decoder = take_layers(weights, hp, "dec", self.n_decoder, self.n_buckets)
        self.output_norm = self.take_norm(weights, "dec.output_norm")
        output = weights.take("output.weight", (hp.n_embd, hp.n_vocab), required=False)
        self.output, self.logit_bias = output or self.token_embd, None
        if output is None:  # T5 1.0, whose tied output matrix reads smaller rows
            hp.logit_scale = 1 / math.sqrt(hp.n_embd)

    # graph

    def projected(self, b: BatchGraph, attn: Projections, h: Value) -> tuple[Value, Value]:
        """k [dk, H, T] and v [dv, H, T] of h [D, T]."""
        hp = self.hp
        return heads(b, attn.k, h, hp.n_embd_head_k), heads(b, attn.v, h, hp.n_embd_head_v)

    def queries(self, b: BatchGraph, attn: Projections, h: Value) -> Value:
        """q [dk, H, T] of h [D, T]."""
        return heads(b, attn.q, h, self.hp.n_embd_head_k)

    def encode(self, b: BatchGraph, il: int, x: Value) -> Value:
        """A layer of the encoder."""
        layer, g, eps = self.encoder[il], b.graph, self.hp.norm_eps
        h = g.rms_norm(x, layer.attn.norm, eps)
        q, (k, v) = self.queries(b, layer.attn, h), self.projected(b, layer.attn, h)
        attended = cached_attention(b, il, q, k, v, scale=1.0, biases=layer.biases)
        return with_network(b, layer, g.add(x, g.mul_mat(layer.attn.out, attended)), eps)

    def decode(self, b: BatchGraph, il: int, x: Value) -> Value:
        """A layer of the decoder: attention to its own tokens, then to the encoder's text."""
        layer, g, eps = self.decoder[il], b.graph, self.hp.norm_eps
        assert layer.cross is not None
        h = g.rms_norm(x, layer.attn.norm, eps)
        q = self.queries(b, layer.attn, h)
        store_heads(b, il, *self.projected(b, layer.attn, h))
        own = Visible(b.text_mask(seen=False))
        attended = attend_cached(b, il, q, scale=1.0, seen=own, biases=layer.biases)
        x = g.add(x, g.mul_mat(layer.attn.out, attended))
        q = self.queries(b, layer.cross, g.rms_norm(x, layer.cross.norm, eps))
        attended = attend_cached(b, il, q, scale=1.0, seen=Visible(b.text_mask(seen=True)))
        attended, x = b.keep_outputs(il, self.n_decoder, attended, x)
        return with_network(b, layer, g.add(x, g.mul_mat(layer.cross.out, attended)), eps)

    def build(self, b: BatchGraph) -> Value | None:
        if b.encodes:
            self.build_encoder(b)
            return None
        return self.build_decoder(b)

    def build_encoder(self, b: BatchGraph) -> None:
        """Keys and values of the text for all layers of the decoder; the states where outputs are asked for."""
        x = self.embed(b)
        for il in range(self.n_encoder):
            x = self.encode(b, il, x)
        states = self.norm(b, x, self.encoder_norm)
        for il, layer in enumerate(self.decoder):
            assert layer.cross is not None
            store_heads(b, il, *self.projected(b, layer.cross, states))
        if b.n_outputs:
            kept = b.keep_outputs(0, 1, states)
            b.embeddings = kept[0]

    def build_decoder(self, b: BatchGraph) -> Value | None:
        """Logits of the tokens behind the texts."""
        x = self.embed(b)
        for il in range(self.n_decoder):
            x = b.steer(il, self.decode(b, il, x))
        if b.n_outputs == 0:
            return None
        b.embeddings = self.norm(b, x, self.output_norm)
        return self.logits(b, b.embeddings)


def decoder_layers(keys: Keys) -> int:
    """Layers of the decoder: as many as the encoder has, unless the file says so."""
    n = int(keys.u32("decoder_block_count", keys.u32("block_count")))
    if not 0 < n <= MAX_LAYERS:
        raise FileFormatError(
            f"{keys.gguf.path}: {keys.arch}.decoder_block_count is {n}; 1 to {MAX_LAYERS} are possible"
        )
    return n
