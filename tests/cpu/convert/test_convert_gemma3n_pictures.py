"""`ikpy convert --mmproj` of Gemma 3n: the file is that of the tests of its encoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.errors import FileFormatError, UnsupportedError
from ikpy.graph.ir import F16
from ikpy.quants import dequantize
from ikpy.vision.projector import open_projector
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert.checkpoints import amend, change_tensors, read_json
from tests.cpu.convert.gemma3n_tower_checkpoint import EMBED, TIMM, TOWER, config, write
from tests.cpu.convert.test_convert_projectors import converted, refused
from tests.cpu.media import mobilenet_tower as reference
from tests.cpu.media.test_vision_deepseek_ocr import picture, worst


def test_file_is_that_of_the_tests(tmp_path: Path) -> None:
    """Filters but for the first are f16 in every file, as llama.cpp reads them."""
    file, weights = converted(write(tmp_path / "checkpoint")), TOWER.weights()
    assert set(file.tensors) == set(weights)
    for name, values in weights.items():
        info = file.tensors[name]
        assert (info.type_id == F16) == (values.ndim == 4 and values.shape[0] > 1 and "stem" not in name), name
        found = dequantize(file.data(info), info.type_id, info.shape).reshape(values.shape)
        wanted = values.astype(np.float16).astype(np.float32) if info.type_id == F16 else values
        np.testing.assert_array_equal(found, wanted, err_msg=name)
        assert tuple(info.shape)[: values.ndim] == values.shape[::-1] or values.shape[0] == 1, name
    for key, value in TOWER.keys.items():
        assert file.metadata[key] == pytest.approx(value), key


@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16", "q8_0"])
def test_rows_are_their_definition(outtype: str, tmp_path: Path) -> None:
    file = converted(write(tmp_path / "checkpoint"), outtype)
    image = picture(TOWER.side, TOWER.side)
    found = open_projector(file.path, n_embd=TOWER.text, n_threads=1, log=print).rows(image).values
    bound = {"f32": 5e-3, "f16": 5e-3}.get(outtype, 2e-2)
    assert worst(found, reference.rows(TOWER, TOWER.weights(), image)) < bound


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "mobilenetv5_base"}, "architecture mobilenetv5_base"),
        ({"model_args": {"stem_size": 3}}, "model_args"),
        ({"hidden_size": 64}, "has shape"),
        ({"hidden_size": -1}, "hidden_size"),
    ],
)
def test_other_networks(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint")
    amend(folder, vision_config=config()["vision_config"] | changes)
    refused(folder, message)


@pytest.mark.parametrize("size", [{"height": 300, "width": 300}, {"height": 256, "width": 512}])
def test_other_pictures(size: dict[str, int], tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint")
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(read_json(path) | {"size": size}))
    refused(folder, f"size {size['height']} x {size['width']}")


@pytest.mark.parametrize(
    "name",
    [
        f"{TIMM}.conv_stem.conv.weight",
        f"{TIMM}.blocks.0.1.bn1.weight",
        f"{TIMM}.blocks.1.0.pw_exp.conv.weight",
        f"{TIMM}.blocks.2.2.attn.key.proj.weight",
        f"{TIMM}.blocks.2.3.pw_proj.conv.weight",
        f"{TIMM}.msfa.norm.weight",
        f"{EMBED}.embedding_projection.weight",
    ],
)
def test_missing_tensors(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint")
    change_tensors(folder, lambda tensors: tensors.pop(name))
    refused(folder, name.removeprefix("model.").removesuffix(".weight"), error=FileFormatError)


def test_a_tensor_without_a_place(tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint")
    other = made.bf16(np.ones((4, 4), np.float32))
    change_tensors(folder, lambda tensors: tensors.update({f"{TIMM}.blocks.1.0.se.weight": other}))
    refused(folder, "has no place", error=UnsupportedError)
