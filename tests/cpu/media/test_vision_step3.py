"""Step3-VL: rows against the definition and transformers, windows against llama.cpp, convolutions, errors."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from ikpy.errors import FileFormatError, IkpyError, ResourceError
from ikpy.vision import step3vl
from ikpy.vision.convolution import F16, neighbour_places
from ikpy.vision.grids import resampled
from ikpy.vision.projector import Projector, open_projector
from ikpy.vision.rows import MediaRows
from ikpy.vision.step3vl import whole_windows, window_size, windows
from ikpy.vision.stretched_positions import antialiased
from tests.cpu.media import reference_towers as reference
from tests.cpu.media.test_vision_towers import PEER_BOUND, assert_rows
from tests.cpu.media.tower_kinds import STEP3VL, STEP_SIZES, step_pictures
from tests.cpu.media.vision_towers import GOLDEN_ROWS, GOLDENS, PEER_COLUMNS, Tower

ENLARGED = 1e-2
"""Errors of pictures that are enlarged, which are rounded to whole numbers here and not by llama.cpp."""


def projector(folder: Path, tower: Tower = STEP3VL, type_name: str = "f32") -> Projector:
    """The tower as a file, opened."""
    path = tower.write(folder / "mmproj.gguf", tower.weights(), type_name)
    return open_projector(str(path), n_embd=tower.text, n_threads=2, log=lambda _: None)


def joined(pieces: list[str | MediaRows]) -> list[str | np.ndarray]:
    """Rows and the text between them."""
    found: list[str | np.ndarray] = []
    for piece in pieces:
        if isinstance(piece, MediaRows):
            assert piece.grid is None and not piece.both_ways
            found.append(piece.values)
        elif found and isinstance(found[-1], str):
            found[-1] += piece
        else:
            found.append(piece)
    return found


def test_rows_are_those_of_the_definition(tmp_path: Path) -> None:
    """Of several sizes, odd ones among them, one after the other; a size that was seen before gives the same bits."""
    opened, first = projector(tmp_path), None
    for size in ((16, 16), (12, 12), (9, 14), (1, 3), (16, 16)):
        picture = STEP3VL.picture(*size)
        found = opened.rows(picture).values
        assert_rows(f"step3vl {size}", found, reference.rows(STEP3VL, STEP3VL.weights(), picture), 2e-5)
        first = found if first is None else first
    assert np.array_equal(found, first)


def test_definition_is_that_of_transformers() -> None:
    """Recorded by scripts/make_vision_golden.py."""
    found = reference.rows(STEP3VL, STEP3VL.weights(), STEP3VL.picture())
    with np.load(GOLDENS / "step3vl.npz") as golden:
        assert len(found) == golden["n"]
        assert_rows("step3vl", found[list(GOLDEN_ROWS)], golden["rows"], 1e-5)


def test_pieces_are_those_of_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its smoothing of positions, which the published code has not. Of the whole of a picture that is made smaller
    marks and numbers of rows alone are compared: llama.cpp does not smooth it, unlike the published code.
    """
    monkeypatch.setattr(step3vl.Embedding, "positions", lambda self, *size: antialiased(self.table, *size))
    opened = projector(tmp_path)
    with np.load(GOLDENS / "peer_step3vl.npz") as golden:
        expected, rows, peaks = json.loads(str(golden["pieces"])), golden["rows"], golden["peaks"]
    i = 0
    for (height, width), image, pieces in zip(STEP_SIZES, step_pictures(), expected, strict=True):
        found = joined(opened.encode(image))
        assert [piece if isinstance(piece, str) else len(piece) for piece in found] == pieces
        values = [piece for piece in found if not isinstance(piece, str)]
        side = window_size(opened.prepared(image).shape[:2], 672)
        for piece in values:
            error = np.abs(piece[[1, -2], :PEER_COLUMNS] - rows[i]).max() / float(peaks[i])
            is_whole = piece is values[-1]
            as_it_is = side == 504 if not is_whole else (height, width) == (672, 672)
            print(f"{height}x{width}, {'whole' if is_whole else side}: {error:.1e}")
            if not is_whole or max(height, width) <= 672:
                assert error < (PEER_BOUND if as_it_is else ENLARGED)
            i += 1
    assert i == len(rows)


