"""The tools themselves with options for GPUs, those of users' command lines among them, on emulated devices.

Kernels are the CPU's own, so that a perplexity is that of the CPU to the last digits whatever lies where.
"""

from __future__ import annotations

import re
import shlex
from functools import cache

import pytest

from ikpy.cli import main
from tests.cuda.models import emulated
from tests.cuda.test_command_lines import TEXT, lines_of_users
from tests.shared import SHARED

# What a line says about the model's context, which changes results, and about places, which must not.
CONTEXTS = (
    "-fa -mla 3 -fmoe -amb 512 -ctk f16",
    "-ctk q8_0 -mla 2 -fa -amb 512 -fmoe",
    "-ctk q8_0 -mla 2 -fa -amb 512 -fmoe -ser 4,1",
    "-ctk q8_0 -mla 1",
    "-mla 0 -fa -ctk q8_0 -ctv q8_0",
    "-mla 3 -no-fa -ctk f16",
)
PLACES = (
    "-ngl 99",
    "-ngl 2",
    "-ngl 63 --override-tensor exps=CPU",
    r'-ngl 99 -ot "blk\.(3|4|5)\.ffn_.*=CUDA0" -ot "blk\.(1|2)\.ffn_.*=CUDA1" -ot exps=CPU',
    "-ngl 99 -nkvo",
    "-ngl 99 -nkvo -ot exps=CPU -op 27,0,29,0",
    "-ngl 99 -ts 1,3 -ncmoe 2",
    "-ngl 99 -sm none -mg 1 -ot attn_kv_b=CPU,ffn_down_exps=CPU",
    "-ngl 99 -ot ffn_up_exps=CUDA1,ffn_gate_exps=CPU -cuda graphs=0",
    "-ngl 99 -ncmoe 99 -cuda offload-batch-size=1",
    "-ngl 99 -cmoe -no-ooae -cuda offload-batch-size=1",
)
SMALL = "-c 48 --chunks 1 -b 48 -ub 32 -t 1"


def estimate(line: str, capsys: pytest.CaptureFixture[str]) -> float:
    """Perplexity that a command line prints."""
    assert main(["perplexity", "-f", str(TEXT), *shlex.split(f"{SMALL} {line}")]) == 0
    out = capsys.readouterr()
    found = re.search(r"PPL over 1 chunks for n_ctx=48 = ([0-9.]+)", out.out)
    assert found, out.err
    return float(found[1])


@cache
def truths() -> dict[str, float]:
    """Perplexities of the CPU that were computed before."""
    return {}


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("context", CONTEXTS)
def test_perplexity_does_not_depend_on_places(context: str, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    if context not in truths():
        truths()[context] = estimate(f"{context} -ngl 0", capsys)
    with emulated(2) as kernels:
        ours = estimate(f"{context} {where}", capsys)
    assert kernels.launched
    assert ours == pytest.approx(truths()[context], rel=2e-5)


def swept(line: str, capsys: pytest.CaptureFixture[str]) -> list[list[float]]:
    """Rows of numbers that sweep-bench prints."""
    assert main(["sweep-bench", *shlex.split(line)]) == 0
    out = capsys.readouterr().out
    rows = [row.strip("| ").split("|") for row in out.splitlines() if re.match(r"\|\s+\d+ \|", row)]
    return [[float(cell) for cell in row] for row in rows]


@pytest.mark.parametrize("where", ["-ngl 99 -ncmoe 2", "-ngl 99 -nkvo", "-ngl 99 -ot exps=CPU -rtr", "-ngl 2 -ts 1,1"])
def test_sweeps_run_to_their_end(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    with emulated(2) as kernels:
        rows = swept(f"-c 256 -b 64 -ub 64 -t 1 -fa -mla 3 -fmoe -ctk q8_0 {where}", capsys)
    assert kernels.launched
    # Tokens of a prompt, generated ones, and cells taken before; then times and speeds.
    assert [row[:3] for row in rows] == [[64, 16, n] for n in (0, 64, 128, 192)]
    assert all(number > 0 for row in rows for number in row[3:])


# Options that name files and sizes of the users' machines, with their value; and prose behind a line.
OWN = re.compile(
    r"(?:^| )(?:-m|--model|--alias|-f|-c|--ctx-size|-b|-ub|--ubatch-size|-t|--threads|--threads-batch) +(?:\"x\"|\S+)"
)


@pytest.mark.skipif(not (SHARED / "seeds").exists(), reason="the users' discussions are not here")
@pytest.mark.parametrize("tool", ["perplexity", "sweep-bench"])
def test_lines_of_the_users_run(tool: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = set()
    for name, rest in lines_of_users():
        if name == tool and "main:" not in rest:
            lines.add(" ".join(OWN.sub("", rest.replace("--numa numactl", "")).split()))
    assert len(lines) >= 4
    for line in sorted(lines):
        with emulated(2) as kernels:
            if tool == "perplexity":
                assert 1 < estimate(line, capsys) < 1e4, line
            else:
                assert len(swept(f"{line} -c 256 -b 128 -ub 128 -t 1", capsys)) == 2, line
        assert kernels.launched or "--n-gpu-layers 0" in line, line
