"""What a host keeps for its client: memory, and programs that were checked against it."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

from ikpy._native import core
from ikpy.backends.remote import rules
from ikpy.backends.remote.kernels import COUNTS
from ikpy.backends.remote.protocol import MAX_NUMBER, ProtocolError, divided
from ikpy.errors import IkpyError
from ikpy.gguf.huge_pages import zeroed_bytes
from ikpy.graph.ir import I32
from ikpy.graph.plan import OP_DTYPE, TENSOR_DTYPE
from ikpy.quants import registry

MAX_RECORDS = 1 << 20
MAX_PROGRAMS = 4096
MAX_EXTENT = 1 << 40
PAD = 64
"""Bytes behind an allocation, as kernels read whole vectors."""


class Stored(NamedTuple):
    """A program that can run. uses: allocations it has addresses in; largest: most cells that its shapes allow."""

    plan: Any
    uses: frozenset[int]
    runtime: int
    largest: int
    nbytes: int
    numbers: list[rules.Range]


class Store:
    """Allocations of at most `limit` bytes, and programs. Raises ProtocolError for whatever the client may not do."""

    def __init__(self, limit: int, n_threads: int) -> None:
        self.limit, self.used = limit, 0
        self._n_threads = n_threads
        self._memory: dict[int, np.ndarray] = {}
        self._programs: dict[int, Stored] = {}
        self._work = core.WorkMemory(0)
        self._work_bytes = 0

    @property
    def free(self) -> int:
        """Bytes that are left."""
        return max(0, self.limit - self.used)

    # memory

    def alloc(self, number: int, nbytes: int) -> bool:
        """Takes memory, filled with zeros; False if there is too little."""
        _check_number(number)
        if number in self._memory:
            raise ProtocolError(f"allocation {number} is there already")
        if not 0 < nbytes < MAX_EXTENT:
            raise ProtocolError(f"an allocation of {nbytes} bytes")
        if nbytes > self.free:
            return False
        try:
            self._memory[number] = zeroed_bytes(nbytes + PAD)[:nbytes]
        except MemoryError:
            return False
        self.used += nbytes
        return True

    def release(self, number: int) -> None:
        """Gives memory back, and the programs that use it."""
        if number not in self._memory:
            raise ProtocolError(f"there is no allocation {number}")
        self.used -= self._memory.pop(number).nbytes
        # Programs hold addresses of what they were checked against.
        for known in [n for n, program in self._programs.items() if number in program.uses]:
            self.drop(known)

    def span(self, where: int, nbytes: int) -> memoryview:
        """Memory from an address on."""
        number, offset = divided(where)
        memory = self._memory.get(number)
        if memory is None or nbytes > memory.nbytes - offset:
            raise ProtocolError(f"{nbytes} bytes at {where:#x} are not memory of this connection")
        return memory.data[offset : offset + nbytes]

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copies within the memory."""
        self.span(target, nbytes)[:] = self.span(source, nbytes)

    def fill(self, where: int, byte: int, nbytes: int) -> None:
        """Sets every byte of a range."""
        if not 0 <= byte < 256:
            raise ProtocolError(f"{byte} is no byte")
        np.frombuffer(self.span(where, nbytes), np.uint8)[:] = byte

    # programs

    def compile(self, number: int, runtime: int, records: bytes) -> None:
        """Checks a program and makes it ready to run."""
        _check_number(number)
        if number in self._programs:
            self.drop(number)
        if len(self._programs) >= MAX_PROGRAMS or len(records) > self.free:
            raise ProtocolError("too many programs")
        self.span(runtime, 8)
        tensors, ops, dynamic = _parsed(records)
        used = self._resolve(tensors)
        numbers = _check_ops(ops, tensors)
        largest = [int(tensors["ne"][t, dim]) for t, dim in dynamic.tolist()]
        try:
            plan = core.Plan(tensors, ops, dynamic)
            needed = plan.work_bytes(self._n_threads)
        except (ValueError, IndexError, OverflowError, MemoryError, RuntimeError) as error:
            raise ProtocolError(f"a program cannot run: {error}") from None
        self._reserve_work(needed)
        uses = frozenset({*used, divided(runtime)[0]})
        self._programs[number] = Stored(plan, uses, runtime, min(largest, default=MAX_EXTENT), len(records), numbers)
        self.used += len(records)

    def _reserve_work(self, nbytes: int) -> None:
        if nbytes <= self._work_bytes:
            return
        if nbytes - self._work_bytes > self.free:
            raise ProtocolError(
                f"{nbytes >> 20} MiB of work memory are needed, the host lends {self.free >> 20} MiB more"
            )
        self._work = core.WorkMemory(nbytes)
        self.used += nbytes - self._work_bytes
        self._work_bytes = nbytes

    def run(self, number: int) -> None:
        """Runs a program."""
        program = self._programs.get(number)
        if program is None:
            raise ProtocolError(f"there is no program {number}")
        n_kv = int(np.frombuffer(self.span(program.runtime, 8), "<i8")[0])
        if not 0 <= n_kv <= program.largest:
            raise ProtocolError(f"{n_kv} cells are attended of {program.largest}")
        for numbers in program.numbers:
            numbers.check()
        program.plan.run(n_kv, self._n_threads, self._work)

    def drop(self, number: int) -> None:
        """Forgets a program; of one that went with its memory there is nothing left to forget."""
        program = self._programs.pop(number, None)
        if program is not None:
            self.used -= program.nbytes
        if not self._programs:
            self._work, self.used, self._work_bytes = core.WorkMemory(0), self.used - self._work_bytes, 0

    def _resolve(self, tensors: np.ndarray) -> set[int]:
        """Replaces addresses by those of this machine; numbers of the allocations that are used."""
        used = set()
        for record in tensors:
            nbytes = extent_of(int(record["type"]), record["ne"].tolist(), record["nb"].tolist())
            where = int(record["data"])
            memory = self.span(where, nbytes)
            used.add(divided(where)[0])
            record["data"] = np.frombuffer(memory, np.uint8).ctypes.data if nbytes else 0
        return used


