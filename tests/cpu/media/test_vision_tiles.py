"""Encoders of squares and tiles: rows against definitions, transformers and llama.cpp, marks, types, errors."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from ikpy.errors import FileFormatError, IkpyError
from ikpy.vision.projector import Projector, open_projector
from ikpy.vision.rows import MediaRows
from tests.cpu.kernels.row_checks import assert_rows
from tests.cpu.media import reference_tiles as reference
from tests.cpu.media.tile_towers import (
    GOLDEN_ROWS,
    GOLDENS,
    PEER_COLUMNS,
    TOWERS,
    golden_picture,
    peer_pictures,
    picture,
)
from tests.cpu.media.tile_weights import TileTower, Weights, decoded

BOUND = 2e-5
PEER_BOUND = 3e-3


def projector(
    folder: Path, tower: TileTower, weights: Weights | None = None, types: dict[str, str] | None = None, **options: int
) -> Projector:
    """The tower as a file, opened."""
    path = tower.write(folder / "mmproj.gguf", weights, types)
    return open_projector(str(path), n_embd=tower.text, n_threads=2, log=print, **options)


def final_picture(tower: TileTower, rows: int, columns: int) -> np.ndarray:
    """A picture in a size that is not changed: of squares all, of other families so many steps."""
    if tower.kind not in ("gemma4v", "gemma4uv", "lfm2", "resampler", "phi4", "minicpmv4_6"):
        return picture(tower.side, tower.side)
    factor = tower.further.get("projector.scale_factor", 1)
    step = tower.patch * factor
    if factor == 4:
        rows, columns = rows // 2, columns // 2
    return picture(rows * step, columns * step)


@pytest.mark.parametrize("name", TOWERS)
def test_rows_are_those_of_the_definition(name: str, tmp_path: Path) -> None:
    """Of several sizes one after the other; a size that was seen before gives the same bits."""
    tower = TOWERS[name]
    opened = projector(tmp_path, tower)
    first: MediaRows | None = None
    for rows, columns in ((7, 11), (12, 8), (8, 8), (7, 11)):
        image = final_picture(tower, rows, columns)
        found = opened.rows(image)
        expected = reference.ROWS[name](reference.Reference(tower, tower.weights()), image)
        assert_rows(f"{name} {image.shape}", found.values, expected, BOUND)
        first = first or found
    assert first is not None and np.array_equal(found.values, first.values)


@pytest.mark.parametrize("name", sorted(set(TOWERS) & {path.stem for path in GOLDENS.glob("*.npz")}))
def test_rows_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Recorded by scripts/make_tile_golden.py."""
    tower = TOWERS[name]
    found = projector(tmp_path, tower).rows(golden_picture(tower)).values
    with np.load(GOLDENS / f"{name}.npz") as golden:
        assert len(found) == golden["n"]
        assert_rows(name, found[list(GOLDEN_ROWS)], golden["rows"], BOUND)


@pytest.mark.parametrize("name", TOWERS)
def test_pieces_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    """Marks, numbers of rows and rows of pictures in many proportions (scripts/make_peer_pictures.py).

    Its tables of activation functions are F16. Of LLaVA's rows it leaves out the first patch, not the class token, and
    it takes Llama 4's squares column by column: transformers, whose rows are ours, does neither.
    """
    tower = TOWERS[name]
    opened = projector(tmp_path, tower)
    with np.load(GOLDENS / f"peer_{name}.npz") as golden:
        expected, rows, peaks = json.loads(str(golden["pieces"])), list(golden["rows"]), list(golden["peaks"])
    for image, pieces in zip(peer_pictures(tower), expected, strict=True):
        found = opened.encode(image)
        assert joined([piece if isinstance(piece, str) else len(piece) for piece in found]) == pieces
        worst = 0.0
        for piece in found:
            if isinstance(piece, str):
                continue
            order = peer_order(name, len(piece))
            theirs, peak = rows.pop(0), float(peaks.pop(0))
            mine = piece.values[order[[1, -2]], :PEER_COLUMNS]
            error = np.abs(mine - theirs).max() / peak
            assert error < PEER_BOUND, f"{name} {image.shape}: {error:.1e}"
            worst = max(worst, float(error))
        print(f"{name} {image.shape}: {worst:.1e}")
    assert not rows


