"""Tiny checkpoints of Ling 3.0 and of models that become files of older architectures, made as those of
seeded_checkpoints.py.
"""

from __future__ import annotations

from typing import Any

from tests.cpu.seeded_checkpoints import (
    FF,
    FF_EXPERT,
    HEADS,
    N_EXPERT,
    NOPE,
    RANK,
    ROT,
    SIZE,
    TAPS,
    USED,
    VALUE,
    D,
    Shapes,
    Tiny,
    V,
    gated,
    head,
)

NAMES = ("gate_proj", "up_proj", "down_proj")

# Ling 3.0

N_LING, LING_GROUP, GROUPS, USED_GROUPS = 4, 2, 4, 2
"""LING_GROUP: layers per group, of which the last one attends; GROUPS: of experts."""


def bailing_hybrid_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes: Shapes = {"model.word_embeddings.weight": (V, D), "model.norm.weight": (D,), "lm_head.weight": (V, D)}
    n = HEADS * SIZE
    for il in range(N_LING):
        p = f"model.layers.{il}"
        shapes |= {f"{p}.{name}.weight": (D,) for name in ("input_layernorm", "post_attention_layernorm")}
        matrices: Shapes = {"dense": (D, HEADS * VALUE)}
        if (il + 1) % LING_GROUP == 0:
            matrices |= {"q_proj": (HEADS * (NOPE + ROT), D), "kv_a_proj_with_mqa": (RANK + ROT, D)}
            matrices |= {"kv_b_proj": (HEADS * (NOPE + VALUE), RANK), "kv_a_layernorm": (RANK,), "g_proj": (HEADS, D)}
        else:
            matrices |= {f"{x}_proj": (n, D) for x in "qkvfg"} | {f"{x}_conv1d": (n, 1, TAPS) for x in "qkv"}
            matrices |= {"b_proj": (HEADS, D), "o_norm": (SIZE,)}
            shapes |= {f"{p}.attention.A_log": (HEADS,), f"{p}.attention.dt_bias": (n,)}
        shapes |= {f"{p}.attention.{name}.weight": shape for name, shape in matrices.items()}
        p = f"{p}.mlp"
        if il == 0:
            shapes |= gated(p, FF, NAMES)
            continue
        shapes |= {f"{p}.gate.weight": (N_EXPERT, D), f"{p}.gate.expert_bias": (N_EXPERT,)}
        shapes |= gated(f"{p}.shared_experts", FF_EXPERT, NAMES)
        for e in range(N_EXPERT):
            shapes |= gated(f"{p}.experts.{e}", FF_EXPERT, NAMES)
    return shapes


_LATENT: dict[str, Any] = {
    "hidden_act": "silu",
    "intermediate_size": FF,
    "kv_lora_rank": RANK,
    "moe_intermediate_size": FF_EXPERT,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "num_experts_per_tok": USED,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROT,
    "v_head_dim": VALUE,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
BAILING_HYBRID = Tiny(
    "bailing-hybrid",
    {
        **head("BailingHybrid", "bailing_hybrid"),
        **_LATENT,
        "gated_attention_proj_granularity_type": "head_wise",
        "head_dim": SIZE,
        "kda_lower_bound": -5.0,
        "kda_safe_gate": True,
        "layer_group_size": LING_GROUP,
        "linear_silu": True,
        "moe_shared_expert_intermediate_size": FF_EXPERT,
        "n_group": GROUPS,
        "no_kda_lora": True,
        "num_experts": N_EXPERT,
        "num_hidden_layers": N_LING,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 1,
        "q_lora_rank": None,
        "rope_interleave": True,
        "rope_scaling": None,
        "score_function": "sigmoid",
        "short_conv_kernel_size": TAPS,
        "topk_group": USED_GROUPS,
        "use_qk_norm": True,
    },
    bailing_hybrid_shapes,
)

CHECKPOINTS = (BAILING_HYBRID,)
