"""Small graphs run by the CPU backend and by the emulated CUDA kernels on the same memory."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ikpy._native import core
from ikpy.backends.cuda import emulator, launch
from ikpy.backends.cuda.api import Device
from ikpy.graph.builder import Graph
from ikpy.graph.ir import F16, F32, I32, I64, Value, contiguous_strides, external
from ikpy.graph.plan import CompiledPlan
from ikpy.graph.planner import plan_arena
from ikpy.quants import registry
from tests.cuda.ptx.launcher import Library

# The GPU that runs the kernels (pytest --device real); None: they are emulated.
DEVICE: Device | None = None
# The machine that executes their PTX (pytest --device ptx); None: they are compiled for the host.
PTX: Library | None = None
# All kernels that were launched.
LAUNCHED: set[str] = set()
# Is told every kernel before it is launched, for reports of tests.
ON_LAUNCH: Callable[[str], None] = lambda kernel: None  # noqa: E731
ORDERS = (emulator.FORWARD, emulator.REVERSE, 2026)
TYPE_OF_DTYPE = {"float32": F32, "float16": F16, "int32": I32, "int64": I64}


def capability() -> tuple[int, int]:
    """Of what runs the kernels; the emulation has all of them."""
    if PTX is not None:
        return PTX.arch // 10, PTX.arch % 10
    return DEVICE.compute_capability if DEVICE is not None else (9, 0)


class DeviceFormats:
    """The native module with the activation formats of single rows, which the CUDA kernels read for any number, or
    with the one of large products.
    """

    def __init__(self, large: launch.Large) -> None:
        self._large = large

    def __getattr__(self, name: str) -> Any:
        return getattr(core, name)

    def activation_format(self, weight_type: int, n_rows: int = 1, by_expert: bool = False) -> int:
        """Format in which activations are prepared."""
        return self._large.format if self._large.tokens else core.activation_format(weight_type, 1)

    def activation_nbytes(self, fmt: int, n_in: int, n_rows: int, n_batch: int) -> int:
        """Bytes of prepared activations."""
        if fmt == launch.ACT_TILES:
            return launch.tiled_bytes(n_in, n_rows * n_batch)
        return core.activation_nbytes(fmt, n_in, n_rows, n_batch)


class Program:
    """A graph under construction and the arrays it reads.

    merge: launches are merged as in plans; launches: those of the last run.
    """

    def __init__(self, target: launch.Target | None = None, *, merge: bool = False) -> None:
        self.target = target or launch.Target.of([capability()])
        self.launches: list[launch.Launch] = []
        self._merge = merge
        self.graph = Graph(DeviceFormats(self.target.large_products("")))
        self.arrays: list[np.ndarray] = []

    def array(self, data: np.ndarray) -> Value:
        """A plain value over a copy of data, last axis first in ggml order."""
        copy = _aligned(data)
        self.arrays.append(copy)
        return external(copy.ctypes.data, copy, TYPE_OF_DTYPE[data.dtype.name], data.shape[::-1])

    def weight(self, data: np.ndarray, type_name: str, shape: Sequence[int]) -> Value:
        """A weight of packed bytes with ggml shape."""
        copy = _aligned(data.reshape(-1).view(np.uint8))
        self.arrays.append(copy)
        return external(copy.ctypes.data, copy, registry.by_name(type_name).id, shape, type_name)

    def run(self, results: Sequence[Value], *, on_cuda: bool, n_kv: int = 0) -> list[np.ndarray]:
        """Contents of results (arena or external) after one run; external memory is put back afterwards.

        Emulated kernels run with checks for races, and must give the same whatever order threads take turns in.
        """
        if not on_cuda or DEVICE is not None:
            return self._run_once(results, n_kv, on_cuda=on_cuda)
        machine, found = PTX or emulator.library(checked=True), []
        for order in ORDERS:
            machine.set_order(order)
            found.append(self._run_once(results, n_kv, on_cuda=True))
        for order, other in zip(ORDERS, found, strict=True):
            same = [a.tobytes() == b.tobytes() for a, b in zip(found[0], other, strict=True)]
            assert all(same), f"results {same} with threads in order {order}"
        return found[0]

    def _run_once(self, results: Sequence[Value], n_kv: int, *, on_cuda: bool) -> list[np.ndarray]:
        saved = [array.copy() for array in self.arrays]
        arena = plan_arena(self.graph.nodes, {v.buffer for v in results})
        memory = _aligned(np.full(arena.nbytes, 0xFF, np.uint8))
        base = memory.ctypes.data
        if on_cuda:
            self._run_cuda(memory, arena.offsets, n_kv)
        else:
            CompiledPlan(core, self.graph.nodes, arena, base).run(n_kv, 2)
        found = []
        for value in results:
            if value.buffer.address is None:
                source, start = memory, arena.offsets[value.buffer] + value.offset
            else:
                source, start = value.buffer.owner.reshape(-1).view(np.uint8), value.offset
            found.append(_strided(source, start, value).copy())
        for array, old in zip(self.arrays, saved, strict=True):
            array[...] = old
        return found

    def _run_cuda(self, memory: np.ndarray, offsets: dict, n_kv: int) -> None:
        if DEVICE is not None:
            self._run_on_device(DEVICE, memory, offsets, n_kv)
            return
        base = memory.ctypes.data
        runtime = np.array([n_kv, 0, 0, 0], np.int32)
        work = _aligned(np.full(max(launch.work_bytes(node, self.target) for node in self.graph.nodes), 0xFF, np.uint8))

        def address(value: Value) -> int:
            if value is launch.RUNTIME:
                return runtime.ctypes.data
            if value is launch.WORK:
                return work.ctypes.data
            start = value.buffer.address
            return (base + offsets[value.buffer] if start is None else start) + value.offset

        self._lower(address)
        for step in self.launches:
            ON_LAUNCH(step.kernel)
            LAUNCHED.add(step.kernel)
            if PTX is None:
                emulator.library(checked=True).launch(*step)
            else:
                PTX.launch(*step, memory=_ranges([memory, runtime, work, *self.arrays]))

    def _lower(self, address: launch.Address) -> None:
        self.launches = []
        for node in self.graph.nodes:
            assert launch.supports(node) is None, launch.supports(node)
            self.launches += launch.lower(node, address, self.target)
        if self._merge:
            self.launches = launch.merged(self.launches)

    def _run_on_device(self, device: Device, memory: np.ndarray, offsets: dict, n_kv: int) -> None:
        """Copies all memory to a GPU, runs the kernels there and copies it back."""
        runtime = np.array([n_kv, 0, 0, 0], np.int32)
        work = np.full(max(launch.work_bytes(node, self.target) for node in self.graph.nodes) + 64, 0xFF, np.uint8)
        host = [memory, runtime, work, *self.arrays]
        stream, blocks = device.new_stream(), [device.alloc(array.nbytes) for array in host]
        by_address = {array.ctypes.data: block for array, block in zip(host, blocks, strict=True)}

        def address(value: Value) -> int:
            if value is launch.RUNTIME:
                return blocks[1]
            if value is launch.WORK:
                return blocks[2]
            start = value.buffer.address
            return (blocks[0] + offsets[value.buffer] if start is None else by_address[start]) + value.offset

        for array, block in zip(host, blocks, strict=True):
            stream.upload(block, array)
        self._lower(address)
        for step in self.launches:
            ON_LAUNCH(step.kernel)
            stream.launch(step)
        for array, block in zip(host, blocks, strict=True):
            stream.download(array, block)
        stream.synchronize()
        for block in blocks:
            device.release(block)

    def compare(self, *results: Value, bound: float, n_kv: int = 0) -> None:
        """Fails unless both give the same within bound times the largest magnitude of each result."""
        expected = self.run(results, on_cuda=False, n_kv=n_kv)
        actual = self.run(results, on_cuda=True, n_kv=n_kv)
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert_close(a, e, bound, f"result {i}")


def assert_close(actual: np.ndarray, expected: np.ndarray, bound: float, what: str) -> None:
    """Error relative to the largest magnitude; integers must be equal."""
    if expected.dtype.kind in "iu":
        differ = np.argwhere(actual != expected)
        first = tuple(differ[0]) if len(differ) else (0,) * expected.ndim
        assert not len(differ), f"{what}: {len(differ)} differ, at {first} {actual[first]} instead of {expected[first]}"
        return
    a, e = actual.astype(np.float64), expected.astype(np.float64)
    same = (a == e) | (np.isnan(a) & np.isnan(e))
    scale = np.abs(e[np.isfinite(e)]).max(initial=1e-30)
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.nan_to_num(np.abs(a - e), nan=np.inf) / scale)
    worst = np.unravel_index(np.argmax(error), error.shape)
    assert error[worst] <= bound, (
        f"{what}: worst at {worst}: {actual[worst]} instead of {expected[worst]} "
        f"({error[worst]:.2e} of {scale:.3g}, allowed {bound:.1e})"
    )


def _aligned(data: np.ndarray) -> np.ndarray:
    """A copy that starts at a multiple of 64 and ends within 64 bytes of a page that must not be touched.

    Device allocations start at multiples of 256; kernels rely on 16 only.
    """
    page = mmap.PAGESIZE
    room = -(-max(data.nbytes, 1) // page) * page
    memory = mmap.mmap(-1, room + page)
    raw = np.frombuffer(memory, np.uint8)
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(raw.ctypes.data + room), ctypes.c_size_t(page), 0):
        raise OSError("mprotect failed")
    start = (room - data.nbytes) // 64 * 64
    copy = raw[start : start + data.nbytes].view(data.dtype).reshape(data.shape)
    copy[...] = data
    return copy


def _ranges(arrays: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    """Where kernels may read and write: the arrays, to the end of the 16 bytes that their last byte is in."""
    return [(array.ctypes.data, -(-array.nbytes // 16) * 16) for array in arrays]


def _strided(source: np.ndarray, start: int, value: Value) -> np.ndarray:
    """The elements of a value; block types as bytes of rows."""
    shape, strides = value.shape, value.strides
    if registry.by_id(value.type_id).block_elements > 1:
        nbytes = contiguous_strides(value.type_id, (shape[0],))[1]
        return np.lib.stride_tricks.as_strided(
            source[start:], (shape[3], shape[2], shape[1], nbytes), (strides[3], strides[2], strides[1], 1)
        )
    dtype = {F32: np.float32, F16: np.float16, I32: np.int32, 30: np.uint16}[value.type_id]
    flat = source[start : start + (len(source) - start) // dtype().itemsize * dtype().itemsize].view(dtype)
    return np.lib.stride_tricks.as_strided(flat, shape[::-1], strides[::-1])
