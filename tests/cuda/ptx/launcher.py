"""Launches kernels on the machine: `Library` for the kernels of the package, `Program` for one of any PTX."""

from __future__ import annotations

import ctypes
import re
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ikpy.backends.cuda import modules
from ikpy.backends.cuda.launch import kernel_file, limits
from tests.cuda.ptx import build
from tests.cuda.ptx.encode import Code, encode
from tests.cuda.ptx.parser import Module, PtxError

Memory = Sequence[tuple[int, int]]
Dim3 = tuple[int, int, int]


class MachineFault(RuntimeError):
    """A launch that would fail, hang or be undefined on a device."""


class Traffic(NamedTuple):
    """What the accesses of an instruction moved, as machine.hpp says; place: `file:line` of the CUDA code."""

    place: str
    instruction: str
    requests: int
    bytes: int
    sectors: int
    lines: int
    least_passes: int
    passes: int

    @property
    def waste(self) -> float:
        """How many times what is needed at least: sectors of global memory, or passes of shared memory."""
        return max(32 * self.sectors / max(self.bytes, 32 * self.requests), self.passes / max(1, self.least_passes))


class _Module:
    """A PTX file with its variables in memory."""

    def __init__(self, text: str) -> None:
        self.module = Module(text)
        self.arrays: dict[str, np.ndarray] = {}
        for name, variable in self.module.variables.items():
            if variable.space in ("global", "const"):
                data = np.zeros(variable.size + variable.alignment, np.uint8)
                start = -data.ctypes.data % variable.alignment
                array = data[start : start + variable.size]
                array[: len(variable.data)] = np.frombuffer(variable.data, np.uint8)
                self.arrays[name] = array
        self._programs: dict[str, Program] = {}

    def program(self, kernel: str) -> Program:
        """A kernel, ready to run."""
        if kernel not in self._programs:
            addresses = {name: array.ctypes.data for name, array in self.arrays.items()}
            parsed = self.module.kernel(kernel)
            code = encode(parsed, self.module.variables, addresses, build.machine())
            self._programs[kernel] = Program(kernel, code, self.memory())
        return self._programs[kernel]

    def memory(self) -> list[tuple[int, int]]:
        """The module's variables as ranges of addresses."""
        return [(array.ctypes.data, array.nbytes) for array in self.arrays.values()]


class Program:
    """A kernel on the machine."""

    def __init__(self, name: str, code: Code, memory: Memory) -> None:
        self.name, self.code, self._memory = name, code, list(memory)
        rows, operands, constants, wide = code.arrays()
        self._program = build.library().ptx_program(
            build.pointer(rows),
            len(rows),
            build.pointer(operands),
            len(operands),
            build.pointer(constants),
            len(constants),
            build.pointer(wide),
            len(wide),
            code.registers,
            code.wide_registers,
        )
        weakref.finalize(self, build.library().ptx_free_program, ctypes.c_void_p(self._program))

    def launch(
        self,
        grid: Dim3,
        block: Dim3,
        shared_bytes: int,
        args: Sequence[bytes],
        memory: Memory,
        *,
        order: int = 0,
        arch: int = 80,
    ) -> None:
        """Runs the kernel. memory: address and bytes of what it may access. Raises MachineFault."""
        parameters = self.code.parameters
        if [len(a) for a in args] != [nbytes for _, nbytes in parameters]:
            sizes = [nbytes for _, nbytes in parameters]
            raise MachineFault(f"kernel {self.name}: arguments of {[len(a) for a in args]} bytes for {sizes}")
        buffer = np.full(sum(parameters[-1]) if parameters else 1, 0xFF, np.uint8)
        for (start, nbytes), value in zip(parameters, args, strict=True):
            buffer[start : start + nbytes] = np.frombuffer(value, np.uint8)
        shared = self.code.dynamic_start + shared_bytes
        sizes = [*grid, *block, shared, self.code.local_bytes, len(buffer), order, int(arch == 75)]
        ranges = sorted((start, start + nbytes) for start, nbytes in [*memory, *self._memory])
        status = build.library().ptx_launch(
            ctypes.c_void_p(self._program),
            build.pointer(np.array(sizes, np.uint32)),
            build.pointer(buffer),
            build.pointer(np.array(ranges, np.uint64)),
            len(ranges),
        )
        if status:
            raise MachineFault(self._explained(build.library().ptx_error().decode()))

    def measure(self) -> None:
        """From now on accesses are counted."""
        build.library().ptx_measure(ctypes.c_void_p(self._program))

    def traffic(self) -> list[Traffic]:
        """Of the instructions that accessed memory since measure()."""
        counts = np.zeros((len(self.code.origins), 6), np.uint64)
        build.library().ptx_traffic(ctypes.c_void_p(self._program), build.pointer(counts))
        found = zip(self.code.origins, counts.tolist(), strict=True)
        return [Traffic(origin.source, origin.mnemonic, *row) for origin, row in found if row[0]]

    def _explained(self, fault: str) -> str:
        """Names instructions with their lines, and those of the CUDA code, instead of by their numbers."""

        def place(match: re.Match[str]) -> str:
            origin = self.code.origins[int(match[1])]
            source = f", from {origin.source}" if origin.source else ""
            return f"PTX line {origin.line} ({origin}){source}"

        return f"kernel {self.name}: {re.sub(r'#([0-9]+)', place, fault)}"


@cache
def _loaded(path: Path) -> _Module:
    return _Module(path.read_text())


def load(text: str) -> _Module:
    """Kernels of PTX that is given."""
    return _Module(text)


class Library:
    """The kernels of the package for one architecture: 75, 80 or 90. measured: accesses are counted."""

    def __init__(self, arch: int, *, measured: bool = False) -> None:
        self.arch = arch
        self.order = 0
        self._measured = measured
        self.used: dict[str, Program] = {}

    def set_order(self, order: int) -> None:
        """As Emulator.set_order; asynchronous operations are late in all orders but the first."""
        self.order = order

    def source(self, kernel: str) -> Path:
        """The file that holds a kernel."""
        return modules.KERNELS / f"{kernel_file(kernel)}.cu"

    def program(self, kernel: str) -> Program:
        """A kernel by its name, compiled on first use."""
        if kernel not in self.used:
            self.used[kernel] = self._compiled(kernel)
            if self._measured:
                self.used[kernel].measure()
        return self.used[kernel]

    def _compiled(self, kernel: str) -> Program:
        stem = kernel_file(kernel)
        only = modules.only_architecture(stem)
        if only not in (None, f"sm_{self.arch}"):
            raise MachineFault(f"kernel {kernel}: there is none for sm_{self.arch}")
        path = build.compile_ptx(self.source(kernel), build.virtual(stem, self.arch))
        try:
            return _loaded(path).program(kernel)
        except PtxError as error:
            raise MachineFault(f"kernel {kernel}: {error}") from error

    def launch(
        self, kernel: str, grid: Dim3, block: Dim3, shared_bytes: int, args: Sequence[bytes], memory: Memory
    ) -> None:
        """Runs a kernel that may access this memory. Raises MachineFault."""
        program = self.program(kernel)
        capability = (self.arch // 10, self.arch % 10)
        fault = limits.geometry_fault(kernel, grid, block) or limits.shared_fault(shared_bytes, capability)
        if fault:
            raise MachineFault(f"kernel {kernel}: {fault}")
        program.launch(grid, block, shared_bytes, args, memory, order=self.order, arch=self.arch)
