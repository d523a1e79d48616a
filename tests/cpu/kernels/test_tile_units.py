"""Which products of the tile unit (AMX) a process uses, by CPU and IKPY_AMX."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ikpy._native import core
from ikpy.cli.info import tile_unit

# The trial of an instruction catches SIGILL, and leaves the handler that it found: none is what survives here.
CHECK = """
import signal
signal.signal(signal.SIGILL, signal.SIG_IGN)
from ikpy._native import core
print(core.has_tiles(), core.has_half_tiles(), core.rounds_f16_activations())
signal.raise_signal(signal.SIGILL)
"""


def units(value: str | None) -> tuple[bool, bool, bool]:
    """has_tiles(), has_half_tiles() and rounds_f16_activations() of a process with this IKPY_AMX."""
    env = {name: text for name, text in os.environ.items() if name != "IKPY_AMX"}
    if value is not None:
        env["IKPY_AMX"] = value
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", CHECK], cwd=root, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"IKPY_AMX={value}: {done.stderr}"
    tiles, halves, rounds = (word == "True" for word in done.stdout.split())
    return tiles, halves, rounds


def listed() -> bool:
    try:
        return "amx_fp16" in Path("/proc/cpuinfo").read_text(encoding="ascii").split()
    except OSError:
        return False


def test_environment_decides() -> None:
    tiles, halves, rounds = units(None)
    assert not rounds, "activations were rounded without a wish"
    assert halves == (tiles and listed()), "without a wish only what the CPU lists"
    assert units("0") == (False, False, False)
    assert units("bf16") == (tiles, False, False)
    asked_tiles, asked_halves, asked_rounds = units("fp16")
    assert asked_tiles == tiles
    assert asked_rounds == asked_halves
    assert asked_halves >= halves, "asking for a trial took away what the CPU lists"


def test_info_names_what_is_in_use() -> None:
    text = tile_unit(core)
    assert ("bf16" in text) == core.has_tiles()
    assert ("fp16" in text) == core.has_half_tiles()


def test_unknown_use_is_refused() -> None:
    env = os.environ | {"IKPY_AMX": "fp8"}
    command = [sys.executable, "-m", "ikpy", "info"]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr == "error: IKPY_AMX=fp8: unknown use of the tile unit; give one of 0, 1, bf16, fp16\n"
