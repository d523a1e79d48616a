"""Checkpoints of the conformers of the tests, in the names that they are published with."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.cpu.convert import checkpoints as made
from tests.cpu.convert import gemma3n_tower_checkpoint as pictures
from tests.cpu.convert import later_tower_checkpoints
from tests.cpu.convert.checkpoints import amend, change_tensors
from tests.cpu.convert.later_tower_checkpoints import TEXT
from tests.cpu.convert.tower_checkpoints import write as write_tower
from tests.cpu.media.conformer_kinds import GEMMA3N, GEMMA3N_LAYER, GRANITE_NAMES, GRANITE_WINDOW_NAMES
from tests.cpu.media.conformer_weights import CHARACTERS, OUTPUT_CODES, WINDOW_LAYERS
from tests.cpu.media.sound_kinds import TOWERS

State = dict[str, np.ndarray]
NEUTRAL = {"running_mean": 0.0, "running_var": 1 - 1e-5}
"""Statistics of norms over batches that change nothing."""
DOTS3NOTE = dataclasses.replace(TOWERS["dots3note_a"], text=TEXT)
GEMMA = dataclasses.replace(TOWERS["gemma3na"], text=pictures.TOWER.text)
LFM2_LAYER = {
    "ffn_norm": "norm_feed_forward1",
    "ffn_up": "feed_forward1.linear1",
    "ffn_down": "feed_forward1.linear2",
    "ffn_norm_1": "norm_feed_forward2",
    "ffn_up_1": "feed_forward2.linear1",
    "ffn_down_1": "feed_forward2.linear2",
    "ln1": "norm_self_att",
    **{f"attn_{part}": f"self_attn.linear_{part}" for part in ("q", "k", "v", "out")},
    "linear_pos": "self_attn.linear_pos",
    "norm_conv": "norm_conv",
    "conv_pw1": "conv.pointwise_conv1",
    "conv_dw": "conv.depthwise_conv",
    "conv_norm": "conv.batch_norm",
    "conv_pw2": "conv.pointwise_conv2",
    "ln2": "norm_out",
}


def batch_norms(layers: int, prefix: str, n: int) -> State:
    """Statistics of the norms of all layers."""
    found: State = {}
    for il in range(layers):
        for part, value in NEUTRAL.items():
            found[f"{prefix}.{il}.conv.batch_norm.{part}"] = np.full(n, value, np.float32)
        found[f"{prefix}.{il}.conv.batch_norm.num_batches_tracked"] = np.array(1, np.float32)
    return found


def filters(part: str, tail: str, value: np.ndarray) -> np.ndarray:
    """Filters as modules store them."""
    if tail != "weight":
        return value
    return value[:, None] if part == "conv_dw" else value[..., None] if part in ("conv_pw1", "conv_pw2") else value


def granite(name: str) -> tuple[dict[str, Any], State]:
    """config.json and tensors of Granite Speech."""
    tower = TOWERS[name]
    weights, further, state = tower.weights(), tower.further, batch_norms(tower.layers, "encoder.layers", 2 * tower.d)
    for il in range(tower.layers):
        parts = [weights.pop(f"a.blk.{il}.attn_{part}.weight") for part in "kv"]
        state[f"encoder.layers.{il}.attn.to_kv.weight"] = np.concatenate(parts)
    for full, value in weights.items():
        head, _, tail = full.rpartition(".")
        parts = full.split(".")
        if full.startswith("a.blk"):
            tail = tail if len(parts) == 5 else "weight"
            module = f"encoder.layers.{parts[2]}.{GRANITE_NAMES[parts[3]]}"
            state[f"{module}.{tail}"] = filters(parts[3], tail, value)
        elif full.startswith("a.proj_blk"):
            module = f"projector.qformer.encoder.layer.{parts[2]}.{GRANITE_WINDOW_NAMES[parts[3]]}"
            state[f"{module}.{tail}"] = value
        elif head in GRANITE_NAMES:
            state[f"encoder.{GRANITE_NAMES[head]}.{tail}"] = value
        else:
            state["projector.query" if head == "a" else f"projector.{GRANITE_WINDOW_NAMES[head]}.{tail}"] = value
    kept = further.get("feature_layer")
    encoder = {"input_dim": tower.mel, "num_layers": tower.layers, "hidden_dim": tower.d, "num_heads": tower.heads}
    encoder |= {"feedforward_mult": tower.ff // tower.d, "output_dim": CHARACTERS, "dim_head": tower.d // tower.heads}
    encoder |= {"context_size": further["chunk_size"], "conv_expansion_factor": 2, "dropout": 0.1}
    encoder |= {key: further[key] for key in ("max_pos_emb", "conv_kernel_size")}
    windows = {"model_type": "blip_2_qformer", "hidden_size": tower.d, "num_hidden_layers": WINDOW_LAYERS}
    windows |= {"num_attention_heads": further["projector.head_count"], "intermediate_size": tower.ff}
    windows |= {"cross_attention_frequency": 1, "encoder_hidden_size": tower.d * (1 + len(kept or ()))}
    config = {
        "model_type": name,
        "encoder_config": encoder | ({"cat_hidden_layers": kept} if kept else {}),
        "projector_config": windows,
        "text_config": {"model_type": "granite", "hidden_size": tower.text},
        "window_size": further["projector.window_size"],
        "downsample_rate": further["projector.downsample_rate"],
        "has_lora_adapter": True,
    }
    return config, state


def lfm2(name: str) -> tuple[dict[str, Any], State]:
    """config.json, which names no type, and tensors of LFM2-Audio."""
    tower = TOWERS[name]
    outer = {"a.pre_encode.out": "conformer.pre_encode.out", "a.position_embd": "audio_embedding.embedding"}
    outer |= {f"a.conv1d.{i}": f"conformer.pre_encode.conv.{i}" for i in (0, 2, 3, 5, 6)}
    outer |= {f"mm.a.mlp.{i}": f"audio_adapter.model.{i}" for i in (0, 1, 3)}
    state = batch_norms(tower.layers, "conformer.layers", tower.d)
    for full, value in tower.weights().items():
        head, _, tail = full.rpartition(".")
        parts = full.split(".")
        if head in outer:
            is_bias = full.startswith("a.conv1d") and tail == "bias"
            state[f"{outer[head]}.{tail}"] = value.reshape(-1) if is_bias else value
        elif parts[3].startswith("pos_bias"):
            state[f"conformer.layers.{parts[2]}.self_attn.{parts[3]}"] = value
        else:
            module = f"conformer.layers.{parts[2]}.{LFM2_LAYER[parts[3]]}"
            state[f"{module}.{tail}"] = filters(parts[3], tail, value)
    encoder = {"feat_in": tower.mel, "feat_out": -1, "n_layers": tower.layers, "d_model": tower.d}
    encoder |= {"subsampling": "dw_striding", "subsampling_factor": 8, "subsampling_conv_channels": 6}
    encoder |= {"ff_expansion_factor": 1, "self_attention_model": "rel_pos", "n_heads": tower.heads}
    encoder |= {"att_context_size": [-1, -1], "xscaling": False, "untie_biases": True, "conv_kernel_size": 9}
    heard = {"sample_rate": 16000, "normalize": "per_feature", "window_size": 0.025, "window_stride": 0.01}
    heard |= {"window": "hann", "features": tower.mel, "n_fft": 512, "log": True, "frame_splicing": 1}
    config = {
        "architectures": ["Lfm2AudioForConditionalGeneration"],
        "codebooks": 8,
        "encoder": encoder | {"causal_downsampling": False, "conv_norm_type": "batch_norm"},
        "preprocessor": heard | {"dither": 1e-5, "pad_to": 0, "pad_value": 0.0},
        "lfm": {"hidden_size": tower.text},
        "depthformer": {"layers": 6, "dim": 1024, "tie": True},
    }
    state["depth_linear.weight"] = np.ones((4, tower.text), np.float32)
    assert len(state["audio_embedding.embedding.weight"]) == OUTPUT_CODES
    return config, state


CHECKPOINTS = {"granite_speech": granite, "granite_speech_plus": granite, "lfm2a": lfm2}


def write(folder: Path, name: str) -> Path:
    """A checkpoint of a tower of the tests."""
    if name in BOTH:
        return BOTH[name](folder)
    config, state = CHECKPOINTS[name](name)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        key: ("F32", value.shape, np.ascontiguousarray(value, np.float32).tobytes()) for key, value in state.items()
    }
    made.write_tensors(folder / "model.safetensors", tensors)
    return folder


def gemma3n(folder: Path) -> Path:
    """A checkpoint of Gemma 3n with both encoders."""
    pictures.write(folder)
    tower, state = GEMMA, {}
    for full, value in tower.weights().items():
        head, _, tail = full.rpartition(".")
        parts = full.split(".")
        if full.startswith("mm.a"):
            names = {"hard_emb_norm": "hard_embedding_norm", "soft_emb_norm": "soft_embedding_norm"}
            module = (names | {"input_projection": "embedding_projection"}).get(parts[2], parts[2])
            state[f"model.embed_audio.{module}.weight"] = value
        elif head in GEMMA3N:
            state[f"model.audio_tower.{GEMMA3N[head]}.{tail}"] = value
        elif parts[3] == "per_dim_scale":
            state[f"model.audio_tower.conformer.{parts[2]}.attention.attn.per_dim_scale"] = value
        else:
            state[f"model.audio_tower.conformer.{parts[2]}.{GEMMA3N_LAYER[parts[3]]}.{tail}"] = value
    tensors = {key: ("F32", value.shape, np.ascontiguousarray(value).tobytes()) for key, value in state.items()}
    audio = {"model_type": "gemma3n_audio", "hidden_size": tower.d, "input_feat_size": tower.mel}
    audio |= {"conf_num_attention_heads": tower.heads, "conf_num_hidden_layers": tower.layers}
    audio |= {"sscp_conv_channel_size": [6, 4], "vocab_size": 3, "gradient_clipping": 1e10}
    amend(folder, audio_config=audio)

    def add(found: made.Tensors) -> None:
        found.pop("model.audio_tower.x.weight")
        found.update(tensors)

    change_tensors(folder, add)
    return folder


def dots3note(folder: Path) -> Path:
    """A checkpoint of dots3 note with both encoders."""
    write_tower(later_tower_checkpoints.DOTS3, folder)
    tower, state = DOTS3NOTE, {}
    weights, whole = tower.weights(), "audio_encoder.dots_encoder.speech_encoder"
    for il in range(tower.layers):
        for tail in ("weight", "bias"):
            parts = [weights.pop(f"a.blk.{il}.ffn_{part}.{tail}") for part in ("gate", "up")]
            state[f"{whole}.layers.{il}.fc1.{tail}"] = np.concatenate(parts)
    outer = {f"a.conv2d.{i}": f"{whole}.conv2d{i}" for i in (1, 2, 3)}
    outer |= {"a.conv_out": f"{whole}.conv_out", "a.post_ln": f"{whole}.layer_norm"}
    adapter = {"mm.a.norm_pre": 0, "mm.a.mlp.1": 1, "mm.a.mlp.3": 3}
    outer |= {target: f"audio_encoder.audio_adapter.proj.{i}" for target, i in adapter.items()}
    layer = {"ln1": "self_attn_layer_norm", "ln2": "final_layer_norm", "ffn_down": "fc2"}
    layer |= {"attn_out": "self_attn.out_proj"} | {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"}
    for full, value in weights.items():
        head, _, tail = full.rpartition(".")
        parts = full.split(".")
        module = outer.get(head) or f"{whole}.layers.{parts[2]}.{layer[parts[3]]}"
        state[f"{module}.{tail}"] = value
    tensors = {key: ("F32", value.shape, np.ascontiguousarray(value).tobytes()) for key, value in state.items()}
    sizes = {"d_model": tower.d, "encoder_ffn_dim": tower.ff, "encoder_layers": tower.layers}
    sizes |= {"encoder_attention_heads": tower.heads, "num_mel_bins": tower.mel}
    audio = {"whisper_config": sizes, "downsample_hidden_size": 6, "whisper_adapter_in_dim": tower.d}
    amend(folder, audio_config=audio | {"whisper_adapter_out_dim": tower.text})
    change_tensors(folder, lambda found: found.update(tensors))
    return folder


BOTH = {"gemma3na": gemma3n, "dots3note_a": dots3note}
"""Checkpoints with encoders of pictures and of sound."""
