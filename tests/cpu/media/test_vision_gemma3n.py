"""Gemma 3n's encoder beside its definition in float64, timm with transformers, and llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ikpy.errors import FileFormatError
from ikpy.vision.projector import Projector, open_projector
from tests.cpu.media import mobilenet_tower as reference
from tests.cpu.media.mobilenet_tower import GOLDEN, GOLDEN_ROWS, PEER, PEER_TOWER, MobileTower
from tests.cpu.media.projector_files import Weights, write_in_type
from tests.cpu.media.test_vision_deepseek_ocr import picture, worst
from tests.cpu.media.vision_towers import PEER_COLUMNS

TOWER = MobileTower()


def opened(folder: Path, tower: MobileTower = TOWER, type_name: str = "f32") -> Projector:
    path = tower.write(folder / "mmproj.gguf", tower.weights(), type_name)
    return open_projector(str(path), n_embd=tower.text, n_threads=1, log=print)


@pytest.mark.parametrize(
    ("side", "type_name"),
    [(side, name) for side in (256, 512) for name in ("f32", "f16", "q8_0")] + [(768, "f32")],
)
def test_rows_are_their_definition(side: int, type_name: str, tmp_path: Path) -> None:
    """With and without means of squares of states; of pictures of the published side, too."""
    tower = MobileTower(side=side)
    weights = tower.weights()
    path = tower.write(tmp_path / "mmproj.gguf", weights, type_name)
    found = open_projector(str(path), n_embd=tower.text, n_threads=1, log=print).rows(picture(side, side)).values
    assert (
        worst(found, reference.rows(tower, weights, picture(side, side)))
        < {"f32": 1e-5, "f16": 5e-3, "q8_0": 2e-2}[type_name]
    )


@pytest.mark.parametrize("side", [256, 512])
def test_rows_are_those_of_timm(side: int, tmp_path: Path) -> None:
    """Recorded by scripts/make_mobilenet_golden.py."""
    rows = opened(tmp_path, MobileTower(side=side)).rows(picture(side, side)).values
    with np.load(GOLDEN) as golden:
        wanted = golden[f"rows{side}"]
    assert worst(rows[list(GOLDEN_ROWS)], wanted) < 1e-5


def test_rows_are_those_of_llama_cpp(tmp_path: Path) -> None:
    """Recorded by scripts/make_peer_towers.py: pictures in other proportions have black bars. llama.cpp rounds what
    filters read to F16."""
    projector = opened(tmp_path, PEER_TOWER, "f16")
    with np.load(PEER) as peer:
        texts, rows, peaks = json.loads(str(peer["pieces"])), peer["rows"], peer["peaks"]
    for image, text, wanted, peak in zip(reference.peer_pictures(), texts, rows, peaks, strict=True):
        pieces = projector.encode(image)
        assert [piece if isinstance(piece, str) else len(piece) for piece in pieces] == text
        found = next(piece.values for piece in pieces if not isinstance(piece, str))
        error = np.abs(found[[1, -2], :PEER_COLUMNS] - wanted).max() / peak
        print(f"{image.shape}: {error:.1e}")
        assert error < 1e-2


def test_damaged_sizes(tmp_path: Path) -> None:
    path = MobileTower(side=300).write(tmp_path / "mmproj.gguf", TOWER.weights())
    with pytest.raises(FileFormatError, match=r"clip.vision.image_size 300 is no multiple of 256"):
        open_projector(str(path), n_embd=TOWER.text, n_threads=1, log=print)


def without(*names: str) -> Weights:
    """Weights but for some."""
    return {name: w for name, w in TOWER.weights().items() if not name.startswith(names)}


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("v.conv_stem.conv.weight", "'v.conv_stem.conv.weight' not found"),
        ("v.blk.1.", "no convolutions 'v.blk.1.0' begin a stage"),
        ("v.blk.2.0.", "no convolutions 'v.blk.2.0' begin a stage"),
        ("v.blk.2.0.dw_mid", "'v.blk.2.0.dw_mid.conv.weight' not found, which begins a stage"),
        ("v.blk.2.1.pw_proj", "'v.blk.2.1.pw_proj.conv.weight' not found"),
        ("v.blk.2.2.attn.key.proj", "'v.blk.2.2.attn.key.proj.weight' not found"),
        ("v.blk.2.2.attn.key.down_conv", "v.blk.2.2.attn has queries, keys and values"),
        ("v.blk.0.0.conv_pwl", "'v.blk.0.0.conv_pwl.weight' not found"),
        ("v.msfa.ffn.pw_exp.conv", "'v.msfa.ffn.pw_exp.conv.weight' not found"),
        ("v.blk.2.1.pw_exp.conv", "'v.blk.2.1.[a-z_.]*' is of no known block"),
        ("v.blk.2.1.", "'v.blk.2.2.[a-z_.]*' is of no known block"),
        ("v.blk.2.2.attn.query.proj", "'v.blk.2.2.[a-z_.]*' is of no known block"),
        ("v.blk.0.0.bn1", "'v.blk.0.0.bn1.weight' not found"),
        ("v.blk.2.2.norm", "'v.blk.2.2.norm.weight' not found"),
        ("v.blk.2.0.dw_mid.bn", "'v.blk.2.0.dw_mid.bn.weight' not found"),
        ("v.blk.2.2.attn.key.norm", "'v.blk.2.2.attn.key.norm.weight' not found"),
        ("v.conv_stem.bn", "'v.conv_stem.bn.weight' not found"),
        ("v.msfa.norm", "'v.msfa.norm.weight' not found"),
        ("mm.soft_emb_norm", "'mm.soft_emb_norm.weight' not found"),
        ("mm.input_projection", "'mm.input_projection.weight' not found"),
    ],
)
def test_missing_tensors(missing: str, message: str, tmp_path: Path) -> None:
    path = write_in_type(tmp_path / "mmproj.gguf", TOWER.keys, without(missing))
    with pytest.raises(FileFormatError, match=message):
        open_projector(str(path), n_embd=TOWER.text, n_threads=1, log=print)


@pytest.mark.parametrize(
    "name", ["v.blk.1.0.dw_mid.conv.weight", "v.blk.0.1.conv_exp.weight", "v.blk.2.2.attn.output.proj.weight"]
)
def test_other_shapes(name: str, tmp_path: Path) -> None:
    weights = TOWER.weights()
    weights[name] = weights[name][:, :, :, :1].repeat(2, axis=3)[: len(weights[name]) - 1].copy()
    path = write_in_type(tmp_path / "mmproj.gguf", TOWER.keys, weights)
    with pytest.raises(FileFormatError, match=name.removesuffix(".weight")) as found:
        open_projector(str(path), n_embd=TOWER.text, n_threads=1, log=print)
    assert "\n" not in str(found.value)
