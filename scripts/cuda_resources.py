"""Print registers, shared memory, spills and occupancy of every CUDA kernel, and fail if a kernel spills.

Usage: python scripts/cuda_resources.py [ARCH ...] [--files REGEX] [--jobs N]

ARCH is a compute capability such as 80; without any, all supported ones are compiled. NAME is a kernel file without
.cu. No GPU is needed, only nvcc; results are kept in the user cache.
"""

from __future__ import annotations

import argparse
import os
import re

from ikpy.backends.cuda import emulator, launch
from ikpy.backends.cuda.resources import ARCHITECTURES, Usage, usages

# Threads per block as launched, by the beginning of the kernel name.
THREADS = {
    "matvec": 128,
    "matmul": 256,
    "flash32": 256,
    "flash": 128,
    "attention_any": 128,
    "kv_store": 128,
    "kv_shift": 32,
    "moe_route": 32,
}


def threads(kernel: str) -> int:
    """Threads per block of a kernel."""
    return next((n for name, n in THREADS.items() if kernel.startswith(name)), 256)


def line(row: Usage) -> str:
    """One row of the table."""
    count = threads(row.kernel)
    dynamic = launch.flash_shared_bytes(row.kernel)
    spills = f"  SPILLS {row.spill_bytes} bytes" if row.spill_bytes else ""
    return (
        f"sm_{row.arch:<4} {row.kernel:<24} {row.registers:4d} registers {row.shared_bytes + dynamic:6d} bytes shared "
        f"{count:5d} threads {row.occupancy(count, dynamic):4.0%} occupancy{spills}"
    )


def main() -> None:
    """Compile, print, and exit with 1 if anything spills."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch", nargs="*", type=int, default=list(ARCHITECTURES))
    parser.add_argument("--files", default=".*", help="regular expression of kernel file names")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    files = [path for path in emulator.sources() if re.fullmatch(arguments.files, path.stem)]
    rows = usages(files, arguments.arch, arguments.jobs)
    print("\n".join(map(line, rows)))
    spilling = [row for row in rows if row.spill_bytes]
    if spilling:
        raise SystemExit(f"{len(spilling)} of {len(rows)} kernels spill registers")


if __name__ == "__main__":
    main()
