"""AltUp (arXiv:2301.13310): layers work on one of several residual streams, the others are predicted from it.

In shapes: T tokens, n streams of D elements.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ikpy.errors import FileFormatError
from ikpy.graph.hyper_connections import MAX_STREAMS
from ikpy.graph.ir import F32, Value
from ikpy.models.batch import BatchGraph
from ikpy.models.keys import Keys
from ikpy.models.latent_tensors import planned, store
from ikpy.models.weights import WeightSource

TINY = 1e-12
"""Epsilon of norms that must not divide by 0 and change nothing else."""


@dataclass(frozen=True)
class AltUpSizes:
    """Number of streams, and the one that layers work on."""

    n: int
    active: int

    @classmethod
    def read(cls, keys: Keys) -> AltUpSizes:
        """Sizes of a file. FileFormatError for numbers that no model has."""
        sizes = cls(keys.u32("altup.num_inputs", 4), keys.u32("altup.active_idx", 0))
        if not (2 <= sizes.n <= MAX_STREAMS and sizes.active < sizes.n):
            raise FileFormatError(
                f"{keys.gguf.path}: {sizes.n} residual streams of which layers work on stream {sizes.active} are not "
                "possible"
            )
        return sizes

    @property
    def n_weights(self) -> int:
        """Weights with which a token's streams are mixed, as Graph.hyper_expand takes them."""
        return (2 + self.n) * self.n


@dataclass
class AltUp:
    """Tensors of a layer. Of n numbers for a token, which `router` makes, matrix and bias of `predict` and `correct`
    make weights of Graph.hyper_expand; behind those of `correct` stand those of the layer's own input.
    """

    router_norm: Value
    router: Value
    predict: tuple[Value, Value]
    correct: tuple[Value, Value]
    scale: Value


def take_altup(weights: WeightSource, prefix: str, d: int, sizes: AltUpSizes) -> AltUp:
    """`prefix.altup_*`."""
    n = sizes.n
    predicted = weights.decoded(f"{prefix}.altup_predict_coef.weight", n, n * n)
    corrected = weights.decoded(f"{prefix}.altup_correct_coef.weight", n, n)
    return AltUp(
        router_norm=weights.take(f"{prefix}.altup_router_norm.weight", (d,)),
        router=weights.take(f"{prefix}.altup_router.weight", (d, n)),
        predict=_derived(weights, f"{prefix}.altup_predict", *_prediction(predicted, sizes)),
        correct=_derived(weights, f"{prefix}.altup_correct", *_correction(corrected, sizes)),
        scale=weights.take(f"{prefix}.altup_correct_scale.weight", (d,)),
    )


def _prediction(coefs: np.ndarray, sizes: AltUpSizes) -> tuple[np.ndarray, np.ndarray]:
    """Matrix [W, n] and bias [W]: stream k becomes itself plus the sum of coefs[k * n + j] times stream j."""
    n = sizes.n
    matrix, bias = np.zeros((sizes.n_weights, n), np.float32), np.zeros(sizes.n_weights, np.float32)
    matrix[2 * n :] = coefs.reshape(n, n, n).swapaxes(0, 1).reshape(n * n, n)
    bias[2 * n :] = np.eye(n).reshape(-1)
    return matrix, bias


def _correction(coefs: np.ndarray, sizes: AltUpSizes) -> tuple[np.ndarray, np.ndarray]:
    """Matrix [W + 2 n, n] and bias: stream k gets 1 + coefs[k] times what the active one lies beside its prediction.

    The weights of the layer's own input follow, which all streams but the first get.
    """
    n, size = sizes.n, sizes.n_weights
    matrix, bias = np.zeros((size + 2 * n, n), np.float32), np.zeros(size + 2 * n, np.float32)
    matrix[n : 2 * n], bias[n : 2 * n] = coefs, 1.0
    shares = np.eye(n, dtype=np.float32)
    shares[sizes.active] -= 1.0
    bias[2 * n : size] = shares.reshape(-1)
    first = (2 + sizes.active) * n
    matrix[first : first + n] = -coefs
    bias[size + n + 1 :] = 1.0
    return matrix, bias


def _derived(weights: WeightSource, name: str, matrix: np.ndarray, bias: np.ndarray) -> tuple[Value, Value]:
    """Matrix and bias as values in memory of their own."""
    return own_weight(weights, f"{name}.weight", matrix), own_weight(weights, f"{name}.bias", bias)


def own_weight(weights: WeightSource, name: str, values: np.ndarray) -> Value:
    """Numbers f32 that no tensor of the file has, as a weight."""
    weights.own_bytes[name] = values.nbytes
    return planned(F32, name, *values.shape[::-1]) if weights.header_only else store(values, F32, name)


def mean_row(weights: WeightSource, name: str, n: int) -> Value:
    """A matrix [n, 1] whose product with rows is their mean."""
    return own_weight(weights, name, np.full((1, n), 1.0 / n, np.float32))


def stream(x: Value, i: int) -> Value:
    """Stream i [D, T] of x [D, n, T]."""
    return x.view((x.shape[0], x.shape[2]), (x.strides[2],), i * x.strides[1])


def router_numbers(b: BatchGraph, altup: AltUp, x: Value, eps: float) -> Value:
    """n numbers for every token of the stream x [D, T]."""
    g = b.graph
    routed = g.mul_mat(altup.router, g.rms_norm(x, altup.router_norm, eps))
    return g.unary(g.scale(routed, 1.0 / x.shape[0]), "tanh")


def predict(b: BatchGraph, altup: AltUp, sizes: AltUpSizes, x: Value, eps: float) -> Value:
    """Streams [D, n, T] as they will be behind a layer that has not run yet."""
    active = stream(x, sizes.active)
    weights = b.graph.mul_mat(altup.predict[0], router_numbers(b, altup, active, eps), altup.predict[1])
    return b.graph.hyper_expand(x, active, weights)


def correct(
    b: BatchGraph, altup: AltUp, sizes: AltUpSizes, predicted: Value, active: Value, eps: float
) -> tuple[Value, Value]:
    """Streams [D, n, T] by what the layer made of the active one [D, T]; the weights of the layer's own input."""
    numbers = router_numbers(b, altup, active, eps)
    weights = b.graph.mul_mat(altup.correct[0], numbers, altup.correct[1])
    corrected = b.graph.hyper_expand(predicted, active, weights.slice0(0, sizes.n_weights))
    return corrected, weights.slice0(sizes.n_weights, 2 * sizes.n)


def of_same_length(b: BatchGraph, x: Value, pattern: Value, mean: Value) -> Value:
    """Streams x [D, m, T], each of the root mean square of the pattern [D, T]."""
    g = b.graph
    length = g.mul_mat(mean, g.mul(pattern, g.rms_norm(pattern, None, TINY)))
    return g.mul(g.rms_norm(x, None, TINY), length.reshape(1, 1, length.shape[1]))
