"""DeepSeek-OCR 2's encoder beside its definition in float64, transformers and llama.cpp; tiles."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ikpy.errors import FileFormatError
from ikpy.vision import deepseekocr2, sam
from ikpy.vision.projector import Projector, open_projector
from tests.cpu.media import deepseek_ocr2_tower as reference
from tests.cpu.media.deepseek_ocr2_tower import GOLDEN, GOLDEN_ROWS, PEER, PUBLISHED, TILE, WHOLE, Ocr2Tower
from tests.cpu.media.projector_files import write_in_type
from tests.cpu.media.test_vision_deepseek_ocr import picture, worst
from tests.cpu.media.vision_towers import PEER_COLUMNS

TOWER = Ocr2Tower()


@pytest.fixture
def small_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The published ones have 1024 and 768 pixels."""
    monkeypatch.setattr(deepseekocr2.DeepseekOcr2Projector, "whole", WHOLE)
    monkeypatch.setattr(deepseekocr2.DeepseekOcr2Projector, "tile", TILE)


def opened(folder: Path, tower: Ocr2Tower = TOWER, type_name: str = "f32") -> Projector:
    path = tower.write(folder / "mmproj.gguf", tower.weights(), type_name)
    return open_projector(str(path), n_embd=tower.text, n_threads=1, log=print)


@pytest.mark.usefixtures("small_pictures")
@pytest.mark.parametrize("side", [TILE, WHOLE])
@pytest.mark.parametrize(("type_name", "bound"), [("f32", 1e-5), ("f16", 5e-3), ("q8_0", 4e-2)])
def test_rows_are_their_definition(side: int, type_name: str, bound: float, tmp_path: Path) -> None:
    """Of a tile, and of the whole picture with the row that ends it."""
    wanted = reference.rows(TOWER, TOWER.weights(), picture(side, side), is_whole=side == WHOLE)
    found = opened(tmp_path, type_name=type_name).rows(picture(side, side)).values
    assert worst(found, wanted) < bound


@pytest.mark.usefixtures("small_pictures")
def test_sizes_of_published_heads(tmp_path: Path) -> None:
    """14 heads of 64 elements, two of keys and values."""
    tower = replace(TOWER, d=896, heads=14, kv=2)
    wanted = reference.rows(tower, tower.weights(), picture(TILE, TILE), is_whole=False)
    assert worst(opened(tmp_path, tower).rows(picture(TILE, TILE)).values, wanted) < 1e-5


@pytest.mark.usefixtures("small_pictures")
@pytest.mark.parametrize("side", [TILE, WHOLE])
def test_rows_are_those_of_transformers(side: int, tmp_path: Path) -> None:
    """Recorded by scripts/make_deepseek_ocr2_golden.py, without the row that ends a picture."""
    rows = opened(tmp_path).rows(picture(side, side)).values
    rows = rows[:-1] if side == WHOLE else rows
    with np.load(GOLDEN) as golden:
        wanted = golden[f"rows{side}"]
    assert worst(rows[list(GOLDEN_ROWS)], wanted) < 1e-5


def unsmoothed(side: int, n: int) -> np.ndarray:
    """Shares [side, n] of cubic interpolation with a = -3/4, as llama.cpp makes tables of positions smaller."""
    shares, a = np.zeros((side, n)), -0.75
    for i in range(side):
        at = (i + 0.5) * n / side - 0.5
        for j in range(math.floor(at) - 1, math.floor(at) + 3):
            x = abs(at - j)
            near, far = (a + 2) * x**3 - (a + 3) * x**2 + 1, a * (x**3 - 5 * x**2 + 8 * x - 4)
            shares[i, min(max(j, 0), n - 1)] += near if x < 1 else far
    return shares


