"""A checkpoint of Gemma 3n in published names: the encoder of the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.cpu.convert import checkpoints as made
from tests.cpu.media.mobilenet_tower import MobileTower

TOWER = MobileTower()
TIMM = "model.vision_tower.timm_model"
EMBED = "model.embed_vision"
BEHIND = {
    "mm.soft_emb_norm.weight": f"{EMBED}.soft_embedding_norm.weight",
    "mm.input_projection.weight": f"{EMBED}.embedding_projection.weight",
}


def published(name: str) -> str:
    """The name in the checkpoint."""
    return BEHIND.get(name) or f"{TIMM}.{name.removeprefix('v.').replace('blk.', 'blocks.', 1)}"


def config() -> dict[str, Any]:
    """As in published files."""
    vision = {"architecture": "mobilenetv5_300m_enc", "do_pooling": False, "hidden_size": TOWER.fused}
    vision |= {"model_args": None, "model_type": "gemma3n_vision", "rms_norm_eps": 1e-6, "vocab_size": 128}
    return {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "model_type": "gemma3n",
        "text_config": {"model_type": "gemma3n_text", "hidden_size": TOWER.text},
        "vision_config": vision,
        "vision_soft_tokens_per_image": 256,
    }


def write(folder: Path) -> Path:
    """A checkpoint whose tensors are those of the tests' file."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config()))
    processor = {"do_normalize": False, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    processor |= {"size": {"height": TOWER.side, "width": TOWER.side}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    found = {published(name): values for name, values in TOWER.weights().items()}
    flat = ("conv.bias", "layer_scale.gamma")
    found |= {name: values.reshape(-1) for name, values in found.items() if name.endswith(flat)}
    found[f"{EMBED}.embedding.weight"] = np.ones((128, TOWER.fused), np.float32)
    found[f"{EMBED}.hard_embedding_norm.weight"] = np.ones(TOWER.fused, np.float32)
    found["model.language_model.norm.weight"] = np.ones(TOWER.text, np.float32)
    found["model.audio_tower.x.weight"] = np.ones((4, 4), np.float32)
    tensors = {name: ("F32", values.shape, np.ascontiguousarray(values).tobytes()) for name, values in found.items()}
    made.write_tensors(folder / "model.safetensors", tensors)
    return folder
