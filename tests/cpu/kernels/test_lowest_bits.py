"""Models whose importance matrix is all that a type of about two bits asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.cli.quantize import run as quantize
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.gguf.reader import GGUFFile
from ikpy.graph.activations import ActivationCollector
from ikpy.graph.placement import Device, PlacementParams, place
from ikpy.quants import registry
from tests.cpu.models import test_arch_gemma3n, test_arch_grovemoe
from tests.cpu.models.qwen4exp_model import Sizes, random_model
from tests.cpu.models.reference_models import RandomModel
from tests.cpu.quantize.imatrices import legacy, trailer

TEXT = np.random.default_rng(4).integers(4, 160, 400)


def grovemoe(patch: pytest.MonkeyPatch) -> RandomModel:
    for name, value in (("HEADS", 8), ("D", 256), ("F", 256), ("WIDTH", 256)):
        patch.setattr(test_arch_grovemoe, name, value)
    return test_arch_grovemoe.grovemoe()[0]


def gemma3n(patch: pytest.MonkeyPatch) -> RandomModel:
    """Its last layers have keys and values that nothing reads."""
    for name, value in (("D", 256), ("F", 256), ("INPUT", 256), ("HEADS", 8), ("HEAD", 32), ("RANK", 32)):
        patch.setattr(test_arch_gemma3n, name, value)
    return test_arch_gemma3n.gemma3n(gain=0.4)


def qwen4exp(patch: pytest.MonkeyPatch) -> RandomModel:
    return random_model(Sizes(d=256, dk=32, row=64, rank=256, ff=256, heads=8, value_heads=8))


def importance(path: Path, to: Path) -> None:
    """What the layers of a model read of TEXT, in the legacy form."""
    model = Model.load(path)
    collector = ActivationCollector({name: (*info.shape, 1, 1)[2] for name, info in model.gguf.tensors.items()})
    context = Context(model, ContextParams(n_ctx=512, n_threads=1, collector=collector))
    context.decode(Batch.single(TEXT, 0, logits="all"))
    entries = [
        (name, sums.calls, (sums.sums / np.maximum(sums.rows, 1)[:, None]).reshape(-1).tolist())
        for name, sums in collector.entries.items()
        if sums.calls and name.startswith("blk.")
    ]
    to.write_bytes(legacy(*entries, trailer=trailer(4, b"text")))


@pytest.mark.parametrize("make", [grovemoe, gemma3n, qwen4exp], ids=lambda f: f.__name__)
def test_two_bits(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, small = make(monkeypatch).write(tmp_path / "model.gguf"), tmp_path / "small.gguf"
    importance(path, tmp_path / "imatrix.dat")
    assert quantize(["--imatrix", str(tmp_path / "imatrix.dat"), str(path), str(small), "IQ2_XS"]) == 0
    with GGUFFile.open(small) as file:
        kinds = {name: registry.by_id(info.type_id).name for name, info in file.tensors.items()}
    kept = ("per_layer_model_proj.weight", "output_hc_down.weight", "output_hc_up.weight")
    assert {kind for name, kind in kinds.items() if name in kept} <= {"f32"}
    assert any(kind == "iq2_xs" for kind in kinds.values())
    logits = Context(Model.load(small), ContextParams(n_ctx=512, n_threads=1)).decode(Batch.single(TEXT, logits="all"))
    assert np.isfinite(logits).all()


def test_experts_of_groups_stay_in_host_memory() -> None:
    """-ncmoe means them as it does the experts that bring them along."""
    names = [f"blk.0.ffn_{part}_{kind}.weight" for part in ("gate", "up", "down") for kind in ("exps", "chexps")]
    placed = place(dict.fromkeys(names, 1 << 20), 1, PlacementParams(n_cpu_moe=1), [Device("CUDA0")])
    assert {placed.device_of(name) for name in names} == {"CPU"}
