"""Granite 4 Vision's encoder on a device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ikpy.backends.cuda.devices import available
from ikpy.backends.cuda.encoder_runtime import EncoderRuntime
from ikpy.graph.placement import DeviceParams
from ikpy.vision.projector import open_projector
from tests.cpu.media.granite4_tower import TOWER
from tests.cuda.test_vision import HALVES, assert_rows


@pytest.mark.parametrize("type_name", ["f32", "f16"])
def test_rows_are_those_of_the_cpu(type_name: str, tmp_path: Path, cuda_devices: int) -> None:
    """All on the device; queries, keys and values are f16 there."""
    lines = list[str]()
    path = str(TOWER.write(tmp_path / "mmproj.gguf", TOWER.weights(), type_name))
    device = EncoderRuntime(available()[0], DeviceParams(), lines.append)
    tile = np.random.default_rng(3).integers(0, 256, (24, 24, 3), dtype=np.uint8)
    here, there = (
        open_projector(path, n_embd=TOWER.text, n_threads=1, log=lines.append, device=each).rows(tile).values
        for each in (None, device)
    )
    assert_rows(type_name, there, here, HALVES)
    assert not [line for line in lines if line.startswith("note")]
