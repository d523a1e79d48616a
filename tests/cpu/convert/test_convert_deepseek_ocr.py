"""`ikpy convert` of DeepSeek-OCR: the projector is that of the tests of its encoder; the text part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import Conversion
from ikpy.engine.model import Model
from ikpy.errors import UnsupportedError
from ikpy.vision import deepseekocr
from ikpy.vision.projector import open_projector
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert import seeded_checkpoints as tiny
from tests.cpu.convert.checkpoints import amend, convert, read_json
from tests.cpu.convert.deepseek_ocr_checkpoints import LANGUAGE, TEXT, TOWER, vision_config, write
from tests.cpu.convert.seeded_checkpoints import FF_EXPERT, HEADS, N_EXPERT, USED, D
from tests.cpu.convert.test_convert_projectors import converted, refused
from tests.cpu.convert.test_convert_seeded import logits_of
from tests.cpu.media import deepseek_ocr_tower as reference
from tests.cpu.media.deepseek_ocr_tower import GOLDEN


def test_file_is_that_of_the_tests(tmp_path: Path) -> None:
    file, weights = converted(write(tmp_path / "checkpoint")), TOWER.weights()
    assert set(file.tensors) == set(weights)
    for name, values in weights.items():
        found = file.data(file.tensors[name]).view(np.float32).reshape(values.shape)
        np.testing.assert_array_equal(found, values, err_msg=name)
    for key, value in TOWER.keys.items():
        assert file.metadata[key] == pytest.approx(value), key


@pytest.mark.parametrize("outtype", ["f32", "f16", "q8_0"])
def test_rows_are_their_definition(outtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepseekocr.DeepseekOcrProjector, "whole", 128)
    image = np.random.default_rng(3).integers(0, 256, (128, 128, 3), dtype=np.uint8)
    file = converted(write(tmp_path / "checkpoint"), outtype)
    found = open_projector(file.path, n_embd=TOWER.text, n_threads=1, log=print).rows(image).values
    wanted = reference.line(TOWER, TOWER.weights(), image, is_whole=True)
    error = np.abs(found - wanted).max(axis=1) / np.abs(wanted).max()
    bound = {"f32": 1e-5, "f16": 5e-3, "q8_0": 5e-2}[outtype]
    assert error.max() < bound, f"row {error.argmax()} is off by {error.max():.1e}"


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("sam_vit_b", {"heads": 5}, "5 heads in 32"),
        ("sam_vit_b", {"global_attn_indexes": [1]}, r"windows of \[3, 8\]"),
        ("sam_vit_b", {"layers": 4}, "no tensor 'sam_model.blocks.3.attn.rel_pos_h'"),
        ("clip-l-14-224", {"width": 128}, "has shape"),
        ("clip-l-14-224", {"layers": 1}, "has no place"),
    ],
)
def test_other_sizes(part: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint")
    vision = read_json(folder / "config.json")["vision_config"]
    vision["width"][part] |= changes
    amend(folder, vision_config=vision)
    refused(folder, message, **({"error": UnsupportedError} if "no place" in message else {}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"projector_config": {"projector_type": "mlp_gelu"}}, "projector of type mlp_gelu"),
        ({"global_view_pos": "tail"}, "global_view_pos tail"),
        ({"vision_config": {"width": 1152}}, "no 'width' of 'sam_vit_b'"),  # DeepSeek-VL2
    ],
)
def test_other_models(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint")
    amend(folder, **changes)
    refused(folder, message)


# The text part


@pytest.mark.parametrize("model_type", ["deepseek_v2", None])
def test_text_part(model_type: str | None, tmp_path: Path) -> None:
    """Its configuration may not name its type; encoders are left out."""
    folder = tiny.write(TEXT, tmp_path / "checkpoint")
    inner = {name: value for name, value in LANGUAGE.items() if name != "model_type"}
    inner |= {"model_type": model_type} if model_type else {}
    outer = {"architectures": ["DeepseekOCRForCausalLM"], "model_type": "deepseek_vl_v2"}
    config = {**outer, "language_config": inner, "vision_config": vision_config()}
    (folder / "config.json").write_text(json.dumps(config))
    others = ("sam_model.pos_embed", "vision_model.x.weight", "projector.layers.weight", "image_newline")
    other = made.bf16(np.ones((4, 4), np.float32))
    made.change_tensors(folder, lambda t: t.update({f"model.{name}": other for name in (*others, "view_seperator")}))
    assert any("--mmproj writes the encoder of pictures" in note for note in Conversion(folder).notes)
    file = convert(folder, tmp_path, outtype="f32")
    with np.load(GOLDEN) as golden:
        wanted, rows = golden["logits"], golden["logit_rows"]
    error = np.abs(logits_of(file)[rows, : wanted.shape[1]] - wanted).max(axis=1)
    assert error.max() < 5e-4, f"row {rows[error.argmax()]} is off by {error.max():.1e}"
    hp = Model.load(file.path).hparams
    assert (hp.n_dense_layers, hp.n_expert, hp.n_expert_used, hp.n_ff_exp, hp.n_ff_shared) == (
        1,
        N_EXPERT,
        USED,
        FF_EXPERT,
        2 * FF_EXPERT,
    )
    assert (hp.routing.gating, hp.routing.normalize, hp.routing.scale) == ("softmax", False, 1)
    arch = "deepseek2-ocr"
    assert file.metadata["general.architecture"] == arch
    assert file.metadata[f"{arch}.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)
    assert file.metadata[f"{arch}.attention.key_length"] == D // HEADS
