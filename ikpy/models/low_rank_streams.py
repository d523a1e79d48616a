"""Residual streams with gates of low rank (Qwen4-Exp): branches read the mean of gated streams, and every stream takes
a share of their output.

In shapes: T tokens, n streams of D elements.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ikpy.errors import FileFormatError
from ikpy.graph.hyper_connections import MAX_STREAMS
from ikpy.graph.ir import F32, Value, external
from ikpy.models.batch import BatchGraph
from ikpy.models.hyper_connections import StreamSizes
from ikpy.models.keys import Keys
from ikpy.models.weights import WeightSource


@dataclass(frozen=True)
class MixerSizes(StreamSizes):
    """rank: elements between the two matrices of the gates."""

    rank: int = 0

    @classmethod
    def read(cls, keys: Keys) -> MixerSizes:
        """Sizes of a file. FileFormatError for those that no model has."""
        n, rank = keys.u32("hyper_connection.count"), keys.u32("hyper_connection.low_rank")
        if not 2 <= n <= MAX_STREAMS or rank < 1:
            raise FileFormatError(f"{keys.gguf.path}: {n} residual streams with gates of rank {rank} are not possible")
        return cls(n, 0, 0.0, rank=rank)


@dataclass
class Mixer:
    """Norm [n D] of the streams, down [n D, rank] and up [rank, n D] of their gates, what makes the shares of the
    output [n D, n] (not behind the last layer), and the weights of a mean, f32 [n].
    """

    norm: Value
    down: Value
    up: Value
    inject: Value | None
    mean: Value


def take_mixer(weights: WeightSource, prefix: str, d: int, sizes: MixerSizes, *, last: bool = False) -> Mixer:
    """`prefix_norm`, `prefix_down`, `prefix_up` and, unless it is the last one, `prefix_inject`."""
    wide = sizes.n * d
    mean = np.full(sizes.n, 1.0 / sizes.n, np.float32)
    return Mixer(
        norm=weights.take(f"{prefix}_norm.weight", (wide,)),
        down=weights.take(f"{prefix}_down.weight", (wide, sizes.rank)),
        up=weights.take(f"{prefix}_up.weight", (sizes.rank, wide)),
        inject=None if last else weights.take(f"{prefix}_inject.weight", (wide, sizes.n)),
        mean=external(mean.ctypes.data, mean, F32, (sizes.n,), f"{prefix}_mean", "weight"),
    )


def mix_streams(b: BatchGraph, mixer: Mixer, streams: Value, eps: float) -> tuple[Value, Value | None]:
    """The input [D, T] of a branch, and the weights [n, T] with which its output goes back to the streams [D, n, T]."""
    g = b.graph
    d, n, n_tokens = streams.shape[:3]
    normed = g.rms_norm(streams, mixer.norm.reshape(d, n), eps).reshape(d * n, n_tokens)
    low = g.unary(g.scale(g.mul_mat(mixer.down, normed), 1.0 / n), "silu")
    gated = g.gated(g.mul_mat(mixer.up, low), normed, "sigmoid")
    mean = mixer.mean.view((n, n_tokens), (0,))
    mixed = g.hyper_collapse(gated.reshape(d, n, n_tokens), mean)
    if mixer.inject is None:
        return mixed, None
    back = g.unary(g.scale(g.mul_mat(mixer.inject, normed), 1.0 / n), "sigmoid")
    return mixed, g.scale(back, 2.0)
