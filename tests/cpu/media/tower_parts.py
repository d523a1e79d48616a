"""What tiny checkpoints of encoders of pictures are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.shared import DATA
from tests.sound_models import tone

Shapes = dict[str, tuple[int, ...]]
N, HEADS, FF, LAYERS, PATCH, TEXT, V = 64, 2, 96, 3, 14, 64, 48
"""Of all encoders; TEXT is the width of the text model, V its vocabulary."""
MERGED = 4 * N
BREAK = 9
"""[IMG_BREAK] of Pixtral."""
GOLDEN_ROWS = (0, 1, -1)
HEARING = ("glmasr", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
BOUNDS = {"min": -1.5, "max": 1.75}
"""Of inputs and outputs of matrices."""


@dataclass(frozen=True)
class TowerCheckpoint:
    """config.json, names and shapes, height and width of the picture; processor: preprocessor_config.json beside its
    colours; golden_of: another checkpoint with the same rows."""

    name: str
    config: dict[str, Any]
    shapes: Callable[[], Shapes]
    size: tuple[int, int] = (56, 56)
    processor: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 2e-5
    golden_of: str = ""

    @property
    def golden(self) -> Path:
        """Rows f32 [GOLDEN_ROWS, elements]."""
        return DATA / "towers" / f"{self.golden_of or self.name}.npz"

    def picture(self) -> np.ndarray:
        """uint8 [h, w, 3]."""
        return np.random.RandomState(3).randint(0, 256, (*self.size, 3)).astype(np.uint8)

    @property
    def hears(self) -> bool:
        """Whether rows of a sound are recorded."""
        return self.config["model_type"] in HEARING

    def sound(self) -> np.ndarray:
        """Samples f32 [n]: some seconds and a part of one."""
        return tone(10.33)

    @property
    def colours(self) -> dict[str, Any]:
        """Mean and divisor of each."""
        return {"image_mean": [0.5, 0.45, 0.4], "image_std": [0.25, 0.5, 0.3], "rescale_factor": 1 / 255}


def module(name: str, *shape: int, bias: bool = True) -> Shapes:
    """Weight and bias."""
    return {f"{name}.weight": shape} | ({f"{name}.bias": shape[:1]} if bias else {})


def modules(prefix: str, parts: dict[str, tuple[int, ...]], *, bias: bool = True) -> Shapes:
    """Several, by their names."""
    return {k: v for name, shape in parts.items() for k, v in module(f"{prefix}{name}", *shape, bias=bias).items()}


def siglip(
    prefix: str, *, head: bool = False, last: bool = True, patches: tuple[int, ...] = (N, 3, PATCH, PATCH)
) -> Shapes:
    """SigLIP under a prefix; head: also what is left out; last: the norm behind the layers."""
    shapes = module(f"{prefix}embeddings.patch_embedding", *patches)
    shapes |= {f"{prefix}embeddings.position_embedding.weight": (16, N)}
    for il in range(LAYERS):
        shapes |= siglip_layer(f"{prefix}encoder.layers.{il}.")
    shapes |= module(f"{prefix}post_layernorm", N) if last else {}
    if head:
        shapes |= {f"{prefix}head.probe": (1, 1, N), f"{prefix}head.attention.in_proj_weight": (3 * N, N)}
        shapes |= {f"{prefix}head.attention.in_proj_bias": (3 * N,)}
        parts = {"attention.out_proj": (N, N), "layernorm": (N,), "mlp.fc1": (FF, N), "mlp.fc2": (N, FF)}
        shapes |= modules(f"{prefix}head.", parts)
    return shapes


def siglip_layer(prefix: str) -> Shapes:
    """A layer."""
    attention = {f"self_attn.{name}": (N, N) for name in ("q_proj", "k_proj", "v_proj", "out_proj")}
    network = {"mlp.fc1": (FF, N), "mlp.fc2": (N, FF)}
    return modules(prefix, {"layer_norm1": (N,), "layer_norm2": (N,), **attention, **network})


VISION: dict[str, Any] = {
    "hidden_size": N,
    "intermediate_size": FF,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "image_size": 56,
    "patch_size": PATCH,
}
TEXT_CONFIG: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": TEXT,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}


def config(
    class_name: str, model_type: str, text: dict[str, Any], vision: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """config.json."""
    return {
        "architectures": [f"{class_name}ForConditionalGeneration"],
        "model_type": model_type,
        "text_config": {**TEXT_CONFIG, **text},
        "vision_config": vision,
        "torch_dtype": "bfloat16",
        **more,
    }
