"""Tensors of a projector file as graph values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import FileFormatError
from ikpy.gguf.reader import GGUFFile
from ikpy.graph.ir import F32, Value, external
from ikpy.models.weights import WeightSource, same_shape
from ikpy.quants import dequantize


def value_of(array: NDArray[np.float32], name: str = "") -> Value:
    """A graph value over a float32 array, which it keeps; its shape in ggml order."""
    array = np.ascontiguousarray(array, np.float32)
    return external(array.ctypes.data, array, F32, array.shape[::-1], name)


Bounds = tuple[float, float]
"""Smallest and largest value; infinite ones do nothing."""


@dataclass
class Linear:
    """A matrix [n_in, n_out] of any type and its bias; bounds of its inputs and of its results, if there are any."""

    weight: Value
    bias: Value | None = None
    inputs: Bounds = (-math.inf, math.inf)
    results: Bounds = (-math.inf, math.inf)

    @property
    def n_out(self) -> int:
        """Elements of a result."""
        return self.weight.shape[1]


@dataclass
class Mlp:
    """Two matrices with an activation between them."""

    first: Linear
    second: Linear

    @property
    def n_out(self) -> int:
        """Elements of a result."""
        return self.second.n_out


@dataclass
class Norm:
    """Factors of a norm and, of LayerNorm, what is added."""

    weight: Value
    bias: Value | None = None


class ProjectorWeights:
    """Matrices stay in the mapped file as they are; what kernels read as floats is decoded to float32."""

    def __init__(self, gguf: GGUFFile, log: Callable[[str], None]) -> None:
        self.gguf = gguf
        self.source = WeightSource(gguf, log)

    def has(self, name: str) -> bool:
        """Whether the file holds the tensor."""
        return self.source.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape in ggml order, which must be there: two dimensions, or those up to the last that is not 1."""
        info = self.gguf.tensors.get(name)
        if info is None:
            raise FileFormatError(f"{self.gguf.path}: tensor '{name}' not found")
        n = max((i + 1 for i, size in enumerate(info.shape) if size != 1), default=0)
        return (*info.shape[:n], *[1] * (2 - n))

    def array(self, name: str, *shapes: Sequence[int]) -> NDArray[np.float32]:
        """A tensor of one of these ggml-order shapes, by default its own, decoded to float32, in numpy order."""
        wanted = shapes or [self.shape(name)]
        info = self.source.find(name, wanted)
        assert info is not None
        shape = next(each for each in wanted if same_shape(each, info.shape))
        values = dequantize(self.gguf.data(info), info.type_id, info.shape)
        return np.array(values, np.float32).reshape(tuple(reversed(shape)))

    def table(self, name: str, *shapes: Sequence[int]) -> Value:
        """As `array`, as a graph value."""
        return value_of(self.array(name, *shapes), name)

    def vector(self, name: str, n: int) -> Value | None:
        """Float32 [n]; None if it is absent."""
        return self.table(name, (n,)) if self.has(name) else None

    def matrix(self, name: str, n_in: int, n_out: int | None = None) -> Value:
        """A matrix of any type as it is stored; n_out: None takes what the file has."""
        return self.source.take(name, (n_in, self.shape(name)[1] if n_out is None else n_out))

    def linear(self, name: str, n_in: int, n_out: int | None = None) -> Linear:
        """`name`.weight and, if it is there, `name`.bias."""
        weight = self.matrix(f"{name}.weight", n_in, n_out)
        bounds = self._bounds(f"{name}.input"), self._bounds(f"{name}.output")
        return Linear(weight, self.vector(f"{name}.bias", weight.shape[1]), *bounds)

    def _bounds(self, name: str) -> Bounds:
        """`name`_min and `name`_max, of which files need have none."""
        low, high = self.scalar(f"{name}_min", -math.inf), self.scalar(f"{name}_max", math.inf)
        if not low <= high:
            raise FileFormatError(f"{self.gguf.path}: tensor '{name}_min' is {low}, above {high}")
        return low, high

    def scalar(self, name: str, default: float) -> float:
        """The only element of an optional tensor."""
        return float(self.array(name, ()).item()) if self.has(name) else default

    def linear_if(self, name: str, n_in: int, n_out: int | None = None) -> Linear | None:
        """As `linear`; None without the weight."""
        return self.linear(name, n_in, n_out) if self.has(f"{name}.weight") else None

    def mlp(self, first: str, second: str, n_in: int) -> Mlp:
        """Two matrices of these names."""
        matrix = self.linear(first, n_in)
        return Mlp(matrix, self.linear(second, matrix.n_out))

    def norm(self, name: str, n: int) -> Norm:
        """`name`.weight and, if it is there, `name`.bias."""
        return Norm(self.table(f"{name}.weight", (n,)), self.vector(f"{name}.bias", n))

    def norm_if(self, name: str, n: int) -> Norm | None:
        """As `norm`; None without the weight."""
        return self.norm(name, n) if self.has(f"{name}.weight") else None

    def filters(self, name: str, patch_size: int, n_out: int) -> Value:
        """Filters [p, p, 3, n_out] that meet every pixel once, as a matrix [3 p p, n_out]."""
        n_in = 3 * patch_size * patch_size
        return self.source.take(name, (patch_size, patch_size, 3, n_out), (n_in, n_out)).reshape(n_in, n_out)
