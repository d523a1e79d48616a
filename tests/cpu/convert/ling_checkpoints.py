"""Tiny checkpoints of Ling 3.0 and of models that become files of older architectures, made as those of
seeded_checkpoints.py.
"""

from __future__ import annotations

from typing import Any

from tests.cpu.convert.seeded_checkpoints import (
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

# Step 3.7

STEP_KINDS = ("full_attention", "sliding_attention", "sliding_attention", "full_attention")
N_STEP, STEP_HEAD, STEP_HEADS, STEP_SEEN, IMAGE = len(STEP_KINDS), 32, (2, 3), 16, 16
"""STEP_HEADS: of full layers and of those with a window of STEP_SEEN tokens; IMAGE: width of the vision tower."""


def step37_shapes() -> Shapes:
    """Names and shapes of all tensors, those of the vision tower included."""
    shapes = dict(OUTER)
    for il, kind in enumerate(STEP_KINDS):
        p, n_heads = f"model.layers.{il}", STEP_HEADS[kind == STEP_KINDS[1]]
        shapes |= {f"{p}.{name}.weight": (D,) for name in ("input_layernorm", "post_attention_layernorm")}
        n = n_heads * STEP_HEAD
        matrices: Shapes = {"q_proj": (n, D), "o_proj": (D, n), "k_proj": (STEP_HEAD, D), "v_proj": (STEP_HEAD, D)}
        matrices |= {"g_proj": (n_heads, D), "q_norm": (STEP_HEAD,), "k_norm": (STEP_HEAD,)}
        shapes |= {f"{p}.self_attn.{name}.weight": shape for name, shape in matrices.items()}
        if il == 0:
            shapes |= gated(f"{p}.mlp", FF, NAMES)
            continue
        stacks = gated(f"{p}.moe", FF_EXPERT, NAMES)
        shapes |= {name: (N_EXPERT, *shape) for name, shape in stacks.items()}
        shapes |= {f"{p}.moe.gate.weight": (N_EXPERT, D), f"{p}.moe.router_bias": (N_EXPERT,)}
        shapes |= gated(f"{p}.share_expert", FF_EXPERT, NAMES)
    return shapes | vision_shapes()


def vision_shapes() -> Shapes:
    """A vision tower of one layer."""
    n, p = IMAGE, "vision_model.transformer.resblocks.0"
    shapes: Shapes = {
        "vision_model.conv1.weight": (n, 3, 14, 14),
        "vision_model.positional_embedding": (4, n),
        "vision_model.vit_downsampler1.weight": (2 * n, n, 3, 3),
        "vision_model.vit_downsampler1.bias": (2 * n,),
        "vision_model.vit_downsampler2.weight": (4 * n, 2 * n, 3, 3),
        "vision_model.vit_downsampler2.bias": (4 * n,),
        "vit_large_projector.weight": (D, 4 * n),
        f"{p}.attn.in_proj_weight": (3 * n, n),
        f"{p}.attn.in_proj_bias": (3 * n,),
    }
    for name, shape in {"attn.out_proj": (n, n), "mlp.c_fc": (2 * n, n), "mlp.c_proj": (n, 2 * n)}.items():
        shapes |= {f"{p}.{name}.weight": shape, f"{p}.{name}.bias": shape[:1]}
    for name in ("vision_model.ln_pre", f"{p}.ln_1", f"{p}.ln_2"):
        shapes |= {f"{name}.weight": (n,), f"{name}.bias": (n,)}
    return shapes | {f"{p}.ls_{i}.gamma": (n,) for i in (1, 2)}


STEP37 = Tiny(
    "step37",
    {
        "architectures": ["Step3p7ForConditionalGeneration"],
        "model_type": "step3p7",
        "image_token_id": 5,
        "tie_word_embeddings": False,
        "vision_config": {
            "width": IMAGE,
            "layers": 1,
            "heads": 2,
            "image_size": 28,
            "patch_size": 14,
            "mlp_ratio": 2.0,
            "model_type": "step3p5_vision",
        },
        "text_config": {
            "model_type": "step3p5",
            "vocab_size": V,
            "hidden_size": D,
            "intermediate_size": FF,
            "num_hidden_layers": N_STEP,
            "num_attention_heads": STEP_HEADS[0],
            "num_attention_groups": 1,
            "head_dim": STEP_HEAD,
            "layer_types": [*STEP_KINDS, "full_attention"],
            "num_nextn_predict_layers": 1,
            "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 0.5],
            "rope_theta": [5000000.0, 10000.0, 10000.0, 5000000.0, 5000000.0],
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 2.0,
                "original_max_position_embeddings": 64,
                "low_freq_factor": 1.0,
                "high_freq_factor": 32.0,
            },
            "yarn_only_types": ["full_attention"],
            "attention_other_setting": {
                "attention_type": "sliding_attention",
                "num_attention_heads": STEP_HEADS[1],
                "num_attention_groups": 1,
                "head_dim": STEP_HEAD,
            },
            "moe_layers_enum": "1,2,3",
            "moe_num_experts": N_EXPERT,
            "moe_top_k": USED,
            "moe_intermediate_size": FF_EXPERT,
            "moe_router_scaling_factor": 2.0,
            "share_expert_dim": FF_EXPERT,
            "sliding_window": STEP_SEEN,
            "swiglu_limits": [0.0, 0.0, 0.5, None, 0.0],
            "swiglu_limits_shared": [0.0, 0.0, 0.0, 0.7, 0.0],
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5,
        },
    },
    step37_shapes,
)

CHECKPOINTS = (BAILING_HYBRID, SARVAM_MLA, SARVAM_MOE, STEP37)
