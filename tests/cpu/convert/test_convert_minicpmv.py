"""`ikpy convert` of MiniCPM-V 2.5 to 4.5 and MiniCPM-o: files are those of the tests of encoders; the text part."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import ProjectorConversion
from ikpy.convert.checkpoint import Checkpoint
from ikpy.convert.config import Config
from ikpy.convert.families import family
from ikpy.convert.tensor_map import map_tensors
from ikpy.convert.weights import Weights
from ikpy.errors import FileFormatError, UnsupportedError
from ikpy.vision.projector import open_projector
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert.checkpoints import amend, read_json
from tests.cpu.convert.test_convert_projectors import converted, refused
from tests.cpu.media.reference_tiles import Reference, minicpmv
from tests.cpu.media.tile_towers import TOWERS, picture

TOWER = dataclasses.replace(TOWERS["minicpmv"], mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
LAYER = {
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in ("q", "k", "v", "out")},
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
NAMES = {
    "v.patch_embd": "vpm.embeddings.patch_embedding",
    "v.position_embd": "vpm.embeddings.position_embedding",
    "v.post_ln": "vpm.post_layernorm",
    "resampler.kv": "resampler.kv_proj",
    "resampler.attn.out": "resampler.attn.out_proj",
    **{f"resampler.ln_{part}": f"resampler.ln_{part}" for part in ("q", "kv", "post")},
}
VERSIONS = {
    ("minicpmv", None): (2, "llama"),
    ("minicpmv", 2.6): (3, "qwen2"),
    ("minicpmo", "2.6"): (4, "qwen2"),
    ("minicpmv", "4.0"): (5, "llama"),
    ("minicpmv", 4.5): (6, "qwen3"),
    ("minicpmo", "4.5"): (100045, "qwen3"),
}


def config_of(model_type: str = "minicpmv", version: float | str | None = 4.5) -> dict[str, Any]:
    """config.json, the values of the text part outside."""
    t = TOWER
    vision = {"hidden_size": t.d, "intermediate_size": t.ff, "num_hidden_layers": t.layers, "image_size": 70 * t.patch}
    config = {
        "architectures": ["MiniCPMV"],
        "model_type": model_type,
        "hidden_size": t.text,
        "query_num": 9,
        "vision_config": {**vision, "num_attention_heads": t.heads, "patch_size": t.patch},
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
    }
    return config if version is None else {**config, "version": version}


def write(folder: Path, **config: Any) -> Path:
    """A checkpoint whose tensors are those of the tests' file."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**config_of(), **config}))
    processor = {"norm_mean": [0.5] * 3, "norm_std": [0.5] * 3, "max_slice_nums": 9, "scale_resolution": TOWER.side}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    weights, found = TOWER.weights(), {}
    for end in ("weight", "bias"):
        parts = [weights.pop(f"resampler.attn.{part}.{end}") for part in "qkv"]
        found[f"resampler.attn.in_proj_{end}"] = np.concatenate(parts)
    found["resampler.proj"] = weights.pop("resampler.proj.weight").T
    found["resampler.query"] = weights.pop("resampler.query")
    weights.pop("resampler.pos_embed_k")
    for name, values in weights.items():
        head, _, tail = name.rpartition(".")
        if head in NAMES:
            found[f"{NAMES[head]}.{tail}"] = values
            continue
        _, _, il, part = head.split(".")
        found[f"vpm.encoder.layers.{il}.{LAYER[part]}.{tail}"] = values
    found["llm.model.norm.weight"] = np.ones(TOWER.text, np.float32)
    tensors = {name: ("F32", values.shape, np.ascontiguousarray(values).tobytes()) for name, values in found.items()}
    made.write_tensors(folder / "model.safetensors", tensors)
    return folder


def test_file_is_that_of_the_tests(tmp_path: Path) -> None:
    file = converted(write(tmp_path / "checkpoint"))
    weights = TOWER.weights()
    assert set(file.tensors) == set(weights)
    for name, values in weights.items():
        if name == "resampler.pos_embed_k":
            continue
        found = file.data(file.tensors[name]).view(np.float32).reshape(values.shape)
        np.testing.assert_array_equal(found, values, err_msg=name)
    for key, value in TOWER.keys.items():
        assert file.metadata[key] == pytest.approx(value), key


