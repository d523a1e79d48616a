"""Tiny checkpoints of Qwen2.5-Omni and Qwen3-Omni: the thinker as transformers saves it, and within the whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.cpu.convert.checkpoints import Tensors, change_tensors, read_json
from tests.cpu.convert.native_tower_checkpoints import QWEN, gated, qwen_shapes
from tests.cpu.convert.picture_text_checkpoints import NAMES, VISION, attention, model, outer, sections
from tests.cpu.convert.seeded_checkpoints import FF as TEXT_FF
from tests.cpu.convert.seeded_checkpoints import N_EXPERT, USED, D, Tiny
from tests.cpu.convert.seeded_checkpoints import gated as network
from tests.cpu.media.tower_parts import (
    FF,
    HEADS,
    LAYERS,
    MERGED,
    TEXT,
    N,
    Shapes,
    TowerCheckpoint,
    config,
    module,
    modules,
)

MEL, CHANNELS, N_TEXT_LAYER, WIDTH, DEEP = 128, 5, 2, 32, (0, 2)
SOUND: dict[str, Any] = {
    "d_model": N,
    "encoder_layers": LAYERS - 1,
    "encoder_attention_heads": HEADS,
    "encoder_ffn_dim": FF,
    "num_mel_bins": MEL,
    "max_source_positions": 1500,
    "output_dim": TEXT,
    "activation_function": "gelu",
}
_TEXT = {"rope_theta": 10000.0, "rope_scaling": sections(4, 6, 6)}


def sound_layers(*, key_bias: bool) -> Shapes:
    """Of both."""
    shapes: Shapes = module("audio_tower.ln_post", N)
    for il in range(SOUND["encoder_layers"]):
        p = f"audio_tower.layers.{il}."
        shapes |= modules(p, {"self_attn_layer_norm": (N,), "final_layer_norm": (N,), "fc1": (FF, N), "fc2": (N, FF)})
        shapes |= modules(p, {f"self_attn.{part}_proj": (N, N) for part in ("q", "v", "out")})
        shapes |= module(f"{p}self_attn.k_proj", N, N, bias=key_bias)
    return shapes


def qwen25_shapes() -> Shapes:
    """Queries, keys and values of pictures lie apart."""
    shapes = qwen_shapes("visual.", gated("mlp.", N, FF), norm_bias=False)
    shapes = {name: shape for name, shape in shapes.items() if ".attn.qkv." not in name}
    for il in range(LAYERS):
        shapes |= modules(f"visual.blocks.{il}.attn.", {part: (N, N) for part in "qkv"})
    shapes |= modules("visual.merger.", {"mlp.0": (MERGED, MERGED), "mlp.2": (TEXT, MERGED)})
    shapes |= module("visual.merger.ln_q", N, bias=False) | sound_layers(key_bias=False)
    shapes |= modules("audio_tower.", {"conv1": (N, MEL, 3), "conv2": (N, N, 3), "proj": (TEXT, N)})
    return shapes | {"audio_tower.audio_bos_eos_token.weight": (2, TEXT)}


def qwen3_shapes() -> Shapes:
    """Features of layers, too."""
    shapes = qwen_shapes("visual.", {"mlp.linear_fc1": (FF, N), "mlp.linear_fc2": (N, FF)}, norm_bias=True)
    shapes |= {"visual.patch_embed.proj.bias": (N,), "visual.pos_embed.weight": (64, N)}
    shapes |= module("visual.merger.ln_q", N)
    for name in ("merger", *(f"merger_list.{i}" for i in range(len(DEEP)))):
        shapes |= modules(f"visual.{name}.", {"mlp.0": (MERGED, MERGED), "mlp.2": (TEXT, MERGED)})
    for i in range(len(DEEP)):
        shapes |= module(f"visual.merger_list.{i}.ln_q", MERGED)
    shapes |= sound_layers(key_bias=True)
    for i, n_in in ((1, 1), (2, CHANNELS), (3, CHANNELS)):
        shapes |= module(f"audio_tower.conv2d{i}", CHANNELS, n_in, 3, 3)
    shapes |= module("audio_tower.conv_out", N, CHANNELS * MEL // 8, bias=False)
    return shapes | modules("audio_tower.", {"proj1": (N, N), "proj2": (TEXT, N)})


QWEN25_OMNI = TowerCheckpoint(
    "qwen2.5-omni",
    config(
        "Qwen2_5OmniThinker",
        "qwen2_5_omni_thinker",
        {"model_type": "qwen2_5_omni_text", **_TEXT},
        {
            **QWEN,
            "hidden_size": N,
            "out_hidden_size": TEXT,
            "intermediate_size": FF,
            "window_size": 112,
            "fullatt_block_indexes": [1],
            "hidden_act": "silu",
            "model_type": "qwen2_5_omni_vision_encoder",
        },
        audio_config={**SOUND, "n_window": 100, "model_type": "qwen2_5_omni_audio_encoder"},
    ),
    qwen25_shapes,
    (140, 168),
)
QWEN3_OMNI = TowerCheckpoint(
    "qwen3-omni",
    config(
        "Qwen3OmniMoeThinker",
        "qwen3_omni_moe_thinker",
        {"model_type": "qwen3_omni_moe_text", **_TEXT, "num_experts": 4, "num_experts_per_tok": 2},
        {
            **QWEN,
            "hidden_size": N,
            "out_hidden_size": TEXT,
            "intermediate_size": FF,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": list(DEEP),
            "hidden_act": "gelu_pytorch_tanh",
            "model_type": "qwen3_omni_moe_vision_encoder",
        },
        audio_config={
            **SOUND,
            "n_window": 50,
            "n_window_infer": 800,
            "downsample_hidden_size": CHANNELS,
            "model_type": "qwen3_omni_moe_audio_encoder",
        },
    ),
    qwen3_shapes,
    (84, 112),
)
TOWERS = (QWEN25_OMNI, QWEN3_OMNI)

# Text parts


def qwen25_text_shapes() -> Shapes:
    """As Qwen 2."""
    shapes = outer("model")
    for il in range(N_TEXT_LAYER):
        p = f"model.layers.{il}"
        shapes |= attention(p, bias=True) | network(f"{p}.mlp", TEXT_FF, NAMES)
    return shapes


def qwen3_text_shapes() -> Shapes:
    """As Qwen 3, every expert by itself."""
    shapes = outer("model")
    for il in range(N_TEXT_LAYER):
        p = f"model.layers.{il}"
        shapes |= attention(p, norms=True) | {f"{p}.mlp.gate.weight": (N_EXPERT, D)}
        for e in range(N_EXPERT):
            shapes |= network(f"{p}.mlp.experts.{e}", WIDTH, NAMES)
    return shapes


QWEN25_OMNI_TEXT = Tiny(
    "qwen2.5-omni-text",
    model(
        "Qwen2_5OmniThinker",
        "qwen2_5_omni_thinker",
        {
            "model_type": "qwen2_5_omni_text",
            "num_hidden_layers": N_TEXT_LAYER,
            "rope_scaling": sections(2, 3, 3),
            "use_sliding_window": False,
        },
        vision_config=VISION,
        audio_config={**SOUND, "output_dim": D},
    ),
    qwen25_text_shapes,
)
QWEN3_OMNI_TEXT = Tiny(
    "qwen3-omni-text",
    model(
        "Qwen3OmniMoeThinker",
        "qwen3_omni_moe_thinker",
        {
            "model_type": "qwen3_omni_moe_text",
            "num_hidden_layers": N_TEXT_LAYER,
            "rope_scaling": sections(4, 2, 2, mrope_interleaved=True, interleaved=True),
            "num_experts": N_EXPERT,
            "num_experts_per_tok": USED,
            "moe_intermediate_size": WIDTH,
        },
        vision_config={**VISION, "deepstack_visual_indexes": [0]},
        audio_config={**SOUND, "output_dim": D, "downsample_hidden_size": CHANNELS},
    ),
    qwen3_text_shapes,
)
CHECKPOINTS = (QWEN25_OMNI_TEXT, QWEN3_OMNI_TEXT)


def make_whole(folder: Path) -> Path:
    """Turns the thinker of a folder into the whole model as it is published, with what speaks beside it."""
    thinker = read_json(folder / "config.json")
    model_type = thinker["model_type"].removesuffix("_thinker")
    whole = {
        "architectures": [thinker["architectures"][0].replace("Thinker", "")],
        "model_type": model_type,
        "thinker_config": thinker,
        "talker_config": {"model_type": f"{model_type}_talker", "hidden_size": 7},
        "enable_audio_output": True,
    }
    (folder / "config.json").write_text(json.dumps(whole))
    speech: Tensors = {
        name: ("F32", (2,), bytes(8))
        for name in ("talker.model.layers.0.mlp.gate.weight", "token2wav.a.weight", "code2wav.pre.weight")
    }

    def rename(tensors: Tensors) -> None:
        found = {f"thinker.{name}": tensor for name, tensor in tensors.items()}
        tensors.clear()
        tensors.update(found | speech)

    change_tensors(folder, rename)
    return folder
