"""A checkpoint of DeepSeek-OCR 2 in published names: the encoder of the tests with heads of 64 elements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.cpu.convert import checkpoints as made
from tests.cpu.convert import deepseek_ocr_checkpoints as first
from tests.cpu.media.deepseek_ocr2_tower import PUBLISHED

TOWER = PUBLISHED
CAUSAL = "model.qwen2_model"
LAYER = {
    "ln1": "input_layernorm",
    "ln2": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def published(name: str) -> str:
    """The name in the checkpoint."""
    if name.startswith("v.resample_query_"):
        return f"{CAUSAL}.query_{name.removeprefix('v.resample_query_')}"
    if name.startswith("v.post_ln"):
        return name.replace("v.post_ln", f"{CAUSAL}.model.model.norm")
    if name.startswith("v.blk."):
        il, part, end = name.removeprefix("v.blk.").split(".")
        return f"{CAUSAL}.model.model.layers.{il}.{LAYER[part]}.{end}"
    return first.published(name)


def vision_config() -> dict[str, Any]:
    """As in published files."""
    t = TOWER
    sam = {"downsample_channels": [2 * t.neck, t.d], "global_attn_indexes": [2]}
    sam |= {"heads": t.sam_heads, "layers": t.sam_layers, "width": t.sam}
    widths = {"qwen2-0-5b": {"dim": t.d}, "sam_vit_b": sam}
    return {"image_size": 1024, "model_name": "deepencoderv2", "model_type": "vision", "width": widths}


def write(folder: Path) -> Path:
    """A checkpoint whose tensors are those of the tests' file."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["DeepseekOCR2ForCausalLM"],
        "model_type": "deepseek_vl_v2",
        "language_config": {"architectures": ["DeepseekV2ForCausalLM"], "hidden_size": TOWER.text},
        "global_view_pos": "head",
        "tile_tag": "2D",
        "projector_config": {"input_dim": TOWER.d, "n_embed": TOWER.text, "projector_type": "linear"},
        "vision_config": vision_config(),
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "processor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    found = {published(name): values for name, values in TOWER.weights().items()}
    found[f"{first.SAM}.pos_embed"] = found[f"{first.SAM}.pos_embed"][None]
    found["model.norm.weight"] = np.ones(TOWER.text, np.float32)
    tensors = {name: ("F32", values.shape, np.ascontiguousarray(values).tobytes()) for name, values in found.items()}
    made.write_tensors(folder / "model.safetensors", tensors)
    return folder