def test_places_of_keys(tmp_path: Path) -> None:
    """Waves of columns, then of rows, by their definition."""
    file = converted(write(tmp_path / "checkpoint"))
    found = file.data(file.tensors["resampler.pos_embed_k"]).view(np.float32).reshape(70, 70, TOWER.text)
    n = TOWER.text // 4
    for row, column in ((0, 0), (3, 69), (41, 7)):
        rates = [10000 ** (-i / n) for i in range(n)]
        wanted = [f(place * rate) for place in (column, row) for f in (np.sin, np.cos) for rate in rates]
        assert np.abs(found[row, column] - wanted).max() < 1e-6


@pytest.mark.parametrize("outtype", ["f32", "f16", "q8_0"])
def test_rows_are_their_definition(outtype: str, tmp_path: Path) -> None:
    image = picture(6 * TOWER.patch, 9 * TOWER.patch)
    file = converted(write(tmp_path / "checkpoint"), outtype)
    found = open_projector(file.path, n_embd=TOWER.text, n_threads=1, log=print).rows(image).values
    wanted = minicpmv(Reference(TOWER, TOWER.weights()), image)
    error = np.abs(found - wanted).max(axis=1) / np.abs(wanted).max()
    bound = {"f32": 1e-5, "f16": 5e-3, "q8_0": 5e-2}[outtype]
    assert error.max() < bound, f"row {error.argmax()} is off by {error.max():.1e}"


@pytest.mark.parametrize(("named", "wanted"), VERSIONS.items())
def test_versions(named: tuple[str, Any], wanted: tuple[int, str], tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint")
    (folder / "config.json").write_text(json.dumps(config_of(*named)))
    assert ProjectorConversion(folder).metadata["clip.minicpmv_version"] == wanted[0]
    config = Config(Checkpoint(folder).config, folder / "config.json")
    assert family(config).arch == wanted[1]


def test_text_in_a_part_of_its_own(tmp_path: Path) -> None:
    """Names of the language model begin with llm."""
    folder = write(tmp_path / "checkpoint")
    tensors = made.read_tensors(folder / "model.safetensors")
    tensors["llm.model.embed_tokens.weight"] = "F32", (4, TOWER.text), bytes(16 * TOWER.text)
    tensors["llm.lm_head.weight"] = tensors["llm.model.embed_tokens.weight"]
    tensors["llm.model.layers.0.input_layernorm.weight"] = tensors["llm.model.norm.weight"]
    made.write_tensors(folder / "model.safetensors", tensors)
    checkpoint = Checkpoint(folder)
    found = map_tensors(Weights(checkpoint), family(Config(checkpoint.config, folder / "config.json")))
    names = ["token_embd.weight", "blk.0.attn_norm.weight", "output.weight", "output_norm.weight"]
    assert [output.name for output in found.outputs] == names
    assert all(name.startswith(("vpm.", "resampler.")) for name in found.skipped_parts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_num": 0}, "query_num 0"),
        ({"hidden_size": 96}, "heads of 128 in 96"),
        ({"vision": {"image_size": 448}}, "64 x 64 positions"),
        ({"vision": {"layer_norm_eps": 1e-5}}, "layer_norm_eps 1e-05"),
        ({"drop_vision_last_layer": True}, r"'vpm.encoder.layers.2.* has no place"),
        ({"query_num": 8}, r"has shape \[9, 128\], not \[8, 128\]"),
    ],
)
def test_other_configurations(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint")
    vision = changes.pop("vision", {})
    amend(folder, **changes)
    amend(folder, vision_config=read_json(folder / "config.json")["vision_config"] | vision)
    refused(folder, message, UnsupportedError if "no place" in message else FileFormatError)


def test_unknown_versions(tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint", version="9.1")
    refused(folder, r"minicpmv of version 9.1 is not known \(known are minicpmv 2.5", UnsupportedError)
    amend(folder, version=True)
    refused(folder, "version True is not known", UnsupportedError)
    amend(folder, drop=("version",), hidden_size=2304)
    refused(folder, "minicpmv of version 2.0 is not known", UnsupportedError)
