"""Encoders of pictures in their own proportions: rows against definitions and transformers, sizes, orders, errors."""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ikpy.errors import FileFormatError, IkpyError, UsageError
from ikpy.vision import plans
from ikpy.vision.grids import Limits, axial_table, fitting_size, ranges_of, resampled, square_order, window_order
from ikpy.vision.kimi import GLM_WORDS
from ikpy.vision.native_size import NativeSizeProjector
from ikpy.vision.projector import Projector, open_projector
from ikpy.vision.qwen2vl import OMNI_WORDS
from ikpy.vision.resize import padded
from ikpy.vision.rows import MediaRows
from ikpy.vision.youtuvl import scaled_size
from tests.cpu.media import reference_towers as reference
from tests.cpu.media.tower_kinds import TEXT_AROUND, TOWERS, UNKNOWN_TO_TRANSFORMERS, peer_pictures, peer_tower
from tests.cpu.media.vision_towers import GOLDEN_ROWS, GOLDENS, PEER_COLUMNS, Tower

PEER_BOUND = 1e-3
GRIDS = ("qwen2vl", "qwen25vl", "qwen3vl", "glm4v", "glm_ocr", "paddleocr")
RESIZED = ("lightonocr", "glm5v")
"""Kinds that resize some of the pictures whose sides are whole squares."""
FREE_TABLES = ("kimik25", False), ("glm4v", True)
# Height and width of pictures, and what llama.cpp made of them: squares of 12 pixels, 8 to 4096, 8 to 100 and 1000 to
# 4096 of them.
SIZES = [
    ((1, 1), (3, 3), (3, 3), (32, 32)),
    ((3, 700), (1, 58), (1, 58), (3, 484)),
    ((700, 3), (58, 1), (58, 1), (484, 3)),
    ((1500, 1500), (64, 64), (10, 10), (64, 64)),
    ((2000, 3000), (52, 78), (8, 12), (52, 78)),
    ((119, 8), (10, 1), (10, 1), (122, 9)),
    ((443, 941), (37, 78), (6, 14), (37, 78)),
]


def projector(folder: Path, tower: Tower, n_threads: int = 1, **options: int) -> NativeSizeProjector:
    """The tower as a file, opened."""
    path = tower.write(folder / "mmproj.gguf", tower.weights())
    found: Projector = open_projector(str(path), n_embd=tower.text, n_threads=n_threads, log=print, **options)
    assert isinstance(found, NativeSizeProjector)
    return found


def rows_of(pieces: list[str | MediaRows]) -> MediaRows:
    (rows,) = (piece for piece in pieces if isinstance(piece, MediaRows))
    return rows


def assert_rows(what: str, found: np.ndarray, expected: np.ndarray, bound: float) -> None:
    """Errors relative to the mean magnitude of the largest row."""
    assert found.shape == expected.shape
    error = np.abs(found - expected) / np.abs(expected).mean(-1).max()
    row, element = np.unravel_index(np.nan_to_num(error, nan=np.inf).argmax(), error.shape)
    print(f"{what}: row {row}, element {element}: {error[row, element]:.1e}")
    assert error[row, element] <= bound


