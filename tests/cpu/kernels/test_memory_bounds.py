"""Nothing outside of weights, activations, caches and results is touched, in any tier."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ikpy._native import available_tiers
from tests.shared import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="guards memory with mprotect")
GRIDS = ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "IQ2_XXS_R4", "IQ3_S_R4", "IQ1_M_R4"]


def check(names: list[str], **variables: str) -> None:
    """Runs the program of memory_bounds; a read or a write outside ends it with a signal."""
    env = {**os.environ, **variables, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.cpu.kernels.memory_bounds", *names]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    last = done.stdout.splitlines()[-1:]
    assert done.returncode == 0, f"{variables}: status {done.returncode} in {last}: {done.stderr[:1500]}"
    assert last == ["done"]


@pytest.mark.parametrize("tier", available_tiers)
def test_bounds(tier: str) -> None:
    check([], IKPY_ISA=tier)


@pytest.mark.skipif("avx512" not in available_tiers, reason="only this tier has both ways")
def test_bounds_of_grids_without_byte_permutes() -> None:
    check(GRIDS, IKPY_ISA="avx512", IKPY_VBMI="0", IKPY_AMX="0")


@pytest.mark.skipif("avx512" not in available_tiers, reason="only this tier has tiles")
def test_bounds_of_f16_weights_on_tiles_of_halves() -> None:
    check(["F16"], IKPY_ISA="avx512", IKPY_AMX="fp16")
