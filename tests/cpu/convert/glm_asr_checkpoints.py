"""Tiny checkpoints of GLM-ASR in the names of transformers, and the same in those of its first repository."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.cpu.convert.checkpoints import Tensors, change_tensors, read_json
from tests.cpu.media.tower_parts import (
    FF,
    HEADS,
    LAYERS,
    TEXT,
    TEXT_CONFIG,
    N,
    Shapes,
    TowerCheckpoint,
    V,
    module,
    modules,
)

MEL, STACK, ENDS = 128, 4, {"<|begin_of_audio|>": 7, "<|end_of_audio|>": 11}
WIDE = STACK * N
LATER = {
    "input_layernorm": "self_attn_layer_norm",
    "post_attention_layernorm": "final_layer_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "mlp.fc1": "fc1",
    "mlp.fc2": "fc2",
}


def shapes() -> Shapes:
    """Encoder, projector and the token embedding."""
    found = modules("audio_tower.", {"conv1": (N, MEL, 3), "conv2": (N, N, 3), "norm": (N,)})
    for il in range(LAYERS):
        p = f"audio_tower.layers.{il}."
        norms = {"input_layernorm": (N,), "post_attention_layernorm": (N,)}
        found |= modules(p, {**norms, "mlp.fc1": (WIDE, N), "mlp.fc2": (N, WIDE)})
        found |= modules(p, {f"self_attn.{part}_proj": (N, N) for part in "qvo"})
        found |= module(f"{p}self_attn.k_proj", N, N, bias=False)
    found |= modules("multi_modal_projector.", {"linear_1": (2 * TEXT, WIDE), "linear_2": (TEXT, 2 * TEXT)})
    return found | {"language_model.model.embed_tokens.weight": (V, TEXT)}


GLM_ASR = TowerCheckpoint(
    "glm-asr",
    {
        "architectures": ["GlmAsrForConditionalGeneration"],
        "model_type": "glmasr",
        "projector_hidden_act": "gelu",
        "torch_dtype": "bfloat16",
        "audio_config": {
            "hidden_size": N,
            "intermediate_size": WIDE,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_mel_bins": MEL,
            "hidden_act": "gelu",
            "partial_rotary_factor": 0.5,
            "model_type": "glmasr_encoder",
        },
        "text_config": {**TEXT_CONFIG, "intermediate_size": FF, "model_type": "llama"},
    },
    shapes,
)


def name_tokens(folder: Path) -> Path:
    """Adds the special tokens around sounds."""
    added = [{"id": index, "content": text} for text, index in ENDS.items()]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    return folder


def in_first_names(folder: Path) -> Path:
    """Turns a checkpoint into one of the first repository: rotated elements are neighbours, unused positions lie
    beside what is used, two rows of their own stand for the ends of a sound."""
    config = read_json(folder / "config.json")
    audio = config.pop("audio_config")
    config["lm_config"] = config.pop("text_config")
    config |= {"merge_factor": STACK, "use_rope": True, "adapter_type": "mlp", "mlp_adapter_act": "gelu"}
    config["whisper_config"] = {
        "d_model": audio["hidden_size"],
        "encoder_layers": audio["num_hidden_layers"],
        "encoder_attention_heads": audio["num_attention_heads"],
        "encoder_ffn_dim": audio["intermediate_size"],
        "num_mel_bins": audio["num_mel_bins"],
        "activation_function": "gelu",
    }
    (folder / "config.json").write_text(json.dumps(config))

    def rename(tensors: Tensors) -> None:
        found: Tensors = {}
        for name, (kind, shape, data) in tensors.items():
            new = name.replace("audio_tower.norm.", "audio_encoder.layer_norm.")
            new = new.replace("audio_tower.", "audio_encoder.whisper.").removeprefix("language_model.")
            for i, old in ((0, "linear_1"), (2, "linear_2")):
                new = new.replace(f"multi_modal_projector.{old}", f"audio_encoder.adapting.{i}")
            for later, first in LATER.items():
                new = new.replace(f".{later}.", f".{first}.")
            turns = ".q_proj." in name or ".k_proj." in name
            rows = np.frombuffer(data, np.uint16).reshape(shape)
            found[new] = kind, shape, (neighbours(rows) if turns else rows).tobytes()
        embedding, row = found["model.embed_tokens.weight"][2], 2 * TEXT
        ends = b"".join(embedding[index * row : (index + 1) * row] for index in ENDS.values())
        found["audio_encoder.audio_bos_eos_token.weight"] = "BF16", (2, TEXT), ends
        found["audio_encoder.whisper.embed_positions.weight"] = "BF16", (1500, N), bytes(2 * 1500 * N)
        found["audio_encoder.proj.weight"] = "BF16", (3, 3), bytes(18)
        tensors.clear()
        tensors.update(found)

    change_tensors(folder, rename)
    return folder


def neighbours(rows: np.ndarray) -> np.ndarray:
    """Rows of q or k whose rotated elements, of the first half of each head, lie beside each other."""
    found, head = rows.copy(), len(rows) // HEADS
    for h in range(HEADS):
        for i in range(head // 4):
            found[h * head + 2 * i] = rows[h * head + i]
            found[h * head + 2 * i + 1] = rows[h * head + head // 4 + i]
    return found
