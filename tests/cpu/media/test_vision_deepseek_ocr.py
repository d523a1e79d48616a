"""DeepSeek-OCR's encoder beside its definition in float64 and transformers; tiles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ikpy.errors import FileFormatError
from ikpy.vision import deepseekocr
from ikpy.vision.projector import Projector, open_projector
from tests.cpu.media import deepseek_ocr_tower as reference
from tests.cpu.media.deepseek_ocr_tower import GOLDEN, GOLDEN_ROWS, OcrTower

TOWER = OcrTower()


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole pictures of 128 pixels and tiles of 80: the published ones have 1024 and 640."""
    monkeypatch.setattr(deepseekocr.DeepseekOcrProjector, "whole", 128)
    monkeypatch.setattr(deepseekocr.DeepseekOcrProjector, "tile", 80)


def opened(folder: Path, tower: OcrTower = TOWER, type_name: str = "f32") -> Projector:
    path = tower.write(folder / "mmproj.gguf", tower.weights(), type_name)
    return open_projector(str(path), n_embd=tower.text, n_threads=1, log=print)


def picture(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, (height, width, 3), dtype=np.uint8)


def worst(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference of a row as a share of the largest value; its row is printed."""
    assert found.shape == wanted.shape
    errors = np.abs(found - wanted).max(axis=1) / np.abs(wanted).max()
    print(f"row {errors.argmax()} of {len(errors)}: {errors.max():.1e}")
    return float(errors.max())


@pytest.mark.parametrize("size", [(128, 128), (80, 80), (80, 160), (80, 240), (64, 64)])
def test_rows_are_their_definition(size: tuple[int, int], tmp_path: Path) -> None:
    """Of the whole picture and of lines of tiles, for which tables of positions and distances are stretched."""
    image = picture(*size)
    wanted = reference.line(TOWER, TOWER.weights(), image, is_whole=size == (128, 128))
    assert worst(opened(tmp_path).rows(image).values, wanted) < 1e-5


@pytest.mark.parametrize(("type_name", "bound"), [("f16", 5e-3), ("q8_0", 4e-2)])
def test_types_of_matrices(type_name: str, bound: float, tmp_path: Path) -> None:
    image = picture(80, 160)
    wanted = reference.line(TOWER, TOWER.weights(), image, is_whole=False)
    assert worst(opened(tmp_path, type_name=type_name).rows(image).values, wanted) < bound


def test_sizes_of_published_heads(tmp_path: Path) -> None:
    """Heads of 64 elements beside 8 rows and columns, windows that do not divide the picture."""
    tower = replace(TOWER, sam=128, window=5)
    image = picture(128, 128)
    wanted = reference.line(tower, tower.weights(), image, is_whole=True)
    assert worst(opened(tmp_path, tower).rows(image).values, wanted) < 1e-5


@pytest.mark.parametrize("side", [128, 64])
def test_rows_are_those_of_transformers(side: int, tmp_path: Path) -> None:
    """Recorded by scripts/make_deepseek_ocr_golden.py, without the ends of lines."""
    rows = opened(tmp_path).rows(picture(side, side)).values
    n = side // 64
    found = rows[: n * (n + 1)].reshape(n, n + 1, -1)[:, :-1].reshape(n * n, -1)
    with np.load(GOLDEN) as golden:
        wanted = golden[f"rows{side}"]
    assert worst(found[list(GOLDEN_ROWS if n > 1 else (0,))], wanted) < 1e-5


@pytest.mark.parametrize(
    ("size", "sizes"),
    [
        ((80, 80), [(128, 128)]),
        ((81, 60), [(80, 160)] * 3 + [(128, 128)]),
        ((60, 200), [(80, 240), (128, 128)]),
        ((160, 160), [(80, 160), (80, 160), (128, 128)]),
        ((300, 300), [(80, 240)] * 3 + [(128, 128)]),
    ],
)
def test_tiles(size: tuple[int, int], sizes: list[tuple[int, int]], tmp_path: Path) -> None:
    """Lines of two to nine tiles, the whole picture behind them."""
    tiles = [tile for tile in opened(tmp_path).tiles(picture(*size)) if not isinstance(tile, str)]
    assert [tile.shape[:2] for tile in tiles] == sizes


def test_text_around(tmp_path: Path) -> None:
    pieces = opened(tmp_path).encode(picture(60, 200))
    assert [piece if isinstance(piece, str) else len(piece) for piece in pieces] == [2 * (6 + 1), 2 * (2 + 1) + 1, "\n"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d": 60}, "v.blk.0|states of 64|60"),
        ({"sam_heads": 3}, "is no multiple of 3 heads"),
    ],
)
def test_odd_files(changes: dict[str, int], message: str, tmp_path: Path) -> None:
    tower = replace(TOWER, **changes)
    path = TOWER.write(tmp_path / "mmproj.gguf", TOWER.weights())
    path = reference.write_in_type(path, tower.keys, TOWER.weights())
    with pytest.raises(FileFormatError, match=message):
        open_projector(str(path), n_embd=TOWER.text, n_threads=1, log=print)
