"""The kernels as nvcc sees them: they compile for the supported architectures and no kernel spills registers.

Needs nvcc, no GPU. Compiling everything takes many minutes the first time (results are kept in the user cache), so
by default the weight families are compiled for one architecture each; IKPY_CUDA_ARCHS=all compiles everything.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ikpy.backends.cuda import emulator, launch, resources
from ikpy.errors import UnsupportedError

try:
    resources.nvcc()
except UnsupportedError as error:
    pytestmark = pytest.mark.skip(reason=str(error))

EVERYTHING = os.environ.get("IKPY_CUDA_ARCHS") == "all"
# One plain and one interleaved family with offsets and with 16-element scales, the rest on demand.
DEFAULT = {
    "weights_trellis": (90,),
    "elementwise": (75,),
    "norm": (75,),
    "rope": (89,),
    "kv_cache": (80,),
    "moe": (120,),
}


def cases() -> list[tuple[Path, int]]:
    return [
        (source, arch)
        for source in emulator.sources()
        for arch in (resources.ARCHITECTURES if EVERYTHING else DEFAULT.get(source.stem, ()))
    ]


@pytest.mark.parametrize(("source", "arch"), cases(), ids=lambda v: v.stem if isinstance(v, Path) else f"sm_{v}")
def test_compiles_without_spills(source: Path, arch: int) -> None:
    rows = resources.usage(source, arch)
    assert rows, f"{source.name} defines no kernel"
    spilling = [f"{row.kernel}: {row.spill_bytes} bytes" for row in rows if row.spill_bytes]
    assert not spilling, f"{source.name} on sm_{arch} spills: {', '.join(spilling)}"


def test_every_kernel_is_in_the_file_that_lowering_names() -> None:
    for kernel in emulator.library().kernels():
        text = (emulator.KERNELS / f"{launch.kernel_file(kernel)}.cu").read_text()
        family, _, name = kernel.partition("_")
        by_macro = family in ("matvec1", "matvec4", "matmul", "rows") and f"_TYPE({name}," in text
        assert by_macro or f"{kernel}(" in text or f"FLASH({kernel}," in text, kernel
