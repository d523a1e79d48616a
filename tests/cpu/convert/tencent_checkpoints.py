"""Tiny checkpoints of Tencent's and poolside's mixtures, made as those of seeded_checkpoints.py."""

from __future__ import annotations

from typing import Any

import numpy as np

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

NAMES = ("gate_proj", "up_proj", "down_proj")

# Hy3

N_HY_V3 = 3


def grouped_heads(prefix: str, heads: int, kv: int, size: int) -> Shapes:
    """Projections and norms of q and k."""
    shapes: Shapes = {"q_proj": (heads * size, D), "k_proj": (kv * size, D), "v_proj": (kv * size, D)}
    shapes |= {"o_proj": (D, heads * size), "q_norm": (size,), "k_norm": (size,)}
    return {f"{prefix}.self_attn.{name}.weight": shape for name, shape in shapes.items()}


def block_norms(prefix: str) -> Shapes:
    """Those before both branches."""
    return {f"{prefix}.{name}.weight": (D,) for name in ("input_layernorm", "post_attention_layernorm")}


def hy_v3_shapes() -> Shapes:
    """Names and shapes of all tensors, as published."""
    shapes: Shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,), "lm_head.weight": (V, D)}
    for il in range(N_HY_V3):
        p = f"model.layers.{il}"
        shapes |= block_norms(p) | grouped_heads(p, HEADS, KV, HEAD)
        p = f"{p}.mlp"
        if il == 0:
            shapes |= gated(p, FF, NAMES)
            continue
        shapes |= {f"{p}.router.gate.weight": (N_EXPERT, D), f"{p}.expert_bias": (N_EXPERT,)}
        shapes |= gated(f"{p}.shared_mlp", FF_EXPERT, NAMES)
        for e in range(N_EXPERT):
            shapes |= gated(f"{p}.experts.{e}", FF_EXPERT, NAMES)
    return shapes


HY_V3 = Tiny(
    "hy-v3",
    {
        **head("HYV3", "hy_v3"),
        "hidden_act": "silu",
        "intermediate_size": FF,
        "moe_intermediate_size": FF_EXPERT,
        "expert_hidden_dim": FF_EXPERT,
        "num_hidden_layers": N_HY_V3,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": HEAD,
        "num_experts": N_EXPERT,
        "num_experts_per_tok": USED,
        "num_shared_experts": 1,
        "num_nextn_predict_layers": 0,
        "first_k_dense_replace": 1,
        "moe_router_enable_expert_bias": True,
        "moe_router_use_sigmoid": True,
        "qk_norm": True,
        "route_norm": True,
        "router_scaling_factor": 2.826,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 11158840.0},
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    hy_v3_shapes,
)

# Laguna

N_LAGUNA, WINDOW, FF_SHARED = 5, 11, 64
LAGUNA_HEADS = [4, 6, 6, 6, 4]
"""Of layers of one kind and of the other; the full ones rotate half of their heads."""
KINDS = ["full_attention", *["sliding_attention"] * 3, "full_attention"]
LAGUNA_ROPE = {
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 64.0,
        "beta_slow": 1.0,
        "attention_factor": 1.0,
        "partial_rotary_factor": 0.5,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}


def laguna_shapes(*, per_element: bool = False) -> Shapes:
    """Names and shapes of all tensors, as published."""
    shapes: Shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,), "lm_head.weight": (V, D)}
    for il, heads in enumerate(LAGUNA_HEADS):
        p = f"model.layers.{il}"
        shapes |= block_norms(p) | grouped_heads(p, heads, KV, HEAD)
        shapes[f"{p}.self_attn.g_proj.weight"] = (heads * HEAD if per_element else heads, D)
        p = f"{p}.mlp"
        if il == 0:
            shapes |= gated(p, FF, NAMES)
            continue
        shapes |= {f"{p}.gate.weight": (N_EXPERT, D), f"{p}.experts.e_score_correction_bias": (N_EXPERT,)}
        shapes |= gated(f"{p}.shared_expert", FF_SHARED, NAMES)
        for e in range(N_EXPERT):
            shapes |= gated(f"{p}.experts.{e}", FF_EXPERT, NAMES)
    return shapes


