"""Copies of weights to a device: threads fill pinned buffers while the copy engine empties others.

A copy straight from pageable memory (a mapped file) would hold up the host and reach a fraction of the link's speed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import NamedTuple

import numpy as np

from ikpy.backends.cuda.api import Device, DeviceError, Event, Stream
from ikpy.machine.threads import physical_cores

Log = Callable[[str], None]
Part = tuple[int, np.ndarray]
# Large enough that starting a copy costs nothing, small enough that the first one starts soon.
CHUNK = 8 << 20
BUFFERS = 8
# One thread copies memory at about a third of the speed of a PCIe 5 link.
THREADS = 4


def pinned_or_pageable(device: Device, nbytes: int, log: Log) -> np.ndarray:
    """Pinned host memory uint8 [nbytes], or ordinary memory, with a warning, where the system locks no more."""
    try:
        return device.pinned(nbytes)
    except DeviceError as error:
        log(f"warning: {error}; copies to and from the device will be slower")
        return np.empty(nbytes, np.uint8)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(THREADS, physical_cores()), "ikpy-staging")


class _Buffer:
    """Pinned memory. empty: the copy that reads it is done."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.memory = device.pinned(nbytes)
        self.empty: Event = device.new_event()


class _Filling(NamedTuple):
    """A buffer on its way to becoming the next copy."""

    done: Future[None]
    buffer: _Buffer
    target: int
    nbytes: int


class StagingRing:
    """Pinned buffers of a device that take turns. Used by one thread at a time.

    chunk: bytes of a buffer; n_buffers: two or more. Where not even two can be pinned, copies read pageable memory, and
    log gets a warning.
    """

    def __init__(self, device: Device, log: Log, chunk: int = CHUNK, n_buffers: int = BUFFERS) -> None:
        self.chunk = chunk
        self._buffers: list[_Buffer] = []
        self._next = 0
        try:
            for _ in range(n_buffers):
                self._buffers.append(_Buffer(device, chunk))
        except DeviceError as error:
            if len(self._buffers) < 2:
                self._buffers.clear()
                log(f"warning: {error}; weights are copied from pageable memory, which is slower")

    def copy(self, stream: Stream, parts: Iterable[Part], started: Callable[[int], None] = lambda _: None) -> None:
        """Copies uint8 arrays to addresses on the device; returns when all copies are on the stream.

        started: is told the bytes of every piece whose copy is on the stream, in order. From then on the array may
        change, unless no memory could be pinned: then not before the stream is done.
        """
        if not self._buffers:
            for target, source in parts:
                stream.upload(target, source)
                started(source.nbytes)
            return
        filling: deque[_Filling] = deque()
        try:
            for target, piece in self._pieces(parts):
                # One half of the buffers is filled while the other half is on its way.
                if len(filling) >= len(self._buffers) // 2:
                    _start(stream, filling.popleft(), started)
                filling.append(self._fill(target, piece))
            while filling:
                _start(stream, filling.popleft(), started)
        finally:
            wait([each.done for each in filling])

    def _pieces(self, parts: Iterable[Part]) -> Iterator[Part]:
        for target, source in parts:
            for start in range(0, source.nbytes, self.chunk):
                yield target + start, source[start : start + self.chunk]

    def _fill(self, target: int, piece: np.ndarray) -> _Filling:
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        buffer.empty.synchronize()
        done = _threads().submit(np.copyto, buffer.memory[: piece.nbytes], piece)
        return _Filling(done, buffer, target, piece.nbytes)


def _start(stream: Stream, filled: _Filling, started: Callable[[int], None]) -> None:
    filled.done.result()
    stream.upload(filled.target, filled.buffer.memory[: filled.nbytes])
    stream.record(filled.buffer.empty)
    started(filled.nbytes)
