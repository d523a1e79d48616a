"""Hands an architecture its tensors, checking presence, shape and completeness."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, overload

import numpy as np

from ikpy._native import core
from ikpy.errors import FileFormatError, UnsupportedError
from ikpy.gguf.huge_pages import Block
from ikpy.gguf.reader import GGUFFile, TensorInfo
from ikpy.graph.ir import F32, I32, PLANNED_ADDRESS, Buffer, Value, external
from ikpy.graph.weight_parts import whole_name
from ikpy.machine.memory import check_memory
from ikpy.models.factors import (
    activation_scale,
    companions,
    factor_values,
    find_factor,
    joined_factors,
    multiplied,
)
from ikpy.models.interleaving import interleaved_sizes, interleaved_type, repack_parallel
from ikpy.quants import dequantize, registry

Presence = Literal["none", "optional", "required"]
# Kernels read these as f32, whatever number of rows they have.
ELEMENT_WISE = (
    "norm.weight",
    "norm_1.weight",
    "norm_2.weight",
    "_norm",
    ".bias",
    "exp_probs_b",
    "attn_sinks.weight",
    "rope_freqs.weight",
    "_long.weight",
    "_short.weight",
    "_ape.weight",
    "altup_correct_scale.weight",
    *(f"ssm_conv1d{part}.weight" for part in ("", "_q", "_k", "_v")),
    "shortconv.conv.weight",
    "_conv_base",
    *(f"time_mix_{name}.weight" for name in ("w0", "a0", "v0", "k_k", "k_a", "r_k", "ln", "first", "decay")),
    *(f"time_mix_lerp_{name}.weight" for name in ("fused", "x", "w", "k", "v", "r", "g")),
    *(f"channel_mix_lerp_{name}.weight" for name in ("k", "r")),
    *(f"ple_{part}.weight" for part in ("norm_key", "norm_query", "norm_conv", "conv1d")),
    *(f"hc{place}_{part}.weight" for place in ("", "_attn", "_ffn") for part in ("base", "scale")),
)
REPACK_REMEDY = (
    "without it they stay in the mapped file, and ikpy quantize --repack makes a file of rearranged weights once"
)
# What kernels read is aligned to that; general.alignment may be less.
WORD_BYTES = 4


def _full(shape: Sequence[int]) -> tuple[int, ...]:
    return (*shape, *([1] * (4 - len(shape))))


def same_shape(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether two ggml-order shapes are equal; files need not store sizes of 1 at the end."""
    return _full(a) == _full(b)


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


def page_dropper(gguf: GGUFFile) -> Callable[[Buffer], None]:
    """Takes the pages of a mapped tensor out of this process's memory."""

    def drop(buffer: Buffer) -> None:
        info = gguf.tensors.get(whole_name(buffer.name))
        if info is not None and gguf.address(info) == buffer.address:
            gguf.release(info)

    return drop


