"""HunyuanVL's encoder beside its definition in float64, transformers and llama.cpp; places in the text; limits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ikpy.errors import IkpyError
from ikpy.vision.hunyuan import HunyuanProjector
from ikpy.vision.projector import Projector, open_projector
from ikpy.vision.rows import MediaRows
from tests.cpu.media import hunyuan_tower as reference
from tests.cpu.media.hunyuan_tower import GOLDEN, GOLDEN_ROWS, MARKS, PEER, TOWER, HunyuanTower, peer_pictures
from tests.cpu.media.vision_towers import PEER_COLUMNS
from tests.cpu.models.definition_checks import hold

PEER_BOUND = 1e-3
"""llama.cpp's GELU is its approximation, in a table of F16."""


def opened(folder: Path, tower: HunyuanTower = TOWER, type_name: str = "f32", **options: int) -> Projector:
    path = tower.write(folder / "mmproj.gguf", tower.weights(), type_name)
    return open_projector(str(path), n_embd=tower.text, n_threads=1, log=print, **options)


def joined(pieces: list[str | MediaRows]) -> np.ndarray:
    """Rows of all pieces that have some."""
    return np.concatenate([piece.values for piece in pieces if not isinstance(piece, str)])


@pytest.mark.parametrize("kind", ["hunyuanvl", "hunyuanocr"])
@pytest.mark.parametrize("size", [(10, 14), (18, 6), (2, 18), (8, 8)])
def test_rows_are_their_definition(kind: str, size: tuple[int, int], tmp_path: Path) -> None:
    tower = replace(TOWER, kind=kind, further={**TOWER.further, "image_min_pixels": 144})
    picture = tower.picture(*size)
    hold(
        f"{size}",
        joined(opened(tmp_path, tower).encode(picture)),
        reference.rows(tower, tower.weights(), picture),
        2e-6,
    )


def test_a_picture_as_large_as_the_table(tmp_path: Path) -> None:
    """Has interpolated positions as others."""
    tower = replace(TOWER, side=10)
    picture = tower.picture(10, 10)
    expected = reference.rows(tower, tower.weights(), picture)
    hold("whole", joined(opened(tmp_path, tower).encode(picture)), expected, 2e-6)


@pytest.mark.parametrize(("type_name", "bound"), [("f16", 1e-3), ("q8_0", 5e-2)])
def test_rows_of_other_types(type_name: str, bound: float, tmp_path: Path) -> None:
    tower = replace(TOWER, d=64, heads=2, ff=96)
    weights = tower.weights()
    path = tower.write(tmp_path / "mmproj.gguf", weights, type_name)
    picture = tower.picture(6, 10)
    found = open_projector(str(path), n_embd=tower.text, n_threads=1, log=print).encode(picture)
    hold(type_name, joined(found), reference.rows(tower, weights, picture), bound)


def test_places_in_the_text(tmp_path: Path) -> None:
    """Lines and their ends are a grid that is counted; rows around it are like tokens."""
    before, first, inside, last, behind = opened(tmp_path).encode(TOWER.picture(10, 14))
    assert (before, behind) == MARKS
    assert isinstance(first, MediaRows) and isinstance(inside, MediaRows) and isinstance(last, MediaRows)
    assert [(len(piece), piece.grid, piece.turn) for piece in (first, inside, last)] == [
        (1, None, 0),
        (40, (5, 8), 1),
        (1, None, 0),
    ]
    assert inside.n_positions == 40 and not inside.both_ways


def test_definition_is_that_of_transformers() -> None:
    """Recorded by scripts/make_hunyuan_golden.py; transformers interpolates positions for the grid itself."""
    found = reference.rows(TOWER, TOWER.weights(), TOWER.picture(), more=0.0)
    with np.load(GOLDEN) as golden:
        assert len(found) == golden["n"]
        hold("transformers", found[list(GOLDEN_ROWS)], golden["rows"], 1e-5)


def test_rows_are_those_of_llama_cpp(tmp_path: Path) -> None:
    """Marks and rows of pictures as they are, enlarged and made smaller (scripts/make_peer_towers.py)."""
    projector = opened(tmp_path)
    with np.load(PEER) as golden:
        expected, rows, peaks = json.loads(str(golden["pieces"])), golden["rows"], golden["peaks"]
    for i, (image, pieces) in enumerate(zip(peer_pictures(), expected, strict=True)):
        found = projector.encode(image)
        assert [found[0], len(joined(found)), found[-1]] == pieces
        error = np.abs(joined(found)[[1, -2]][:, :PEER_COLUMNS] - rows[i]).max() / float(peaks[i])
        print(f"{image.shape}: {error:.1e}")
        assert error < PEER_BOUND


def test_limits(tmp_path: Path) -> None:
    """The user comes before the file, that before what is usual."""
    no_limits = {"spatial_merge_size": 2, "image_size": 54}
    for further, options, expected in (
        (TOWER.further, {}, (12, 400)),
        (TOWER.further, {"max_tokens": 30}, (12, 30)),
        (no_limits, {}, (256, 16384)),
        (no_limits, {"min_tokens": 5}, (5, 16384)),
    ):
        projector = opened(tmp_path, replace(TOWER, further=further), **options)
        assert isinstance(projector, HunyuanProjector)
        assert (projector.limits.least // 144, projector.limits.most // 144) == expected


@pytest.mark.parametrize("name", [name for name in TOWER.weights() if ".blk.1" not in name and ".blk.2" not in name])
def test_every_tensor_is_needed_and_has_its_shape(name: str, tmp_path: Path) -> None:
    """Biases may be missing; all else is an error of one line."""
    weights = TOWER.weights()
    for changed in (None, np.concatenate([weights[name], weights[name][:1]])):
        broken = {k: w for k, w in weights.items() if k != name} | ({} if changed is None else {name: changed})
        path = TOWER.write(tmp_path / "mmproj.gguf", broken)
        try:
            open_projector(str(path), n_embd=TOWER.text, n_threads=1, log=lambda _: None)
        except IkpyError as error:
            assert "\n" not in str(error)
        else:
            assert changed is None and name.endswith("bias"), name
