"""The CUDA kernels compiled as host C++ and run on the CPU: proof of their logic without a GPU.

Every .cu file is compiled with the host compiler against ``shim/cuda_shim.hpp``; objects and the library are kept in
the user cache by the hash of their sources. The emulation is exact in what threads see, not in speed.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from ikpy.backends.cuda.launch import limits
from ikpy.errors import UnsupportedError
from ikpy.file_locks import lock_file

KERNELS = Path(__file__).parent / "kernels"
SHIM = Path(__file__).parent / "shim"
NATIVE = Path(__file__).parent.parent.parent / "_native"
INCLUDE_DIRS = (KERNELS, NATIVE / "include")

# Static variables of templates that are visible are one for all libraries of a process.
_FLAGS = (
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-Wno-attributes",
    "-w",
)


# What the handlers are for: shim/races.cpp, shim/undefined.cpp. Arrays that nothing was assigned to hold a pattern.
_UNDEFINED = "alignment,bounds,float-cast-overflow,integer-divide-by-zero,shift-exponent,signed-integer-overflow"
_CHECKS = (
    f"-fsanitize=thread,{_UNDEFINED}",
    "--param=tsan-instrument-func-entry-exit=0",
    "-ftrivial-auto-var-init=pattern",
)
FORWARD, REVERSE = 0, 1


class EmulationError(RuntimeError):
    """A launch that would fail or hang on a device."""


class Emulator:
    """Kernels of the host build by name."""

    def __init__(self, path: Path) -> None:
        self._lib = ctypes.CDLL(str(path))
        self._lib.ikpy_emulator_error.restype = ctypes.c_char_p
        self._lib.ikpy_emulator_kernel_name.restype = ctypes.c_char_p
        self._parameters: dict[str, list[tuple[int, int]]] = {}

    def kernels(self) -> list[str]:
        """Names of all kernels."""
        count = self._lib.ikpy_emulator_kernel_count()
        return [self._lib.ikpy_emulator_kernel_name(i).decode() for i in range(count)]

    def parameters(self, kernel_name: str) -> list[tuple[int, int]]:
        """Bytes and alignment of each parameter of a kernel, as the compiler lays them out."""
        if kernel_name not in self._parameters:
            nbytes, alignment = ctypes.c_size_t(), ctypes.c_size_t()
            found: list[tuple[int, int]] = []
            while True:
                self._lib.ikpy_emulator_parameter(
                    kernel_name.encode(), len(found), ctypes.byref(nbytes), ctypes.byref(alignment)
                )
                if not nbytes.value:
                    break
                found.append((nbytes.value, alignment.value))
            self._parameters[kernel_name] = found
        return self._parameters[kernel_name]

    def set_order(self, order: int) -> None:
        """The order in which blocks, warps and threads take turns: uncovers missing barriers and waits.

        FORWARD, REVERSE (asynchronous copies arrive late), or the seed of a random order (copies arrive late as well).
        """
        self._lib.ikpy_emulator_set_order(order)

    def launch(
        self,
        kernel_name: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        args: Sequence[bytes],
    ) -> None:
        """Runs a kernel to its end. args: one packed value per parameter. Raises EmulationError."""
        parameters = self.parameters(kernel_name)
        fault = limits.geometry_fault(kernel_name, grid, block)
        if parameters:  # else there is no such kernel
            fault = fault or limits.argument_fault(args, parameters)
        if fault:
            raise EmulationError(f"kernel {kernel_name}: {fault}")
        buffers = [ctypes.create_string_buffer(a, max(len(a), 1)) for a in args]
        pointers = (ctypes.c_void_p * max(len(buffers), 1))(*[ctypes.addressof(b) for b in buffers])
        status = self._lib.ikpy_emulator_launch(
            kernel_name.encode(),
            (ctypes.c_uint * 3)(*grid),
            (ctypes.c_uint * 3)(*block),
            ctypes.c_size_t(shared_bytes),
            pointers,
        )
        if status:
            raise EmulationError(f"kernel {kernel_name}: {self._lib.ikpy_emulator_error().decode()}")


def sources() -> list[Path]:
    """The kernel files, in order of their names."""
    return sorted(KERNELS.glob("*.cu"))


_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def dependencies(source: Path, folders: Sequence[Path]) -> list[Path]:
    """The file and all files it includes by name, found in its folder or in those given."""
    found: dict[Path, None] = {}
    waiting = [source.resolve()]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found[path] = None
        for name in _INCLUDE.findall(path.read_text(encoding="utf-8")):
            places = [(folder / name).resolve() for folder in (path.parent, *folders)]
            waiting += [place for place in places if place.exists()][:1]
    return list(found)


def sources_digest(source: Path, folders: Sequence[Path], *parts: str) -> str:
    """Hash of a file with everything it includes from these folders, and of further strings."""
    return _digest(*(path.read_bytes() for path in dependencies(source, folders)), *(part.encode() for part in parts))


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def _compiler() -> str:
    compiler = os.environ.get("CXX", "").split()[:1] or [shutil.which("g++") or shutil.which("clang++") or ""]
    if not compiler[0]:
        raise UnsupportedError("emulating the CUDA kernels needs a C++ compiler (g++ or clang++)")
    return compiler[0]


def cache_dir() -> Path:
    """Where builds are kept: $XDG_CACHE_HOME/ikpy/cuda-emulator."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ikpy" / "cuda-emulator"


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulationError(f"{' '.join(command)} failed:\n{done.stderr[:4000]}")


