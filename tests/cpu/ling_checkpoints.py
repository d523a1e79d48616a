"""Tiny checkpoints of Ling 3.0 and of models that become files of older architectures, made as those of
seeded_checkpoints.py.
"""

from __future__ import annotations

from typing import Any

from tests.cpu.seeded_checkpoints import (
    FF,
    FF_EXPERT,
    HEAD,
    HEADS,
    KV,
    N_EXPERT,
    NOPE,
    OUTER,
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
            matrices |= {**latent(), "g_proj": (HEADS, D)}
        else:
            matrices |= {f"{x}_proj": (n, D) for x in "qkvfg"} | {f"{x}_conv1d": (n, 1, TAPS) for x in "qkv"}
            matrices |= {"b_proj": (HEADS, D), "o_norm": (SIZE,)}
            shapes |= {f"{p}.attention.A_log": (HEADS,), f"{p}.attention.dt_bias": (n,)}
        shapes |= {f"{p}.attention.{name}.weight": shape for name, shape in matrices.items()}
        shapes |= experts(f"{p}.mlp", "expert_bias") if il else gated(f"{p}.mlp", FF, NAMES)
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

# Sarvam 105B, as files of DeepSeek V3

N_SARVAM = 3
_SARVAM: dict[str, Any] = {
    "num_hidden_layers": N_SARVAM,
    "num_experts": N_EXPERT,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
}


def experts(prefix: str, bias: str) -> Shapes:
    """Router, routed and shared experts."""
    shapes: Shapes = {f"{prefix}.gate.weight": (N_EXPERT, D), f"{prefix}.gate.{bias}": (N_EXPERT,)}
    shapes |= gated(f"{prefix}.shared_experts", FF_EXPERT, NAMES)
    for e in range(N_EXPERT):
        shapes |= gated(f"{prefix}.experts.{e}", FF_EXPERT, NAMES)
    return shapes


def latent() -> Shapes:
    """Latent attention with queries of one matrix."""
    return {
        "q_proj": (HEADS * (NOPE + ROT), D),
        "kv_a_proj_with_mqa": (RANK + ROT, D),
        "kv_b_proj": (HEADS * (NOPE + VALUE), RANK),
        "kv_a_layernorm": (RANK,),
    }


def sarvam_mla_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes = dict(OUTER)
    for il in range(N_SARVAM):
        p = f"model.layers.{il}"
        shapes |= {f"{p}.{name}.weight": (D,) for name in ("input_layernorm", "post_attention_layernorm")}
        matrices = {**latent(), "o_proj": (D, HEADS * VALUE)}
        shapes |= {f"{p}.self_attn.{name}.weight": shape for name, shape in matrices.items()}
        shapes |= experts(f"{p}.mlp", "e_score_correction_bias") if il else gated(f"{p}.mlp", FF, NAMES)
    return shapes


SARVAM_MLA = Tiny(
    "sarvam-mla",
    {
        **head("DeepseekV3", "sarvam_mla"),
        **_LATENT,
        **_SARVAM,
        "head_dim": RANK + ROT,
        "q_head_dim": NOPE + ROT,
        "q_lora_rank": None,
        "rope_scaling": {
            "type": "deepseek_yarn",
            "factor": 4.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 64,
        },
    },
    sarvam_mla_shapes,
)

# Sarvam 30B, as files of Ling 2


def sarvam_moe_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes: Shapes = {"model.word_embeddings.weight": (V, D), "model.norm.weight": (D,), "lm_head.weight": (V, D)}
    for il in range(N_SARVAM):
        p = f"model.layers.{il}"
        shapes |= {f"{p}.{name}.weight": (D,) for name in ("input_layernorm", "post_attention_layernorm")}
        matrices: Shapes = {"query_key_value": ((HEADS + 2 * KV) * HEAD, D), "dense": (D, HEADS * HEAD)}
        matrices |= {"query_layernorm": (HEAD,), "key_layernorm": (HEAD,)}
        shapes |= {f"{p}.attention.{name}.weight": shape for name, shape in matrices.items()}
        shapes |= experts(f"{p}.mlp", "expert_bias") if il else gated(f"{p}.mlp", FF, NAMES)
    return shapes


SARVAM_MOE = Tiny(
    "sarvam-moe",
    {
        **head("Glm4Moe", "sarvam_moe"),
        **{name: value for name, value in _LATENT.items() if "rope_head" not in name and "nope" not in name},
        **_SARVAM,
        "head_dim": HEAD,
        "num_key_value_heads": KV,
        "moe_shared_expert_intermediate_size": FF_EXPERT,
        "rope_scaling": None,
        "rope_theta": 8000000.0,
        "score_function": "sigmoid",
        "use_qk_norm": True,
        "use_qkv_bias": False,
    },
    sarvam_moe_shapes,
)

CHECKPOINTS = (BAILING_HYBRID, SARVAM_MLA, SARVAM_MOE)