def _check_number(number: int) -> None:
    if not 0 < number < MAX_NUMBER:
        raise ProtocolError(f"{number} is no number of an allocation or program")


def _parsed(records: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tensors, ops and dynamic extents of a program, copies."""
    if len(records) < COUNTS.size:
        raise ProtocolError("a program is too short")
    counts = COUNTS.unpack_from(records)
    sizes = [n * size for n, size in zip(counts, (TENSOR_DTYPE.itemsize, OP_DTYPE.itemsize, 8), strict=True)]
    if not (0 < counts[0] <= MAX_RECORDS and 0 < counts[1] <= MAX_RECORDS):
        raise ProtocolError("a program without ops, or with too many")
    if len(records) != COUNTS.size + sum(sizes):
        raise ProtocolError("a program has the wrong size")
    start, parts = COUNTS.size, []
    for dtype, size in ((TENSOR_DTYPE, sizes[0]), (OP_DTYPE, sizes[1]), (np.dtype("<i4"), sizes[2])):
        parts.append(np.frombuffer(records, dtype, size // dtype.itemsize, start).copy())
        start += size
    tensors, ops = parts[:2]
    dynamic = parts[2].astype(np.int32).reshape(-1, 2)
    if ((dynamic < 0) | (dynamic >= np.array([len(tensors), 4]))).any():
        raise ProtocolError("a dynamic extent of a tensor that there is not")
    return tensors, ops, dynamic


def extent_of(type_id: int, shape: list[int], strides: list[int]) -> int:
    """Bytes from the first one of a tensor to its last, also for kernels that take its rows to be contiguous."""
    if not all(0 < n < MAX_EXTENT for n in shape) or not all(0 <= n < MAX_EXTENT for n in strides):
        raise ProtocolError(f"a tensor of shape {shape} and strides {strides}")
    try:
        kind = registry.by_id(type_id)
        packed = kind.row_nbytes(shape[0])
        row = packed if kind.block_elements > 1 else (shape[0] - 1) * strides[0] + kind.block_bytes
    except (IkpyError, ValueError) as error:
        raise ProtocolError(f"a tensor of type {type_id}: {error}") from None
    return max(packed, row) + sum((n - 1) * step for n, step in zip(shape[1:], strides[1:], strict=True))


def _check_ops(ops: np.ndarray, tensors: np.ndarray) -> list[rules.Range]:
    """Checks ops against each other's tensors; numbers that the client sets and that are to be checked in every run."""
    kinds = {number: name for name, number in core.op_kinds().items()}
    known = [_tensor(record) for record in tensors]
    written: set[int] = set()
    found: dict[tuple[int, int, int], rules.Range] = {}
    for op in ops:
        kind, places, target = kinds.get(int(op["kind"])), op["src"].tolist(), int(op["dst"])
        if kind is None or not all(-1 <= i < len(known) for i in places) or not 0 <= target < len(known):
            raise ProtocolError("an op that there is not, or of tensors that there are not")
        sources, cells = [None if i < 0 else known[i] for i in places], (int(op["above"]), int(op["upto"]))
        made = rules.Op(kind, known[target], sources, op["ip"].tolist(), op["fp"].tolist(), cells)
        rules.check(made)
        for tensor, low, high in rules.ranges(made):
            if tensor.data not in written:
                found[tensor.data, low, high] = rules.Range(_numbers(tensor), low, high)
        written.update(tensor.data for tensor in made.written)
    return list(found.values())


def _tensor(record: np.ndarray) -> rules.Tensor:
    shape, strides = tuple(record["ne"].tolist()), tuple(record["nb"].tolist())
    type_id = int(record["type"])
    return rules.Tensor(type_id, shape, extent_of(type_id, list(shape), list(strides)), int(record["data"]), strides)


def _numbers(tensor: rules.Tensor) -> np.ndarray:
    """Its numbers where they lie, i32 [elements of dimension 1, of dimension 0]."""
    if tensor.type_id != I32:
        raise ProtocolError("numbers of rows or cells that are no i32")
    data = np.ctypeslib.as_array((ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data))
    shape, strides = tensor.shape[1::-1], (tensor.strides[1], 4)
    return np.lib.stride_tricks.as_strided(data.view(np.uint8)[: tensor.nbytes // 4 * 4].view(np.int32), shape, strides)