def joined(pieces: list[str | int]) -> list[str | int]:
    """Neighbouring texts as one."""
    found: list[str | int] = []
    for piece in pieces:
        if isinstance(piece, str) and found and isinstance(found[-1], str):
            found[-1] += piece
        else:
            found.append(piece)
    return found


def peer_order(name: str, n: int) -> np.ndarray:
    """Which of our rows llama.cpp's n rows are."""
    if name == "llava":
        return np.append(np.arange(1, n), 0)  # its last row is the class token's
    side = round(n**0.5)
    return np.arange(n).reshape(side, side).T.reshape(-1) if name == "llama4" else np.arange(n)


@pytest.mark.parametrize("type_name", ["f16", "bf16", "q8_0", "q4_K"])
def test_weights_of_other_types(type_name: str, tmp_path: Path) -> None:
    """Matrices of every type; activations are rounded as they are for text."""
    block = 256 if type_name == "q4_K" else 32
    tower = dataclasses.replace(TOWERS["internvl"], d=256, ff=512, heads=4, layers=2)
    weights = tower.weights()
    chosen = [n for n, w in weights.items() if w.ndim == 2 and w.shape[1] % block == 0 and "position" not in n]
    assert any("attn_qkv" in name for name in chosen) and any("mlp.1" in name for name in chosen)
    types = dict.fromkeys(chosen, type_name)
    if block == 32 and type_name in ("f16", "bf16"):
        types["v.patch_embd.weight"] = type_name
    held = weights | {name: decoded(weights[name], type_name) for name in types}
    image = final_picture(tower, 0, 0)
    expected = reference.internvl(reference.Reference(tower, held), image)
    bound = {"f16": BOUND, "bf16": 2e-2, "q8_0": 3e-2, "q4_K": 3e-2}[type_name]
    assert_rows(type_name, projector(tmp_path, tower, weights, types).rows(image).values, expected, bound)


@pytest.mark.parametrize("name", ["glm_edge", "ldp", "ldpv2"])
def test_every_tensor_is_needed_and_has_its_shape(name: str, tmp_path: Path) -> None:
    """Behind the encoder. Biases may be missing; all else is an error of one line."""
    weights = TOWERS[name].weights()
    for tensor in (tensor for tensor in weights if not tensor.startswith("v.")):
        longer = np.concatenate([weights[tensor], weights[tensor][:1]])
        for changed in ({}, {tensor: longer}):
            broken = {k: w for k, w in weights.items() if k != tensor} | changed
            if not changed and tensor.endswith("bias") and "peg" not in tensor:
                projector(tmp_path, TOWERS[name], broken)
                continue
            with pytest.raises(IkpyError) as caught:
                projector(tmp_path, TOWERS[name], broken)
            assert "\n" not in str(caught.value), tensor


@pytest.mark.parametrize("parts", [("2.0.weight", "2.1.weight", "2.1.bias"), ("1.fc2.weight", "1.fc2.bias")])
@pytest.mark.parametrize("n", [1, 20])
def test_blocks_that_change_widths(parts: tuple[str, ...], n: int, tmp_path: Path) -> None:
    """What a block of MobileVLM gives or multiplies by is as wide as what it reads."""
    weights = TOWERS["ldp"].weights()
    names = [f"mm.model.mb_block.1.block.{part}" for part in parts]
    narrow = {name: weights[name][:n] for name in names}
    with pytest.raises(FileFormatError, match=f"'{names[0]}' has wrong shape"):
        projector(tmp_path, TOWERS["ldp"], weights | narrow)
