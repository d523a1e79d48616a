"""What kernels take of a multiprocessor, as the compiler reports it: registers, shared memory, spills, occupancy."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from ikpy.backends.cuda import emulator, modules
from ikpy.gguf.atomic import write_whole

# One for each PTX that the kernels have. Of those from sm_80 on, sm_90 takes most registers for most of the kernels
# that are near their limit.
ARCHITECTURES = (75, 90)
REPORT_FLAGS = ("-fatbin", "-Xptxas=-v")

# Shared memory per multiprocessor and per block (KiB), threads and blocks per multiprocessor (CUDA programming guide,
# "Technical Specifications per Compute Capability").
_LIMITS = {
    75: (64, 64, 1024, 16),
    80: (164, 163, 2048, 32),
    86: (100, 99, 1536, 16),
    89: (100, 99, 1536, 24),
    90: (228, 227, 2048, 32),
    120: (100, 99, 1536, 24),
}
# A multiprocessor has four parts with registers of their own, which are given to warps 256 at a time.
_PARTS, _PART_REGISTERS, _REGISTER_UNIT = 4, 16384, 256
# What the driver takes of the shared memory of every block.
_RESERVED_SHARED = 1024


@dataclass(frozen=True)
class Usage:
    """One kernel on one architecture. shared_bytes is static; spill_bytes counts stores and loads."""

    kernel: str
    arch: int
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int

    def limits(self, threads: int, dynamic_bytes: int = 0) -> dict[str, int]:
        """Blocks of this many threads that a multiprocessor has room for, by what limits them."""
        shared_kib, block_kib, max_threads, max_blocks = _LIMITS[self.arch]
        per_warp = -(-self.registers * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
        shared = self.shared_bytes + dynamic_bytes
        return {
            "shared memory": shared_kib * 1024 // (shared + _RESERVED_SHARED) if shared <= block_kib * 1024 else 0,
            "registers": _PARTS * (_PART_REGISTERS // per_warp) // (threads // 32),
            "threads": max_threads // threads,
            "blocks": max_blocks,
        }

    def blocks(self, threads: int, dynamic_bytes: int = 0) -> int:
        """Blocks that a multiprocessor runs at a time."""
        return min(self.limits(threads, dynamic_bytes).values())

    def occupancy(self, threads: int, dynamic_bytes: int = 0) -> float:
        """Share of the threads of a multiprocessor that blocks of this size can fill."""
        return self.blocks(threads, dynamic_bytes) * threads / _LIMITS[self.arch][2]


_ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\d+)a?'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
# Products of sm_90 that the compiler lets wait for each other, or for which it adds waits.
_HELD_UP = re.compile(r"^.*\(C75\d\d\).*$|^.*wgmma.*serialized.*$", re.MULTILINE)


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


def _reports(source: Path, architectures: Collection[int]) -> dict[int, Path]:
    """Where the usages of a kernel file are kept for each architecture."""
    folder = modules.cache_dir().parent / "cuda-resources"
    # What stands in for CUDA on the host is not seen by nvcc.
    parts = modules.nvcc_version(), *modules.NVCC_FLAGS, *REPORT_FLAGS
    key = emulator.sources_digest(source, emulator.INCLUDE_DIRS, *parts)
    return {arch: folder / f"{source.stem}-{arch}-{key}.json" for arch in architectures}


def _compile(source: Path, architectures: Sequence[int]) -> str:
    """What ptxas reports about a kernel file. The architectures share their PTX, so the front end runs once."""
    includes = [f"-I{path}" for path in emulator.INCLUDE_DIRS]
    names = [f"sm_{arch}" for arch in architectures]
    code = modules.special_code_flag(names[0]) if modules.only_architecture(source.stem) else modules.code_flag(names)
    command = [modules.nvcc(), *modules.NVCC_FLAGS, *REPORT_FLAGS, code, *includes, str(source), "-o", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[:4000]}")
    log = done.stderr + done.stdout
    if found := _HELD_UP.search(log):
        raise RuntimeError(f"{source.name}: {found[0]}")
    return log


def usage(source: Path, architectures: Sequence[int]) -> list[Usage]:
    """Usages of a file's kernels on architectures that share their PTX (``modules.virtual_architecture``).

    What the user cache lacks is compiled. RuntimeError if the compiler fails, or holds up products of sm_90.
    """
    reports = _reports(source, architectures)
    missing = [arch for arch, path in reports.items() if not path.exists()]
    if missing:
        made = parse(_compile(source, missing))
        for arch in missing:
            path = reports[arch]
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps([asdict(row) for row in made if row.arch == arch]).encode())
    return [Usage(**row) for path in reports.values() for row in json.loads(path.read_text())]


def _groups(source: Path, architectures: Collection[int]) -> list[list[int]]:
    """Those of the architectures that a file is for, in groups that share their PTX."""
    groups: dict[str, list[int]] = {}
    for arch in architectures:
        if modules.only_architecture(source.stem) in (None, f"sm_{arch}"):
            groups.setdefault(modules.virtual_architecture(f"sm_{arch}"), []).append(arch)
    return list(groups.values())


def usages(sources: Sequence[Path], architectures: Sequence[int], jobs: int) -> Iterator[tuple[Path, list[Usage]]]:
    """Usages of all kernels of the files on all architectures, file by file; `jobs` compilers run at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        work = {source: _groups(source, architectures) for source in sources}
        found = {source: [pool.submit(usage, source, group) for group in groups] for source, groups in work.items()}
        for source, futures in found.items():
            yield source, [row for future in futures for row in future.result()]