def _produce(target: Path, command: list[str]) -> Path:
    """Runs a compiler command that writes target unless it exists; parallel processes do not disturb each other."""
    if target.exists():
        return target
    with tempfile.NamedTemporaryFile(dir=target.parent, suffix=target.suffix, delete=False) as temporary:
        pass
    try:
        _run([*command, "-o", temporary.name])
        os.replace(temporary.name, target)
    finally:
        Path(temporary.name).unlink(missing_ok=True)
    return target


def _object(source: Path, folder: Path, compiler: str, flags: Sequence[str]) -> Path:
    folders = (SHIM, *INCLUDE_DIRS)
    key = sources_digest(source, folders, compiler, *flags)
    includes = [f"-I{path}" for path in folders]
    command = [compiler, *flags, *includes, "-x", "c++", "-c", str(source)]
    built = _produce(folder / f"{source.stem}-{key}.o", command)
    if (
        sources_digest(source, folders, compiler, *flags) != key
    ):  # edited meanwhile: the object may not be what its name says
        built.unlink(missing_ok=True)
        raise EmulationError(f"{source.name} or a header changed while it was compiled; try again")
    return built


def build(kernel_files: Sequence[Path], *, checked: bool = False) -> Emulator:
    """An emulator with the kernels of these files; compiles what is not in the user cache.

    checked: races and misaligned accesses end a launch with an error; several times as slow.
    """
    compiler = _compiler()
    folder = cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    work = [(path, (*_FLAGS, *_CHECKS) if checked else _FLAGS) for path in kernel_files]
    work += [(path, _FLAGS) for path in sorted(SHIM.glob("*.cpp"))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda item: _object(item[0], folder, compiler, item[1]), work))
    key = _digest(*(path.name.encode() for path in objects))
    linked = folder / f"kernels-{key}.so"
    return Emulator(_produce(linked, [compiler, "-shared", *map(str, objects)]))


@cache
def library(*, checked: bool = False) -> Emulator:
    """The emulator with all kernels. Processes that need it at the same time wait for the one that compiles it."""
    folder = cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ("checked.lock" if checked else "plain.lock")).open("ab") as lock:
        lock_file(lock.fileno(), fcntl.LOCK_EX)  # without locks: what is compiled twice is the same
        return build(sources(), checked=checked)