class WeightSource:
    """Tensors of a GGUF file as graph values over the mapped memory.

    header_only: no data is read; values have no memory and can only be measured. repack: which matrices, by name, of
    types with a row-interleaved form are rearranged into memory of their own; reserved_pages: in reserved huge pages if
    enough are free. taken: gets the bytes of every tensor when it is ready.
    """

    def __init__(
        self,
        gguf: GGUFFile,
        log: Callable[[str], None],
        *,
        header_only: bool = False,
        repack: Callable[[str], bool] | None = None,
        reserved_pages: bool = False,
        taken: Callable[[int], None] | None = None,
    ) -> None:
        self.gguf = gguf
        self.taken = taken
        self.log = log
        self.header_only = header_only
        self.repack = repack
        self.reserved_pages = reserved_pages
        self.used: set[str] = set()
        self.values: dict[str, Value] = {}
        self.repacked: dict[str, int] = {}
        self.own_bytes: dict[str, int] = {}
        self._block: Block | None = None
        self.replaced: set[str] = set()
        """Tensors of the file that are not used where it is mapped: repacked, decoded or joined into own memory."""

    def has(self, name: str) -> bool:
        """Whether the file holds the tensor."""
        return name in self.gguf.tensors

    @overload
    def take(self, name: str, *shapes: Sequence[int]) -> Value: ...
    @overload
    def take(self, name: str, *shapes: Sequence[int], required: Literal[True], parts: Sequence[int] = ()) -> Value: ...
    @overload
    def take(self, name: str, *shapes: Sequence[int], parts: Sequence[int]) -> Value: ...
    @overload
    def take(self, name: str, *shapes: Sequence[int], required: bool, parts: Sequence[int] = ()) -> Value | None: ...

    def take(self, name: str, *shapes: Sequence[int], required: bool = True, parts: Sequence[int] = ()) -> Value | None:
        """The tensor with one of the given ggml-order shapes; None if it is optional and absent.

        parts: sizes of the row ranges that will be used as views; interleaved rows must not cross them
        (UnsupportedError for a file where they do).
        """
        info = self.find(name, shapes, required=required)
        if info is None:
            return None
        value = self.values[name] = self._value(info, parts)
        value.buffer.factor = self._factor(info)
        self._count(info)
        return value

    def find(self, name: str, shapes: Sequence[Sequence[int]], *, required: bool = True) -> TensorInfo | None:
        """The entry of a tensor with one of the given ggml-order shapes, which counts as used; None if it is optional
        and absent.
        """
        info = self.gguf.tensors.get(name)
        if info is None:
            if required:
                raise FileFormatError(f"{self.gguf.path}: tensor '{name}' not found")
            return None
        if not any(same_shape(info.shape, shape) for shape in shapes):
            expected = ", ".join(str(n) for n in _full(shapes[0]))
            found = ", ".join(str(n) for n in _full(info.shape))
            raise FileFormatError(
                f"{self.gguf.path}: tensor '{name}' has wrong shape; expected {expected}, got {found}"
            )
        self.used.add(name)
        return info

    def _scale(self, info: TensorInfo) -> TensorInfo | None:
        """The tensor with the factors of a matrix, which counts as used; None for what no product has."""
        if info.name.endswith(ELEMENT_WISE):
            return None
        self.skip(activation_scale(info))
        scale = find_factor(self.gguf, info)
        if scale is not None:
            self.used.add(scale.name)
            self._count(scale)
        return scale

    def _factor(self, info: TensorInfo) -> float | Value | None:
        """What products with a matrix are multiplied by."""
        scale = self._scale(info)
        if scale is None:
            return None
        values = None if self.header_only else factor_values(self.gguf, scale)
        if scale.element_count > 1:
            return self._value(scale, ()).reshape(1, scale.element_count)
        return 1.0 if values is None else None if values[0] == 1.0 else float(values[0])

    def own_factor(self, module: str) -> None:
        """The architecture applies `module`.scale itself."""
        self.values[f"{module}.weight"].buffer.factor = None

    def _count(self, info: TensorInfo) -> None:
        if self.taken:
            self.taken(info.nbytes)

    def take_if(self, presence: Presence, name: str, *shapes: Sequence[int]) -> Value | None:
        """The tensor if the architecture has it: "none" does not look for it, "required" insists on it."""
        if presence == "none":
            return None
        return self.take(name, *shapes, required=presence == "required")

    def written(self, module: str) -> str:
        """Name of a tensor that files may have without a suffix, as llama.cpp converts some models."""
        return module if module in self.gguf.tensors else f"{module}.weight"

    def row(self, name: str, n: int, index: int) -> Value:
        """Row ``index`` of a matrix [n, any] as f32 [n] in memory of its own."""
        info = self.gguf.tensors.get(name)
        if info is None:
            raise FileFormatError(f"{self.gguf.path}: tensor '{name}' not found")
        self.take(name, (n, _full(info.shape)[1]))
        if self.header_only:
            return external(PLANNED_ADDRESS, None, F32, (n,), name)
        values = np.ascontiguousarray(self._numbers(info)[index], np.float32)
        return external(values.ctypes.data, values, F32, (n,), name)

    def array(self, name: str, *shape: int) -> np.ndarray | None:
        """An optional tensor of this ggml-order shape decoded to float32, in numpy order; None if it is absent."""
        info = self.find(name, [shape], required=False)
        if info is None:
            return None
        if self.header_only:
            return np.broadcast_to(np.float32(0), shape[::-1])
        self._count(info)
        return self._numbers(info)

    def _numbers(self, info: TensorInfo) -> np.ndarray:
        """A tensor decoded, times its factor."""
        values = np.array(dequantize(self.gguf.data(info), info.type_id, info.shape), np.float32)
        scale = self._scale(info)
        return values if scale is None else multiplied(values, factor_values(self.gguf, scale))

    def decoded(self, name: str, *shape: int) -> np.ndarray:
        """As `array`, of a tensor that must be there."""
        self.find(name, [shape])
        values = self.array(name, *shape)
        assert values is not None
        return values

    def rows(self, name: str, default: int) -> int:
        """Rows of a matrix whose number no key says; default if it is absent."""
        info = self.gguf.tensors.get(name)
        return default if info is None else _full(info.shape)[1]

    def transposed(self, name: str, shape: tuple[int, int]) -> Value:
        """A matrix of this ggml-order shape as f32 with its dimensions exchanged, in memory of its own."""
        info = self.find(name, [shape])
        assert info is not None
        self.own_bytes[name] = 4 * info.element_count
        self.replaced.add(name)
        if self.header_only:
            turned = external(PLANNED_ADDRESS, None, F32, shape[::-1], name, "weight")
        else:
            values = np.ascontiguousarray(self._numbers(info).reshape(shape[::-1]).T)
            turned = external(values.ctypes.data, values, F32, shape[::-1], name, "weight")
        self.values[name] = turned
        self._count(info)
        return turned

    def scalar(self, name: str, default: float) -> float:
        """The value of an optional f32 tensor of one element."""
        if self.take(name, (1,), required=False) is None or self.header_only:
            return default
        info = self.gguf.tensors[name]
        if info.type_id != F32:
            raise FileFormatError(f"{self.gguf.path}: tensor '{name}' must be of type f32")
        return float(self.gguf.data(info).view(np.float32)[0])

    def integers(self, name: str, shape: Sequence[int]) -> Value:
        """A table of integers i32. FileFormatError for another type."""
        info = self.gguf.tensors.get(name)
        if info is not None and info.type_id != I32:
            kind = registry.by_id(info.type_id).name
            raise FileFormatError(f"{self.gguf.path}: tensor '{name}' of type {kind} must be of type i32")
        return self.take(name, shape)

    def skip(self, *names: str) -> None:
        """Counts tensors as used that the forward pass does not need, with the factors beside them."""
        for name in names:
            self.used.update({name, *companions(name)}.intersection(self.gguf.tensors))

    def skip_layer(self, il: int) -> None:
        """Counts all tensors of a layer as used (multi-token prediction heads)."""
        self.used.update(n for n in self.gguf.tensors if n.startswith(f"blk.{il}."))

    def _value(self, info: TensorInfo, parts: Sequence[int]) -> Value:
        is_read_as_f32 = info.name.endswith(ELEMENT_WISE) and info.type_id != F32
        if is_read_as_f32 or not (info.type_id == I32 or core.has_decoder(info.type_id)):
            return self._decoded(info)
        self._check_parts(info, parts)
        if self.repack and self.repack(info.name):
            target = interleaved_type(info, parts)
            if target is not None:
                return self._repacked(info, target)
            if interleaved_type(info):
                self.log(
                    f"llm_load_tensors: note: tensor {info.name} is not rearranged: "
                    "row groups would cross the matrices that it joins"
                )
        if info.offset % WORD_BYTES:
            return self._aligned(info)
        if self.header_only:
            return external(PLANNED_ADDRESS, None, info.type_id, info.shape, info.name, "weight")
        return external(self.gguf.address(info), self.gguf, info.type_id, info.shape, info.name, "weight")

    def _check_parts(self, info: TensorInfo, parts: Sequence[int]) -> None:
        kind = registry.by_id(info.type_id)
        if not kind.keeps_apart(parts):
            raise UnsupportedError(
                f"{self.gguf.path}: tensor '{info.name}' of type {kind.name} joins matrices whose rows are no multiple "
                f"of {kind.interleave}, the row group of that type; quantize it to another one"
            )

    def _repacked(self, info: TensorInfo, target: registry.TensorType) -> Value:
        nbytes = target.tensor_nbytes(info.shape)
        self.repacked[info.name] = self.own_bytes[info.name] = nbytes
        self.replaced.add(info.name)
        if self.header_only:
            return external(PLANNED_ADDRESS, None, target.id, info.shape, info.name, "weight")
        data = self._repack_block().take(nbytes)
        repack_parallel(self.gguf.data(info), info.type_id, target, info.shape, data)
        if info.name not in self.values:  # no value reads the file's rows
            self.gguf.drop_copy(info)
            self.gguf.release(info)
        return external(data.ctypes.data, data, target.id, info.shape, info.name, "weight")

    def _repack_block(self) -> Block:
        """Room for every tensor that may be rearranged; those that turn out not to be take no memory."""
        if self._block is None:
            assert self.repack is not None
            sizes = interleaved_sizes(info for name, info in self.gguf.tensors.items() if self.repack(name))
            check_memory(sum(sizes), "weights that -rtr rearranges take", REPACK_REMEDY)
            self._block = Block(sizes, reserved=self.reserved_pages)
            if size := self._block.page_size:
                self.log(f"llm_load_tensors: rearranged weights in reserved huge pages of {size >> 20} MiB")
        return self._block

    def _aligned(self, info: TensorInfo) -> Value:
        """A tensor that lies where kernels cannot read words, copied (general.alignment may be 1 or 2)."""
        self.own_bytes[info.name] = info.nbytes
        self.replaced.add(info.name)
        data = None if self.header_only else self.gguf.data(info).copy()
        address = PLANNED_ADDRESS if data is None else data.ctypes.data
        return external(address, data, info.type_id, info.shape, info.name, "weight")

    def _decoded(self, info: TensorInfo) -> Value:
        """A tensor whose type has no row layout (I2_S), decoded once to F32 in memory of its own."""
        self.own_bytes[info.name] = 4 * info.element_count
        self.replaced.add(info.name)
        if self.header_only:
            return external(PLANNED_ADDRESS, None, F32, info.shape, info.name, "weight")
        values = dequantize(self.gguf.data(info), info.type_id, info.shape)
        if info.name not in self.values:
            self.gguf.drop_copy(info)
        name = registry.by_id(info.type_id).name
        self.log(f"llm_load_tensors: note: tensor {info.name} of type {name} is decoded to f32 in memory")
        return external(values.ctypes.data, values, F32, info.shape, info.name, "weight")

    def join(self, parts: Sequence[Value], shape: Sequence[int], name: str) -> Value:
        """Tensors of one type joined along a new last axis, in memory of their own."""
        for part in parts:
            self.own_bytes.pop(part.name, None)
            self.replaced.add(part.name)
        self.own_bytes[name] = sum(part.buffer.nbytes for part in parts)
        is_packed = all(part.name in self.repacked for part in parts)
        join = _joined if is_packed else np.concatenate
        data = None if self.header_only else join([self._bytes(part) for part in parts])
        address = PLANNED_ADDRESS if data is None else data.ctypes.data
        joined = self.values[name] = external(address, data, parts[0].type_id, shape, name, "weight")
        joined.buffer.factor = joined_factors(parts)
        return joined

    def _bytes(self, value: Value) -> np.ndarray:
        owner = value.buffer.owner
        return owner if isinstance(owner, np.ndarray) else self.gguf.data(self.gguf.tensors[value.name])

    def check_all_used(self) -> None:
        """Extra tensors mean that the file is not what the architecture says: an error."""
        extra = [n for n in self.gguf.tensors if n not in self.used]
        if extra:
            shown = ", ".join(extra[:3]) + (" ..." if len(extra) > 3 else "")
            raise FileFormatError(
                f"{self.gguf.path}: wrong number of tensors; expected {len(self.used)}, "
                f"got {len(self.gguf.tensors)} (not used: {shown})"
            )


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Bytes of all parts: a view where they lie one behind the other in one block, else a copy."""
    block = parts[0].base
    ends = [part.ctypes.data + part.nbytes for part in parts]
    is_gapless = all(part.ctypes.data == end for part, end in zip(parts[1:], ends[:-1], strict=True))
    if not is_gapless or not isinstance(block, np.ndarray) or any(part.base is not block for part in parts):
        return np.concatenate(parts)
    start = parts[0].ctypes.data - block.ctypes.data
    return block[start : start + sum(part.nbytes for part in parts)]
