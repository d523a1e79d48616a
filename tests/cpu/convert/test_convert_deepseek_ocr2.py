"""`ikpy convert` of DeepSeek-OCR 2: the projector is that of the tests of its encoder; the text part is plain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import Conversion
from ikpy.errors import FileFormatError, UnsupportedError
from ikpy.vision.projector import open_projector
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert import seeded_checkpoints as tiny
from tests.cpu.convert.checkpoints import amend, change_tensors, convert, read_json
from tests.cpu.convert.deepseek_ocr2_checkpoints import CAUSAL, TOWER, vision_config, write
from tests.cpu.convert.deepseek_ocr_checkpoints import LANGUAGE, TEXT
from tests.cpu.convert.test_convert_projectors import converted, refused
from tests.cpu.media import deepseek_ocr2_tower as reference

LAYERS = f"{CAUSAL}.model.model.layers"


def test_file_is_that_of_the_tests(tmp_path: Path) -> None:
    file, weights = converted(write(tmp_path / "checkpoint")), TOWER.weights()
    assert set(file.tensors) == set(weights)
    for name, values in weights.items():
        found = file.data(file.tensors[name]).view(np.float32).reshape(values.shape)
        np.testing.assert_array_equal(found, values, err_msg=name)
    for key, value in TOWER.keys.items():
        assert file.metadata[key] == pytest.approx(value), key


@pytest.mark.parametrize("outtype", ["f16", "q8_0"])
def test_rows_of_other_types(outtype: str, tmp_path: Path) -> None:
    """Near those of the file in f32."""
    image, (wanted, found) = reference.peer_picture(), ([], [])
    for rows, kind in ((wanted, "f32"), (found, outtype)):
        file = converted(write(tmp_path / kind / "checkpoint"), kind)
        pieces = open_projector(file.path, n_embd=TOWER.text, n_threads=1, log=print).encode(image)
        rows.extend(piece.values for piece in pieces if not isinstance(piece, str))
    for each, exact in zip(found, wanted, strict=True):
        error = np.abs(each - exact).max(axis=1) / np.abs(exact).max()
        assert error.max() < {"f16": 5e-3, "q8_0": 5e-2}[outtype], f"row {error.argmax()} is off by {error.max():.1e}"


@pytest.mark.parametrize(
    ("part", "changes", "message", "error"),
    [
        ("sam_vit_b", {"heads": 5}, "5 heads in 32", FileFormatError),
        ("sam_vit_b", {"global_attn_indexes": [1]}, r"windows of \[14, 64\]", FileFormatError),
        ("qwen2-0-5b", {"dim": 96}, "heads of 96 elements in 96", FileFormatError),
        ("qwen2-0-5b", {"dim": 128}, "has shape", FileFormatError),
    ],
)
def test_other_sizes(part: str, changes: dict[str, Any], message: str, error: type, tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint")
    vision = read_json(folder / "config.json")["vision_config"]
    vision["width"][part] |= changes
    amend(folder, vision_config=vision)
    refused(folder, message, error=error)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{LAYERS}.0.self_attn.k_proj.weight", "no tensor 'qwen2_model.model.model.layers.0.self_attn.k_proj.weight'"),
        (f"{LAYERS}.1.mlp.up_proj.weight", "mlp.up_proj.weight"),
        (f"{CAUSAL}.query_768.weight", "query_768.weight"),
        ("model.view_seperator", "view_seperator"),
    ],
)
def test_missing_tensors(name: str, message: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint")
    change_tensors(folder, lambda tensors: tensors.pop(name))
    refused(folder, message)


def test_a_tensor_without_a_place(tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint")
    other = made.bf16(np.ones((4, 4), np.float32))
    change_tensors(folder, lambda tensors: tensors.update({f"{LAYERS}.0.self_attn.q_norm.weight": other}))
    refused(folder, "has no place", error=UnsupportedError)


def test_text_part(tmp_path: Path) -> None:
    """Is that of DeepSeek-OCR; encoders are left out."""
    files = []
    for name, encoders in (("plain", {}), ("whole", {"vision_config": vision_config()})):
        folder = tiny.write(TEXT, tmp_path / name / "checkpoint")
        if encoders:
            config = {"architectures": ["DeepseekOCR2ForCausalLM"], "model_type": "deepseek_vl_v2"}
            config |= {"language_config": LANGUAGE, **encoders}
            (folder / "config.json").write_text(json.dumps(config))
            other = made.bf16(np.ones((4, 4), np.float32))
            others = (f"{LAYERS}.0.mlp.up_proj.weight", f"{CAUSAL}.query_768.weight", "model.view_seperator")
            change_tensors(folder, lambda t, others=others, other=other: t.update(dict.fromkeys(others, other)))
            assert any("--mmproj writes the encoder of pictures" in note for note in Conversion(folder).notes)
        files.append(convert(folder, tmp_path / name, outtype="f32"))
    plain, whole = files
    assert whole.metadata["general.architecture"] == "deepseek2-ocr"
    assert set(plain.tensors) == set(whole.tensors)
    for name, info in plain.tensors.items():
        np.testing.assert_array_equal(plain.data(info), whole.data(whole.tensors[name]), err_msg=name)
