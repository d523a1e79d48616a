"""`ikpy convert` of Granite 4 Vision: the projector is that of the tests of its encoder; layers of the text part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import Conversion
from ikpy.convert.checkpoint import Checkpoint
from ikpy.convert.config import Config
from ikpy.convert.families.granite import Granite
from ikpy.errors import FileFormatError
from ikpy.vision.projector import open_projector
from tests.cpu.convert.checkpoints import amend, change_tensors, read_json
from tests.cpu.convert.granite4_vision_checkpoints import MAPPING, TOWER, published, write
from tests.cpu.convert.test_convert_projectors import converted, refused
from tests.cpu.media import granite4_tower as reference
from tests.cpu.models.definition_checks import hold


def test_file_is_that_of_the_tests(tmp_path: Path) -> None:
    """Blocks in the order of the text model's layers."""
    file, weights = converted(write(tmp_path / "checkpoint")), TOWER.weights()
    assert set(file.tensors) == set(weights)
    for name, values in weights.items():
        found = file.data(file.tensors[name]).view(np.float32).reshape(values.shape)
        np.testing.assert_array_equal(found, values, err_msg=name)
    for key, value in TOWER.keys.items():
        assert file.metadata[key] == pytest.approx(value), key


@pytest.mark.parametrize(("outtype", "bound"), [("f16", 5e-3), ("q8_0", 5e-2)])
def test_rows_of_other_types(outtype: str, bound: float, tmp_path: Path) -> None:
    image = reference.pictures()[0][:24, :24]
    file = converted(write(tmp_path / "checkpoint"), outtype)
    found = open_projector(file.path, n_embd=TOWER.text, n_threads=1, log=print).rows(image).values
    hold(outtype, found, reference.rows(TOWER, TOWER.weights(), image), bound)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"downsample_rate": "3/8"}, "downsample_rate 3/8 of 8 patches"),
        ({"downsample_rate": "2:4"}, "downsample_rate 2:4"),
        ({"downsample_rate": None}, "'downsample_rate' is missing"),
        ({"deepstack_layer_map": [[-2, 6], [-3, 3]]}, r"layers \[0, 3, 3, 5, 6, 7\] of 8"),
        ({"deepstack_layer_map": [[-2, 6], [-3, 8]]}, "of 8"),
        ({"deepstack_layer_map": [[-2, 6], [-4, 2]]}, "states -4 of 3 layers"),
        ({"deepstack_layer_map": [[0, 6], [-3, 2]]}, "states 0 of 3 layers"),
        ({"deepstack_layer_map": [[-2, 6, 1]]}, "deepstack_layer_map"),
        ({"deepstack_layer_map": None}, "no parts of pictures' rows"),
        ({"spatial_target_layers": [1, 3, 5, 7]}, r"layers \[1, 2, 3, 5, 6, 7\]"),
        ({"spatial_target_layers": [0, 3, 5]}, "spatial_target_layers"),
        ({"image_grid_pinpoints": [[24, 50]]}, "image_grid_pinpoints for tiles of 24 pixels"),
        ({"image_grid_pinpoints": []}, "image_grid_pinpoints for tiles of 24 pixels"),
        ({"vision_feature_select_strategy": "default"}, "vision_feature_select_strategy default"),
        ({"qformer_config": {"num_hidden_layers": 2}}, "num_hidden_layers 2"),
        ({"qformer_config": {"num_attention_heads": 4}}, "num_attention_heads 4"),
    ],
)
def test_other_models(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint")
    amend(folder, **changes)
    refused(folder, message)


@pytest.mark.parametrize("name", ["v.image_newline", "v.proj_blk.1.query", "v.proj_blk.5.cross_attn_out.bias"])
def test_missing_tensors(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint")
    change_tensors(folder, lambda tensors: tensors.pop(published(name)))
    refused(folder, "is missing; the checkpoint is incomplete")


@pytest.mark.parametrize("model_type", ["granite", "granite4_vision_text"])
def test_layers_of_the_text_part(model_type: str, tmp_path: Path) -> None:
    """Are said in the file; the encoder is left out."""
    folder = write(tmp_path / "checkpoint")
    text = read_json(folder / "config.json")["text_config"] | {"model_type": model_type}
    text |= {"intermediate_size": 48, "num_attention_heads": 2, "vocab_size": 9, "rms_norm_eps": 1e-5}
    text |= {"max_position_embeddings": 64}
    amend(folder, text_config=text)
    checkpoint = Checkpoint(folder)
    family = Granite(Config(checkpoint.config, folder / "config.json"))
    assert family.keys()["deepstack_mapping"].tolist() == MAPPING
    with pytest.raises(
        FileFormatError, match="the token embedding is missing"
    ) as caught:  # it has no more than one tensor of the text part
        Conversion(folder)
    assert "\n" not in str(caught.value)
