"""Tiny checkpoints of encoders of pictures, made from a seed in the names that models are published with.

scripts/make_tower_golden.py records the rows that transformers makes of a random picture.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from tests.cpu.convert import checkpoints as made
from tests.cpu.convert import later_tower_checkpoints as later
from tests.cpu.convert import native_tower_checkpoints as native
from tests.cpu.convert import omni_checkpoints as omni
from tests.cpu.convert import square_tower_checkpoints as square
from tests.cpu.convert.deepseek4_checkpoints import bf16_values
from tests.cpu.convert.glm_asr_checkpoints import GLM_ASR
from tests.cpu.media.tower_parts import BOUNDS, BREAK, TowerCheckpoint

ADDED = ("position", "pos_emb", "embed_tokens")
"""Tables, whose numbers are not added up."""
HEARING_ALONE = (GLM_ASR,)
TOWERS = (*square.TOWERS, *native.TOWERS, *later.TOWERS, *omni.TOWERS)


def weights(tower: TowerCheckpoint) -> dict[str, np.ndarray]:
    """Tensors f32 by name, rounded to bf16."""
    random = np.random.RandomState(5)  # its numbers never change
    made_weights = {}
    for name, shape in tower.shapes().items():
        values = random.standard_normal(shape)
        if not shape:
            values = np.array(BOUNDS[name[-3:]])
        elif name.endswith("mm_soft_emb_norm.weight"):
            values *= 0.2  # one is added to it
        elif name.endswith((".bias", "in_proj_bias")):
            values *= 0.2
        elif len(shape) == 1 and "class" not in name:
            values = 1 + 0.2 * values
        elif name.endswith((".weight", "in_proj_weight")) and not any(part in name for part in ADDED):
            values *= 1.2 / math.sqrt(math.prod(shape[1:]))
        made_weights[name] = bf16_values(values).reshape(shape)
    return made_weights


def write(tower: TowerCheckpoint, folder: Path, **changes: Any) -> Path:
    """The checkpoint; changes: further values of config.json."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**tower.config, **changes}))
    (folder / "preprocessor_config.json").write_text(json.dumps({**tower.colours, **tower.processor}))
    named = {"added_tokens_decoder": {str(BREAK): {"content": "[IMG_BREAK]"}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    made.write_tensors(folder / "model.safetensors", {k: made.bf16(v) for k, v in weights(tower).items()})
    return folder
