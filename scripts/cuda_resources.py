"""Compile CUDA kernels, print registers, shared memory and occupancy of each, and fail if one spills, uses local
memory or cannot start.

Usage: python scripts/cuda_resources.py [ARCH ...] [--all] [--files REGEX] [--jobs N]

ARCH is a compute capability such as 80; without any, all that the tests cover are compiled, with --all those of
`ikpy cuda build --arch all`. REGEX selects kernel files
by name without .cu. No GPU is needed, only nvcc; results are kept in the user cache.
"""

from __future__ import annotations

import argparse
import os
import re
from itertools import groupby

from ikpy.backends.cuda import emulator, launch, modules
from ikpy.backends.cuda.launch import limits
from ikpy.backends.cuda.launch.limits import block_threads
from ikpy.backends.cuda.launch.products import WGMMA_S8_SHARED
from ikpy.backends.cuda.launch.products_bf16 import WGMMA_SHARED
from ikpy.backends.cuda.resources import ARCHITECTURES, Usage, usages

# The library's sine and cosine reduce large angles there.
IN_LOCAL_MEMORY = ("rope_table",)


def dynamic_bytes(kernel: str) -> int:
    """Bytes of shared memory that are asked for at the launch, for the kernels that fill most of it."""
    if kernel.startswith("wgmma_"):
        return WGMMA_S8_SHARED
    return WGMMA_SHARED if kernel == "gemm_wgmma" else launch.flash_shared_bytes(kernel)


def fault(row: Usage) -> str:
    """What is wrong with a kernel, empty if nothing is."""
    if row.spill_bytes:
        return f"SPILLS {row.spill_bytes} B"
    # Arrays with an index known at run time lie in local memory, which is no spill but as slow.
    if row.stack_bytes and row.kernel not in IN_LOCAL_MEMORY:
        return f"LOCAL MEMORY {row.stack_bytes} B"
    # Kernels that want more shared memory than a device has are not chosen for it.
    chosen = not limits.shared_fault(dynamic_bytes(row.kernel), divmod(row.arch, 10))
    started = row.blocks(block_threads(row.kernel), dynamic_bytes(row.kernel) if chosen else 0)
    return "" if started else "CANNOT START"


def line(kernel: str, rows: list[Usage]) -> str:
    """A kernel on all architectures: registers, bytes of shared memory and occupancy for each."""
    dynamic = dynamic_bytes(kernel)
    cells = [
        f"sm_{row.arch} {row.registers:3d} reg {row.shared_bytes + dynamic:5d} B "
        f"{row.blocks(block_threads(kernel), dynamic):2d} blocks {row.occupancy(block_threads(kernel), dynamic):4.0%} "
        f"{fault(row)}".rstrip()
        for row in rows
    ]
    return f"{kernel:<22} {' | '.join(cells)}"


def lonely(rows: list[Usage]) -> list[str]:
    """Kernels of which a multiprocessor runs one block at a time, so that nothing fills the waits at its barriers."""
    found = []
    for row in rows:
        limits = row.limits(block_threads(row.kernel), dynamic_bytes(row.kernel))
        if min(limits.values()) == 1:
            reasons = [name for name, blocks in limits.items() if blocks == 1]
            found.append(f"{row.kernel} on sm_{row.arch}: {block_threads(row.kernel)} threads, {' and '.join(reasons)}")
    return found


def main() -> None:
    """Compile, print, and exit with 1 if anything spills."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch", nargs="*", type=int, default=list(ARCHITECTURES))
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--files", default=".*", help="regular expression of kernel file names")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    files = [path for path in emulator.sources() if re.fullmatch(arguments.files, path.stem)]
    faults, alone, total = [], [], 0
    everything = [int(arch.removeprefix("sm_")) for arch in modules.ARCHITECTURES]
    for source, rows in usages(files, everything if arguments.all else arguments.arch, arguments.jobs):
        print(f"--- {source.name}")
        for kernel, of_kernel in groupby(sorted(rows, key=lambda row: row.kernel), key=lambda row: row.kernel):
            print(line(kernel, sorted(of_kernel, key=lambda row: row.arch)), flush=True)
        total += len(rows)
        alone += lonely(rows)
        faults += [f"{row.kernel} on sm_{row.arch}: {fault(row)}" for row in rows if fault(row)]
    print(f"{total} kernels compiled, {len(faults)} spill, use local memory or cannot start", *faults, sep="\n  ")
    print(f"{len(alone)} run one block per multiprocessor", *alone, sep="\n  ")
    if faults:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
