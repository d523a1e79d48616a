"""Checkpoints of DeepSeek-OCR in published names: one of the encoder of the tests, one of a text part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.cpu.convert import checkpoints as made
from tests.cpu.convert import seeded_checkpoints as tiny
from tests.cpu.convert.seeded_checkpoints import FF, FF_EXPERT, HEADS, N_EXPERT, OUTER, USED, D, Shapes, Tiny
from tests.cpu.media.deepseek_ocr_tower import OcrTower

TOWER = OcrTower()
SAM = "model.sam_model"
CLIP = "model.vision_model"
MODULES = {
    "v.sam.patch_embd": f"{SAM}.patch_embed.proj",
    **{f"v.sam.neck.{i}": f"{SAM}.neck.{i}" for i in range(4)},
    **{f"v.sam.net_{i}": f"{SAM}.net_{i}" for i in (2, 3)},
    "v.position_embd": f"{CLIP}.embeddings.position_embedding",
    "v.pre_ln": f"{CLIP}.pre_layrnorm",
    "mm.model.fc": "model.projector.layers",
}
BARE = {
    "v.class_embd": f"{CLIP}.embeddings.class_embedding",
    "v.image_newline": "model.image_newline",
    "v.view_seperator": "model.view_seperator",
}
LAYERS = {
    "v.sam.blk": (f"{SAM}.blocks", {"pre_ln": "norm1", "post_ln": "norm2", "attn.out": "attn.proj"}),
    "v.blk": (
        f"{CLIP}.transformer.layers",
        {
            "ln1": "layer_norm1",
            "ln2": "layer_norm2",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_out": "self_attn.out_proj",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
    ),
}


def published(name: str) -> str:
    """The name in the checkpoint."""
    module, _, end = name.rpartition(".")
    if name in BARE:
        return BARE[name]
    if module in MODULES:
        return f"{MODULES[module]}.{end}"
    if name == "v.sam.pos_embd.weight":
        return f"{SAM}.pos_embed"
    prefix, il, part = next(
        (key, *module.removeprefix(f"{key}.").split(".", 1)) for key in LAYERS if name.startswith(f"{key}.")
    )
    folder, parts = LAYERS[prefix]
    if part.startswith("attn.pos_"):
        return f"{folder}.{il}.attn.rel_pos_{part[-1]}"
    return f"{folder}.{il}.{parts.get(part, part)}.{end}"


def vision_config() -> dict[str, Any]:
    """As in published files."""
    t = TOWER
    clip = {"heads": t.heads, "image_size": 224, "layers": t.layers, "patch_size": 14, "width": t.d}
    sam = {"downsample_channels": [2 * t.neck, t.d], "global_attn_indexes": [2]}
    sam |= {"heads": t.sam_heads, "layers": t.sam_layers, "width": t.sam}
    return {"image_size": 1024, "model_type": "vision", "width": {"clip-l-14-224": clip, "sam_vit_b": sam}}


def write(folder: Path) -> Path:
    """A checkpoint whose tensors are those of the tests' file."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["DeepseekOCRForCausalLM"],
        "model_type": "deepseek_vl_v2",
        "language_config": {"architectures": ["DeepseekV2ForCausalLM"], "hidden_size": TOWER.text},
        "global_view_pos": "head",
        "tile_tag": "2D",
        "projector_config": {"input_dim": 2 * TOWER.d, "n_embed": TOWER.text, "projector_type": "linear"},
        "vision_config": vision_config(),
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "processor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    found = {published(name): values for name, values in TOWER.weights().items()}
    found[f"{SAM}.pos_embed"] = found[f"{SAM}.pos_embed"][None]
    found[f"{CLIP}.embeddings.patch_embedding.weight"] = np.ones((TOWER.d, 3, 14, 14), np.float32)
    found["model.norm.weight"] = np.ones(TOWER.text, np.float32)
    tensors = {name: ("F32", values.shape, np.ascontiguousarray(values).tobytes()) for name, values in found.items()}
    made.write_tensors(folder / "model.safetensors", tensors)
    return folder


# The text part


def text_shapes() -> Shapes:
    """A dense layer, and one of experts."""
    found = dict(OUTER)
    for il in range(2):
        p = f"model.layers.{il}"
        found |= {f"{p}.self_attn.{name}_proj.weight": (D, D) for name in "qkvo"}
        found |= {f"{p}.{name}_layernorm.weight": (D,) for name in ("input", "post_attention")}
        networks = {"mlp": FF}
        if il:
            found[f"{p}.mlp.gate.weight"] = (N_EXPERT, D)
            networks = {f"mlp.experts.{e}": FF_EXPERT for e in range(N_EXPERT)}
            networks["mlp.shared_experts"] = 2 * FF_EXPERT
        for name, n in networks.items():
            found |= {f"{p}.{name}.{part}_proj.weight": (n, D) for part in ("gate", "up")}
            found[f"{p}.{name}.down_proj.weight"] = (D, n)
    return found


LANGUAGE = {
    **tiny.head("DeepseekV2", "deepseek_v2"),
    "first_k_dense_replace": 1,
    "intermediate_size": FF,
    "kv_lora_rank": None,
    "max_position_embeddings": 256,
    "moe_intermediate_size": FF_EXPERT,
    "n_group": 1,
    "n_routed_experts": N_EXPERT,
    "n_shared_experts": 2,
    "num_attention_heads": HEADS,
    "num_experts_per_tok": USED,
    "num_hidden_layers": 2,
    "num_key_value_heads": HEADS,
    "q_lora_rank": None,
    "qk_nope_head_dim": 0,
    "qk_rope_head_dim": 0,
    "topk_group": 1,
    "topk_method": "greedy",
    "use_mla": False,
    "v_head_dim": 0,
}
TEXT = Tiny("deepseek-ocr", LANGUAGE, text_shapes)