_LAGUNA: dict[str, Any] = {
    **head("Laguna", "laguna"),
    "hidden_act": "silu",
    "intermediate_size": FF,
    "moe_intermediate_size": FF_EXPERT,
    "shared_expert_intermediate_size": FF_SHARED,
    "num_hidden_layers": N_LAGUNA,
    "num_attention_heads": HEADS,
    "num_attention_heads_per_layer": LAGUNA_HEADS,
    "num_key_value_heads": KV,
    "head_dim": HEAD,
    "num_experts": N_EXPERT,
    "num_experts_per_tok": USED,
    "moe_routed_scaling_factor": 2.5,
    "moe_router_logit_softcapping": 0.0,
    "norm_topk_prob": True,
    "layer_types": KINDS,
    "mlp_layer_types": ["dense", *["sparse"] * (N_LAGUNA - 1)],
    "sliding_window": WINDOW,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_parameters": LAGUNA_ROPE,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LAGUNA = Tiny("laguna", {**_LAGUNA, "gating": "per-head"}, laguna_shapes)
LAGUNA_PER_ELEMENT = Tiny(
    "laguna-per-element",
    {**_LAGUNA, "gating": "per-element", "layer_types": KINDS[1:] + KINDS[:1], "sliding_window": FF_SHARED},
    lambda: laguna_shapes(per_element=True),
)

# Hy4

N_HY_V4, N_STREAMS, Q_RANK, RANK, NOPE, ROT, VALUE = 4, 3, 32, 64, 32, 16, 32
INDEX_HEADS, INDEX_SIZE, TOP_K = 8, 32, 16
INDEXERS = ["full", "full", "shared", "full"]


def hy_v4_shapes() -> Shapes:
    """Names and shapes of all tensors, as published."""
    shapes: Shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,), "lm_head.weight": (V, D)}
    for part, shape in (("fn", (N_STREAMS, N_STREAMS * D)), ("base", (N_STREAMS,)), ("scale", (1,))):
        shapes[f"model.hc_head.hc_head_{part}"] = shape
    for il in range(N_HY_V4):
        p = f"model.layers.{il}"
        shapes |= block_norms(p)
        for branch in ("attn", "mlp"):
            for part, shape in (("fn", (2 * N_STREAMS, N_STREAMS * D)), ("base", (2 * N_STREAMS,)), ("scale", (2,))):
                shapes[f"{p}.hc_{branch}_layer.hc_pre.hc_{part}"] = shape
        matrices: Shapes = {"q_a_proj": (Q_RANK, D), "q_a_layernorm": (Q_RANK,)}
        matrices |= {"q_b_proj": (HEADS * (NOPE + ROT), Q_RANK), "kv_a_proj_with_mqa": (RANK + ROT, D)}
        matrices |= {"kv_a_layernorm": (RANK,), "kv_b_proj": (HEADS * (NOPE + VALUE), RANK)}
        matrices |= {"o_proj": (D, HEADS * VALUE), "linear_gate": (HEADS * VALUE, D)}
        if INDEXERS[il] == "full":
            matrices |= {"indexer.wq_b": (INDEX_HEADS * INDEX_SIZE, Q_RANK), "indexer.wk": (INDEX_SIZE, D)}
            matrices |= {"indexer.k_norm": (INDEX_SIZE,), "indexer.weights_proj": (INDEX_HEADS, D)}
            shapes[f"{p}.self_attn.indexer.k_norm.bias"] = (INDEX_SIZE,)
        shapes |= {f"{p}.self_attn.{name}.weight": shape for name, shape in matrices.items()}
        shapes[f"{p}.self_attn.learnable_sink_param"] = (HEADS,)
        p = f"{p}.mlp"
        if il == 0:
            shapes |= gated(p, FF, NAMES)
            continue
        shapes |= {f"{p}.gate.weight": (N_EXPERT, D), f"{p}.gate.e_score_correction_bias": (N_EXPERT,)}
        shapes |= gated(f"{p}.shared_experts", FF_EXPERT, NAMES)
        shapes |= {f"{p}.experts.gate_up_proj": (N_EXPERT, 2 * FF_EXPERT, D)}
        shapes |= {f"{p}.experts.down_proj": (N_EXPERT, D, FF_EXPERT)}
    return shapes


def halves(name: str, values: np.ndarray) -> np.ndarray:
    """Rotated rows of a tensor in the order in which transformers 5.24 pairs the halves of a head.

    Deployments of the model pair neighbours, as its files do.
    """
    sizes = {"q_b_proj.weight": NOPE + ROT, "kv_a_proj_with_mqa.weight": RANK + ROT}
    sizes |= {f"indexer.{part}": INDEX_SIZE for part in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias")}
    size = next((size for end, size in sizes.items() if name.endswith(end)), 0)
    if not size:
        return values
    heads = values.reshape(-1, size, *values.shape[1:]).copy()
    heads[:, -ROT:] = np.concatenate([heads[:, -ROT::2], heads[:, 1 - ROT :: 2]], axis=1)
    return heads.reshape(values.shape)


HY_V4 = Tiny(
    "hy-v4",
    {
        **head("HYV4", "hy_v4"),
        "hidden_act": "silu",
        "intermediate_size": FF,
        "moe_intermediate_size": FF_EXPERT,
        "num_hidden_layers": N_HY_V4,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "n_routed_experts": N_EXPERT,
        "n_shared_experts": 1,
        "num_experts_per_tok": USED,
        "first_k_dense_replace": 1,
        "mlp_layer_types": ["dense", *["sparse"] * (N_HY_V4 - 1)],
        "layer_types": ["deepseek_sparse_attention"] * N_HY_V4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": Q_RANK,
        "kv_lora_rank": RANK,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROT,
        "v_head_dim": VALUE,
        "index_n_heads": INDEX_HEADS,
        "index_head_dim": INDEX_SIZE,
        "index_topk": TOP_K,
        "indexer_types": INDEXERS,
        "hc_mult": N_STREAMS,
        "hc_eps": 1e-3,
        "hc_magnitude": 1.8,
        "swiglu_limit": 0.7,
        "learnable_sink": True,
        "gated_mla": True,
        "gating_type": "elementwise",
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0},
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    hy_v4_shapes,
    halves,
)

CHECKPOINTS = (HY_V3, LAGUNA, LAGUNA_PER_ELEMENT, HY_V4)
