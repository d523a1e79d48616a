"""Tiny checkpoints of encoders of pictures of one size: Gemma 3, SmolVLM, LLaVA, InternVL, Llama 4."""

from __future__ import annotations

from tests.cpu.media.tower_parts import (
    FF,
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
)


def gemma3_shapes() -> Shapes:
    """Also the head of SigLIP, which is of no use."""
    projector = {"mm_input_projection_weight": (N, TEXT), "mm_soft_emb_norm.weight": (N,)}
    shapes = siglip("vision_tower.vision_model.", head=True)
    return shapes | {f"multi_modal_projector.{name}": shape for name, shape in projector.items()}


GEMMA3 = TowerCheckpoint(
    "gemma3",
    config(
        "Gemma3",
        "gemma3",
        {"model_type": "gemma3_text"},
        {**VISION, "model_type": "siglip_vision_model"},
        mm_tokens_per_image=4,
        image_token_index=5,
    ),
    gemma3_shapes,
)
SMOLVLM = TowerCheckpoint(
    "smolvlm",
    config(
        "SmolVLM",
        "smolvlm",
        {"model_type": "llama"},
        {**VISION, "model_type": "smolvlm_vision"},
        scale_factor=2,
        image_token_id=5,
    ),
    lambda: (
        siglip("model.vision_model.") | module("model.connector.modality_projection.proj", TEXT, MERGED, bias=False)
    ),
    processor={"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}, "do_image_splitting": True},
)


def llava_shapes() -> Shapes:
    """CLIP, of which the last layer and the norm behind it are of no use."""
    prefix = "vision_tower.vision_model."
    shapes = siglip(prefix)
    del shapes[f"{prefix}embeddings.patch_embedding.bias"]
    shapes |= {f"{prefix}embeddings.class_embedding": (N,), f"{prefix}embeddings.position_embedding.weight": (17, N)}
    shapes |= module(f"{prefix}pre_layrnorm", N)
    return shapes | modules("multi_modal_projector.", {"linear_1": (TEXT, N), "linear_2": (TEXT, TEXT)})


LLAVA = TowerCheckpoint(
    "llava",
    config(
        "Llava",
        "llava",
        {"model_type": "llama"},
        {**VISION, "model_type": "clip_vision_model", "projection_dim": 32},
        image_token_index=5,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        projector_hidden_act="gelu",
    ),
    llava_shapes,
)
# Of a picture of one tile, which is looked at as a whole alone.
LLAVA_NEXT = TowerCheckpoint(
    "llava_next",
    {**LLAVA.config, "architectures": ["LlavaNextForConditionalGeneration"], "model_type": "llava_next"}
    | {"image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]]},
    lambda: llava_shapes() | {"image_newline": (TEXT,)},
    processor={"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}},
    golden_of="llava",
)


def internvl_shapes() -> Shapes:
    """Branches have scales."""
    p = "model.vision_tower."
    shapes: Shapes = {f"{p}embeddings.cls_token": (1, 1, N), f"{p}embeddings.position_embeddings": (1, 17, N)}
    shapes |= module(f"{p}embeddings.patch_embeddings.projection", N, 3, PATCH, PATCH)
    for il in range(LAYERS):
        layer = f"{p}encoder.layer.{il}."
        shapes |= modules(layer, {"layernorm_before": (N,), "layernorm_after": (N,)})
        shapes |= {f"{layer}attention.{name}_proj.weight": (N, N) for name in "qkv"}
        shapes |= {f"{layer}attention.{name}_proj.bias": (N,) for name in "qkv"}
        shapes |= modules(layer, {"attention.projection_layer": (N, N), "mlp.fc1": (FF, N), "mlp.fc2": (N, FF)})
        shapes |= {f"{layer}lambda_{i}": (N,) for i in (1, 2)}
    parts = {"layer_norm": (MERGED,), "linear_1": (TEXT, MERGED), "linear_2": (TEXT, TEXT)}
    return shapes | modules("model.multi_modal_projector.", parts)


def internvl_chat_shapes() -> Shapes:
    """The same model in the names of its own repositories."""
    p = "vision_model."
    shapes: Shapes = {f"{p}embeddings.class_embedding": (1, 1, N), f"{p}embeddings.position_embedding": (1, 17, N)}
    shapes |= module(f"{p}embeddings.patch_embedding", N, 3, PATCH, PATCH)
    layer = {"norm1": (N,), "norm2": (N,), "attn.qkv": (3 * N, N), "attn.proj": (N, N), "mlp.fc1": (FF, N)}
    for il in range(LAYERS):
        shapes |= modules(f"{p}encoder.layers.{il}.", {**layer, "mlp.fc2": (N, FF)})
        shapes |= {f"{p}encoder.layers.{il}.ls{i}": (N,) for i in (1, 2)}
    return shapes | modules("mlp1.", {"0": (MERGED,), "1": (TEXT, MERGED), "3": (TEXT, TEXT)})


INTERNVL = TowerCheckpoint(
    "internvl",
    config(
        "InternVL",
        "internvl",
        {"model_type": "qwen2"},
        {
            **VISION,
            "image_size": [56, 56],
            "patch_size": [PATCH, PATCH],
            "attention_bias": True,
            "hidden_act": "gelu",
            "norm_type": "layer_norm",
            "use_mean_pooling": True,
            "model_type": "internvl_vision",
        },
        downsample_ratio=0.5,
        image_token_id=5,
    ),
    internvl_shapes,
    processor={"min_patches": 1, "max_patches": 12},
)
INTERNVL_CHAT = TowerCheckpoint(
    "internvl-chat",
    {
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "llm_config": {**TEXT_CONFIG, "model_type": "qwen2"},
        "vision_config": {
            **VISION,
            "qkv_bias": True,
            "qk_normalization": False,
            "hidden_act": "gelu",
            "norm_type": "layer_norm",
            "model_type": "intern_vit_6b",
        },
        "downsample_ratio": 0.5,
        "select_layer": -1,
        "ps_version": "v2",
        "min_dynamic_patch": 1,
        "max_dynamic_patch": 12,
    },
    internvl_chat_shapes,
    golden_of="internvl",
)
LLAMA4_WIDTH = 72


def llama4_shapes() -> Shapes:
    """A token stands for the whole picture."""
    p = "vision_model."
    shapes: Shapes = {f"{p}class_embedding": (N,), f"{p}positional_embedding_vlm": (17, N)}
    shapes |= module(f"{p}patch_embedding.linear", N, 3 * PATCH**2, bias=False)
    shapes |= modules(p, {"layernorm_pre": (N,), "layernorm_post": (N,)})
    attention = {f"self_attn.{name}_proj": (N, N) for name in "qkvo"}
    network = {"mlp.fc1": (MERGED, N), "mlp.fc2": (N, MERGED)}
    for il in range(LAYERS):
        parts = {"input_layernorm": (N,), "post_attention_layernorm": (N,), **attention, **network}
        shapes |= modules(f"{p}model.layers.{il}.", parts)
    fc = {"vision_adapter.mlp.fc1": (LLAMA4_WIDTH, MERGED), "vision_adapter.mlp.fc2": (LLAMA4_WIDTH, LLAMA4_WIDTH)}
    shapes |= modules(p, fc, bias=False)
    return shapes | module("multi_modal_projector.linear_1", TEXT, LLAMA4_WIDTH, bias=False)


LLAMA4 = TowerCheckpoint(
    "llama4",
    config(
        "Llama4",
        "llama4",
        {"model_type": "llama4_text", "num_local_experts": 2, "interleave_moe_layer_step": 1},
        {
            **VISION,
            "intermediate_size": MERGED,
            "pixel_shuffle_ratio": 0.5,
            "vision_output_dim": LLAMA4_WIDTH,
            "projector_input_dim": LLAMA4_WIDTH,
            "projector_output_dim": LLAMA4_WIDTH,
            "hidden_act": "gelu",
            "norm_eps": 1e-5,
            "multi_modal_projector_bias": False,
            "model_type": "llama4_vision_model",
        },
    ),
    llama4_shapes,
)
TOWERS = (GEMMA3, SMOLVLM, LLAVA, LLAVA_NEXT, INTERNVL, INTERNVL_CHAT, LLAMA4)