def test_halves_are_kept(tmp_path: Path) -> None:
    """Filters of F16 are those of the file."""
    tower = dataclasses.replace(STEP3VL, layers=1)
    weights, picture = tower.weights(), tower.picture(4, 6)
    for name in ("mm.0.weight", "mm.1.weight"):
        weights[name] = weights[name].astype(np.float16)
    found = open_projector(
        str(tower.write(tmp_path / "half.gguf", weights)), n_embd=tower.text, n_threads=1, log=lambda _: None
    )
    assert found.first.weight.type_id == F16  # type: ignore[attr-defined]
    assert_rows("f16", found.rows(picture).values, reference.rows(tower, weights, picture), 2e-5)


# windows


@pytest.mark.parametrize(
    ("size", "side"),
    [
        ((728, 728), 0),
        ((400, 600), 0),  # the ratio is not above the limit
        ((400, 601), 400),
        ((729, 100), 100),
        ((729, 300), 504),
        ((2500, 600), 504),
        ((3024, 32), 32),
    ],
)
def test_sizes_of_windows(size: tuple[int, int], side: int) -> None:
    assert window_size(size, 728) == window_size(size[::-1], 728) == side


def test_whole_windows() -> None:
    """What exceeds them by more than a fifth of one becomes one more."""
    lengths = [(100, 100), (99, 100), (119, 100), (121, 100), (219, 100), (221, 100), (250, 100)]
    assert [whole_windows(*length) for length in lengths] == [100, 99, 100, 200, 200, 300, 300]


def test_windows_are_filled_up() -> None:
    image = np.full((3, 8, 3), 9, np.uint8)
    (row,) = windows(image, 4)
    assert [window.shape for window in row] == [(4, 4, 3)] * 2
    assert all((window[:3] == 9).all() and not window[3].any() for window in row)
    assert windows(image, 0) == []


def test_neighbours_of_every_second_patch() -> None:
    assert neighbour_places(2, 3).reshape(2, 3, 3).tolist() == [
        [[-1, -1, -1], [-1, 0, 1], [-1, 3, 4]],
        [[-1, -1, -1], [1, 2, -1], [4, 5, -1]],
    ]


def test_positions_between_patches() -> None:
    table = np.random.default_rng(2).normal(size=(5, 5, 3)).astype(np.float32)
    for rows, columns in ((9, 2), (1, 17), (5, 4), (5, 5)):
        shares = (reference.linear_weights(n, 5) for n in (rows, columns))
        expected = np.einsum("ry,cx,yxd->rcd", *shares, table).reshape(-1, 3)
        np.testing.assert_allclose(resampled(table, rows, columns, "linear"), expected, atol=1e-6)


# errors


def test_thin_pictures_are_no_huge_squares(tmp_path: Path) -> None:
    opened = projector(tmp_path)
    assert opened.prepared(np.zeros((2, 3000, 3), np.uint8)).shape == (3000, 3000, 3)  # type: ignore[attr-defined]
    with pytest.raises(ResourceError, match="would get 65535 x 65535 pixels"):
        opened.encode(np.zeros((1, 65535, 3), np.uint8))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"further": {"image_size": 41}}, "patches of 42 pixels"),
        ({"heads": 30}, "heads of 2 elements"),
        ({"further": {"preproc_image_size": 8193}}, "preproc_image_size is 8193"),
    ],
)
def test_keys_that_make_no_sense(change: dict[str, object], said: str, tmp_path: Path) -> None:
    with pytest.raises(IkpyError, match=said) as caught:
        projector(tmp_path, dataclasses.replace(STEP3VL, **change))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_every_tensor_has_its_shape(tmp_path: Path) -> None:
    weights, path = STEP3VL.weights(), tmp_path / "mmproj.gguf"
    for tensor in weights:
        if ".blk.1." in tensor or ".blk.2." in tensor:
            continue
        for changed in (None, np.concatenate([weights[tensor], weights[tensor][:1]])):
            broken = {k: w for k, w in weights.items() if k != tensor} | ({} if changed is None else {tensor: changed})
            try:
                open_projector(str(STEP3VL.write(path, broken)), n_embd=64, n_threads=1, log=lambda _: None)
            except (FileFormatError, IkpyError) as error:
                assert "\n" not in str(error)
            else:
                assert changed is None and any(part in tensor for part in ("bias", "pre_ln", ".ls")), tensor
