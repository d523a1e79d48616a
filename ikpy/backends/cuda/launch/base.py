"""What the lowerings of all ops share: launches, packed arguments, and the table of lowerings by op kind."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ikpy._native import core
from ikpy.graph.ir import I32, Buffer, Node, Value
from ikpy.quants import registry

Address = Callable[[Value], int]
Dim3 = tuple[int, int, int]

BF16 = 30
FLOAT_WEIGHTS = {"f32", "f16", "bf16", "bf16_r16"}
# ACT_TILES, bf16 in blocks for sm_90, exists on devices only; ids in between are formats of CPUs.
ACT_F32, ACT_Q8, ACT_BF16, ACT_TILES = 0, 1, 2, 16
# Rows and columns of a block of ACT_TILES (kernels/tiles.cuh).
TILED_ROWS, TILED_DEPTH = 128, 64

# Columns (tokens or assignments of experts) up to which the matrix-vector kernels run. Above, a tensor-core tile of
# eight columns costs no more than reading the weights once.
MATVEC_COLUMNS = 8
# Warps of a block of the matrix-vector kernels.
VECTOR_WARPS = 4
MAX_EXPERTS = 1024
MAX_GRID_YZ = 65535
SHARED_LIMIT = 99 * 1024  # of sm_86, sm_89 and sm_120


def _sentinel(name: str, nbytes: int) -> Value:
    return Value(Buffer(nbytes), I32, (nbytes // 4, 1, 1, 1), (4, nbytes, nbytes, nbytes), name=name)


RUNTIME = _sentinel("runtime", 16)
WORK = _sentinel("work", 0)


@dataclass(frozen=True)
class Large:
    """Products of `tokens` and more (0 = none) are multiplied in bf16 from activations in this format.

    wgmma: int8 products of that many tokens per matrix and more (0 = none) use the kernels of sm_90.
    """

    tokens: int = 0
    format: int = ACT_BF16
    wgmma: int = 0


@dataclass(frozen=True)
class Target:
    """What all devices that are to run a launch offer.

    shared_bytes: shared memory that a block may have at most (with opting in). large: how large products of weights of
    a kernel file are computed, by its name; other files have the entry "".
    """

    shared_bytes: int = SHARED_LIMIT
    large: Mapping[str, Large] = field(default_factory=dict)

    @classmethod
    def of(cls, capabilities: Sequence[tuple[int, int]], large: Mapping[str, Large] | None = None) -> Target:
        """Of devices with these compute capabilities (CUDA guide); more than SHARED_LIMIT is not used."""
        if min(capabilities, default=(8, 0)) < (8, 0):
            return cls(64 * 1024)
        return cls(SHARED_LIMIT, large or {})

    def large_products(self, file: str) -> Large:
        """How large products of weights of a kernel file are computed."""
        return self.large.get(file) or self.large.get("") or Large()


SM_80 = Target()


class Launch(NamedTuple):
    """One kernel launch; args are the packed parameters in order."""

    kernel: str
    grid: Dim3
    block: Dim3
    shared_bytes: int
    args: list[bytes]


def pointer(address: int) -> bytes:
    """A kernel's parameter of 64 bits."""
    return struct.pack("<Q", address)


def i32(value: int) -> bytes:
    """A kernel's parameter of type int32_t."""
    return struct.pack("<i", value)


def i64(value: int) -> bytes:
    """A kernel's parameter of type int64_t."""
    return struct.pack("<q", value)


def f32(value: float) -> bytes:
    """A kernel's parameter of type float."""
    return struct.pack("<f", value)


def view(value: Value | None, address: Address) -> bytes:
    """ikpy::cuda::View of a value; all zero for None."""
    if value is None:
        return bytes(64)
    return packed_view(address(value), value.strides, value.shape, value.dynamic_dim)


def packed_view(address: int, strides: Sequence[int], shape: Sequence[int], dynamic_dim: int | None) -> bytes:
    """ikpy::cuda::View of its fields."""
    return struct.pack("<Q4q4iii", address, *strides, *shape, -1 if dynamic_dim is None else dynamic_dim, 0)


def optional_address(value: Value | None, address: Address) -> int:
    """Address of a value, 0 for None."""
    return 0 if value is None else address(value)


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up, for positive b."""
    return -(-a // b)


def n_rows(value: Value) -> int:
    """Rows of a value, over all its outer axes."""
    return value.shape[1] * value.shape[2] * value.shape[3]


def type_name(type_id: int) -> str:
    """Name of a weight type as in kernel names."""
    return registry.by_id(type_id).name.lower()


def tiled_bytes(n_columns: int, n_rows: int) -> int:
    """Bytes of a matrix in ACT_TILES."""
    return ceil_div(n_rows, TILED_ROWS) * TILED_ROWS * n_columns * 2


def act_row_bytes(fmt: int, n_in: int) -> int:
    """Bytes from one row of prepared activations to the next, those of the native executor: its rows may be longer."""
    return int(core.activation_nbytes(fmt, n_in, 1, 1))


@dataclass
class OpContext:
    """An op being lowered."""

    op: Node
    address: Address
    target: Target

    def source(self, i: int) -> Value:
        """Operand i, which the op must have."""
        value = self.op.src[i]
        assert value is not None, f"{self.op.kind} lacks source {i}"
        return value

    def view(self, i: int) -> bytes:
        """Packed View of operand i; all zero where the op has none."""
        return view(self.op.src[i] if i < len(self.op.src) else None, self.address)

    @property
    def dst(self) -> bytes:
        """Packed View of the result."""
        return view(self.op.dst, self.address)

    @property
    def runtime(self) -> bytes:
        """Packed address of the run-time scalars."""
        return pointer(self.address(RUNTIME))

    def at(self, i: int) -> bytes:
        """Packed address of operand i, 0 where the op has none."""
        return pointer(optional_address(self.op.src[i] if i < len(self.op.src) else None, self.address))


Lowering = Callable[[OpContext], list[Launch]]
LOWERINGS: dict[str, Lowering] = {}


def lowers(*kinds: str) -> Callable[[Lowering], Lowering]:
    """Registers the lowering of ops of these kinds."""

    def decorate(function: Lowering) -> Lowering:
        LOWERINGS.update(dict.fromkeys(kinds, function))
        return function

    return decorate


def is_aligned(value: Value) -> bool:
    """Whether rows can be read 16 bytes at a time (buffers are aligned to 16)."""
    strides = [s for n, s in zip(value.shape[1:], value.strides[1:], strict=True) if n > 1]
    return value.offset % 16 == 0 and all(s % 16 == 0 for s in strides)


def vector_width(*values: Value) -> int:
    """Elements per thread: 4 if all rows allow float4, else 1. A value of one column does not count."""
    wide = [v for v in values if v.shape[0] != 1 or v is values[0]]
    return 4 if all(v.shape[0] % 4 == 0 and is_aligned(v) for v in wide) else 1


def flat_grid(value: Value, width: int) -> Dim3:
    """Blocks of 256 threads with `width` elements each; kernels go on in steps where that is more than 65536."""
    return (max(1, min(ceil_div(value.n_elements, 256 * width), 65536)), 1, 1)


def store_parts(row: Value) -> int:
    """Parts of a row that warps store on their own; a row with one scale is a single part."""
    return 1 if row.type_name == "q8_KV" else ceil_div(row.shape[0], 32)
