"""Models with NVFP4 matrices and factors on devices, whole and divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ikpy.graph.placement import PlacementParams
from tests.cpu.models.definition_checks import TOKENS
from tests.cpu.quants.test_nvfp4 import BOUND, dense, mixture
from tests.cuda.models import emulated, logits_of
from tests.cuda.test_placement_matrix import assert_same

PLACES: dict[str, dict[str, Any]] = {
    "all": {},
    "experts on the CPU": {"rules": (("exps", "CPU"),)},
    "heads and networks divided": {"split_mode": "graph"},
}


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("make", [dense, mixture], ids=lambda f: f.__name__)
def test_factors_on_devices(make: Any, where: str, tmp_path: Path) -> None:
    model, truth = make()
    path, places = model.write(tmp_path / "model.gguf"), PlacementParams(**PLACES[where])
    log: list[str] = []
    with emulated(2) as kernels:
        ours = logits_of(path, TOKENS, 36, placement=places, type_k="f32", type_v="f32", log=log)
    assert kernels.launched
    assert_same(ours, truth, BOUND)
    if "split_mode" in PLACES[where]:
        assert any("attention of 2 layers stays whole: its matrices have factors" in line for line in log)
