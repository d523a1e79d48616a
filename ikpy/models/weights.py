"""Hands an architecture its tensors, checking presence, shape and completeness (model semantics 9.3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, overload

import numpy as np

from ikpy._native import core
from ikpy.errors import FileFormatError
from ikpy.gguf.reader import GGUFFile, TensorInfo
from ikpy.graph.ir import F32, Value, external
from ikpy.quants import dequantize, registry

Presence = Literal["none", "optional", "required"]


def _full(shape: Sequence[int]) -> tuple[int, ...]:
    return (*shape, *([1] * (4 - len(shape))))


def split_rows(fused: Value, *sizes: int, named: int = 0) -> list[Value]:
    """Consecutive row ranges of a weight as views.

    Only the view with index named keeps the name: statistics of matmul inputs count every token once per tensor.
    """
    parts: list[Value] = []
    start = 0
    for i, size in enumerate(sizes):
        part = fused.slice(1, start, size)
        part.name = fused.name if i == named else ""
        parts.append(part)
        start += size
    return parts


class WeightSource:
    """Tensors of a GGUF file as graph values over the mapped memory."""

    def __init__(self, gguf: GGUFFile, log: Callable[[str], None]) -> None:
        self.gguf = gguf
        self.log = log
        self.used: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether the file holds the tensor."""
        return name in self.gguf.tensors

    @overload
    def take(self, name: str, *shapes: Sequence[int]) -> Value: ...
    @overload
    def take(self, name: str, *shapes: Sequence[int], required: Literal[True]) -> Value: ...
    @overload
    def take(self, name: str, *shapes: Sequence[int], required: bool) -> Value | None: ...

    def take(self, name: str, *shapes: Sequence[int], required: bool = True) -> Value | None:
        """The tensor with one of the given ggml-order shapes; None if it is optional and absent."""
        info = self.gguf.tensors.get(name)
        if info is None:
            if required:
                raise FileFormatError(f"{self.gguf.path}: tensor '{name}' not found")
            return None
        if _full(info.shape) not in [_full(s) for s in shapes]:
            expected = ", ".join(str(n) for n in _full(shapes[0]))
            found = ", ".join(str(n) for n in _full(info.shape))
            raise FileFormatError(
                f"{self.gguf.path}: tensor '{name}' has wrong shape; expected {expected}, got {found}"
            )
        self.used.add(name)
        return self._value(info)

    def take_if(self, presence: Presence, name: str, *shapes: Sequence[int]) -> Value | None:
        """The tensor if the architecture has it: "none" does not look for it, "required" insists on it."""
        if presence == "none":
            return None
        return self.take(name, *shapes, required=presence == "required")

    def scalar(self, name: str, default: float) -> float:
        """The value of an optional f32 tensor of one element."""
        if self.take(name, (1,), required=False) is None:
            return default
        info = self.gguf.tensors[name]
        if info.type_id != F32:
            raise FileFormatError(f"{self.gguf.path}: tensor '{name}' must be of type f32")
        return float(self.gguf.data(info).view(np.float32)[0])

    def skip(self, *names: str) -> None:
        """Counts tensors as used that the forward pass does not need."""
        self.used.update(n for n in names if n in self.gguf.tensors)

    def skip_layer(self, il: int) -> None:
        """Counts all tensors of a layer as used (multi-token prediction heads)."""
        self.used.update(n for n in self.gguf.tensors if n.startswith(f"blk.{il}."))

    def _value(self, info: TensorInfo) -> Value:
        if not core.has_decoder(info.type_id):
            return self._decoded(info)
        return external(self.gguf.address(info), self.gguf, info.type_id, info.shape, info.name)

    def _decoded(self, info: TensorInfo) -> Value:
        """A tensor whose type has no row layout (I2_S), decoded once to F32 in memory of its own."""
        values = dequantize(self.gguf.data(info), info.type_id, info.shape)
        name = registry.by_id(info.type_id).name
        self.log(f"llm_load_tensors: note: tensor {info.name} of type {name} is decoded to f32 in memory")
        return external(values.ctypes.data, values, F32, info.shape, info.name)

    def check_all_used(self) -> None:
        """Extra tensors mean that the file is not what the architecture says: an error."""
        extra = [n for n in self.gguf.tensors if n not in self.used]
        if extra:
            shown = ", ".join(extra[:3]) + (" ..." if len(extra) > 3 else "")
            raise FileFormatError(
                f"{self.gguf.path}: wrong number of tensors; expected {len(self.used)}, "
                f"got {len(self.gguf.tensors)} (not used: {shown})"
            )
