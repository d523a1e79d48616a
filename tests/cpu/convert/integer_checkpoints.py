"""Checkpoints of compressed-tensors for the tests of `ikpy convert`, written from the definition of the format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ikpy.convert.words import e4m3_values
from tests.cpu.convert import checkpoints as made

Entry = tuple[str, tuple[int, ...], bytes]


def config(format_name: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    """A quantization_config as published; weights: other values than those of INT4 in groups of 32."""
    args = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "actorder": None}
    group = {"targets": ["Linear"], "input_activations": None, "output_activations": None, "weights": args | weights}
    return {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*self_attn.*"],
        "kv_cache_scheme": None,
    }


def packed(integers: np.ndarray, bits: int, axis: int = 1) -> Entry:
    """Signed integers [rows, columns] as I32 words along an axis, one number after the other."""
    per_word, half = 32 // bits, 1 << bits - 1
    source = integers if axis else integers.T
    rows, n = source.shape
    words = np.zeros((rows, -(-n // per_word)), np.uint32)
    for i in range(n):
        words[:, i // per_word] |= (source[:, i].astype(np.int64) + half).astype(np.uint32) << (i % per_word * bits)
    words = np.ascontiguousarray(words if axis else words.T)
    return "I32", words.shape, words.tobytes()


def plain(values: np.ndarray) -> Entry:
    """An entry in the type of an array."""
    names = {"float32": "F32", "float16": "F16", "int8": "I8", "int32": "I32", "int64": "I64"}
    return names[values.dtype.name], values.shape, values.tobytes()


def random_bf16(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Scales that bf16 holds, float32, of the size that trained models have."""
    values = random.uniform(0.005, 0.05, shape).astype(np.float32)
    return (values.view(np.uint32) & 0xFFFF0000).view(np.float32)


def put(tensors: made.Tensors, name: str, integers: np.ndarray, scales: np.ndarray, bits: int = 4) -> np.ndarray:
    """Replace the matrix of a name by packed integers [rows, columns] with bf16 scales [rows, groups]; its values."""
    tensors.pop(name, None)
    tensors[f"{name}_packed"] = packed(integers, bits)
    tensors[f"{name}_scale"] = made.bf16(scales)
    tensors[f"{name}_shape"] = plain(np.array(integers.shape, np.int64))
    return integers * scales.repeat(integers.shape[1] // scales.shape[1], 1)


def kimi(tmp_path: Path, *, nested: bool = False) -> tuple[Path, Path]:
    """A tiny checkpoint of Kimi K2's kind with experts in INT4, and the same with their values in float32."""
    random = np.random.default_rng(3)
    (tmp_path / "floats").mkdir()
    folders = made.copy("deepseek-v3", tmp_path), made.copy("deepseek-v3", tmp_path / "floats")
    integers, floats = (_decoded(made.read_tensors(folder / "model.safetensors")) for folder in folders)
    for name, (_, shape, _) in list(integers.items()):
        if ".experts." in name:
            values = random.integers(-8, 8, shape), random_bf16(random, (shape[0], shape[1] // 32))
            floats[name] = plain(put(integers, name, *values).astype(np.float32))
    for folder, tensors in zip(folders, (integers, floats), strict=True):
        made.amend(folder, drop=("quantization_config",), model_type="kimi_k2")
        made.write_tensors(folder / "model.safetensors", tensors)
    made.amend(folders[0], quantization_config=config())
    if nested:
        _nest(folders[0])
    return folders


def _nest(folder: Path) -> None:
    """As Kimi K2.5 is published: the language model beside a vision tower."""
    inner = made.read_json(folder / "config.json")
    (folder / "config.json").unlink()
    made.amend(folder, model_type="kimi_k25", architectures=["KimiK25ForConditionalGeneration"], text_config=inner)

    def rename(tensors: made.Tensors) -> None:
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)
        tensors["mm_projector.proj.0.weight"] = tensors["vision_tower.patch_embed.proj.weight"] = made.bf16(
            np.ones((4, 4), np.float32)
        )

    made.change_tensors(folder, rename)


def _decoded(tensors: made.Tensors) -> made.Tensors:
    """FP8 matrices (one block each or several of 128 x 128) as float32."""
    out: made.Tensors = {}
    for name, (dtype, shape, data) in tensors.items():
        if dtype == "F8_E4M3":
            scale_type, scale_shape, scale_data = tensors[f"{name}_scale_inv"]
            assert scale_type == "F32"
            scales = np.frombuffer(scale_data, "<f4").reshape(scale_shape).repeat(128, 0).repeat(128, 1)
            values = e4m3_values()[np.frombuffer(data, np.uint8).reshape(shape)]
            out[name] = plain(values * scales[: shape[0], : shape[1]])
        elif not name.endswith("_scale_inv"):
            out[name] = dtype, shape, data
    return out
