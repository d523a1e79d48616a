"""Encoders of pictures on a device: rows of every family against those of transformers and of the CPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from ikpy.backends.cuda.devices import available
from ikpy.backends.cuda.encoder_runtime import EncoderRuntime
from ikpy.graph.placement import DeviceParams
from ikpy.vision.grids import MEASURED_PATCHES
from ikpy.vision.projector import Projector, open_projector
from tests.cpu.kernels.row_checks import assert_rows
from tests.cpu.media import tile_towers, tower_kinds
from tests.cpu.media.tile_towers import TileTower
from tests.cpu.media.vision_towers import GOLDEN_ROWS, GOLDENS, Tower

TOWERS: dict[str, Tower | TileTower] = {
    **tile_towers.TOWERS,
    **tower_kinds.TOWERS,
    "step3vl": dataclasses.replace(tower_kinds.STEP3VL, further={"image_size": 504}, side=12),
}
RECORDED = sorted(name for name in TOWERS if (GOLDENS / f"{name}.npz").exists() and name != "step3vl")
BOUND = 3e-5
"""Of sums in other orders, relative to the largest value."""
HALVES = 3e-3
"""Where queries, keys, values and probabilities are f16: heads that flash attention has."""
CHANGING = ("gemma4v", "gemma4uv", "lfm2", "resampler", "minicpmv4_6")


def write(tower: Tower | TileTower, path: Path, type_name: str = "f32") -> Path:
    if isinstance(tower, TileTower):
        return tower.write(path)
    return tower.write(path, tower.weights(), type_name)


def opened(tower: Tower | TileTower, path: Path, log: list[str] | None = None) -> tuple[Projector, Projector]:
    """The projector on the CPU and on the first device."""
    lines = [] if log is None else log
    device = EncoderRuntime(available()[0], DeviceParams(), lines.append)
    where = {"n_embd": tower.text, "n_threads": 1, "log": lines.append}
    return open_projector(str(path), **where), open_projector(str(path), **where, device=device)  # type: ignore[arg-type]


def small_picture(tower: Tower | TileTower, rows: int, columns: int) -> np.ndarray:
    """In its final size: squares where the family has no others."""
    if tower.kind == "step3vl":
        return np.random.default_rng(rows).integers(0, 256, (504, 504, 3), dtype=np.uint8)
    if isinstance(tower, Tower):
        return tower.picture(rows, columns)
    if tower.kind not in CHANGING:
        return tile_towers.picture(tower.side, tower.side)
    step = tower.patch * tower.further.get("projector.scale_factor", 1)
    return tile_towers.picture(rows // 2 * step, columns // 2 * step)


@pytest.mark.parametrize("name", RECORDED)
def test_rows_are_those_of_transformers(name: str, tmp_path: Path, cuda_devices: int) -> None:
    """All on the device: nothing falls back."""
    tower, lines = TOWERS[name], list[str]()
    _, there = opened(tower, write(tower, tmp_path / "mmproj.gguf"), lines)
    is_tile = isinstance(tower, TileTower)
    picture = tile_towers.golden_picture(tower) if is_tile else tower.picture()
    rows = tile_towers.GOLDEN_ROWS if is_tile else GOLDEN_ROWS
    found = there.rows(picture).values
    with np.load(GOLDENS / f"{name}.npz") as golden:
        assert len(found) == golden["n"]
        assert_rows(name, found[list(rows)], golden["rows"], BOUND)
    assert not [line for line in lines if line.startswith("note")]


@pytest.mark.parametrize("name", sorted(set(TOWERS) - set(RECORDED)))
def test_rows_are_those_of_the_cpu(name: str, tmp_path: Path, cuda_devices: int) -> None:
    """Of two sizes in turn; the same bits for a size that was seen before."""
    tower, lines = TOWERS[name], list[str]()
    here, there = opened(tower, write(tower, tmp_path / "mmproj.gguf"), lines)
    bound = HALVES if tower.kind == "resampler" else BOUND
    first = None
    for rows, columns in ((4, 6), (6, 4), (4, 6)):
        picture = small_picture(tower, rows, columns)
        found = there.rows(picture).values
        assert_rows(f"{name} {picture.shape}", found, here.rows(picture).values, bound)
        first = found if first is None else first
    assert np.array_equal(found, first)
    assert not [line for line in lines if line.startswith("note")]


@pytest.mark.parametrize(
    ("name", "head", "type_name", "bound"),
    [
        ("qwen3vl", 72, "f16", HALVES),
        ("qwen25vl", 80, "f16", HALVES),
        ("kimivl", 88, "bf16", 3e-2),
        ("qwen25vl", 64, "q8_0", 3e-2),
        ("mimovl", 64, "q8_0", 3e-2),
    ],
)
def test_heads_and_types_of_published_files(
    name: str, head: int, type_name: str, bound: float, tmp_path: Path, cuda_devices: int
) -> None:
    """Flash attention to all and to windows, with sinks too; types whose activations are rounded."""
    change = {"head": head} if name == "mimovl" else {"d": 4 * head, "heads": 4}
    tower = dataclasses.replace(TOWERS[name], ff=256, layers=2 if name != "mimovl" else 5, **change)
    assert isinstance(tower, Tower)
    here, there = opened(tower, write(tower, tmp_path / "mmproj.gguf", type_name))
    picture = tower.picture(10, 12)
    assert_rows(f"{name} {head}", there.rows(picture).values, here.rows(picture).values, bound)


@pytest.mark.parametrize("name", TOWERS)
def test_the_largest_picture_is_measured(name: str, tmp_path: Path, cuda_devices: int) -> None:
    """No picture of usual proportions has more patches, but beyond 65536 of them."""
    tower = TOWERS[name]
    _, there = opened(tower, write(tower, tmp_path / "mmproj.gguf"))
    rows, columns = there.largest
    for height, width in ((2000, 2000), (1500, 2900), (1900, 1100)):
        for tile in there.tiles(tile_towers.picture(height, width)):
            if not isinstance(tile, str):
                patches, down, across = there.patches(tile)
                assert len(patches) == down * across
                assert min(len(patches), MEASURED_PATCHES) <= rows * columns, (height, width)
    assert there.device_bytes["CUDA0"] > 4 * rows * columns * there.n_patch_elements


@pytest.mark.parametrize("name", ["gemma4", "minicpmv"])
def test_limits_beyond_what_can_be_encoded(name: str, tmp_path: Path, cuda_devices: int) -> None:
    """No more is measured than tables hold, and than memory is kept for."""
    tower = TOWERS[name]
    assert isinstance(tower, TileTower)
    if name == "minicpmv":
        tower = dataclasses.replace(tower, further={**tower.further, "image_size": 8192})
    path = write(tower, tmp_path / "mmproj.gguf")
    device = EncoderRuntime(available()[0], DeviceParams(), lambda line: None, plan_only=True)
    there = open_projector(
        str(path), n_embd=tower.text, n_threads=1, log=lambda line: None, max_tokens=100000, device=device
    )
    rows, columns = there.largest
    assert 100 < rows <= columns and rows * columns <= 1.01 * MEASURED_PATCHES
