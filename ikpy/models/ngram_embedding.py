"""Embeddings of hashed n-grams (PLE of Qwen4-Exp): rows of a large table, chosen by a token and those before it, which
every residual stream takes a share of.

In shapes: T tokens, n streams of D elements, H heads of R elements, as many for each length of an n-gram.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ikpy.errors import FileFormatError, UnsupportedError
from ikpy.graph.builder import MAX_CONV_TAPS, MAX_HASHED_TOKEN
from ikpy.graph.ir import F32, I64, Value, external
from ikpy.models.batch import BatchGraph, StateSpec
from ikpy.models.keys import Keys
from ikpy.models.weights import WeightSource

TABLE = "per_layer_token_embd.weight"
LEAST_GATE = 1e-6  # of whose magnitude the root is taken
MAX_HEADS, MAX_NGRAM = 256, 16
MAX_ROWS = 2**31


@dataclass(frozen=True)
class NgramSizes:
    """The layer that adds the embeddings; tokens of the longest n-gram, heads of each length, elements of a head, taps
    of the convolution and the token that ends texts. multipliers: of the tokens of an n-gram; sizes and offsets: rows
    of every head, and where they begin.
    """

    layer: int
    n: int
    per_length: int
    row: int
    taps: int
    eos: int
    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]

    @classmethod
    def read(cls, keys: Keys, n_layer: int) -> NgramSizes | None:
        """Sizes of a file, None for one without such a layer. FileFormatError for those that no model has,
        UnsupportedError for several layers."""
        path = keys.gguf.path
        layers = keys.integers("ple.layers") if keys.has("ple.layers") else []
        if not layers:
            return None
        if len(layers) > 1:
            raise UnsupportedError(f"{path}: n-gram embeddings in {len(layers)} layers; one is supported")
        n, per_length = keys.u32("ple.ngram_size"), keys.u32("ple.heads_per_ngram")
        row, taps = keys.u32("embedding_length_per_layer_input"), keys.u32("ple.conv_kernel")
        n_heads = (n - 1) * per_length
        if (
            not 2 <= n <= MAX_NGRAM
            or not 1 <= n_heads <= MAX_HEADS
            or min(row, taps) < 1
            or not 0 <= layers[0] < n_layer
        ):
            raise FileFormatError(
                f"{path}: impossible n-gram embeddings: layer {layers[0]}, ngram_size {n}, heads_per_ngram "
                f"{per_length}, {row} elements, conv_kernel {taps}"
            )
        found = cls(
            layer=layers[0],
            n=n,
            per_length=per_length,
            row=row,
            taps=taps,
            eos=keys.u32("ple.eos_token_id"),
            multipliers=tuple(keys.integers("ple.layer_multipliers", n)),
            sizes=tuple(keys.integers("ple.head_vocab_sizes", n_heads)),
            offsets=tuple(keys.integers("ple.head_offsets", n_heads)),
        )
        found._check(path)
        return found

    def _check(self, path: object) -> None:
        if min(self.sizes) < 1 or self.n_rows > MAX_ROWS or max(self.multipliers) >= 2**63:
            raise FileFormatError(f"{path}: impossible rows of n-grams: sizes {self.sizes}, offsets {self.offsets}")
        if self.eos >= MAX_HASHED_TOKEN:
            raise FileFormatError(f"{path}: ple.eos_token_id {self.eos} is no token")
        if self.n_past >= MAX_CONV_TAPS:
            raise UnsupportedError(
                f"{path}: a convolution of {self.taps} taps {self.n} tokens apart; at most {MAX_CONV_TAPS} tokens are "
                "supported"
            )

    @property
    def n_heads(self) -> int:
        """Rows of a token."""
        return (self.n - 1) * self.per_length

    @property
    def width(self) -> int:
        """Elements of a token's rows."""
        return self.n_heads * self.row

    @property
    def n_rows(self) -> int:
        """Rows that the heads reach."""
        return max(size + offset for size, offset in zip(self.sizes, self.offsets, strict=True))

    @property
    def n_past(self) -> int:
        """Tokens before a token that the convolution reads."""
        return (self.taps - 1) * self.n

    def states(self, wide: int) -> list[StateSpec]:
        """Tokens before the next one, and what the convolution reads of n D = `wide` channels."""
        return [StateSpec("tokens", (self.n - 1,)), StateSpec("conv_ple", (self.n_past, wide))]


