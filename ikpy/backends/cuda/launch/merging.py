"""Two launches of one kernel that follow each other and have nothing to do with each other, as one.

In generation most launches are shorter than the time that a device needs from one to the next.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from ikpy.backends.cuda.launch.base import Launch
from ikpy.graph.ir import F32
from ikpy.quants import registry


class _Views(NamedTuple):
    """Which arguments of a kernel are views that it writes, and views that it reads; all of f32.

    cache_type: the argument with the type of the first view that is written, if that is another one.
    """

    written: tuple[int, ...]
    read: tuple[int, ...]
    cache_type: int | None = None


# Kernels with a twin, NAME_two, whose parameters are those of two launches. The twin's blocks take the number of the
# launch from blockIdx.y and end at once if a launch has fewer.
_KERNELS = {
    "kv_store": _Views((0,), (1,), cache_type=3),
    "rope": _Views((0,), (1, 2)),
    "rms_norm": _Views((0, 4), (1, 2, 3)),
}


class _Place(NamedTuple):
    """The memory of a view: slices of so many bytes, a stride apart, from address on."""

    address: int
    slice_bytes: int
    stride: int
    n_slices: int

    def meets(self, other: _Place) -> bool:
        """Whether they may share a byte."""
        if self.stride == other.stride:  # slices may take turns, as columns of the same rows do
            apart = (other.address - self.address) % self.stride
            if apart >= self.slice_bytes and apart + other.slice_bytes <= self.stride:
                return False
        ends = [p.address + (p.n_slices - 1) * p.stride + p.slice_bytes for p in (self, other)]
        return self.address < ends[1] and other.address < ends[0]


def merged(launches: Iterable[Launch]) -> list[Launch]:
    """The launches, on one stream in order, with pairs of neighbours that touch different memory made one."""
    found: list[Launch] = []
    for launch in launches:
        if found and _may_meet(found[-1], launch):
            first = found[-1]
            grid = (max(first.grid[0], launch.grid[0]), 2, 1)
            found[-1] = Launch(f"{first.kernel}_two", grid, first.block, 0, [*first.args, *launch.args])
        else:
            found.append(launch)
    return found


def _may_meet(one: Launch, other: Launch) -> bool:
    views = _KERNELS.get(one.kernel)
    if views is None or one.kernel != other.kernel or one.block != other.block:
        return False
    return not (_reaches(one, other, views) or _reaches(other, one, views))


def _reaches(one: Launch, other: Launch, views: _Views) -> bool:
    """Whether one writes what the other reads or writes."""
    touched = [_place(other, i, views) for i in (*views.written, *views.read)]
    written = [_place(one, i, views) for i in views.written]
    return any(a.meets(b) for a in written if a for b in touched if b)


def _place(launch: Launch, argument: int, views: _Views) -> _Place | None:
    """Where an argument (ikpy::cuda::View) lies, None for a view of nothing."""
    address, *numbers = struct.unpack("<Q4q4iii", launch.args[argument])
    strides, shape = numbers[:4], numbers[4:8]
    if not address:
        return None
    type_id = F32
    if views.cache_type is not None and argument == views.written[0]:
        (type_id,) = struct.unpack("<i", launch.args[views.cache_type])
    row = registry.by_id(type_id).row_nbytes(shape[0])
    if shape[3] > 1:  # one slice, as long as everything
        length = row + sum((n - 1) * stride for n, stride in zip(shape[1:], strides[1:], strict=True))
        return _Place(address, length, length, 1)
    return _Place(address, row + (shape[1] - 1) * strides[1], max(strides[2], 1), shape[2])
