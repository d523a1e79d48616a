"""Launches of one kernel that follow each other and have nothing to do with each other, as one.

In generation most launches are shorter than the time that a device needs from one to the next.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from ikpy.backends.cuda.launch.base import Launch
from ikpy.backends.cuda.launch.merging_products import merged_products
from ikpy.backends.cuda.launch.places import Place, Touched
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


def merged(launches: Iterable[Launch]) -> list[Launch]:
    """The launches, on one stream in order, with neighbours that touch different memory made one.

    These are pairs of kernels with twins, and matrix-vector products.
    """
    found: list[Launch] = []
    for launch in launches:
        one = _one(found[-1], launch) if found else None
        if one is None:
            found.append(launch)
        else:
            found[-1] = one
    return found


def _one(first: Launch, second: Launch) -> Launch | None:
    """One launch that does what both do, or None."""
    if first.kernel != second.kernel or first.block != second.block:
        return None
    views = _KERNELS.get(first.kernel)
    if views is None:
        return merged_products(first, second)
    if _touched(first, views).meets(_touched(second, views)):
        return None
    grid = (max(first.grid[0], second.grid[0]), 2, 1)
    return Launch(f"{first.kernel}_two", grid, first.block, 0, [*first.args, *second.args])


def _touched(launch: Launch, views: _Views) -> Touched:
    written, read = ([_place(launch, i, views) for i in numbers] for numbers in (views.written, views.read))
    return Touched([place for place in written if place], [place for place in read if place])


def _place(launch: Launch, argument: int, views: _Views) -> Place | None:
    """Where an argument (ikpy::cuda::View) lies, None for a view of nothing."""
    address, *numbers = struct.unpack("<Q4q4iii", launch.args[argument])
    strides, shape = numbers[:4], numbers[4:8]
    if not address:
        return None
    type_id = F32
    if views.cache_type is not None and argument == views.written[0]:
        (type_id,) = struct.unpack("<i", launch.args[views.cache_type])
    row = registry.by_id(type_id).row_nbytes(shape[0])
    if shape[3] > 1:
        return Place.whole(address, row + sum((n - 1) * s for n, s in zip(shape[1:], strides[1:], strict=True)))
    return Place(address, row + (shape[1] - 1) * strides[1], max(strides[2], 1), shape[2])
