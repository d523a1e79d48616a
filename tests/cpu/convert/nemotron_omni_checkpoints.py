"""A checkpoint of Nemotron 3 Nano Omni: encoders as those of the tests, in published names."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.cpu.convert import checkpoints as made
from tests.cpu.convert.conformer_checkpoints import filters
from tests.cpu.media.conformer_kinds import FAST_NAMES
from tests.cpu.media.conformer_weights import CHANNELS
from tests.cpu.media.sound_kinds import TOWERS as SOUNDS
from tests.cpu.media.tile_towers import TOWERS

State = dict[str, np.ndarray]
SOUND = SOUNDS["parakeet"]
PICTURES = replace(TOWERS["nemotron"], text=SOUND.text)
STORED = 6
"""Positions of a side in the checkpoint; pictures have fewer."""
GOLDEN = Path(__file__).parents[2] / "data" / "towers" / "nemotron_omni.npz"
GOLDEN_ROWS = (0, 1, -1)
RADIO = "vision_model.radio_model"
PATCHES = f"{RADIO}.model.patch_generator"
LAYER = {"ln1": "norm1", "ln2": "norm2", "attn_out": "attn.proj", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
OUTER = {f"mm.model.mlp.{i}": f"mlp1.{i}" for i in (0, 1, 3)}
BATCH_NORM = {"conv_norm_mean": "running_mean", "conv_norm_var": "running_var"}
PROJECTION = {"mm.a.norm_pre": "norm", "mm.a.mlp.1": "linear1", "mm.a.mlp.2": "linear2"}
HEARING = {"a.mel_filters": "fb", "a.window": "window"}


def positions() -> np.ndarray:
    """Those of the largest grid [1, STORED * STORED, D]."""
    return np.random.default_rng(8).normal(0, 0.5, (1, STORED**2, PICTURES.d)).astype(np.float32)


def picture_state() -> State:
    """The encoder of pictures, and what other programs read or models hear."""
    weights = PICTURES.weights()
    state = {
        f"{PATCHES}.pos_embed": positions(),
        f"{PATCHES}.cls_token.token": weights["v.class_embd"],
        f"{PATCHES}.embedder.weight": weights["v.patch_embd.weight"].reshape(PICTURES.d, -1),
        f"{PATCHES}.video_embedder.weight": np.ones((PICTURES.d, 6 * PICTURES.patch**2), np.float32),
        f"{RADIO}.input_conditioner.norm_mean": np.reshape(PICTURES.mean, (3, 1, 1)),
        f"{RADIO}.input_conditioner.norm_std": np.reshape(PICTURES.std, (3, 1, 1)),
        f"{RADIO}.summary_idxs": np.array([0, 1]),
    }
    for il in range(PICTURES.layers):
        for tail in ("weight", "bias"):
            parts = [weights[f"v.blk.{il}.attn_{part}.{tail}"] for part in "qkv"]
            state[f"{RADIO}.model.blocks.{il}.attn.qkv.{tail}"] = np.concatenate(parts)
    for full, value in weights.items():
        head, _, tail = full.rpartition(".")
        parts = full.split(".")
        if head in OUTER:
            state[f"{OUTER[head]}.{tail}"] = value
        elif full.startswith("v.blk") and parts[3] in LAYER:
            state[f"{RADIO}.model.blocks.{parts[2]}.{LAYER[parts[3]]}.{tail}"] = value
    return state


def sound_state() -> State:
    """The encoder of sound."""
    state: State = {}
    tower = "sound_encoder.encoder"
    for full, value in sound_weights().items():
        head, _, tail = full.rpartition(".")
        parts = full.split(".")
        if full in HEARING:
            module = f"{tower}.feature_extractor.featurizer.{HEARING[full]}"
            state[module] = value[None] if full == "a.mel_filters" else value
        elif head in PROJECTION:
            state[f"sound_projection.{PROJECTION[head]}.{tail}"] = value
        elif head in FAST_NAMES:
            state[f"{tower}.{FAST_NAMES[head]}.{tail}"] = value.reshape(-1) if tail == "bias" else value
        elif parts[3] in BATCH_NORM:
            state[f"{tower}.layers.{parts[2]}.conv.norm.{BATCH_NORM[parts[3]]}"] = value
        elif parts[3].startswith("pos_bias"):
            state[f"{tower}.layers.{parts[2]}.self_attn.bias_{parts[3][-1]}"] = value
        else:
            module = f"{tower}.layers.{parts[2]}.{FAST_NAMES[parts[3]]}"
            state[f"{module}.{tail}"] = filters(parts[3], tail, value)
    for il in range(SOUND.layers):
        state[f"{tower}.layers.{il}.conv.norm.num_batches_tracked"] = np.array(1)
    return state


def sound_weights() -> State:
    """Of the file of the tests, without what stands for an encoder of pictures."""
    return {name: value for name, value in SOUND.weights().items() if not name.startswith("mm.model")}


def config() -> dict[str, Any]:
    """config.json as published: sizes of the encoder of pictures are not in it."""
    return {
        "architectures": ["NemotronH_Nano_Omni_Reasoning_V3"],
        "model_type": "NemotronH_Nano_Omni_Reasoning_V3",
        "force_image_size": PICTURES.side,
        "downsample_ratio": 0.5,
        "ps_version": "v2",
        "projector_hidden_size": 40,
        "vit_hidden_size": PICTURES.d,
        "vision_config": {
            "args": {"model": "vit_huge_patch16_224"},
            "patch_size": PICTURES.patch,
            "num_attention_heads": PICTURES.heads,
            "version": "c-radio_v4-h",
        },
        "sound_config": {
            "model_type": "parakeet",
            "hidden_size": SOUND.d,
            "num_attention_heads": SOUND.heads,
            "num_hidden_layers": SOUND.layers,
            "intermediate_size": SOUND.ff,
            "conv_kernel_size": 9,
            "subsampling_factor": 8,
            "subsampling_conv_channels": CHANNELS,
            "subsampling_conv_kernel_size": 3,
            "subsampling_conv_stride": 2,
            "num_mel_bins": SOUND.mel,
            "projection_hidden_size": SOUND.ff,
            "convolution_bias": False,
            "projection_bias": False,
            "sampling_rate": 16000,
        },
        "llm_config": {"model_type": "nemotron_h", "hidden_size": SOUND.text},
    }


def write(folder: Path, **more: Any) -> Path:
    """The checkpoint; more: further values of config.json."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**config(), **more}))
    colours = {"norm_mean": list(PICTURES.mean), "norm_std": list(PICTURES.std)}
    (folder / "preprocessor_config.json").write_text(json.dumps(colours))
    state = picture_state() | sound_state()
    tensors = {
        name: ("F32", value.shape, np.ascontiguousarray(value, np.float32).tobytes()) for name, value in state.items()
    }
    made.write_tensors(folder / "model.safetensors", tensors)
    return folder
