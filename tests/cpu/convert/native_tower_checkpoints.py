"""Tiny checkpoints of encoders of pictures of any size: Qwen VL, GLM-V, Pixtral, Kimi, LFM2-VL, Gemma 4."""

from __future__ import annotations

from tests.cpu.media.tower_parts import (
    BOUNDS,
    FF,
    HEADS,
    LAYERS,
    MERGED,
    PATCH,
    TEXT,
    VISION,
    N,
    Shapes,
    TowerCheckpoint,
    V,
    config,
    module,
    modules,
    siglip,
)

# Qwen VL and GLM-V

_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
QWEN = {"depth": LAYERS, "num_heads": HEADS, "patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2}


def qwen_shapes(prefix: str, network: dict[str, tuple[int, ...]], *, norm_bias: bool) -> Shapes:
    """Patches of two frames and the layers."""
    shapes: Shapes = {f"{prefix}patch_embed.proj.weight": (N, 3, 2, PATCH, PATCH)}
    for il in range(LAYERS):
        shapes |= modules(f"{prefix}blocks.{il}.", {"norm1": (N,), "norm2": (N,)}, bias=norm_bias)
        shapes |= modules(f"{prefix}blocks.{il}.", {"attn.qkv": (3 * N, N), "attn.proj": (N, N), **network})
    return shapes


def gated(prefix: str, n: int, width: int) -> dict[str, tuple[int, ...]]:
    """Matrices of a network."""
    return {f"{prefix}gate_proj": (width, n), f"{prefix}up_proj": (width, n), f"{prefix}down_proj": (n, width)}


QWEN2_VL = TowerCheckpoint(
    "qwen2-vl",
    config(
        "Qwen2VL",
        "qwen2_vl",
        {"model_type": "qwen2_vl_text", "rope_scaling": _SECTIONS},
        {**QWEN, "embed_dim": N, "hidden_size": TEXT, "mlp_ratio": 2, "model_type": "qwen2_vl_vision"},
    ),
    lambda: (
        qwen_shapes("visual.", {"mlp.fc1": (2 * N, N), "mlp.fc2": (N, 2 * N)}, norm_bias=True)
        | modules("visual.merger.", {"ln_q": (N,), "mlp.0": (MERGED, MERGED), "mlp.2": (TEXT, MERGED)})
    ),
    (84, 112),
)
QWEN25_VL = TowerCheckpoint(
    "qwen2.5-vl",
    config(
        "Qwen2_5_VL",
        "qwen2_5_vl",
        {"model_type": "qwen2_5_vl_text", "rope_scaling": _SECTIONS},
        {
            **QWEN,
            "hidden_size": N,
            "out_hidden_size": TEXT,
            "intermediate_size": FF,
            "window_size": 112,
            "fullatt_block_indexes": [1],
            "hidden_act": "silu",
            "model_type": "qwen2_5_vl_vision",
        },
    ),
    lambda: (
        qwen_shapes("visual.", gated("mlp.", N, FF), norm_bias=False)
        | modules("visual.merger.", {"mlp.0": (MERGED, MERGED), "mlp.2": (TEXT, MERGED)})
        | module("visual.merger.ln_q", N, bias=False)
    ),
    (140, 168),
)
DEEP = (0, 2)


def qwen3_vl_shapes() -> Shapes:
    """Also what takes features of layers."""
    p = "model.visual."
    shapes = qwen_shapes(p, {"mlp.linear_fc1": (FF, N), "mlp.linear_fc2": (N, FF)}, norm_bias=True)
    shapes |= {f"{p}patch_embed.proj.bias": (N,), f"{p}pos_embed.weight": (64, N)}
    shapes |= module(f"{p}merger.norm", N)
    for name in ("merger", *(f"deepstack_merger_list.{i}" for i in range(len(DEEP)))):
        shapes |= modules(f"{p}{name}.", {"linear_fc1": (MERGED, MERGED), "linear_fc2": (TEXT, MERGED)})
    for i in range(len(DEEP)):
        shapes |= module(f"{p}deepstack_merger_list.{i}.norm", MERGED)
    return shapes


QWEN3_VL = TowerCheckpoint(
    "qwen3-vl",
    config(
        "Qwen3VL",
        "qwen3_vl",
        {"model_type": "qwen3_vl_text", "rope_scaling": {**_SECTIONS, "mrope_interleaved": True}},
        {
            **QWEN,
            "hidden_size": N,
            "out_hidden_size": TEXT,
            "intermediate_size": FF,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": list(DEEP),
            "hidden_act": "gelu_pytorch_tanh",
            "model_type": "qwen3_vl",
        },
    ),
    qwen3_vl_shapes,
    (84, 112),
)


def glm4v_shapes() -> Shapes:
    """No biases in the layers."""
    p = "model.visual."
    shapes = qwen_shapes(p, gated("mlp.", N, TEXT), norm_bias=False)
    shapes = {name: shape for name, shape in shapes.items() if not name.endswith(".bias")}
    shapes |= {f"{p}patch_embed.proj.bias": (N,), f"{p}embeddings.position_embedding.weight": (64, N)}
    shapes |= modules(p, {"post_conv_layernorm": (N,), "post_layernorm": (N,)}, bias=False)
    shapes |= module(f"{p}downsample", TEXT, N, 2, 2) | module(f"{p}merger.post_projection_norm", TEXT)
    return shapes | modules(f"{p}merger.", {"proj": (TEXT, TEXT), **gated("", TEXT, FF)}, bias=False)


GLM4V = TowerCheckpoint(
    "glm4v",
    config(
        "Glm4v",
        "glm4v",
        {
            "model_type": "glm4v_text",
            "partial_rotary_factor": 0.5,
            "rope_scaling": {**_SECTIONS, "mrope_section": [2, 3, 3]},
        },
        {
            **QWEN,
            "hidden_size": N,
            "out_hidden_size": TEXT,
            "intermediate_size": FF,
            "image_size": 112,
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": 1e-5,
            "model_type": "glm4v",
        },
    ),
    glm4v_shapes,
    (84, 112),
)

# Pixtral and Mistral 3


def pixtral_shapes(*, merges: bool) -> Shapes:
    """Also the embedding of the text model, of which a row goes into the file."""
    p = "vision_tower."
    shapes = modules(p, {"patch_conv": (N, 3, PATCH, PATCH), "ln_pre": (N,)}, bias=False)
    attention = {f"attention.{name}_proj": (N, N) for name in "qkvo"}
    layer = {"attention_norm": (N,), "ffn_norm": (N,), **attention, **gated("feed_forward.", N, FF)}
    for il in range(LAYERS):
        shapes |= modules(f"{p}transformer.layers.{il}.", layer, bias=False)
    parts = {"linear_1": (TEXT, N), "linear_2": (TEXT, TEXT)}
    merger = {"norm": (N,), "patch_merger.merging_layer": (N, MERGED)} if merges else {}
    shapes |= modules("multi_modal_projector.", {**parts, **merger}, bias=not merges)
    return shapes | {"language_model.model.embed_tokens.weight": (V, TEXT)}


_PIXTRAL = {**VISION, "model_type": "pixtral", "head_dim": N // HEADS, "hidden_act": "silu", "rope_theta": 10000.0}
_FULL = {"image_token_index": 5, "vision_feature_layer": -1, "projector_hidden_act": "gelu"}
PIXTRAL = TowerCheckpoint(
    "pixtral",
    config(
        "Llava",
        "llava",
        {"model_type": "mistral"},
        _PIXTRAL,
        **_FULL,
        vision_feature_select_strategy="full",
    ),
    lambda: pixtral_shapes(merges=False),
    (28, 42),
    tolerance=1e-3,
)
MISTRAL3 = TowerCheckpoint(
    "mistral3",
    config(
        "Mistral3",
        "mistral3",
        {"model_type": "mistral"},
        _PIXTRAL,
        **_FULL,
        multimodal_projector_bias=False,
        spatial_merge_size=2,
    ),
    lambda: pixtral_shapes(merges=True),
    (56, 84),
    tolerance=1e-3,
)


def lightonocr_shapes() -> Shapes:
    """Those of Mistral 3 under other names."""
    names = {"vision_tower.": "model.vision_encoder.", "multi_modal_projector.": "model.vision_projection."}
    names["language_model.model."] = "model.language_model."
    shapes: Shapes = {}
    for name, shape in pixtral_shapes(merges=True).items():
        old = next(old for old in names if name.startswith(old))
        shapes[names[old] + name.removeprefix(old)] = shape
    return shapes


LIGHTONOCR = TowerCheckpoint(
    "lightonocr",
    config("LightOnOcr", "lighton_ocr", {"model_type": "qwen3"}, _PIXTRAL, image_token_id=5, spatial_merge_size=2),
    lightonocr_shapes,
    (56, 84),
    {"size": {"longest_edge": 84}},
    tolerance=1e-3,
    golden_of="mistral3",
)
LFM2_WIDTH = 72
LFM2 = TowerCheckpoint(
    "lfm2-vl",
    config(
        "Lfm2Vl",
        "lfm2_vl",
        {"model_type": "lfm2", "layer_types": ["conv"], "conv_L_cache": 3, "block_ff_dim": 32},
        {
            **{name: value for name, value in VISION.items() if name != "image_size"},
            "model_type": "siglip2_vision_model",
            "num_patches": 16,
        },
        downsample_factor=2,
        projector_hidden_size=LFM2_WIDTH,
        image_token_id=5,
    ),
    lambda: (
        siglip("model.vision_tower.vision_model.", head=True, patches=(N, 3 * PATCH**2))
        | modules(
            "model.multi_modal_projector.",
            {"layer_norm": (MERGED,), "linear_1": (LFM2_WIDTH, MERGED), "linear_2": (TEXT, LFM2_WIDTH)},
        )
    ),
    (56, 84),
    {"resample": 2},
)


def gemma4_shapes() -> Shapes:
    """Matrices have bounds."""
    p = "model.vision_tower."
    shapes: Shapes = {f"{p}patch_embedder.input_proj.weight": (N, 3 * PATCH**2)}
    shapes |= {f"{p}patch_embedder.position_embedding_table": (2, 16, N), f"{p}std_bias": (N,), f"{p}std_scale": (N,)}
    branches = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
    matrices = {**{f"self_attn.{name}_proj": (N, N) for name in "qkvo"}, **gated("mlp.", N, FF)}
    heads = {f"self_attn.{name}_norm": (N // HEADS,) for name in "qk"}
    for il in range(LAYERS):
        layer = f"{p}encoder.layers.{il}."
        shapes |= modules(layer, {**dict.fromkeys(branches, (N,)), **heads}, bias=False)
        shapes |= {f"{layer}{name}.linear.weight": shape for name, shape in matrices.items()}
        shapes |= {
            f"{layer}{name}.{side}_{end}": () for name in matrices for side in ("input", "output") for end in BOUNDS
        }
    return shapes | module("model.embed_vision.embedding_projection", TEXT, N, bias=False)


GEMMA4 = TowerCheckpoint(
    "gemma4",
    config(
        "Gemma4",
        "gemma4",
        {"model_type": "gemma4_text", "layer_types": ["full_attention"], "global_head_dim": 32},
        {
            **{name: value for name, value in VISION.items() if name != "image_size"},
            "num_key_value_heads": HEADS,
            "head_dim": N // HEADS,
            "global_head_dim": N // HEADS,
            "position_embedding_size": 16,
            "pooling_kernel_size": 2,
            "use_clipped_linears": True,
            "standardize": True,
            "model_type": "gemma4_vision",
        },
        audio_config=None,
        image_token_id=5,
    ),
    gemma4_shapes,
    (56, 84),
    tolerance=1e-4,
)


def kimi_shapes(prefix: str, first: str, second: str) -> Shapes:
    """MoonViT."""
    p = "vision_tower."
    shapes = module(f"{p}patch_embed.proj", N, 3, PATCH, PATCH) | {f"{p}patch_embed.pos_emb.weight": (8, 8, N)}
    layer = {"norm0": (N,), "norm1": (N,), "wqkv": (3 * N, N), "wo": (N, N), "mlp.fc0": (FF, N), "mlp.fc1": (N, FF)}
    for il in range(LAYERS):
        shapes |= modules(f"{p}encoder.blocks.{il}.", layer)
    shapes |= module(f"{p}encoder.final_layernorm", N)
    return shapes | modules(prefix, {"pre_norm": (N,), first: (MERGED, MERGED), second: (TEXT, MERGED)})


_KIMI = {
    "patch_size": PATCH,
    "init_pos_emb_height": 8,
    "init_pos_emb_width": 8,
    "merge_kernel_size": [2, 2],
}
_LATENT = {"model_type": "deepseek_v3", "q_lora_rank": 32, "kv_lora_rank": 32, "n_routed_experts": 2, "n_group": 1}
KIMI_VL = TowerCheckpoint(
    "kimi-vl",
    config("KimiVL", "kimi_vl", _LATENT, {**_KIMI, **{name: VISION[name] for name in list(VISION)[:4]}}),
    lambda: kimi_shapes("multi_modal_projector.", "linear_1", "linear_2"),
    (112, 112),
    golden_of="kimi-k2.5",
)
KIMI_K25 = TowerCheckpoint(
    "kimi-k2.5",
    config("KimiK25", "kimi_k25", _LATENT, {**_KIMI, **{f"vt_{name}": VISION[name] for name in list(VISION)[:4]}}),
    lambda: kimi_shapes("mm_projector.", "proj.0", "proj.2"),
    (112, 112),
)
TOWERS = (QWEN2_VL, QWEN25_VL, QWEN3_VL, GLM4V, PIXTRAL, MISTRAL3, LIGHTONOCR, LFM2, GEMMA4, KIMI_VL, KIMI_K25)
