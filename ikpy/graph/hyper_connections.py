"""Hyper-connections: residual streams that blocks read a sum of and write a mixture to (arXiv:2512.24880)."""

from __future__ import annotations

from ikpy.errors import UnsupportedError
from ikpy.graph.elementwise import ElementwiseOps
from ikpy.graph.ir import Value

MAX_STREAMS = 8


class HyperConnectionOps(ElementwiseOps):
    """Ops between the n residual streams [D, n, T] and the blocks. Streams may be a view with stride 0 over n."""

    def hyper_weights(
        self, mix: Value, base: Value, scale: Value, n: int, iterations: int, eps: float, magnitude: float = 2.0
    ) -> Value:
        """Weights of n streams for each token from mix f32 [(2 + n) * n, T]; from [n, T] or [2 * n, T] the first ones.

        base f32 of a row's elements; scale f32 [3], [1] or [2]. With x = mix * scale + base: n weights sigmoid(x) + eps
        of the streams in the input of a block; n weights magnitude * sigmoid(x) of its output in every stream, plus eps
        where these are all; and the share of stream j in the new stream k at 2 * n + j * n + k: softmax(x) over k, plus
        eps, and then columns, and rows and columns `iterations` - 1 times more, divided by their sum + eps.
        """
        _check_number(n)
        parts = {n: 1, 2 * n: 2, (2 + n) * n: 3}.get(mix.shape[0])
        if base.n_elements != mix.shape[0] or scale.n_elements != parts:
            raise ValueError(f"weights of {n} streams from {mix.shape}, base {base.shape}, scale {scale.shape}")
        dst = self.new(*mix.shape[:2])
        return self._emit("hyper_weights", dst, [mix, base, scale], ip=[n, iterations], fp=[eps, magnitude])

    def hyper_collapse(self, streams: Value, weights: Value) -> Value:
        """What a block reads: sum_i weights[i] * streams[:, i], f32 [D, T]; weights of hyper_weights."""
        d, n, n_tokens = streams.shape[:3]
        if weights.shape[0] < n or weights.shape[1] != n_tokens:
            raise ValueError(f"sum of streams {streams.shape} with weights {weights.shape}")
        return self._emit("hyper_collapse", self.new(d, n_tokens), [streams, weights])

    def hyper_expand(self, streams: Value, y: Value, weights: Value) -> Value:
        """The streams behind a block with output y f32 [D, T], f32 [D, n, T]; weights of hyper_weights.

        Stream k is weights[n + k] * y + sum_j weights[2 * n + j * n + k] * streams[:, j], with 2 * n weights
        weights[n + k] * y + streams[:, k], and with n, those of the output alone, weights[k] * y + streams[:, k].
        """
        d, n, n_tokens = streams.shape[:3]
        _check_number(n)
        known = weights.shape[0] in (n, 2 * n, (2 + n) * n)
        if y.shape[:2] != (d, n_tokens) or weights.shape[1] != n_tokens or not known:
            raise ValueError(f"mixture of streams {streams.shape} and {y.shape} with weights {weights.shape}")
        return self._emit("hyper_expand", self.new(d, n, n_tokens), [streams, y, weights])


def _check_number(n: int) -> None:
    if not 1 <= n <= MAX_STREAMS:
        raise UnsupportedError(f"{n} residual streams; at most {MAX_STREAMS} are supported")