@pytest.mark.parametrize("name", TOWERS)
def test_rows_are_those_of_the_definition(name: str, tmp_path: Path) -> None:
    """Of several sizes one after the other, by one file; a size that was seen before gives the same bits."""
    tower = TOWERS[name]
    opened, weights = projector(tmp_path, tower, n_threads=2), tower.weights()
    before, behind = TEXT_AROUND[name]
    first = None
    for size in ((10, 14), (14, 6), (2, 18), (tower.side or 8,) * 2, (10, 14)):
        rows, columns = (n + n % tower.merge for n in size)
        picture = tower.picture(rows, columns)
        pieces = opened.encode(picture)
        assert [piece for piece in pieces if isinstance(piece, str)] == [text for text in (before, behind) if text]
        assert pieces[-1] == behind and (not before or pieces[0] == before)
        found = rows_of(pieces)
        (tile,) = opened.tiles(picture)
        assert isinstance(tile, np.ndarray)
        assert name in RESIZED or np.array_equal(tile, picture)
        grid = (rows // 2, columns // 2) if name in GRIDS else None
        assert found.grid == grid and not found.both_ways
        assert found.values.dtype == np.float32
        assert_rows(f"{name} {rows}x{columns}", found.values, reference.rows(tower, weights, tile), 2e-5)
        first = found.values if first is None else first
    assert np.array_equal(found.values, first)


@pytest.mark.parametrize(("type_name", "bound"), [("f16", 1e-5), ("bf16", 3e-2), ("q8_0", 0.15), ("q5_1", 0.15)])
@pytest.mark.parametrize("name", ["qwen25vl", "qwen3vl", "mistral3", "glm4v", "exaone4_5"])
def test_matrices_of_other_types(name: str, type_name: str, bound: float, tmp_path: Path) -> None:
    """Bounds are what kernels round activations to: bfloat16, or 8 bits."""
    tower = dataclasses.replace(TOWERS[name], d=128, heads=4, ff=96)
    weights = tower.weights()
    path = tower.write(tmp_path / "mmproj.gguf", weights, type_name)
    opened = open_projector(str(path), n_embd=tower.text, n_threads=1, log=print)
    picture = tower.picture(6, 10)
    assert_rows(type_name, rows_of(opened.encode(picture)).values, reference.rows(tower, weights, picture), bound)


@pytest.mark.parametrize("name", sorted(set(TOWERS) - UNKNOWN_TO_TRANSFORMERS))
def test_definitions_are_those_of_transformers(name: str) -> None:
    """Recorded by scripts/make_vision_golden.py."""
    tower = TOWERS[name]
    found = reference.rows(tower, tower.weights(), tower.picture())
    with np.load(GOLDENS / f"{name}.npz") as golden:
        assert len(found) == golden["n"]
        assert_rows(name, found[list(GOLDEN_ROWS)], golden["rows"], 1e-5)


@pytest.mark.parametrize("name", TOWERS)
def test_pieces_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    """Marks, numbers of rows and rows of pictures in many proportions (scripts/make_peer_towers.py), whose activation
    functions are tables of F16, and of which GELU in projectors is approximated.
    """
    tower = peer_tower(name)
    opened = projector(tmp_path, tower)
    with np.load(GOLDENS / f"peer_{name}.npz") as golden:
        expected, rows, peaks = json.loads(str(golden["pieces"])), golden["rows"], golden["peaks"]
    for i, (image, pieces) in enumerate(zip(peer_pictures(tower), expected, strict=True)):
        found = opened.encode(image)
        assert [piece if isinstance(piece, str) else len(piece) for piece in found] == pieces
        mine = rows_of(found).values[[1, -2]][:, :PEER_COLUMNS]
        error = np.abs(mine - rows[i]).max() / float(peaks[i])
        print(f"{name} {image.shape}: {error:.1e}")
        assert error < PEER_BOUND


def test_what_towers_have_in_common_is_told_apart() -> None:
    """Rotation, windows, positions and parts of rows change what the definitions give."""
    for name, change in (
        ("qwen25vl", {"windows": 4}),
        ("qwen3vl", {"deep": (0, 1)}),
        ("pixtral", {"kind": "kimivl"}),
        ("kimik25", {"kind": "qwen3vl_merger"}),
    ):
        tower = TOWERS[name]
        other = dataclasses.replace(tower, **change)
        if "kind" in change:
            turns = [reference.angles(each, 4, 6) for each in (tower, other)]
            assert np.abs(turns[0] - turns[1]).max() > 0.1
            continue
        weights = tower.weights() | other.weights()
        rows = [reference.rows(each, weights, tower.picture()) for each in (tower, other)]
        assert np.abs(rows[0] - rows[1]).max() > 0.01


def test_pictures_of_any_size_are_fitted_and_padded(tmp_path: Path) -> None:
    """In their proportions, black on two sides, as llama.cpp does it."""
    tower = TOWERS["qwen3vl"]
    opened = projector(tmp_path, tower, max_tokens=40)
    picture = np.random.default_rng(1).integers(0, 256, (61, 137, 3), dtype=np.uint8)
    target = fitting_size(61, 137, 12, Limits(8 * 144, 40 * 144))
    assert target == (48, 108)
    found = rows_of(opened.encode(picture))
    expected = reference.rows(tower, tower.weights(), padded(picture, target, "bicubic"))
    assert found.grid == (4, 9) and found.n_positions == 9
    assert_rows("padded", found.values, expected, 2e-5)


@pytest.mark.parametrize(("size", "usual", "few", "many"), SIZES)
def test_sizes_are_those_of_llama_cpp(
    size: tuple[int, int], usual: tuple[int, int], few: tuple[int, int], many: tuple[int, int]
) -> None:
    for limits, lines in (((8, 4096), usual), ((8, 100), few), ((1000, 4096), many)):
        found = fitting_size(*size, 12, Limits(*(n * 144 for n in limits)))
        assert found == tuple(12 * n for n in lines)


def test_scaled_sizes_are_those_of_llama_cpp() -> None:
    """Of Youtu-VL: tokens of pictures of some sizes, for several limits."""
    for size, most, tokens in [
        ((650, 55), 30, 30),
        ((785, 4), 30, 29),
        ((95, 25), 30, 24),
        ((155, 243), 100, 96),
        ((8, 41), 100, 4),
        ((23, 7), 100, 2),
    ]:
        height, width = scaled_size(size, 12, most * 144)
        assert height * width == tokens * 144 and tokens <= most
    assert scaled_size((1, 1), 12, 144) == (12, 12)
    assert scaled_size((1, 10000), 12, 144) == (12, 12)


def test_limits(tmp_path: Path) -> None:
    """Of Qwen the user comes before the file, of Kimi K2.5 a file that says both before the user."""
    squares = {"image_min_pixels": 20 * 144, "image_max_pixels": 50 * 144}
    for name, further, options, expected in (
        ("qwen2vl", {}, {}, (8, 4096)),
        ("qwen2vl", squares, {}, (20, 50)),
        ("qwen2vl", squares, {"max_tokens": 30}, (20, 30)),
        ("qwen2vl", squares, {"min_tokens": 5, "max_tokens": 10}, (5, 10)),
        ("pixtral", squares, {}, (8, 1024)),
        ("mistral3", {}, {"min_tokens": 9}, (9, 1024)),
        ("kimivl", squares, {}, (8, 1024)),
        ("kimik25", {}, {"max_tokens": 10}, (2, 10)),
        ("kimik25", squares, {"min_tokens": 5, "max_tokens": 10}, (20, 50)),
        ("kimik25", {"image_max_pixels": 50 * 144}, {}, (2, 4096)),
        ("paddleocr", squares, {"min_tokens": 5, "max_tokens": 10}, (20, 50)),
        ("youtuvl", squares, {"max_tokens": 10}, (1, 10)),
    ):
        tower = TOWERS[name]
        opened = projector(tmp_path, dataclasses.replace(tower, further={**tower.further, **further}), **options)
        area = opened.square**2
        assert (opened.limits.least // area, opened.limits.most // area) == expected, (name, further, options)


def test_older_files_have_up_and_down_exchanged(tmp_path: Path) -> None:
    tower = TOWERS["qwen2vl"]
    weights, picture = tower.weights(), tower.picture(6, 8)
    names = {name: name.replace("ffn_up", "ffn_*") for name in weights}
    names = {name: new.replace("ffn_down", "ffn_up").replace("ffn_*", "ffn_down") for name, new in names.items()}
    path = tower.write(tmp_path / "old.gguf", {names[name]: w for name, w in weights.items()})
    opened = open_projector(str(path), n_embd=tower.text, n_threads=1, log=print)
    assert_rows("old", rows_of(opened.encode(picture)).values, reference.rows(tower, weights, picture), 2e-5)


# errors


@pytest.mark.parametrize(
    ("name", "change", "options", "said"),
    [
        ("qwen2vl", {"further": {"spatial_merge_size": 0}}, {}, "spatial_merge_size is 0"),
        ("qwen2vl", {"heads": 30, "d": 60}, {}, "heads of 2 elements"),
        ("qwen2vl", {}, {"min_tokens": 5000}, "at least 5000 and at most 4096"),
        ("qwen25vl", {"windows": 0}, {}, "n_wa_pattern"),
        ("youtuvl", {"further": {"spatial_merge_size": 2}}, {}, "window_size"),
        ("kimivl", {"further": {"projector.scale_factor": 65}}, {}, "scale_factor is 65"),
    ],
)
def test_keys_that_make_no_sense(
    name: str, change: dict[str, object], options: dict[str, int], said: str, tmp_path: Path
) -> None:
    with pytest.raises(IkpyError, match=said) as caught:
        projector(tmp_path, dataclasses.replace(TOWERS[name], **change), **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", TOWERS)
def test_every_tensor_is_needed_and_has_its_shape(name: str, tmp_path: Path) -> None:
    """One that is missing, or has a row too many, is an error of one line, or is optional."""
    tower = TOWERS[name]
    weights, path = tower.weights(), tmp_path / "mmproj.gguf"
    optional = (
        "bias",
        "_norm.",
        "norm_embd",
        ".ln",
        "_ln",
        "img_break",
        "merger.w",
        "ffn_gate.",
        "exp_probs",
        "v.deepstack",
    )
    for tensor in weights:
        if any(f".blk.{il}." in tensor for il in (1, 2, 3)) and "exps" not in tensor:
            continue
        for changed in (None, np.concatenate([weights[tensor], weights[tensor][:1]])):
            broken = {k: w for k, w in weights.items() if k != tensor} | ({} if changed is None else {tensor: changed})
            try:
                open_projector(str(tower.write(path, broken)), n_embd=tower.text, n_threads=1, log=lambda _: None)
            except (FileFormatError, UsageError) as error:
                assert "\n" not in str(error)
            else:
                lacking = changed is None and any(part in tensor for part in optional)
                # A table of any height, and one that GLM-OCR has not.
                table = tensor == "v.position_embd.weight" and (name, changed is None) in FREE_TABLES
                assert lacking or table, tensor


@pytest.mark.parametrize(
    ("name", "kind", "others"), [("kimik25", "kimik25", GLM_WORDS), ("qwen25vl", "qwen2.5o", OMNI_WORDS)]
)
def test_words_around_pictures_depend_on_the_vocabulary(
    name: str, kind: str, others: tuple[str, str], tmp_path: Path
) -> None:
    """Kimi K2.5 and GLM-5.2 Vision have the same projector; so have Qwen2.5-VL and Omni, under two names."""
    tower = TOWERS[name]
    path = str(dataclasses.replace(tower, kind=kind).write(tmp_path / "mmproj.gguf", tower.weights()))
    picture = tower.picture(8, 6)
    for words in (others, TEXT_AROUND[name]):
        opened = open_projector(path, n_embd=tower.text, n_threads=1, log=print, has_token=words[0].__eq__)
        pieces = opened.encode(picture)
        assert (pieces[0], pieces[-1]) == words
        assert_rows(kind, rows_of(pieces).values, reference.rows(tower, tower.weights(), picture), 2e-5)


def test_narrow_pictures_are_refused(tmp_path: Path) -> None:
    opened = projector(tmp_path, TOWERS["qwen2vl"], max_tokens=10)
    with pytest.raises(UsageError, match="too narrow"):
        opened.encode(np.zeros((1, 30_000_000, 3), np.uint8))


def test_plans_of_large_pictures_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as fit in a number of bytes; the last one is, and gives the same rows again."""
    tower = TOWERS["qwen3vl"]
    opened = projector(tmp_path, tower)
    found = rows_of(opened.encode(tower.picture(8, 8))).values
    one = opened._plans.n_bytes
    assert one > 64 * (108 + 60) * 4  # patches and positions
    monkeypatch.setattr(plans, "MAX_PLAN_BYTES", 2 * one)
    for n, kept in ((6, 2), (10, 1), (8, 1)):
        rows = rows_of(opened.encode(tower.picture(n, n))).values
        assert len(opened._plans) == kept
    assert np.array_equal(rows, found)


def test_threads_take_turns(tmp_path: Path) -> None:
    """Plans of all sizes share one arena."""
    tower = TOWERS["qwen3vl"]
    opened = projector(tmp_path, tower)
    pictures = [tower.picture(n, 12, seed=n) for n in (8, 10, 12, 14)]
    alone = [rows_of(opened.encode(each)).values for each in pictures]

    def encode(i: int) -> bool:
        return all(np.array_equal(rows_of(opened.encode(pictures[i])).values, alone[i]) for _ in range(25))

    with ThreadPoolExecutor(len(pictures)) as threads:
        assert all(threads.map(encode, range(len(pictures))))


# orders and tables


def test_orders_of_patches() -> None:
    """Squares together, windows together, those at the edges smaller."""
    assert square_order(2, 4, 2).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    order, lengths = window_order(3, 5, 2)
    assert order.tolist() == [0, 1, 5, 6, 2, 3, 7, 8, 4, 9, 10, 11, 12, 13, 14]
    assert lengths.tolist() == [4, 4, 2, 2, 2, 1]
    assert ranges_of(lengths[:3]).tolist() == [[0, 4]] * 4 + [[4, 8]] * 4 + [[8, 10]] * 2


def test_rotation_by_two_positions() -> None:
    table = axial_table((np.array([0, 3]), np.array([2, 5])), (np.array([1.0]), np.array([0.5])))
    expected = [[1, 0, np.cos(1), np.sin(1)], [np.cos(3), np.sin(3), np.cos(2.5), np.sin(2.5)]]
    np.testing.assert_allclose(table, expected, atol=1e-7)


@pytest.mark.parametrize(("method", "shares"), [("corners", "corner_weights"), ("bicubic", "cubic_weights")])
def test_tables_of_positions_are_stretched(method: str, shares: str) -> None:
    """Up and down, to one line, and not at all where the size is the same."""
    table = np.random.default_rng(2).normal(size=(5, 5, 3)).astype(np.float32)
    weights = getattr(reference, shares)
    for rows, columns in ((9, 2), (1, 17), (5, 4), (5, 5)):
        expected = np.einsum("ry,cx,yxd->rcd", weights(rows, 5), weights(columns, 5), table).reshape(-1, 3)
        np.testing.assert_allclose(resampled(table, rows, columns, method), expected, atol=1e-5)
