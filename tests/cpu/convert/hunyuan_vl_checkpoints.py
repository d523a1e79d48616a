"""Checkpoints of HunyuanVL: its text part, made as those of seeded_checkpoints.py, and the encoder of the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.cpu.convert import checkpoints as made
from tests.cpu.convert.seeded_checkpoints import FF, HEADS, KV, D, Shapes, Tiny, V, gated
from tests.cpu.media.hunyuan_tower import TOWER, HunyuanTower

N_LAYER, HEAD = 2, 32
SECTIONS = [4, 4, 4, 4]
ROPE = {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}


def shapes() -> Shapes:
    """Names and shapes of all tensors of the text part, as published."""
    found: Shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    for il in range(N_LAYER):
        p = f"model.layers.{il}"
        found |= {f"{p}.{name}.weight": (D,) for name in ("input_layernorm", "post_attention_layernorm")}
        for name, heads in (("q", HEADS), ("k", KV), ("v", KV)):
            found[f"{p}.self_attn.{name}_proj.weight"] = (heads * HEAD, D)
        found |= {f"{p}.self_attn.{name}_layernorm.weight": (HEAD,) for name in ("query", "key")}
        found[f"{p}.self_attn.o_proj.weight"] = (D, HEADS * HEAD)
        found |= gated(f"{p}.mlp", FF, ("gate_proj", "up_proj", "down_proj"))
    return found


def config(**more: Any) -> dict[str, Any]:
    """config.json, values of the text part lying outside as in published files."""
    return {
        "architectures": ["HunYuanVLForConditionalGeneration"],
        "model_type": "hunyuan_vl",
        "attention_bias": False,
        "attention_head_dim": HEAD,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_id": 1,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "hidden_size": D,
        "intermediate_size": FF,
        "max_position_embeddings": 256,
        "mlp_bias": False,
        "num_attention_heads": HEADS,
        "num_experts": 1,
        "num_hidden_layers": N_LAYER,
        "num_key_value_heads": KV,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {**ROPE, "type": "xdrope", "xdrope_section": SECTIONS},
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_qk_norm": True,
        "vocab_size": V,
        "vision_config": vision_config(TOWER),
        **more,
    }


def vision_config(tower: HunyuanTower) -> dict[str, Any]:
    """As in published files."""
    return {
        "hidden_act": "gelu",
        "hidden_size": tower.d,
        "intermediate_size": tower.ff,
        "interpolate_mode": "bilinear",
        "cat_extra_token": 1,
        "max_image_size": tower.side * tower.patch,
        "num_attention_heads": tower.heads,
        "num_channels": 3,
        "num_hidden_layers": tower.layers,
        "out_hidden_size": tower.text,
        "patch_size": tower.patch,
        "rms_norm_eps": tower.eps,
        "spatial_merge_size": tower.merge,
        "temporal_patch_size": 1,
    }


CHECKPOINTS = (Tiny("hunyuan-vl", config(), shapes),)

LAYER = {
    "ln1": ("input_layernorm", "layer_norm1"),
    "ln2": ("post_attention_layernorm", "layer_norm2"),
    **{f"attn_{name}": (f"self_attn.{name}_proj",) * 2 for name in "qkv"},
    "attn_out": ("self_attn.o_proj",) * 2,
    "ffn_up": ("mlp.dense_h_to_4h", "mlp.fc1"),
    "ffn_down": ("mlp.dense_4h_to_h", "mlp.fc2"),
}
OTHERS = {
    "v.patch_embd": ("vit.embeddings.patch_embedding", "model.vision_tower.embeddings.patch_embedding"),
    "v.position_embd": ("vit.embeddings.position_embedding", "model.vision_tower.embeddings.position_embedding"),
    "mm.pre_norm": ("vit.perceive.before_rms", "model.vision_tower.patch_merger.before_rms"),
    "mm.0": ("vit.perceive.proj.0", "model.vision_tower.patch_merger.proj_conv"),
    "mm.2": ("vit.perceive.proj.2", "model.vision_tower.patch_merger.proj_out"),
    "mm.model.fc": ("vit.perceive.mlp", "model.vision_tower.patch_merger.mlp"),
    "mm.post_norm": ("vit.perceive.after_rms", "model.vision_tower.patch_merger.after_rms"),
}


def name_of(name: str, kind: int) -> str:
    """The name of a tensor in published files (0) and in those of transformers (1)."""
    if name in ("mm.image_begin", "mm.image_end", "v.image_newline"):
        root = ("vit.perceive", "model.vision_tower.patch_merger")[kind]
        return f"{root}.{name.partition('.')[2]}"
    head, _, end = name.rpartition(".")
    if head.startswith("v.blk."):
        il, part = head.removeprefix("v.blk.").split(".")
        return f"{('vit', 'model.vision_tower')[kind]}.layers.{il}.{LAYER[part][kind]}.{end}"
    return f"{OTHERS[head][kind]}.{end}"


def write(folder: Path, kind: int = 0, tower: HunyuanTower = TOWER) -> Path:
    """A checkpoint whose tensors are those of the tests' file, and one of the text part."""
    folder.mkdir(parents=True)
    values = {"vision_config": vision_config(tower), "hidden_size": tower.text}
    (folder / "config.json").write_text(json.dumps(config(**values)))
    area = (tower.patch * tower.merge) ** 2
    pixels = {"min_pixels": 12 * area, "max_pixels": 400 * area}
    colours = {"image_mean": list(tower.mean), "image_std": list(tower.std)}
    (folder / "preprocessor_config.json").write_text(json.dumps({**colours, **pixels}))
    found = {name_of(name, kind): values for name, values in tower.weights().items()}
    table = next(name for name in found if "position_embedding" in name)
    found[table] = np.concatenate([np.full_like(found[table][:1], 9), found[table]])
    root = name_of("mm.image_end", kind).removesuffix("end")
    found |= {f"{root}sep": np.ones(tower.text, np.float32), "model.norm.weight": np.ones(tower.text, np.float32)}
    tensors = {name: ("F32", values.shape, np.ascontiguousarray(values).tobytes()) for name, values in found.items()}
    made.write_tensors(folder / "model.safetensors", tensors)
    return folder
