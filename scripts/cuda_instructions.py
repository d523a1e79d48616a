"""Count the instructions of the matrix-vector kernels, next to those that a GPU issues while its memory brings weights.

Usage: python scripts/cuda_instructions.py [--arch N] [--types NAME,...] [--jobs N]

Compiles the kernels of weights with nvcc for one architecture (compute capability 90 unless told otherwise) and
reads their machine code with nvdisasm, which NVDISASM names if it is not on the path (the CUDA toolkit has it, and the
package nvidia-cuda-nvdisasm). No GPU is needed. Without --types, all types. The table is the one of
docs/cuda-kernels.md: per 32 weights of each of two rows, which a lane multiplies with 32 activations.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ikpy.backends.cuda import emulator, launch, modules
from ikpy.backends.cuda.launch.products import SET_ROWS, lane_rows
from ikpy.quants import TensorType, registry

# What a multiprocessor of an H100 SXM gets from memory per cycle (3.35 TB/s, 132 of them, 1.755 GHz), and issues.
BYTES_PER_CYCLE = 3.35e12 / 132 / 1.755e9
ISSUED_PER_CYCLE = 4
# Run by the pipe of integers, which takes half of what is issued; conversions by one that takes less.
HALF_RATE = {"PRMT", "LOP3", "PLOP3", "SHF", "IADD3", "IADD", "LEA", "ISETP", "SEL", "FSEL", "FSETP", "FMNMX", "IMNMX"}
HALF_RATE |= {"VIADD", "VIADDMNMX", "VIMNMX", "IABS", "I2F", "I2FP", "F2F", "I2I", "P2R", "R2P", "SGXT", "BMSK"}

# Of sets of four rows, a lane multiplies one at a time.
HALF_STEPS = dict.fromkeys(("iq4_kt", "iq5_k", "iq5_ks", "iq6_k"), 2)
# By the half of the other pipe that multiplies integers, also half of what is issued.
MULTIPLIED = {"IMAD", "IDP", "IMUL"}

_KERNEL = re.compile(r"^\.text\.matvec1_(\w+):$")
_LABEL = re.compile(r"^(\.L_x_\d+):$")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*);")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")


@dataclass
class Loop:
    """The loop over the columns of a kernel: its instructions by name, and loads of global memory by bytes."""

    instructions: Counter[str]
    loads: Counter[int]
    passes: int  # 32 weights of two rows each; the compiler is told not to unroll the loop

    def count(self, names: set[str] | None = None) -> float:
        """Instructions per 32 weights of two rows; of some names only."""
        return sum(n for name, n in self.instructions.items() if names is None or name in names) / self.passes


def kernels(disassembly: str) -> Iterator[tuple[str, list[str]]]:
    """Type and lines of every matvec1_ kernel in the output of nvdisasm."""
    name = ""
    lines: list[str] = []
    for line in disassembly.splitlines():
        if line.startswith(".text."):
            if name:
                yield name, lines
            found = _KERNEL.match(line)
            name, lines = found[1] if found else "", []
        lines.append(line.strip())
    if name:
        yield name, lines


def column_loop(name: str, lines: list[str]) -> Loop:
    """The loop of a type's kernel that has most products of bytes; ValueError if there is none."""
    labels: dict[str, int] = {}
    best: list[tuple[str, str]] = []
    code: list[tuple[str, str]] = []
    for line in lines:
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _INSTRUCTION.search(line):
            code.append((found[1], found[2]))
            target = _TARGET.search(found[2]) if found[1].startswith("BRA") else None
            if target and target[1] in labels:
                body = code[labels[target[1]] :]
                if _products(body) > _products(best):
                    best = body
    if not _products(best):
        raise ValueError("no loop with products of bytes")
    loads = Counter(_load_bytes(code) for code, _ in best if code.startswith(("LDG.", "LDGSTS.")))
    steps = HALF_STEPS.get(name, SET_ROWS.get(name, lane_rows(name)))
    return Loop(Counter(code.partition(".")[0] for code, _ in best), loads, steps)


def _products(code: list[tuple[str, str]]) -> int:
    return sum(name.startswith(("IDP", "IMMA")) for name, _ in code)


def _load_bytes(name: str) -> int:
    for part, nbytes in (("128", 16), ("64", 8), ("16", 2), ("8", 1)):
        if any(p.lstrip("US") == part for p in name.split(".")):
            return nbytes
    return 4


def disassembled(stem: str, arch: int) -> str:
    """Machine code of a kernel file as text."""
    tool = os.environ.get("NVDISASM") or shutil.which("nvdisasm")
    if not tool:
        raise SystemExit("nvdisasm is not found; NVDISASM names it")
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / f"{stem}.cubin"
        modules.compile_cubin(emulator.KERNELS / f"{stem}.cu", f"sm_{arch}", cubin)
        return subprocess.run([tool, "-c", str(cubin)], capture_output=True, text=True, check=True).stdout


def row(kind: TensorType, loop: Loop) -> str:
    """A line of the table."""
    cycles = kind.row_nbytes(2048) / BYTES_PER_CYCLE  # 32 weights of two rows, of 32 lanes
    slots = cycles * ISSUED_PER_CYCLE
    loads = ", ".join(f"{n / loop.passes:.3g} of {size}" for size, n in sorted(loop.loads.items(), reverse=True))
    half, multiplied = (loop.count(names) / (slots / 2) for names in (HALF_RATE, MULTIPLIED))
    shares = " | ".join(f"{share:.0%}" for share in (loop.count() / slots, half, multiplied))
    return f"| {kind.name.lower()} | {loop.count():.0f} | {shares} | {loads} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--types", type=lambda text: text.lower().split(","))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    kinds = {kind.name.lower(): kind for kind in registry.all_types()}
    chosen = arguments.types or list(kinds)
    stems = sorted({launch.kernel_file(f"matvec1_{name}") for name in chosen} - {"float"})
    print(
        "| type | instructions | of the slots | half rate: of theirs | products: of theirs | loads: number of bytes |\n"
        "|---|---|---|---|---|---|"
    )
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for text in pool.map(lambda stem: disassembled(stem, arguments.arch), stems):
            for name, lines in kernels(text):
                if name in chosen:
                    print(row(kinds[name], column_loop(name, lines)), flush=True)


if __name__ == "__main__":
    main()
