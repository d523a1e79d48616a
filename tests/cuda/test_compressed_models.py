"""DeepSeek V4 on emulated devices: compressed cells, residual streams and experts by token on every placement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.graph.placement import CPU, DeviceParams, PlacementParams
from tests.cpu.convert import deepseek4_checkpoints as tiny
from tests.cpu.convert.checkpoints import convert
from tests.cuda.models import emulated

TOLERANCE = 2e-3
PLACES = {
    "whole": PlacementParams(n_gpu_layers=99),
    "some layers": PlacementParams(n_gpu_layers=3),
    "experts on the CPU": PlacementParams(n_gpu_layers=99, rules=(("exps", CPU),)),
    "attention on the CPU": PlacementParams(n_gpu_layers=99, rules=(("attn|indexer", CPU),)),
    "cache in host memory": PlacementParams(n_gpu_layers=99, kv_offload=False),
    "divided": PlacementParams(n_gpu_layers=99, split_mode="graph"),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepseek4")
    return Path(convert(tiny.write(folder / "checkpoint"), folder, outtype="f16").path)


def context_on(path: Path, placement: PlacementParams, log: Any = None, **devices: Any) -> Context:
    params = ModelParams(placement=placement, devices=DeviceParams(**devices))
    return Context(Model.load(path, params), ContextParams(n_ctx=256, n_ubatch=64, n_threads=1, type_k="f32"), log=log)


def logits(context: Context) -> np.ndarray:
    """Of a prompt, then of single tokens and of three sequences' tokens at once."""
    tokens = tiny.tokens()
    rows = [context.decode(Batch.single(tokens[:90], 0, logits="all")).copy()]
    rows += [context.decode(Batch.single(tokens[i : i + 1], i)).copy() for i in range(90, 103)]
    return np.concatenate(rows)


@pytest.mark.parametrize("where", PLACES)
def test_placements(where: str, path: Path) -> None:
    with emulated(2):
        expected = logits(context_on(path, PlacementParams(n_gpu_layers=0)))
        context = context_on(path, PLACES[where])
        got = logits(context)
    errors = np.abs(got - expected).max(1) / np.abs(expected).max()
    assert errors.max() <= TOLERANCE, f"token {errors.argmax()} differs by {errors.max()}"
    assert context.devices is not None and len(context.devices.cache_bytes()) > 0


def test_all_of_it_runs_on_the_device(path: Path) -> None:
    """Nothing but the embedding's lookup stays behind, and nothing is said of a missing kernel."""
    lines: list[str] = []
    with emulated(1):
        context = context_on(path, PLACES["whole"], lines.append)
        logits(context)
    assert context.n_graph_splits == 2
    assert not any("run on the CPU" in line or "stays in host memory" in line for line in lines), lines
    total = sum(context.devices.cache_bytes().values())  # type: ignore[union-attr]
    assert total == context.kv.nbytes(), "a tensor with two kinds of cells counts once"


def test_padded_prompts_compress_every_stretch_once(path: Path) -> None:
    """37 tokens run as 40 of which three are repeated."""
    tokens = tiny.tokens()
    with emulated(1):
        contexts = [context_on(path, PlacementParams(n_gpu_layers=n)) for n in (0, 99)]
        for context in contexts:
            context.decode(Batch.single(tokens[:37], 0))
            context.decode(Batch.single(tokens[37:70], 37))
        expected, got = (context.decode(Batch.single(tokens[70:71], 70)).copy() for context in contexts)
    assert np.abs(got - expected).max() / np.abs(expected).max() <= TOLERANCE


def test_cells_that_were_emptied_are_no_part_of_a_stretch(path: Path) -> None:
    """Those behind all cells in use had tokens of another text at the same positions."""
    found = []
    tokens = tiny.tokens()
    for placement in (PlacementParams(n_gpu_layers=0), PLACES["whole"]):
        with emulated(1):
            model = Model.load(path, ModelParams(placement=placement))
            params = ContextParams(n_ctx=256, n_ubatch=16, n_threads=1, n_seq_max=3, flash_attn=False, type_k="f32")
            context = Context(model, params)
            for seq_id in (1, 2, 0):
                context.decode(Batch.single(tokens[60:72], 0, seq_id, "none"))
            context.kv.clear()
            found.append(context.decode(Batch.single(tokens[:12], 0, 0, "all")).copy())
    expected, got = found
    assert np.abs(got - expected).max() <= TOLERANCE * np.abs(expected).max()
