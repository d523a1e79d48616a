"""`ikpy convert` of Mistral Small 4: keys, the model within one for images, FP8 experts in one tensor, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import Conversion
from ikpy.convert.words import e4m3_values
from ikpy.errors import IkpyError
from ikpy.gguf.reader import GGUFFile
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert import seeded_checkpoints as tiny
from tests.cpu.convert.checkpoints import convert
from tests.cpu.convert.seeded_checkpoints import MISTRAL4
from tests.cpu.convert.test_convert_deepseek4 import assert_same, values

ROPE = MISTRAL4.config["rope_parameters"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.write(MISTRAL4, tmp_path / "checkpoint")


def keys_of(file: GGUFFile) -> dict[str, Any]:
    return {name.removeprefix("mistral4."): value for name, value in file.metadata.items()}


def test_keys(folder: Path, tmp_path: Path) -> None:
    keys = keys_of(convert(folder, tmp_path))
    assert keys["attention.temperature_scale"] == pytest.approx(0.1)
    lengths = "attention.temperature_length", "rope.scaling.original_context_length"
    assert [keys[name] for name in lengths] == [tiny.STRETCHED] * 2
    assert keys["rope.scaling.yarn_log_multiplier"] == pytest.approx(0.1)
    assert (keys["expert_gating_func"], keys["expert_weights_norm"], keys["leading_dense_block_count"]) == (1, True, 1)


def test_temperature_without_yarn(folder: Path, tmp_path: Path) -> None:
    made.amend(folder, rope_parameters={**ROPE, "rope_type": "default", "type": "default"})
    keys = keys_of(convert(folder, tmp_path))
    assert "rope.scaling.type" not in keys
    assert keys["attention.temperature_length"] == tiny.STRETCHED


def test_within_a_model_for_images(folder: Path, tmp_path: Path) -> None:
    """As Mistral Small 4 is published: names of the language model, others are left out."""
    alone = convert(folder, tmp_path)
    (tmp_path / "other").mkdir()
    whole = tiny.write(MISTRAL4, tmp_path / "other" / "checkpoint")
    config = {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"]}
    (whole / "config.json").write_text(json.dumps({**config, "text_config": MISTRAL4.config, "vision_config": {}}))

    def rename(tensors: made.Tensors) -> None:
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)
        tensors["vision_tower.patch_conv.weight"] = made.bf16(np.ones((4, 4), np.float32))

    made.change_tensors(whole, rename)
    assert_same(convert(whole, tmp_path / "other"), alone)


def as_fp8(tensors: made.Tensors) -> dict[str, np.ndarray]:
    """Matrices in FP8 with one scale, those of experts with one for each, and scales of activations; the values."""
    rng, expected = np.random.default_rng(9), {}
    for name, (_, shape, _) in list(tensors.items()):
        if "norm" in name or ".layers." not in name or name.endswith("mlp.gate.weight"):
            continue
        codes = rng.integers(0, 64, shape).astype(np.uint8) | rng.choice([0, 128], shape).astype(np.uint8)
        scale = 2.0 ** rng.integers(-6, -2, (shape[0], 1, 1) if len(shape) == 3 else ()).astype(np.float32)
        tensors[name] = "F8_E4M3", shape, codes.tobytes()
        tensors[f"{name}_scale_inv"] = made.bf16(np.asarray(scale))
        one = made.bf16(np.ones((), np.float32))
        tensors[f"{name.removesuffix('.weight')}{'.' if name.endswith('.weight') else '_'}activation_scale"] = one
        expected[name] = e4m3_values()[codes] * scale
    return expected


def test_fp8(folder: Path, tmp_path: Path) -> None:
    expected: dict[str, np.ndarray] = {}
    made.change_tensors(folder, lambda tensors: expected.update(as_fp8(tensors)))
    file = convert(folder, tmp_path, outtype="f32")
    experts = expected["model.layers.1.mlp.experts.gate_up_proj"]
    for half, name in enumerate(("gate", "up")):
        found = values(file, f"blk.1.ffn_{name}_exps.weight")
        np.testing.assert_array_equal(found, np.split(experts, 2, axis=1)[half], name)
    for source, name in (("mlp.experts.down_proj", "ffn_down_exps"), ("self_attn.q_b_proj.weight", "attn_q_b")):
        np.testing.assert_array_equal(values(file, f"blk.1.{name}.weight"), expected[f"model.layers.1.{source}"], name)


@pytest.mark.parametrize(
    ("what", "config"),
    [
        ("YaRN with mscale 1.0 and mscale_all_dim 0.5", {"rope_parameters": {**ROPE, "mscale_all_dim": 0.5}}),
        ("rope_interleave false", {"rope_interleave": False}),
        ("'kv_lora_rank' is missing", {"kv_lora_rank": None}),
    ],
)
def test_what_no_file_can_say(what: str, config: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny.write(MISTRAL4, tmp_path / "checkpoint", **config)
    with pytest.raises(IkpyError, match=what):
        Conversion(folder)
