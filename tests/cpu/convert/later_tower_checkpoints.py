"""Tiny checkpoints of encoders akin to those of Qwen VL, GLM-V and CLIP: EXAONE 4.5, GLM-5.3 Flash, MiniMax M3,
dots3 note, dots.ocr, Step 3.7 Flash, MiniCPM-V 4.6."""

from __future__ import annotations

from dataclasses import replace

from tests.cpu.convert.native_tower_checkpoints import QWEN, gated, qwen_shapes
from tests.cpu.media.tower_parts import (
    FF,
    HEADS,
    LAYERS,
    MERGED,
    PATCH,
    TEXT,
    TEXT_CONFIG,
    VISION,
    N,
    Shapes,
    TowerCheckpoint,
    config,
    module,
    modules,
    siglip,
    siglip_layer,
)


def exaone_shapes() -> Shapes:
    """One head of keys and of values."""
    shapes = qwen_shapes("model.visual.", gated("mlp.", N, FF), norm_bias=False)
    for il in range(LAYERS):
        shapes |= module(f"model.visual.blocks.{il}.attn.qkv", N + 2 * N // HEADS, N)
    shapes |= modules("model.visual.merger.", {"mlp.0": (MERGED, MERGED), "mlp.2": (TEXT, MERGED)})
    return shapes | module("model.visual.merger.ln_q", N, bias=False)


EXAONE45 = TowerCheckpoint(
    "exaone4.5",
    config(
        "Exaone4_5_",
        "exaone4_5",
        {"model_type": "exaone4_5_text", "sliding_window_pattern": 4},
        {
            **QWEN,
            "hidden_size": N,
            "out_hidden_size": TEXT,
            "intermediate_size": FF,
            "num_key_value_heads": 1,
            "window_size": 112,
            "fullatt_block_indexes": [1],
            "hidden_act": "silu",
            "model_type": "exaone4_5_vision",
        },
    ),
    exaone_shapes,
    (140, 168),
    {"size": {"shortest_edge": 3136, "longest_edge": 100352}},
)
GLM5_WIDTH = 72


def glm5_shapes() -> Shapes:
    """Norms of heads, biases, no positions."""
    p = "model.visual."
    shapes = qwen_shapes(p, gated("mlp.", N, FF), norm_bias=False)
    shapes |= {f"{p}patch_embed.proj.bias": (N,)} | module(f"{p}post_layernorm", N, bias=False)
    for il in range(LAYERS):
        heads = {f"attn.{name}_norm": (N // HEADS,) for name in "qk"}
        shapes |= modules(f"{p}blocks.{il}.", heads, bias=False)
    shapes |= module(f"{p}downsample", TEXT, N, 2, 2) | module(f"{p}merger.post_projection_norm", TEXT)
    return shapes | modules(f"{p}merger.", {"proj": (TEXT, TEXT), **gated("", TEXT, GLM5_WIDTH)}, bias=False)


GLM5 = TowerCheckpoint(
    "glm5.3",
    config(
        "Glm5Next",
        "glm5_next",
        {"model_type": "glm5_next_text"},
        {
            **QWEN,
            "hidden_size": N,
            "out_hidden_size": TEXT,
            "intermediate_size": FF,
            "projection_intermediate_size": GLM5_WIDTH,
            "image_size": 112,
            "hidden_act": "silu",
            "attention_bias": True,
            "rms_norm_eps": 1e-5,
            "swiglu_limit": 0.75,
            "model_type": "glm5_next_vision",
        },
    ),
    glm5_shapes,
    (84, 112),
    {"min_image_tokens": 16, "max_image_tokens": 8000},
)
MINIMAX_WIDTH = 72


def minimax_shapes() -> Shapes:
    """CLIP's names; two more matrices outside."""
    p = "vision_tower.vision_model."
    shapes: Shapes = {f"{p}embeddings.patch_embedding.weight": (N, 3, 2, PATCH, PATCH)}
    shapes |= module(f"{p}pre_layrnorm", N)
    for il in range(LAYERS):
        shapes |= siglip_layer(f"{p}encoder.layers.{il}.")
    shapes |= modules("multi_modal_projector.", {"linear_1": (MINIMAX_WIDTH, N), "linear_2": (TEXT, MINIMAX_WIDTH)})
    joined = {"linear_1": (MINIMAX_WIDTH, 4 * TEXT), "linear_2": (TEXT, MINIMAX_WIDTH)}
    return shapes | modules("patch_merge_mlp.", joined)


MINIMAX_M3 = TowerCheckpoint(
    "minimax-m3",
    config(
        "MiniMaxM3Sparse",
        "minimax_m3_vl",
        {"model_type": "minimax_m3_vl_text", "num_local_experts": 2, "num_experts_per_tok": 1},
        {
            **VISION,
            "image_size": 112,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "model_type": "minimax_m3_vl_vision",
        },
        projector_hidden_size=MINIMAX_WIDTH,
    ),
    minimax_shapes,
    (84, 112),
)
N_EXPERT, WIDTH, SPARSE = 4, 40, 1
"""Experts of the layer that has some."""


def dots3_shapes() -> Shapes:
    """A layer has experts."""
    p = "vision_encoder."
    shapes = module(f"{p}patch_embed.proj", N, 3, PATCH, PATCH) | module(f"{p}patch_embed.norm", N, bias=False)
    for il in range(LAYERS):
        b = f"{p}blocks.{il}."
        parts = {"norm_1": (N,), "norm_2": (N,), "attn.qkv": (3 * N, N), "attn.proj": (N, N)}
        shapes |= modules(b, {**parts, **{f"attn.{name}_norm": (N // HEADS,) for name in "qk"}}, bias=False)
        if il != SPARSE:
            shapes |= modules(f"{b}mlp.", {"fc1": (FF, N), "fc2": (N, FF), "fc3": (FF, N)}, bias=False)
            continue
        shapes |= {f"{b}mlp.gate_weight": (N_EXPERT, N), f"{b}mlp.router_bias": (N_EXPERT,)}
        for e in range(N_EXPERT):
            expert = {"fc1": (WIDTH, N), "fc2": (N, WIDTH), "fc3": (WIDTH, N)}
            shapes |= modules(f"{b}mlp.experts.{e}.", expert, bias=False)
    shapes |= module(f"{p}post_trunk_norm", N, bias=False) | module(f"{p}adapter.ln_q", N)
    return shapes | modules(f"{p}adapter.", {"mlp.0": (MERGED, MERGED), "mlp.2": (TEXT, MERGED)})


DOTS3 = TowerCheckpoint(
    "dots3-note",
    config(
        "Dots3Note",
        "dots3_note",
        {"model_type": "dots3_note_text"},
        {
            "embed_dim": N,
            "num_heads": HEADS,
            "intermediate_size": FF,
            "moe_intermediate_size": WIDTH,
            "num_hidden_layers": LAYERS,
            "patch_size": PATCH,
            "pyramid_num_routed": [N_EXPERT if il == SPARSE else -1 for il in range(LAYERS)],
            "capacity_factor": 2,
            "adapter_in_dim": N,
            "adapter_out_dim": TEXT,
            "adapter_merge_size": 2,
            "spatial_merge_size": 2,
            "use_bias": False,
        },
        audio_config={"adapter_out_dim": TEXT},
    ),
    dots3_shapes,
    (84, 112),
    {"min_pixels": 3136, "max_pixels": 11289600},
)


def dots_ocr_shapes() -> Shapes:
    """No biases in layers."""
    p = "vision_tower."
    names = {"proj": (N, 3, PATCH, PATCH)}
    shapes = modules(f"{p}patch_embed.patchifier.", names) | module(f"{p}patch_embed.patchifier.norm", N, bias=False)
    for il in range(LAYERS):
        parts = {"norm1": (N,), "norm2": (N,), "attn.qkv": (3 * N, N), "attn.proj": (N, N)}
        parts |= {"mlp.fc1": (FF, N), "mlp.fc2": (N, FF), "mlp.fc3": (FF, N)}
        shapes |= modules(f"{p}blocks.{il}.", parts, bias=False)
    shapes |= module(f"{p}post_trunk_norm", N, bias=False) | module(f"{p}merger.ln_q", N)
    return shapes | modules(f"{p}merger.", {"mlp.0": (MERGED, MERGED), "mlp.2": (TEXT, MERGED)})


DOTS_OCR = TowerCheckpoint(
    "dots-ocr",
    {
        **TEXT_CONFIG,
        "architectures": ["DotsOCRForCausalLM"],
        "model_type": "dots_ocr",
        "vision_config": {
            "model_type": "dots_vit",
            "embed_dim": N,
            "hidden_size": TEXT,
            "intermediate_size": FF,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_channels": 3,
            "patch_size": PATCH,
            "post_norm": True,
            "rms_norm_eps": 1e-5,
            "spatial_merge_size": 2,
            "temporal_patch_size": 1,
            "use_bias": False,
            "is_causal": False,
        },
        "torch_dtype": "bfloat16",
    },
    dots_ocr_shapes,
    (84, 112),
    {"min_pixels": 3136, "max_pixels": 11289600},
)


def step3_shapes() -> Shapes:
    """Scaled branches; q, k and v together; two convolutions."""
    p = "vision_model."
    shapes = module(f"{p}conv1", N, 3, PATCH, PATCH, bias=False) | {f"{p}positional_embedding": (64, N)}
    shapes |= module(f"{p}ln_pre", N)
    for il in range(LAYERS):
        b = f"{p}transformer.resblocks.{il}."
        shapes |= {f"{b}attn.in_proj_weight": (3 * N, N), f"{b}attn.in_proj_bias": (3 * N,)}
        parts = {"attn.out_proj": (N, N), "ln_1": (N,), "ln_2": (N,), "mlp.c_fc": (FF, N), "mlp.c_proj": (N, FF)}
        shapes |= modules(b, parts) | {f"{b}ls_{i}.gamma": (N,) for i in (1, 2)}
    shapes |= modules(p, {"vit_downsampler1": (2 * N, N, 3, 3), "vit_downsampler2": (MERGED, 2 * N, 3, 3)})
    return shapes | module("vit_large_projector", TEXT, MERGED, bias=False)


STEP3 = TowerCheckpoint(
    "step3p7",
    config(
        "Step3p7",
        "step3p7",
        {"model_type": "step3p5", "num_attention_groups": 2},
        {
            "width": N,
            "layers": LAYERS,
            "heads": HEADS,
            "image_size": 112,
            "patch_size": PATCH,
            "mlp_ratio": FF / N,
            "model_type": "step3p5_vision",
        },
        understand_projector_stride=2,
        image_token_id=5,
    ),
    step3_shapes,
    (112, 112),
)


def minicpmv_shapes() -> Shapes:
    """SigLIP with 70 x 70 positions and what makes one of squares."""
    p = "model.vision_tower."
    shapes = siglip(p) | {f"{p}embeddings.position_embedding.weight": (4900, N)}
    parts: Shapes = {f"self_attn.{name}_proj": (N, N) for name in ("q", "k", "v", "out")}
    parts |= {"layer_norm1": (N,), "pre_norm": (MERGED,), "linear_1": (4 * FF, MERGED), "linear_2": (N, 4 * FF)}
    shapes |= modules(f"{p}vit_merger.", parts)
    parts = {"pre_norm": (MERGED,), "linear_1": (MERGED, MERGED), "linear_2": (TEXT, MERGED)}
    return shapes | modules("model.merger.mlp.0.", parts)


MINICPMV46 = TowerCheckpoint(
    "minicpmv4_6",
    config(
        "MiniCPMV4_6",
        "minicpmv4_6",
        {"model_type": "qwen3_5_text", "layer_types": ["full_attention"]},
        {**VISION, "model_type": "minicpmv4_6_vision", "image_size": 980},
        image_size=56,
        insert_layer_id=1,
        image_token_id=5,
    ),
    minicpmv_shapes,
    (56, 112),
    {"scale_resolution": 56, "max_slice_nums": 9, "patch_size": PATCH},
)
# Four times as many tokens.
MINICPMV46_LARGE = replace(MINICPMV46, name="minicpmv4_6-4x", config={**MINICPMV46.config, "downsample_mode": "4x"})
TOWERS = (EXAONE45, GLM5, MINIMAX_M3, DOTS3, DOTS_OCR, STEP3, MINICPMV46, MINICPMV46_LARGE)
