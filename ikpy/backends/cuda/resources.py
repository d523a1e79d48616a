"""What kernels take of a multiprocessor, as the compiler reports it: registers, shared memory, spills, occupancy."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from ikpy.backends.cuda import emulator
from ikpy.errors import UnsupportedError

ARCHITECTURES = (75, 80, 89, 90, 120)
NVCC_FLAGS = ("-std=c++17", "-O3", "--cubin", "-Xptxas", "-v")

# Shared memory per multiprocessor and per block (KiB), threads per multiprocessor; all have 65536 registers.
_LIMITS = {
    75: (64, 64, 1024),
    80: (164, 163, 2048),
    86: (100, 99, 1536),
    89: (100, 99, 1536),
    90: (228, 227, 2048),
    120: (100, 99, 1536),
}


@dataclass(frozen=True)
class Usage:
    """One kernel on one architecture. shared_bytes is static; spill_bytes counts stores and loads."""

    kernel: str
    arch: int
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int

    def occupancy(self, threads: int, dynamic_bytes: int = 0) -> float:
        """Share of the threads of a multiprocessor that blocks of this size can fill."""
        shared_kib, _, max_threads = _LIMITS[self.arch]
        per_warp = -(-self.registers * 32 // 256) * 256
        by_registers = 65536 // (per_warp * (threads // 32))
        shared = self.shared_bytes + dynamic_bytes
        by_shared = shared_kib * 1024 // (shared + 1024) if shared else by_registers
        return min(by_registers, by_shared, max_threads // threads) * threads / max_threads


def nvcc() -> str:
    """Path of the CUDA compiler; UnsupportedError if there is none."""
    found = shutil.which("nvcc") or (shutil.which("nvcc", path="/usr/local/cuda/bin"))
    if not found:
        raise UnsupportedError("no CUDA compiler (nvcc) found")
    return found


_ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\d+)a?'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def parse(log: str) -> list[Usage]:
    """Usages in a log of ptxas -v."""
    found = []
    for part in re.split(r"(?=ptxas info\s*: Compiling entry function)", log):
        entry, stack, used = _ENTRY.search(part), _STACK.search(part), _USED.search(part)
        if not (entry and stack and used):
            continue
        shared = _SHARED.search(part)
        frame, stores, loads = (int(stack[i]) for i in (1, 2, 3))
        found.append(
            Usage(entry[1], int(entry[2]), int(used[1]), int(shared[1]) if shared else 0, frame, stores + loads)
        )
    return found


@cache
def _version() -> str:
    return subprocess.run([nvcc(), "--version"], capture_output=True, text=True, check=True).stdout


def usage(source: Path, arch: int) -> list[Usage]:
    """Compiles a kernel file for an architecture; results are kept in the user cache. RuntimeError on errors."""
    folder = emulator.cache_dir().parent / "cuda-resources"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{source.stem}-{arch}-{emulator.sources_digest(source, _version(), *NVCC_FLAGS)}.json"
    if target.exists():
        return [Usage(**row) for row in json.loads(target.read_text())]
    includes = [f"-I{path}" for path in emulator.INCLUDE_DIRS]
    command = [nvcc(), *NVCC_FLAGS, f"-arch=sm_{arch}", *includes, str(source), "-o", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[:4000]}")
    found = parse(done.stderr + done.stdout)
    target.write_text(json.dumps([asdict(row) for row in found]))
    return found


def usages(sources: Sequence[Path], architectures: Sequence[int], jobs: int) -> list[Usage]:
    """Usages of all kernels of the files on all architectures, in order."""
    work = [(source, arch) for source in sources for arch in architectures]
    with ThreadPoolExecutor(jobs) as pool:
        return [row for rows in pool.map(lambda item: usage(*item), work) for row in rows]