def test_rows_are_those_of_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a picture in two tiles and as a whole, in published sizes, recorded by scripts/make_peer_towers.py."""
    monkeypatch.setattr(sam, "cubic_shares", unsmoothed)
    pieces = opened(tmp_path, PUBLISHED).encode(reference.peer_picture())
    with np.load(PEER) as peer:
        texts, rows, peaks = json.loads(str(peer["pieces"])), peer["rows"], peer["peaks"]
    assert [piece if isinstance(piece, str) else len(piece) for piece in pieces] == texts[0]
    found = [piece.values for piece in pieces if not isinstance(piece, str)]
    for each, wanted, peak in zip(found, rows, peaks, strict=True):
        error = np.abs(each[[1, -2], :PEER_COLUMNS] - wanted).max() / peak
        print(f"{len(each)} rows: {error:.1e}")
        assert error < 1e-3


@pytest.mark.usefixtures("small_pictures")
@pytest.mark.parametrize(
    ("size", "n"),
    [((80, 80), 0), ((81, 60), 6), ((60, 200), 3), ((160, 160), 4), ((300, 600), 2)],
)
def test_tiles(size: tuple[int, int], n: int, tmp_path: Path) -> None:
    """Two to six tiles line by line, the whole picture behind them."""
    tiles = [tile for tile in opened(tmp_path).tiles(picture(*size)) if not isinstance(tile, str)]
    assert [tile.shape[:2] for tile in tiles] == [(TILE, TILE)] * n + [(WHOLE, WHOLE)]


@pytest.mark.usefixtures("small_pictures")
def test_text_around(tmp_path: Path) -> None:
    pieces = opened(tmp_path).encode(picture(60, 200))
    assert [piece if isinstance(piece, str) else len(piece) for piece in pieces] == [4, 4, 4, 10, "\n"]


@pytest.mark.usefixtures("small_pictures")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d": 92}, "states of 96 elements are read by an encoder of 92"),
        ({"kv": 4}, "v.blk.0 has keys of 48 elements, not 4 heads of 24"),
        ({"heads": 32}, "heads of 3 elements cannot be rotated"),
        ({"sam_heads": 3}, "is no multiple of 3 heads"),
        ({"layers": 0}, "block_count is 0"),
        ({"layers": 3}, "tensor 'v.blk.2.attn_q.weight' not found"),
    ],
)
def test_odd_files(changes: dict[str, int], message: str, tmp_path: Path) -> None:
    path = write_in_type(tmp_path / "mmproj.gguf", replace(TOWER, **changes).keys, TOWER.weights())
    with pytest.raises(FileFormatError, match=message):
        open_projector(str(path), n_embd=TOWER.text, n_threads=1, log=print)


@pytest.mark.usefixtures("small_pictures")
@pytest.mark.parametrize("name", ["v.resample_query_768.weight", "v.resample_query_1024.weight", "v.view_seperator"])
def test_missing_tensors(name: str, tmp_path: Path) -> None:
    """So are queries of another number than there are states."""
    weights = TOWER.weights()
    values = weights.pop(name)
    path = write_in_type(tmp_path / "mmproj.gguf", TOWER.keys, weights)
    with pytest.raises(FileFormatError, match=f"{name}.*not found"):
        open_projector(str(path), n_embd=TOWER.text, n_threads=1, log=print)
    path = write_in_type(tmp_path / "mmproj.gguf", TOWER.keys, weights | {name: values[:-1].copy()})
    with pytest.raises(FileFormatError, match=f"{name}.* has wrong shape"):
        open_projector(str(path), n_embd=TOWER.text, n_threads=1, log=print)


@pytest.mark.usefixtures("small_pictures")
@pytest.mark.parametrize("name", ["v.post_ln.weight", "v.blk.1.ffn_gate.weight"])
def test_tensors_that_other_encoders_may_lack(name: str, tmp_path: Path) -> None:
    weights = TOWER.weights()
    del weights[name]
    path = write_in_type(tmp_path / "mmproj.gguf", TOWER.keys, weights)
    with pytest.raises(FileFormatError, match=f"{name}.*not found"):
        open_projector(str(path), n_embd=TOWER.text, n_threads=1, log=print)
