"""A checkpoint of Granite 4 Vision: an encoder as that of the tests with all corners, in published names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.cpu.convert import checkpoints as made
from tests.cpu.media.granite4_tower import QUERY, SIDE, SIZES, WINDOW, GraniteTower

TOWER = GraniteTower(blocks=((2, 0), (0, -1), (2, 1), (2, 2), (1, -1), (2, 3)))
MAPPING = [-1, -1, 1, 2, -1, 3, 4, 5]
"""Parts of rows by layers of the text model."""
MODULES = (
    "spatial_projectors.0",
    "layerwise_projectors.1",
    "spatial_projectors.1",
    "spatial_projectors.2",
    "layerwise_projectors.0",
    "spatial_projectors.3",
)
LAYER = {
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    "attn_out": "self_attn.out_proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
QFORMER = "qformer.encoder.layer.0"
ATTENTION = {"q": "attention.query", "k": "attention.key", "v": "attention.value", "out": "output.dense"}
BLOCK = {
    "norm": "norm",
    "post_norm": "qformer.layernorm",
    "linear": "out_linear",
    "ffn_up": f"{QFORMER}.intermediate_query.dense",
    "ffn_down": f"{QFORMER}.output_query.dense",
    "ffn_norm": f"{QFORMER}.output_query.LayerNorm",
    "self_attn_norm": f"{QFORMER}.attention.output.LayerNorm",
    "cross_attn_norm": f"{QFORMER}.crossattention.output.LayerNorm",
    **{f"self_attn_{old}": f"{QFORMER}.attention.{new}" for old, new in ATTENTION.items()},
    **{f"cross_attn_{old}": f"{QFORMER}.crossattention.{new}" for old, new in ATTENTION.items()},
}
OTHERS = {"v.patch_embd": "embeddings.patch_embedding", "v.position_embd": "embeddings.position_embedding"}
OTHERS |= {"v.post_ln": "post_layernorm"}


def published(name: str, root: str = "model.vision_tower.vision_model") -> str:
    """The name in the checkpoint."""
    if name == "v.image_newline":
        return "model.image_newline"
    if name.startswith("v.proj_blk."):
        i, part, *end = name.removeprefix("v.proj_blk.").split(".")
        inner = {"query": "query", "img_pos": "image_positions"}.get(part) or f"{BLOCK[part]}.{end[0]}"
        return f"model.{MODULES[int(i)]}.{inner}"
    head, _, end = name.rpartition(".")  # type: ignore[assignment]
    if head.startswith("v.blk."):
        il, part = head.removeprefix("v.blk.").split(".")
        return f"{root}.encoder.layers.{il}.{LAYER[part]}.{end}"
    return f"{root}.{OTHERS[head]}.{end}"


def config() -> dict[str, Any]:
    """As in published files."""
    t = TOWER
    vision = {"model_type": "siglip_vision_model", "hidden_size": t.d, "intermediate_size": t.ff}
    vision |= {"num_hidden_layers": t.layers, "num_attention_heads": t.heads, "image_size": SIDE * t.patch}
    vision |= {"patch_size": t.patch, "layer_norm_eps": t.eps, "hidden_act": "gelu_pytorch_tanh"}
    text = {"model_type": "granite", "hidden_size": t.text, "num_hidden_layers": len(MAPPING)}
    return {
        "architectures": ["Granite4VisionForConditionalGeneration"],
        "model_type": "granite4_vision",
        "text_config": text,
        "vision_config": vision,
        "qformer_config": {"model_type": "blip_2_qformer", "intermediate_size": 40, "num_hidden_layers": 1},
        "downsample_rate": f"{QUERY}/{WINDOW}",
        "deepstack_layer_map": [[-2, 6], [-3, 2]],
        "spatial_target_layers": [0, 3, 5, 7],
        "spatial_vision_layer": -1,
        "image_grid_pinpoints": [list(size) for size in SIZES],
        "use_image_newline_parameter": True,
        "vision_feature_select_strategy": "full",
    }


def write(folder: Path, **more: Any) -> Path:
    """A checkpoint whose tensors are those of a file of the tests, and one of the text part."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**config(), **more}))
    colours = {"image_mean": list(TOWER.mean), "image_std": list(TOWER.std)}
    (folder / "preprocessor_config.json").write_text(json.dumps(colours))
    found = {published(name): values for name, values in TOWER.weights().items()}
    found |= {name: v[None] for name, v in found.items() if name.endswith((".query", ".image_positions"))}
    found["model.language_model.norm.weight"] = np.ones(TOWER.text, np.float32)
    tensors = {name: ("F32", values.shape, np.ascontiguousarray(values).tobytes()) for name, values in found.items()}
    made.write_tensors(folder / "model.safetensors", tensors)
    return folder