@dataclass
class NgramLayer:
    """The table [R, rows] and constants of the hashes; key [H R, n D] and value [H R, D] read the rows of a token;
    ones: f32 [D, 1], whose product is a sum.
    """

    table: Value
    hashes: Value
    key: Value
    value: Value
    norm_key: Value
    norm_query: Value
    norm_conv: Value
    conv: Value
    ones: Value


def take_ngrams(weights: WeightSource, prefix: str, sizes: NgramSizes, d: int, n_streams: int) -> NgramLayer:
    """The tensors of the layer; of the table nothing is read. FileFormatError if it has too few rows."""
    info = weights.gguf.tensors.get(TABLE)
    n_rows = sizes.n_rows if info is None else max(sizes.n_rows, info.shape[-1])
    constants = np.array([*sizes.multipliers, *sizes.sizes, *sizes.offsets], np.int64)
    wide, ones = n_streams * d, np.ones(d, np.float32)
    return NgramLayer(
        table=weights.take(TABLE, (sizes.row, n_rows)),
        hashes=external(constants.ctypes.data, constants, I64, constants.shape, f"{prefix}.ple_hashes", "weight"),
        key=weights.take(f"{prefix}.ple_key.weight", (sizes.width, wide)),
        value=weights.take(f"{prefix}.ple_value.weight", (sizes.width, d)),
        norm_key=weights.take(f"{prefix}.ple_norm_key.weight", (wide,)),
        norm_query=weights.take(f"{prefix}.ple_norm_query.weight", (wide,)),
        norm_conv=weights.take(f"{prefix}.ple_norm_conv.weight", (wide,)),
        conv=weights.take(f"{prefix}.ple_conv1d.weight", (sizes.taps, wide)),
        ones=external(ones.ctypes.data, ones, F32, (d, 1), f"{prefix}.ple_ones", "weight"),
    )


def embedded_ngrams(b: BatchGraph, layer: NgramLayer, sizes: NgramSizes) -> Value:
    """The rows of every token, one behind the other: [H R, T]."""
    g, (state, kept) = b.graph, b.recurrent[sizes.layer, "tokens"]
    rows = g.ngram_rows(
        b.inputs["tokens"],
        layer.hashes,
        state,
        b.inputs["seq"],
        n_heads=sizes.n_heads,
        eos=sizes.eos,
        kept=b.kept(kept),
    )
    found = g.get_rows(layer.table, rows.reshape(sizes.n_heads * b.n_tokens))
    return found.reshape(sizes.width, b.n_tokens)


def add_ngrams(b: BatchGraph, layer: NgramLayer, sizes: NgramSizes, streams: Value, eps: float) -> Value:
    """Streams [D, n, T] plus the values of their tokens' n-grams, gated by keys, and a convolution of these."""
    g = b.graph
    d, n, n_tokens = streams.shape[:3]
    embedded = embedded_ngrams(b, layer, sizes)
    keys = g.mul_mat(layer.key, embedded).reshape(d, n, n_tokens)
    keys = g.rms_norm(keys, layer.norm_key.reshape(d, n), eps)
    queries = g.rms_norm(streams, layer.norm_query.reshape(d, n), eps)
    ones = layer.ones.reshape(d, 1)
    ones.name = ""  # no matrix that statistics count
    scores = g.mul_mat(ones, g.mul(keys, queries).reshape(d, n * n_tokens))
    gate = g.unary(g.signed_root(g.scale(scores, 1.0 / math.sqrt(d)), LEAST_GATE), "sigmoid")
    value = g.mul_mat(layer.value, embedded)
    repeated = value.view((d, n, n_tokens), (0, value.strides[1]))
    gated = g.mul(repeated, gate.reshape(1, n, n_tokens))
    normed = g.rms_norm(gated, layer.norm_conv.reshape(d, n), eps).reshape(d * n, n_tokens)
    past, kept = b.recurrent[sizes.layer, "conv_ple"]
    mixed = g.causal_conv(
        normed, layer.conv, past, b.inputs["seq"], silu=True, dilation=sizes.n, kept=b.kept(kept)
    ).reshape(d, n, n_tokens)
    return g.add(streams, g.add(gated, mixed))
