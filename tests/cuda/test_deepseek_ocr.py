"""The encoders of DeepSeek-OCR and DeepSeek-OCR 2 on a device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ikpy.backends.cuda.devices import available
from ikpy.backends.cuda.encoder_runtime import EncoderRuntime
from ikpy.graph.placement import DeviceParams
from ikpy.vision import deepseekocr2
from ikpy.vision.projector import open_projector
from tests.cpu.media import deepseek_ocr2_tower as second
from tests.cpu.media.deepseek_ocr_tower import OcrTower
from tests.cuda.test_vision import HALVES, assert_rows


@pytest.mark.parametrize("size", [(64, 64), (80, 160)])
def test_rows_are_those_of_the_cpu(size: tuple[int, int], tmp_path: Path, cuda_devices: int) -> None:
    """All on the device; queries, keys and values are f16 there."""
    compare(OcrTower(), size, tmp_path)


@pytest.mark.parametrize(("side", "head"), [(second.TILE, 24), (second.WHOLE, 64)])
def test_rows_of_the_second(
    side: int, head: int, tmp_path: Path, cuda_devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a tile and of a whole picture."""
    monkeypatch.setattr(deepseekocr2.DeepseekOcr2Projector, "whole", second.WHOLE)
    monkeypatch.setattr(deepseekocr2.DeepseekOcr2Projector, "tile", second.TILE)
    compare(second.Ocr2Tower(d=4 * head), (side, side), tmp_path)


def compare(tower: OcrTower, size: tuple[int, int], folder: Path) -> None:
    """Rows of a picture on a device and on the CPU."""
    lines = list[str]()
    path = str(tower.write(folder / "mmproj.gguf", tower.weights()))
    device = EncoderRuntime(available()[0], DeviceParams(), lines.append)
    image = np.random.default_rng(3).integers(0, 256, (*size, 3), dtype=np.uint8)
    here, there = (
        open_projector(path, n_embd=tower.text, n_threads=1, log=lines.append, device=each).rows(image).values
        for each in (None, device)
    )
    assert_rows(str(size), there, here, HALVES)
    assert not [line for line in lines if line.startswith("note")]
