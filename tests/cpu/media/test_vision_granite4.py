"""Granite 4 Vision's encoder beside its definition in float64, transformers and llama.cpp; tiles; damaged files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ikpy.errors import IkpyError
from ikpy.vision.projector import Projector, open_projector
from ikpy.vision.rows import MediaRows
from tests.cpu.media import granite4_tower as reference
from tests.cpu.media.granite4_tower import ENDS, GOLDEN, GOLDEN_ROWS, PEER, TOWER, GraniteTower, pictures
from tests.cpu.media.vision_towers import PEER_COLUMNS
from tests.cpu.models.definition_checks import hold

LINES = (2, 1, 3, 1)
"""Of tiles of the pictures of tests."""


def opened(folder: Path, tower: GraniteTower = TOWER, type_name: str = "f32") -> Projector:
    path = tower.write(folder / "mmproj.gguf", tower.weights(), type_name)
    return open_projector(str(path), n_embd=tower.text, n_threads=1, log=print)


def rows_of(pieces: list[str | MediaRows]) -> np.ndarray:
    """Of the only picture."""
    rows, end = pieces
    assert isinstance(rows, MediaRows) and rows.grid is None and not rows.both_ways and end == ENDS[0]
    return rows.values


@pytest.mark.parametrize("which", range(4))
def test_rows_are_their_definition(which: int, tmp_path: Path) -> None:
    """Of the whole and of tiles, without those of bars, with a row behind every line."""
    projector, image = opened(tmp_path), pictures()[which]
    assert projector.n_deep == 3
    tiles = [tile for tile in projector.tiles(image) if not isinstance(tile, str)]
    expected = reference.picture_rows(TOWER, TOWER.weights(), tiles, LINES[which], image.shape[:2])
    hold(f"{image.shape}", rows_of(projector.encode(image)), expected, 2e-5)


@pytest.mark.parametrize(("type_name", "bound"), [("f16", 5e-3), ("q8_0", 5e-2)])
def test_rows_of_other_types(type_name: str, bound: float, tmp_path: Path) -> None:
    weights, image = TOWER.weights(), pictures()[0][:24, :24]
    path = TOWER.write(tmp_path / "mmproj.gguf", weights, type_name)
    projector = open_projector(str(path), n_embd=TOWER.text, n_threads=1, log=print)
    hold(type_name, projector.rows(image).values, reference.rows(TOWER, weights, image), bound)


def test_definition_is_that_of_transformers() -> None:
    """Recorded by scripts/make_granite4_golden.py: a picture of one line of tiles, without bars."""
    image = np.random.default_rng(3).integers(0, 256, (24, 48, 3), dtype=np.uint8)
    tiles = [image[:, :24], image[:, :24], image[:, 24:]]
    found = reference.picture_rows(TOWER, TOWER.weights(), tiles, 1, (24, 48))
    with np.load(GOLDEN) as golden:
        assert len(found) == golden["n"]
        hold("transformers", found[list(GOLDEN_ROWS)], golden["rows"], 1e-5)


def test_rows_are_those_of_llama_cpp(tmp_path: Path) -> None:
    """Recorded by scripts/make_peer_towers.py; activations are tables of F16 there."""
    projector = opened(tmp_path)
    with np.load(PEER) as golden:
        expected, rows, peaks = json.loads(str(golden["pieces"])), golden["rows"], golden["peaks"]
    for i, (image, pieces) in enumerate(zip(pictures(), expected, strict=True)):
        found = rows_of(projector.encode(image))
        assert [len(found), *ENDS] == pieces
        error = np.abs(found[[1, -2]][:, :PEER_COLUMNS] - rows[i]).max() / float(peaks[i])
        print(f"{image.shape}: {error:.1e}")
        assert error < 1e-3


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("feature_layer", [0, 1, 2, 3], "names no layers"),
        ("feature_layer", [0, 1, 2], "names no layers"),
        ("feature_layer", [], "names no layers"),
        ("projector.spatial_offsets", [0, 1, 2, 4], "are not -1 to 3"),
        ("projector.window_side", 3, "half of them must"),
        ("projector.query_side", 0, "query_side is 0"),
        ("projector.query_side", 1, "half of them must"),
        ("image_grid_pinpoints", [], "image_grid_pinpoints not found"),
        ("image_grid_pinpoints", [25, 24], "no sizes of tiles of 24"),
    ],
)
def test_keys_that_make_no_sense(key: str, value: object, message: str, tmp_path: Path) -> None:
    keys = {**TOWER.keys, f"clip.vision.{key}": value}
    if value == []:
        del keys[f"clip.vision.{key}"]

    class Changed(GraniteTower):
        keys = property(lambda self: keys)

    with pytest.raises(IkpyError, match=message) as caught:
        opened(tmp_path, Changed())
    assert "\n" not in str(caught.value)


def test_other_widths(tmp_path: Path) -> None:
    with pytest.raises(IkpyError, match="96 elements are no heads of 64"):
        opened(tmp_path, replace(TOWER, d=96))


ONCE = [n for n in TOWER.weights() if ".blk.1" not in n and ".blk.2" not in n and "proj_blk.2" not in n]


@pytest.mark.parametrize("name", [name for name in ONCE if "proj_blk.3" not in name])
def test_every_tensor_is_needed_and_has_its_shape(name: str, tmp_path: Path) -> None:
    """Biases, and the norm that is not used, may be missing; all else is an error of one line."""
    weights = TOWER.weights()
    for changed in (None, np.concatenate([weights[name], weights[name][:1]])):
        broken = {k: w for k, w in weights.items() if k != name} | ({} if changed is None else {name: changed})
        path = TOWER.write(tmp_path / "mmproj.gguf", broken)
        try:
            open_projector(str(path), n_embd=TOWER.text, n_threads=1, log=lambda _: None)
        except IkpyError as error:
            assert "\n" not in str(error)
        else:
            assert (changed is None and name.endswith("bias")) or name.startswith("v.post_ln"), name
