"""HunyuanVL's encoder on a device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ikpy.backends.cuda.devices import available
from ikpy.backends.cuda.encoder_runtime import EncoderRuntime
from ikpy.graph.placement import DeviceParams
from ikpy.vision.projector import open_projector
from tests.cpu.media.hunyuan_tower import TOWER
from tests.cuda.test_vision import HALVES, assert_rows


@pytest.mark.parametrize("type_name", ["f32", "f16"])
def test_rows_are_those_of_the_cpu(type_name: str, tmp_path: Path, cuda_devices: int) -> None:
    """All on the device; queries, keys and values are f16 there."""
    tower, lines = replace(TOWER, d=64, heads=2, ff=96), list[str]()
    path = str(tower.write(tmp_path / "mmproj.gguf", tower.weights(), type_name))
    device = EncoderRuntime(available()[0], DeviceParams(), lines.append)
    here, there = (
        np.concatenate([piece.values for piece in pieces if not isinstance(piece, str)])
        for pieces in (
            open_projector(path, n_embd=tower.text, n_threads=1, log=lines.append, device=each).encode(
                tower.picture(10, 14)
            )
            for each in (None, device)
        )
    )
    assert_rows(type_name, there, here, HALVES)
    assert not [line for line in lines if line.startswith("note")]
