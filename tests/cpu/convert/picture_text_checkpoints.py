"""Tiny checkpoints of the text parts of models that take pictures, made as those of seeded_checkpoints.py."""

from __future__ import annotations

from typing import Any

from tests.cpu.convert.seeded_checkpoints import (
    FF,
    FF_EXPERT,
    HEADS,
    KV,
    N_EXPERT,
    USED,
    D,
    Shapes,
    Tiny,
    V,
    gated,
    head,
)

N_LAYER, HEAD = 3, 16
NAMES = ("gate_proj", "up_proj", "down_proj")
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "out_hidden_size": D,
    "patch_size": 14,
    "spatial_merge_size": 2,
}
_TEXT: dict[str, Any] = {
    "hidden_size": D,
    "vocab_size": V,
    "intermediate_size": FF,
    "num_hidden_layers": N_LAYER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": HEAD,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}


def model(class_name: str, model_type: str, text: dict[str, Any], **more: Any) -> dict[str, Any]:
    """config.json of a model with a text part."""
    values = {**head(class_name, model_type), "tie_word_embeddings": False, "torch_dtype": "bfloat16", **more}
    values["architectures"] = [f"{class_name}ForConditionalGeneration"]
    ids = {name: values[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {**values, "text_config": {**_TEXT, **ids, **text}} if text else values


def sections(*sizes: int, **more: Any) -> dict[str, Any]:
    """How pairs of elements share time, rows and columns."""
    return {"type": "default", "rope_type": "default", "mrope_section": list(sizes), **more}


def attention(prefix: str, *, norms: bool = False, bias: bool = False) -> Shapes:
    """A layer but its network."""
    shapes: Shapes = {f"{prefix}.{name}.weight": (D,) for name in ("input_layernorm", "post_attention_layernorm")}
    p = f"{prefix}.self_attn"
    for name, heads in (("q", HEADS), ("k", KV), ("v", KV)):
        shapes[f"{p}.{name}_proj.weight"] = (heads * HEAD, D)
        shapes |= {f"{p}.{name}_proj.bias": (heads * HEAD,)} if bias else {}
    shapes |= {f"{p}.{name}_norm.weight": (HEAD,) for name in "qk"} if norms else {}
    return shapes | {f"{p}.o_proj.weight": (D, HEADS * HEAD)}


def outer(root: str) -> Shapes:
    """What is beside the layers."""
    return {f"{root}.embed_tokens.weight": (V, D), f"{root}.norm.weight": (D,), "lm_head.weight": (V, D)}


# Qwen 2 VL as its repositories have it: values of the text part lie outside, names are those of texts.


def qwen2_vl_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes = outer("model")
    for il in range(N_LAYER):
        shapes |= attention(f"model.layers.{il}", bias=True) | gated(f"model.layers.{il}.mlp", FF, NAMES)
    return shapes


QWEN2_VL = Tiny(
    "qwen2-vl-text",
    {
        **_TEXT,
        **model("Qwen2VL", "qwen2_vl", {}),
        "use_sliding_window": False,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "vision_config": {**VISION, "embed_dim": 32, "hidden_size": D, "mlp_ratio": 2},
    },
    qwen2_vl_shapes,
)

# Qwen 3 VL


def qwen3_vl_shapes(*, experts: bool) -> Shapes:
    """Experts of a layer lie together, the width of the model before that of a network."""
    root = "model.language_model"
    shapes = outer(root)
    for il in range(N_LAYER):
        p = f"{root}.layers.{il}"
        shapes |= attention(p, norms=True)
        if not experts:
            shapes |= gated(f"{p}.mlp", FF, NAMES)
            continue
        shapes |= {f"{p}.mlp.gate.weight": (N_EXPERT, D)}
        shapes |= {f"{p}.mlp.experts.gate_up_proj": (N_EXPERT, D, 2 * WIDTH)}
        shapes |= {f"{p}.mlp.experts.down_proj": (N_EXPERT, WIDTH, D)}
    return shapes


WIDTH = 96
DEEP = [0]
_INTERLEAVED = sections(4, 2, 2, mrope_interleaved=True)
QWEN3_VL = Tiny(
    "qwen3-vl-text",
    model(
        "Qwen3VL",
        "qwen3_vl",
        {"model_type": "qwen3_vl_text", "rope_scaling": _INTERLEAVED},
        vision_config={**VISION, "deepstack_visual_indexes": DEEP},
    ),
    lambda: qwen3_vl_shapes(experts=False),
)
QWEN3_VL_MOE = Tiny(
    "qwen3-vl-moe-text",
    model(
        "Qwen3VLMoe",
        "qwen3_vl_moe",
        {
            "model_type": "qwen3_vl_moe_text",
            "rope_scaling": _INTERLEAVED,
            "num_experts": N_EXPERT,
            "num_experts_per_tok": USED,
            "moe_intermediate_size": WIDTH,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        vision_config={**VISION, "deepstack_visual_indexes": DEEP},
    ),
    lambda: qwen3_vl_shapes(experts=True),
)

# GLM 4.1V and 4.5V


def glm4v_shapes() -> Shapes:
    """Norms before and after both branches."""
    root = "model.language_model"
    shapes = outer(root)
    for il in range(N_LAYER):
        p = f"{root}.layers.{il}"
        shapes |= attention(p, bias=True)
        shapes |= {f"{p}.{name}.weight": (D,) for name in ("post_self_attn_layernorm", "post_mlp_layernorm")}
        shapes |= {f"{p}.mlp.gate_up_proj.weight": (2 * FF, D), f"{p}.mlp.down_proj.weight": (D, FF)}
    return shapes


def glm4v_moe_shapes() -> Shapes:
    """A dense layer, then layers of experts."""
    root = "model.language_model"
    shapes = outer(root)
    for il in range(N_LAYER):
        p = f"{root}.layers.{il}"
        shapes |= attention(p, bias=True)
        if il == 0:
            shapes |= gated(f"{p}.mlp", FF, NAMES)
            continue
        shapes |= {f"{p}.mlp.gate.weight": (N_EXPERT, D), f"{p}.mlp.gate.e_score_correction_bias": (N_EXPERT,)}
        shapes |= gated(f"{p}.mlp.shared_experts", FF_EXPERT, NAMES)
        for e in range(N_EXPERT):
            shapes |= gated(f"{p}.mlp.experts.{e}", FF_EXPERT, NAMES)
    return shapes


_PARTLY = {"partial_rotary_factor": 0.5, "attention_bias": True, "rope_theta": 10000.0}
GLM4V = Tiny(
    "glm4v-text",
    model(
        "Glm4v",
        "glm4v",
        {"model_type": "glm4v_text", **_PARTLY, "rope_scaling": sections(1, 1, 2)},
        vision_config=VISION,
    ),
    glm4v_shapes,
)
GLM4V_MOE = Tiny(
    "glm4v-moe-text",
    model(
        "Glm4vMoe",
        "glm4v_moe",
        {
            "model_type": "glm4v_moe_text",
            **_PARTLY,
            "rope_scaling": sections(1, 1, 2),
            "n_routed_experts": N_EXPERT,
            "num_experts_per_tok": USED,
            "moe_intermediate_size": FF_EXPERT,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
        },
        vision_config=VISION,
    ),
    glm4v_moe_shapes,
)

# SmolVLM


def smolvlm_shapes() -> Shapes:
    """Another name of the text part."""
    shapes = outer("model.text_model")
    for il in range(N_LAYER):
        p = f"model.text_model.layers.{il}"
        shapes |= attention(p) | gated(f"{p}.mlp", FF, NAMES)
    return shapes


SMOLVLM = Tiny(
    "smolvlm-text",
    model(
        "SmolVLM",
        "smolvlm",
        {"model_type": "llama"},
        vision_config={"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2},
    ),
    smolvlm_shapes,
)

CHECKPOINTS = (QWEN2_VL, QWEN3_VL, QWEN3_VL_MOE, GLM4V, GLM4V_MOE, SMOLVLM)
