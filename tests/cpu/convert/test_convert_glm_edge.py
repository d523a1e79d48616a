"""`ikpy convert` of GLM-Edge-V: the projector is that of the tests of its encoder, with the norm behind the layers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import Conversion, ConvertOptions
from ikpy.errors import UnsupportedError
from ikpy.gguf.reader import GGUFFile
from ikpy.vision.projector import open_projector
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert import seeded_checkpoints
from tests.cpu.convert.checkpoints import Tensors, amend, change_tensors, read_json
from tests.cpu.convert.granite4_vision_checkpoints import LAYER
from tests.cpu.convert.seeded_kinds import KINDS as SEEDED
from tests.cpu.convert.test_convert_projectors import converted, refused
from tests.cpu.media import reference_tiles as reference
from tests.cpu.media.tile_towers import TOWERS, glm_edge, golden_picture
from tests.cpu.media.tile_weights import Maker
from tests.cpu.models.definition_checks import hold

VIT = "vision.vit.model.vision_model"
ADAPTER = "vision.adapter"
OUTER = {
    "v.patch_embd": f"{VIT}.embeddings.patch_embedding",
    "v.position_embd": f"{VIT}.embeddings.position_embedding",
    "v.post_ln": f"{VIT}.post_layernorm",
    "adapter.conv": f"{ADAPTER}.conv",
    "adapter.linear.linear": f"{ADAPTER}.linear_proj.linear_proj",
    "adapter.linear.gate": f"{ADAPTER}.linear_proj.gate_proj",
    **{
        f"adapter.linear.{name}": f"{ADAPTER}.linear_proj.{name}"
        for name in ("norm1", "dense_h_to_4h", "dense_4h_to_h")
    },
}
TEXT = next(kind for kind in SEEDED if kind.name == "glm")


def with_norm(m: Maker) -> None:
    """Files of published checkpoints have the norm behind the layers."""
    glm_edge(m)
    m.norm("v.post_ln", m.tower.d)


TOWER = replace(TOWERS["glm_edge"], make=with_norm, further={"projection_dim": TOWERS["glm_edge"].text})


def published(target: str) -> str:
    """Name of a tensor in the checkpoint."""
    head, _, tail = target.rpartition(".")
    parts = target.split(".")
    if target.startswith("v.blk"):
        return f"model.{VIT}.encoder.layers.{parts[2]}.{LAYER[parts[3]]}.{tail}"
    return f"model.{OUTER[head]}.{tail}" if head in OUTER else f"model.{ADAPTER}.{tail}"


def state() -> dict[str, np.ndarray]:
    """Tensors of both parts behind the text model's, and of a head that is of no use."""
    found = {published(name): values for name, values in TOWER.weights().items()}
    found |= {name: values[None, None] for name, values in found.items() if name.endswith(("boi", "eoi"))}
    return found | {f"model.{VIT}.head.probe": np.ones((1, 1, TOWER.d), np.float32)}


def write(folder: Path, **more: Any) -> Path:
    folder.mkdir(parents=True)
    sizes = {"hidden_size": TOWER.d, "intermediate_size": TOWER.ff, "num_hidden_layers": TOWER.layers}
    sizes |= {"num_attention_heads": TOWER.heads, "image_size": TOWER.side, "patch_size": TOWER.patch}
    config = {"model_type": "glm", "hidden_size": TOWER.text, "vision_config": sizes}
    (folder / "config.json").write_text(json.dumps(config | more))
    colours = {"image_mean": list(TOWER.mean), "image_std": list(TOWER.std)}
    (folder / "preprocessor_config.json").write_text(json.dumps(colours))
    tensors = {name: ("F32", value.shape, np.ascontiguousarray(value).tobytes()) for name, value in state().items()}
    made.write_tensors(folder / "model.safetensors", tensors)
    return folder


def test_the_file_is_that_of_the_tests(tmp_path: Path) -> None:
    file, weights = converted(write(tmp_path / "checkpoint")), TOWER.weights()
    assert set(file.tensors) == set(weights)
    for name, values in weights.items():
        found = file.data(file.tensors[name]).view(np.float32).reshape(values.shape)
        np.testing.assert_array_equal(found, values, err_msg=name)
    for key, value in TOWER.keys.items():
        assert file.metadata[key] == pytest.approx(value), key


@pytest.mark.parametrize(("outtype", "bound"), [("f32", 1e-5), ("f16", 5e-3), ("q8_0", 5e-2)])
def test_rows(outtype: str, bound: float, tmp_path: Path) -> None:
    image = golden_picture(TOWER)
    file = converted(write(tmp_path / "checkpoint"), outtype)
    found = open_projector(file.path, n_embd=TOWER.text, n_threads=1, log=print).rows(image).values
    hold(outtype, found, reference.glm_edge(reference.Reference(TOWER, TOWER.weights()), image), bound)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_size": 21}, "pictures of 3 x 3 patches"),
        ({"hidden_act": "relu"}, "activation 'relu'"),
        ({"num_attention_heads": 5}, "5 heads in 48"),
        ({"num_hidden_layers": 4}, r"layers\.3\.layer_norm1\.weight"),
    ],
)
def test_other_configurations(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint")
    amend(folder, vision_config=read_json(folder / "config.json")["vision_config"] | changes)
    refused(folder, message)


@pytest.mark.parametrize("name", ["adapter.boi", "adapter.conv.weight", "adapter.linear.gate.weight", "v.post_ln.bias"])
def test_missing_tensors(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint")
    change_tensors(folder, lambda tensors: tensors.pop(published(name)))
    refused(folder, published(name).removeprefix("model."))


def test_models_without_pictures(tmp_path: Path) -> None:
    """Are of the same type."""
    folder = write(tmp_path / "checkpoint", vision_config=None)
    refused(folder, "there is no 'vision_config'; the model takes no pictures")
    folder = write(tmp_path / "other")
    more = {f"model.{ADAPTER}.more": ("F32", (2,), bytes(8))}
    change_tensors(folder, lambda tensors: tensors.update(more))
    refused(folder, "has no place in a projector of type adapter", UnsupportedError)


def test_the_text_model(tmp_path: Path) -> None:
    """Is what it is without an encoder; a note says that there is one."""
    files = []
    for whole in (False, True):
        checkpoint = seeded_checkpoints.write(TEXT, tmp_path / str(whole) / "checkpoint")
        if whole:
            amend(checkpoint, vision_config={"hidden_size": TOWER.d})

            def beside(tensors: Tensors) -> None:
                for key, value in state().items():
                    tensors[key] = "F32", value.shape, np.asarray(value, np.float32).tobytes()

            change_tensors(checkpoint, beside)
        path = tmp_path / str(whole) / "text.gguf"
        conversion = Conversion(checkpoint, ConvertOptions(outtype="f32", outfile=str(path)))
        assert any("--mmproj" in note for note in conversion.notes) == whole
        conversion.write()
        files.append(GGUFFile.open(str(path)))
    assert set(files[0].tensors) == set(files[1].tensors)
    for target, info in files[0].tensors.items():
        np.testing.assert_array_equal(files[0].data(info), files[1].data(files[1].tensors[target]), err_msg=target)
