"""Figures in docs/large-models.md are those of plans of the models' shapes."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from benchmarks.synthetic import write_model
from ikpy.cli import main
from ikpy.gguf.reader import GGUFFile
from ikpy.quants import registry
from scripts.make_deepseek_header import write_header
from tests.shared import ROOT

PAGE = (ROOT / "docs" / "large-models.md").read_text()
SHAPES = {
    "DeepSeek V3, R1": "",
    "Kimi K2": "kimi-k2",
    "Qwen3 235B-A22B": "qwen3-235b-a22b",
    "GLM-4.5, 4.6": "glm-4.6",
    "Llama 4 Maverick": "llama4-maverick",
}
PARAMETERS = {"Kimi K2": 1026e9, "Qwen3 235B-A22B": 235.1e9, "Llama 4 Maverick": 400.7e9}
"""As their publishers count them."""


def rows(first_cell: str) -> dict[str, list[str]]:
    """Cells behind the first one of every row of the table whose head begins so."""
    table = re.search(rf"^\| {first_cell}.*\n(?:\|.*\n)+", PAGE, re.M)
    assert table is not None
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]]
    return {line[0]: line[1:] for line in lines}


@pytest.fixture(params=SHAPES, scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Name and header of a model."""
    path = tmp_path_factory.mktemp("large") / "model.gguf"
    if shape := SHAPES[request.param]:
        write_model(shape, "q8_0", str(path), experts="iq4_ks", header_only=True)
    else:
        write_header(str(path), "q8_0", experts="iq4_ks")
    return request.param, path


@pytest.fixture(autouse=True)
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With scratch memory as on a GPU, which devices of `tests.cuda.models` have none of."""
    monkeypatch.setenv("IKPY_CUDA_EMULATE", "1")
    monkeypatch.setenv("IKPY_CUDA_EMULATE_MIB", str(1 << 16))


def planned(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> list[float]:
    """Weights, cache and compute memory of the GPU in MiB."""
    line = ["server", "-m", str(path), "-c", "32768", "-ngl", "99", "-ot", "exps=CPU", "--dry-run", *options]
    capsys.readouterr()
    with pytest.raises(SystemExit, match="0"):
        main(line)
    (plan,) = re.findall(r"memory plan \(MiB\): +CUDA0(.*)", capsys.readouterr().err)
    mapped, _, _, cache, compute, _ = map(float, plan.split())
    return [mapped, cache, compute]


def test_memory_of_the_gpu(model: tuple[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    name, path = model
    stated = rows(r"model \| blocks")[name]
    q8 = ("-ctk", "q8_0", "-ctv", "q8_0")
    plain, small = planned(path, capsys), planned(path, capsys, *q8)
    large = planned(path, capsys, *q8, "-ub", "4096", "-b", "4096")
    found = [small[0], plain[1], small[1], small[2], large[2]]
    assert [float(cell) for cell in stated[1:6]] == [round(value) for value in found]


def test_experts(model: tuple[str, Path]) -> None:
    name, path = model
    with GGUFFile.open(str(path), header_only=True) as file:
        experts = [info for info in file.tensors.values() if "_exps" in info.name]
        n_parameters = sum(math.prod(info.shape) for info in file.tensors.values())
    blocks = sorted({int(info.name.split(".")[1]) for info in experts})
    numbers = [int(number) for number in re.findall(r"\d+", rows(r"model \| blocks")[name][0])]
    assert (numbers[0], numbers[-1]) == (blocks[0], blocks[-1])
    assert float(rows(r"model \| blocks")[name][6]) == round(sum(info.nbytes for info in experts) / len(blocks) / 2**20)
    types = ("iq1_s_r4", "iq2_k", "iq3_k", "iq4_ks", "iq5_k", "q8_0")
    sizes = [sum(registry.by_name(kind).tensor_nbytes(info.shape) for info in experts) / 2**30 for kind in types]
    assert [float(cell) for cell in rows(r"model \| IQ1_S_R4")[name]] == [round(size, 1) for size in sizes]
    assert n_parameters == pytest.approx(PARAMETERS.get(name, n_parameters), rel=5e-4)
