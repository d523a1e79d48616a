"""The bytes of a file: mapped, or read by several threads into memory of their own."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ikpy.errors import FileFormatError, ResourceError, UsageError
from ikpy.gguf.huge_pages import private_memory, reserved_memory
from ikpy.gguf.types import align_up
from ikpy.machine import numa, threads

_READ_STEP = 1 << 24
_READERS = 8
_NAMES_SHOWN = 5
Report = Callable[[int], None]


Area = tuple[int, int]


class Reading(NamedTuple):
    """How a file is read into memory.

    areas: first byte and end of what is read; the rest of the memory is never touched. report: gets the bytes of every
    step.
    """

    areas: Sequence[Area]
    report: Report
    reserved_pages: bool


def areas_without(size: int, holes: Iterable[Area]) -> list[Area]:
    """What is left of `size` bytes without the whole pages of holes, which are in order and do not overlap."""
    areas, start = [], 0
    for hole in holes:
        first, end = align_up(hole[0], mmap.PAGESIZE), hole[1] // mmap.PAGESIZE * mmap.PAGESIZE
        if first < end:
            areas.append((start, first))
            start = end
    return [area for area in (*areas, (start, size)) if area[0] < area[1]]


def no_report(_: int) -> None:
    """Reading that nobody watches."""


def share_of(total: int, progress: Callable[[float], None]) -> Report:
    """Tells progress the share that the reported bytes have of the total."""
    done = 0

    def report(n: int) -> None:
        nonlocal done
        done += n
        progress(min(1.0, done / total))

    return report


def memory_map(data: np.ndarray) -> mmap.mmap | None:
    """What holds the bytes that `file_bytes` gave: a mapping of the file, or anonymous memory."""
    owner = data.base
    while isinstance(owner, memoryview | np.ndarray):
        owner = owner.obj if isinstance(owner, memoryview) else owner.base
    return owner if isinstance(owner, mmap.mmap) else None


def file_bytes(path: str, how: Reading | None) -> tuple[np.ndarray, int]:
    """The bytes of a file, read-only uint8 [size], and the size of the reserved pages that they were read into, or 0.

    how: reads areas of them into memory; None maps the file.

    Raises:
        UsageError: there is no such file.
        FileFormatError: it is empty, or became shorter meanwhile.
        ResourceError: it cannot be opened, mapped or read.
    """
    try:
        if not os.path.isfile(path):
            raise UsageError(f"{path}: cannot open model: {_why_no_file(path)}")
        with open(path, "rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            if size == 0:
                raise FileFormatError(f"{path}: not a GGUF file: it is empty; download it again")
            if how:
                return _read_whole(handle.fileno(), size, path, how)
            return np.frombuffer(mmap.mmap(handle.fileno(), size, access=mmap.ACCESS_READ), np.uint8), 0
    except (OSError, ValueError) as error:
        raise ResourceError(f"{path}: cannot open model: {getattr(error, 'strerror', None) or error}") from error


def _why_no_file(path: str) -> str:
    """What is wrong with a path that names no regular file, and what to give instead."""
    if not os.path.isdir(path):
        problem = "is not a regular file" if os.path.exists(path) else "does not exist"
        return f"{problem}; give the path of a .gguf file"
    names = sorted(os.listdir(path))
    models = [name for name in names if name.endswith(".gguf")]
    if models:
        more = ", ..." if len(models) > _NAMES_SHOWN else ""
        return f"is a folder; give one of its files: {', '.join(models[:_NAMES_SHOWN])}{more}"
    if any(name.endswith(".safetensors") for name in names):
        return "is a checkpoint, not a GGUF file; ikpy convert makes one of it"
    return "is a folder without .gguf files"


def _read_whole(descriptor: int, size: int, path: str, how: Reading) -> tuple[np.ndarray, int]:
    """The file's bytes uint8 [size] in page-aligned memory, and the size of reserved pages if it is made of them."""
    if how.reserved_pages and (reserved := reserved_memory(size)):
        memory, page_size = reserved
        try:
            return _filled(memory, descriptor, size, path, how), page_size
        except OSError as error:
            # The free pages are on memory nodes that this process may not use.
            if error.errno != errno.EFAULT:
                raise
    return _filled(private_memory(size), descriptor, size, path, how), 0


def _filled(pages: mmap.mmap, descriptor: int, size: int, path: str, how: Reading) -> np.ndarray:
    memory = np.frombuffer(pages, np.uint8, size)
    # Pages of the file would fill the node, and the rest of the copy would go to another one.
    lets_go = numa.on_one_of_several()

    def read(area: Area) -> int:
        start, end = area
        position = start
        while position < end:
            count = os.preadv(descriptor, [memory[position:end].data], position)
            if count <= 0:
                raise FileFormatError(f"{path}: the file became shorter while it was read; try again")
            position += count
        if lets_go:
            os.posix_fadvise(descriptor, start, end - start, os.POSIX_FADV_DONTNEED)
        return end - start

    # One thread neither keeps fast drives busy nor touches the pages of more than one memory node.
    with threads.pool(min(_READERS, threads.physical_cores())) as pool:
        steps = [(at, min(at + _READ_STEP, end)) for start, end in how.areas for at in range(start, end, _READ_STEP)]
        for nbytes in pool.map(read, steps):
            how.report(nbytes)
    memory.flags.writeable = False
    return memory
