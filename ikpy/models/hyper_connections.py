"""Hyper-connections: several residual streams, summed to the input of every branch and given a share of its output.
Manifold-constrained ones also mix them with each other (DeepSeek V4, GLM-5.3), independent ones do not (Tencent Hy4).

In shapes: T tokens, n streams of D elements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from ikpy.errors import FileFormatError, UsageError
from ikpy.graph.hyper_connections import MAX_STREAMS
from ikpy.graph.ir import Value
from ikpy.models.base import Decoder
from ikpy.models.batch import BatchGraph
from ikpy.models.keys import Keys
from ikpy.models.weights import WeightSource

MAX_ITERATIONS = 1000


@dataclass(frozen=True)
class StreamSizes:
    """Number of streams; steps that bring rows and columns of their mixing matrix to a sum of 1, 0 where there is no
    matrix; the epsilon of weights; factor of those of a branch's output.
    """

    n: int
    iterations: int
    epsilon: float
    magnitude: float = 2.0

    @classmethod
    def read(cls, keys: Keys) -> StreamSizes:
        """Sizes of a file. FileFormatError for a number of streams that no model has."""
        sizes = cls(
            keys.u32("hyper_connection.count"),
            keys.u32("hyper_connection.sinkhorn_iterations"),
            keys.f32("hyper_connection.epsilon"),
        )
        if not (1 <= sizes.n <= MAX_STREAMS and 1 <= sizes.iterations <= MAX_ITERATIONS):
            raise FileFormatError(
                f"{keys.gguf.path}: {sizes.n} residual streams with {sizes.iterations} iterations are not possible"
            )
        return sizes

    @classmethod
    def read_independent(cls, keys: Keys) -> StreamSizes:
        """The same of streams that are not mixed."""
        n = keys.u32("hyper_connection.count")
        if not 1 <= n <= MAX_STREAMS:
            raise FileFormatError(f"{keys.gguf.path}: {n} residual streams are not possible")
        return cls(n, 0, keys.f32("hyper_connection.epsilon"), keys.f32("hyper_connection.magnitude"))

    @property
    def n_weights(self) -> int:
        """Weights of a branch for each token: of its input, of its output, and of the matrix."""
        return (2 + self.n) * self.n if self.iterations else 2 * self.n


@dataclass
class HyperConnection:
    """What makes the weights of a branch of the streams: fn [n D, weights], base and a scale of each part."""

    fn: Value
    base: Value
    scale: Value


def take_connection(weights: WeightSource, prefix: str, d: int, sizes: StreamSizes) -> HyperConnection:
    """`prefix_fn`, `prefix_base` and `prefix_scale`."""
    return HyperConnection(
        fn=weights.take(f"{prefix}_fn.weight", (sizes.n * d, sizes.n_weights)),
        base=weights.take(f"{prefix}_base.weight", (sizes.n_weights,)),
        scale=weights.take(f"{prefix}_scale.weight", (3 if sizes.iterations else 2,)),
    )


def take_head(weights: WeightSource, prefix: str, d: int, sizes: StreamSizes) -> HyperConnection:
    """The one behind the last layer, which only joins streams."""
    return HyperConnection(
        fn=weights.take(f"{prefix}_fn.weight", (sizes.n * d, sizes.n)),
        base=weights.take(f"{prefix}_base.weight", (sizes.n,)),
        scale=weights.take(f"{prefix}_scale.weight", (1,)),
    )


def streams_of(b: BatchGraph, x: Value, sizes: StreamSizes) -> Value:
    """[D, n, T]: every stream starts as x [D, T]."""
    d, n_tokens = x.shape[:2]
    return b.graph.copy(x.view((d, sizes.n, n_tokens), (0, x.strides[1])), b.graph.new(d, sizes.n, n_tokens))


def join_streams(
    b: BatchGraph, connection: HyperConnection, sizes: StreamSizes, norm_eps: float, streams: Value
) -> tuple[Value, Value]:
    """The input [D, T] of a branch, and the weights with which its output goes back to the streams."""
    g = b.graph
    flat = streams.reshape(streams.shape[0] * sizes.n, streams.shape[2])
    mix = g.mul_mat(connection.fn, g.rms_norm(flat, None, norm_eps))
    weights = g.hyper_weights(
        mix, connection.base, connection.scale, sizes.n, sizes.iterations, sizes.epsilon, sizes.magnitude
    )
    return g.hyper_collapse(streams, weights), weights


class StreamDecoder(Decoder):
    """The frame of models with several residual streams: `layer` takes and gives these, [D, n, T]."""

    stream_sizes: StreamSizes
    has_stream_head: ClassVar[bool] = True
    """Whether a hyper-connection joins the streams behind the last layer."""
    predicts_from_normed = False

    def load_global(self, weights: WeightSource) -> None:
        super().load_global(weights)
        if self.has_stream_head:
            self.head = take_head(weights, "output_hc", self.hp.n_embd, self.stream_sizes)

    @property
    def state_size(self) -> int:
        return self.hp.n_embd if self.predicts_from_normed else self.stream_sizes.n * self.hp.n_embd

    def first_streams(self, b: BatchGraph, x: Value) -> Value:
        """The streams [D, n, T] that the first layer reads, of the embeddings x [D, T]; those of a prediction head are
        streams already.
        """
        return x if self.reads_states else streams_of(b, x, self.stream_sizes)

    def collapsed(self, b: BatchGraph, streams: Value) -> Value:
        """What the output norm reads, [D, T], of the streams [D, n, T] behind the last layer."""
        return join_streams(b, self.head, self.stream_sizes, self.hp.norm_eps, streams)[0]

    def keep_rows(self, b: BatchGraph, il: int, streams: Value, *values: Value) -> tuple[Value, ...]:
        """In the last layer, only the tokens whose logits were asked for, of streams [D, n, T] and values [m, T]."""
        d, n = streams.shape[:2]
        flat, *others = b.keep_outputs(il, self.hp.n_layer, streams.reshape(d * n, b.n_tokens), *values)
        return flat.reshape(d, n, flat.shape[1]), *others

    def with_kept_rows(
        self, b: BatchGraph, il: int, rest: Callable[..., Value], streams: Value, *values: Value
    ) -> Value:
        """The rest of a layer on the rows of `keep_rows`, and on those of all tokens if their states are wanted."""
        if b.keeps_states and il == self.hp.n_layer - 1 and b.n_outputs != b.n_tokens:
            # Apart from the output rows: those must round as they do in a context that keeps no states.
            b.unreduced = rest(streams, *values)
        return rest(*self.keep_rows(b, il, streams, *values))

    def final_state(self, b: BatchGraph, x: Value) -> Value:
        return super().final_state(b, self.collapsed(b, x))

    def build(self, b: BatchGraph) -> Value | None:
        if b.steering is not None:
            raise UsageError(f"control vectors act on one residual stream; {self.hp.arch} models have several")
        x = self.first_streams(b, self.embed(b))
        for il in range(self.hp.n_layer):
            x = self.layer(b, il, x)
        if b.keeps_states and b.n_outputs != b.n_tokens:
            assert b.unreduced is not None
            b.token_states = self._state(b, b.unreduced)
        if b.n_outputs == 0:
            return None
        y = self.final_state(b, x)
        b.embeddings = self._state(b, x, y) if self.reads_states else y
        if b.keeps_states and b.n_outputs == b.n_tokens:
            b.token_states = self._state(b, x, y)
        return self.logits(b, y)

    def _state(self, b: BatchGraph, streams: Value, normed: Value | None = None) -> Value:
        """What prediction heads read of the streams [D, n, T] behind the last layer."""
        if self.predicts_from_normed:
            return normed or self.final_state(b, streams)
        d, n, n_tokens = streams.shape[:3]
        return streams.reshape(d * n, n_tokens)
