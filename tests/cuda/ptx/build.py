"""Compiles the machine with the host's compiler, and kernels to PTX; both are kept in the user cache."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from ikpy.backends.cuda import emulator, modules
from ikpy.file_locks import lock_file
from tests.cuda.ptx.encode import Machine
from tests.cuda.ptx.parser import PtxError

FOLDER = Path(__file__).parent
# -frounding-math: some forms set the rounding mode; contraction would make fused operations of others.
FLAGS = ("-std=c++20", "-O2", "-march=native", "-fPIC", "-ffp-contract=off", "-frounding-math", "-fno-math-errno")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PtxError(f"{' '.join(command)} failed:\n{done.stderr[:4000]}")


def produce(target: Path, command: list[str]) -> Path:
    """Runs a command that writes the file given by -o unless it exists."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            _run([*command, "-o", str(made)])
            os.replace(made, target)
    return target


def cache_dir() -> Path:
    """$XDG_CACHE_HOME/ikpy/ptx-machine."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ikpy" / "ptx-machine"


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def _processor() -> bytes:
    """What -march=native depends on."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line for line in lines if line.startswith("flags")), "").encode()


@cache
def library() -> ctypes.CDLL:
    """The machine, with the types of its functions. Other processes wait for the one that compiles it."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    with (cache_dir() / "machine.lock").open("ab") as lock:
        lock_file(lock.fileno(), fcntl.LOCK_EX)
        return _built()


def _built() -> ctypes.CDLL:
    sources = [*sorted(FOLDER.glob("*.hpp")), *sorted(FOLDER.glob("*.cpp"))]
    compiler = emulator._compiler()
    parts = [compiler.encode(), " ".join(FLAGS).encode(), _processor()]
    objects = []
    headers = [path.read_bytes() for path in sources if path.suffix == ".hpp"]
    for path in sources:
        if path.suffix == ".cpp":
            key = _digest(*parts, *headers, path.read_bytes())
            command = [compiler, *FLAGS, "-c", str(path)]
            objects.append(produce(cache_dir() / f"{path.stem}-{key}.o", command))
    key = _digest(*(path.name.encode() for path in objects))
    linked = produce(cache_dir() / f"machine-{key}.so", [compiler, "-shared", *map(str, objects)])
    found = ctypes.CDLL(str(linked))
    found.ptx_error.restype = ctypes.c_char_p
    found.ptx_program.restype = ctypes.c_void_p
    return found


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@cache
def machine() -> Machine:
    """The forms of the library."""

    def kind(function: ctypes._CFuncPtr, suffix: str) -> int:
        found = function(suffix.encode())
        if found < 0:
            raise PtxError(library().ptx_error().decode())
        return found

    lib = library()
    return Machine(
        cache(lambda name: lib.ptx_form(name.encode())),
        cache(lambda suffix: kind(lib.ptx_mma_kind, suffix)),
        cache(lambda suffix: kind(lib.ptx_wgmma_kind, suffix)),
    )


def virtual(stem: str, arch: int) -> str:
    """The architecture whose PTX a device of this one runs: devices from sm_80 on share it, except of some files."""
    if modules.only_architecture(stem):
        return f"compute_{arch}a"
    return modules.virtual_architecture(f"sm_{arch}")


def compile_ptx(source: Path, architecture: str) -> Path:
    """The PTX of a kernel file, with the flags of modules.py."""
    folders = (modules.KERNELS, modules.NATIVE_INCLUDE)
    flags = (f"-arch={architecture}", *modules.NVCC_FLAGS, *(f"-I{folder}" for folder in folders))
    key = emulator.sources_digest(source, folders, modules.nvcc_version(), *flags)
    target = cache_dir() / architecture / f"{source.stem}-{key}.ptx"
    return produce(target, [modules.nvcc(), "-ptx", *flags, str(source)])
