"""Tiny checkpoints of Command A+ and others, made as those of seeded_checkpoints.py."""

from __future__ import annotations

from typing import Any

from tests.cpu.convert.seeded_checkpoints import (
    FF,
    FF_EXPERT,
    HEAD,
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

OUTER: Shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
OUTPUT: Shapes = {"lm_head.weight": (V, D)}
NAMES = ("gate_proj", "up_proj", "down_proj")
WINDOW = 16


def attention(prefix: str) -> Shapes:
    """Projections of q, k, v and of the output."""
    p = f"{prefix}.self_attn"
    shapes: Shapes = {f"{p}.{x}_proj.weight": (n * HEAD, D) for x, n in (("q", HEADS), ("k", KV), ("v", KV))}
    return shapes | {f"{p}.o_proj.weight": (D, HEADS * HEAD)}


# Command A+

N_SHARED = 2
COHERE_KINDS = ["full", "sliding", "sliding", "full", "sliding"]
"""Attention of the layers, the first of which is dense."""


def cohere2_moe_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes = dict(OUTER)
    for il in range(len(COHERE_KINDS)):
        p = f"model.layers.{il}"
        shapes |= {f"{p}.input_layernorm.weight": (D,), **attention(p)}
        if il == 0:
            shapes |= gated(f"{p}.mlp", FF, NAMES)
            continue
        shapes |= {f"{p}.mlp.gate.weight": (N_EXPERT, D)}
        shapes |= gated(f"{p}.mlp.shared_experts", N_SHARED * FF_EXPERT, NAMES)
        for e in range(N_EXPERT):
            shapes |= gated(f"{p}.mlp.experts.{e}", FF_EXPERT, NAMES)
    return shapes


_COHERE2_MOE = {
    **head("Cohere2Moe", "cohere2_moe"),
    "head_dim": HEAD,
    "hidden_act": "silu",
    "intermediate_size": FF_EXPERT,
    "layer_types": [f"{kind}_attention" for kind in COHERE_KINDS],
    "logit_scale": 0.25,
    "max_position_embeddings": 256,
    "mlp_layer_types": ["dense"] + ["sparse"] * (len(COHERE_KINDS) - 1),
    "num_attention_heads": HEADS,
    "num_experts": N_EXPERT,
    "num_experts_per_tok": USED,
    "num_hidden_layers": len(COHERE_KINDS),
    "num_key_value_heads": KV,
    "num_shared_experts": N_SHARED,
    "prefix_dense_intermediate_size": FF,
    "prefix_dense_sliding_window_pattern": 1,
    "rope_theta": 10000.0,
    "shared_expert_combination_strategy": "average",
    "sliding_window": WINDOW,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
COHERE2_MOE = Tiny(
    "cohere2-moe",
    {**_COHERE2_MOE, "expert_selection_fn": "sigmoid", "layer_norm_eps": 1e-5, "norm_topk_prob": True},
    cohere2_moe_shapes,
)
COHERE2_MOE_SOFTMAX = Tiny(
    "cohere2-moe-softmax",
    {
        **_COHERE2_MOE,
        "expert_selection_fn": "softmax",
        "logit_scale": 2.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    lambda: {**cohere2_moe_shapes(), **OUTPUT},
)


# Solar Open

SOLAR_LAYERS = 3
STRETCHED = 32


def norms(prefix: str) -> Shapes:
    """Norms before the two networks of a layer."""
    return {f"{prefix}.{name}.weight": (D,) for name in ("input_layernorm", "post_attention_layernorm")}


def solar_open_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes = {**OUTER, **OUTPUT}
    for il in range(SOLAR_LAYERS):
        p = f"model.layers.{il}"
        shapes |= {**norms(p), **attention(p)}
        shapes |= {f"{p}.mlp.gate.weight": (N_EXPERT, D), f"{p}.mlp.gate.e_score_correction_bias": (N_EXPERT,)}
        shapes |= gated(f"{p}.mlp.shared_experts", FF_EXPERT, NAMES)
        for e in range(N_EXPERT):
            shapes |= gated(f"{p}.mlp.experts.{e}", FF_EXPERT, NAMES)
    return shapes


SOLAR_OPEN = Tiny(
    "solar-open",
    {
        **head("SolarOpen", "solar_open"),
        "first_k_dense_replace": 0,
        "head_dim": HEAD,
        "intermediate_size": FF,
        "max_position_embeddings": 256,
        "moe_intermediate_size": FF_EXPERT,
        "n_routed_experts": N_EXPERT,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": HEADS,
        "num_experts_per_tok": USED,
        "num_hidden_layers": SOLAR_LAYERS,
        "num_key_value_heads": KV,
        "partial_rotary_factor": 1.0,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": STRETCHED},
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    solar_open_shapes,
)


# Mellum 2

MELLUM_KINDS = ["sliding", "full", "sliding"]


def mellum_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes = {**OUTER, **OUTPUT}
    for il in range(len(MELLUM_KINDS)):
        p = f"model.layers.{il}"
        shapes |= {**norms(p), **attention(p), f"{p}.mlp.gate.weight": (N_EXPERT, D)}
        shapes |= {f"{p}.self_attn.{x}_norm.weight": (HEAD,) for x in "qk"}
        for e in range(N_EXPERT):
            shapes |= gated(f"{p}.mlp.experts.{e}", FF_EXPERT, NAMES)
    return shapes


MELLUM = Tiny(
    "mellum",
    {
        **head("Mellum", "mellum"),
        "head_dim": HEAD,
        "hidden_act": "silu",
        "intermediate_size": FF,
        "layer_types": [f"{kind}_attention" for kind in MELLUM_KINDS],
        "max_position_embeddings": 256,
        "mlp_layer_types": ["sparse"] * len(MELLUM_KINDS),
        "moe_intermediate_size": FF_EXPERT,
        "norm_topk_prob": True,
        "num_attention_heads": HEADS,
        "num_experts": N_EXPERT,
        "num_experts_per_tok": USED,
        "num_hidden_layers": len(MELLUM_KINDS),
        "num_key_value_heads": KV,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 500000.0,
                "factor": 4.0,
                "original_max_position_embeddings": STRETCHED,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "sliding_window": WINDOW,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    mellum_shapes,
)


# Ling 1, which transformers does not have: no part of CHECKPOINTS

BAILING_LAYERS = 2


def bailing_moe_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes: Shapes = {"model.word_embeddings.weight": (V, D), "model.norm.weight": (D,), **OUTPUT}
    for il in range(BAILING_LAYERS):
        p = f"model.layers.{il}"
        shapes |= {**norms(p), f"{p}.mlp.gate.weight": (N_EXPERT, D)}
        shapes[f"{p}.attention.query_key_value.weight"] = ((HEADS + 2 * KV) * HEAD, D)
        shapes[f"{p}.attention.dense.weight"] = (D, HEADS * HEAD)
        shapes |= gated(f"{p}.mlp.shared_experts", N_SHARED * FF_EXPERT, NAMES)
        for e in range(N_EXPERT):
            shapes |= gated(f"{p}.mlp.experts.{e}", FF_EXPERT, NAMES)
    return shapes


BAILING_MOE = Tiny(
    "bailing-moe",
    {
        **head("BailingMoe", "bailing_moe"),
        "first_k_dense_replace": 0,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "intermediate_size": FF,
        "max_position_embeddings": 256,
        "moe_intermediate_size": FF_EXPERT,
        "norm_head": True,
        "norm_softmax": False,
        "norm_topk_prob": True,
        "num_attention_heads": HEADS,
        "num_experts": N_EXPERT,
        "num_experts_per_tok": USED,
        "num_hidden_layers": BAILING_LAYERS,
        "num_key_value_heads": KV,
        "num_shared_experts": N_SHARED,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 600000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_bias": False,
        "use_qkv_bias": False,
    },
    bailing_moe_shapes,
)


# Granite with windows and sinks

GRANITE_KINDS = ["full", "sliding", "sliding", "full"]
GRANITE_BASES = [0, 20000, 0, 20000]
"""Bases of RoPE; 0: the layer does not know positions."""
FF_SHARED = 64


def granite_swa_shapes(*, experts: bool) -> Shapes:
    """Names and shapes of all tensors."""
    shapes = dict(OUTER)
    for il in range(len(GRANITE_KINDS)):
        p = f"model.layers.{il}"
        shapes |= {**norms(p), **attention(p), f"{p}.self_attn.sinks": (HEADS,)}
        if not experts:
            shapes |= gated(f"{p}.mlp", FF, NAMES)
            continue
        shapes |= {
            f"{p}.block_sparse_moe.router.weight": (N_EXPERT, D),
            f"{p}.block_sparse_moe.experts.gate_up_proj": (N_EXPERT, 2 * FF_EXPERT, D),
            f"{p}.block_sparse_moe.experts.down_proj": (N_EXPERT, D, FF_EXPERT),
            f"{p}.shared_mlp.input_linear.weight": (2 * FF_SHARED, D),
            f"{p}.shared_mlp.output_linear.weight": (D, FF_SHARED),
        }
    return shapes


_GRANITE_SWA: dict[str, Any] = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "hidden_act": "silu",
    "layer_rope_theta": GRANITE_BASES,
    "layer_types": [f"{kind}_attention" for kind in GRANITE_KINDS],
    "logits_scaling": 2.0,
    "max_position_embeddings": 256,
    "num_attention_heads": HEADS,
    "num_hidden_layers": len(GRANITE_KINDS),
    "num_key_value_heads": KV,
    "residual_multiplier": 0.6,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "sliding_window": WINDOW,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
GRANITE_SWA = Tiny(
    "granite-swa",
    {**head("GraniteSWA", "granite_swa"), **_GRANITE_SWA, "intermediate_size": FF},
    lambda: granite_swa_shapes(experts=False),
)
GRANITE_MOE_SWA = Tiny(
    "granite-moe-swa",
    {
        **head("GraniteMoeSWA", "granitemoe_swa"),
        **_GRANITE_SWA,
        "intermediate_size": FF_EXPERT,
        "num_experts_per_tok": USED,
        "num_local_experts": N_EXPERT,
        "shared_intermediate_size": FF_SHARED,
    },
    lambda: granite_swa_shapes(experts=True),
)

CHECKPOINTS = (COHERE2_MOE, COHERE2_MOE_SOFTMAX, SOLAR_OPEN, MELLUM, GRANITE_SWA, GRANITE_MOE_SWA)
