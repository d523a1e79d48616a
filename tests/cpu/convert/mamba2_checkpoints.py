"""Tiny checkpoints with layers of Mamba-2, made as those of seeded_checkpoints.py."""

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

M_HEADS, M_SIZE, M_GROUPS, M_STATE, M_TAPS = 8, 16, 2, 32, 4
LATENT, FF_SHARED = 32, 64


def mamba2_shapes(prefix: str, n_groups: int) -> Shapes:
    """A layer of Mamba-2."""
    inner = M_HEADS * M_SIZE
    channels = inner + 2 * n_groups * M_STATE
    return {
        f"{prefix}.in_proj.weight": (inner + channels + M_HEADS, D),
        f"{prefix}.conv1d.weight": (channels, 1, M_TAPS),
        f"{prefix}.conv1d.bias": (channels,),
        f"{prefix}.norm.weight": (inner,),
        f"{prefix}.out_proj.weight": (D, inner),
        **{f"{prefix}.{name}": (M_HEADS,) for name in ("A_log", "D", "dt_bias")},
    }


def nemotron_h_shapes(pattern: str, *, latent: int = 0) -> Shapes:
    """Names and shapes of all tensors; pattern: a letter per layer, as in configurations."""
    shapes: Shapes = {"backbone.embeddings.weight": (V, D), "backbone.norm_f.weight": (D,), "lm_head.weight": (V, D)}
    for il, kind in enumerate(pattern):
        p = f"backbone.layers.{il}"
        shapes[f"{p}.norm.weight"] = (D,)
        p = f"{p}.mixer"
        if kind == "M":
            shapes |= mamba2_shapes(p, M_GROUPS)
        elif kind == "*":
            heads = {"q_proj": (HEADS * HEAD, D), "k_proj": (KV * HEAD, D), "v_proj": (KV * HEAD, D)}
            shapes |= {f"{p}.{name}.weight": shape for name, shape in heads.items()}
            shapes[f"{p}.o_proj.weight"] = (D, HEADS * HEAD)
        elif kind == "-":
            shapes |= {f"{p}.up_proj.weight": (FF, D), f"{p}.down_proj.weight": (D, FF)}
        else:
            n = latent or D
            shapes |= {f"{p}.gate.weight": (N_EXPERT, D), f"{p}.gate.e_score_correction_bias": (N_EXPERT,)}
            shapes |= {f"{p}.shared_experts.up_proj.weight": (FF_SHARED, D)}
            shapes |= {f"{p}.shared_experts.down_proj.weight": (D, FF_SHARED)}
            if latent:
                shapes |= {f"{p}.fc1_latent_proj.weight": (n, D), f"{p}.fc2_latent_proj.weight": (D, n)}
            for e in range(N_EXPERT):
                shapes[f"{p}.experts.{e}.up_proj.weight"] = (FF_EXPERT, n)
                shapes[f"{p}.experts.{e}.down_proj.weight"] = (n, FF_EXPERT)
    return shapes


_NEMOTRON_H: dict[str, Any] = {
    **head("NemotronH", "nemotron_h"),
    "intermediate_size": FF,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": HEAD,
    "max_position_embeddings": 256,
    "layer_norm_epsilon": 1e-5,
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "mamba_num_heads": M_HEADS,
    "mamba_head_dim": M_SIZE,
    "n_groups": M_GROUPS,
    "ssm_state_size": M_STATE,
    "conv_kernel": M_TAPS,
    "expand": 2,
    "use_conv_bias": True,
    "time_step_min": 0.0,
    "chunk_size": 16,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
DENSE_PATTERN, EXPERT_PATTERN = "M-M*-", "MEM*E"
NEMOTRON_H = Tiny(
    "nemotron-h",
    {**_NEMOTRON_H, "hybrid_override_pattern": DENSE_PATTERN, "num_hidden_layers": len(DENSE_PATTERN)},
    lambda: nemotron_h_shapes(DENSE_PATTERN),
)
NEMOTRON_H_MOE = Tiny(
    "nemotron-h-moe",
    {
        **_NEMOTRON_H,
        "hybrid_override_pattern": EXPERT_PATTERN,
        "num_hidden_layers": len(EXPERT_PATTERN),
        "n_routed_experts": N_EXPERT,
        "n_shared_experts": 1,
        "num_experts_per_tok": USED,
        "moe_intermediate_size": FF_EXPERT,
        "moe_shared_expert_intermediate_size": FF_SHARED,
        "moe_latent_size": LATENT,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    lambda: nemotron_h_shapes(EXPERT_PATTERN, latent=LATENT),
)
GRANITE_KINDS = ["mamba", "attention", "mamba"]


def granite_hybrid_shapes(kinds: list[str], *, experts: bool) -> Shapes:
    """Names and shapes of all tensors."""
    shapes: Shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    for il, kind in enumerate(kinds):
        p = f"model.layers.{il}"
        shapes |= {f"{p}.{name}.weight": (D,) for name in ("input_layernorm", "post_attention_layernorm")}
        if kind == "attention":
            heads = {"q_proj": (HEADS * HEAD, D), "k_proj": (KV * HEAD, D), "v_proj": (KV * HEAD, D)}
            shapes |= {f"{p}.self_attn.{name}.weight": shape for name, shape in heads.items()}
            shapes[f"{p}.self_attn.o_proj.weight"] = (D, HEADS * HEAD)
        else:
            shapes |= mamba2_shapes(f"{p}.mamba", 1)
        shapes |= {f"{p}.shared_mlp.input_linear.weight": (2 * FF_SHARED, D)}
        shapes |= {f"{p}.shared_mlp.output_linear.weight": (D, FF_SHARED)}
        if experts:
            p = f"{p}.block_sparse_moe"
            shapes |= {f"{p}.router.layer.weight": (N_EXPERT, D)}
            shapes |= {f"{p}.input_linear.weight": (N_EXPERT, 2 * FF_EXPERT, D)}
            shapes |= {f"{p}.output_linear.weight": (N_EXPERT, D, FF_EXPERT)}
    return shapes


def granite_hybrid(name: str, kinds: list[str], *, experts: bool, rotated: bool) -> Tiny:
    """A kind of Granite 4.0."""
    config = {
        **head("GraniteMoeHybrid", "granitemoehybrid"),
        "hidden_act": "silu",
        "intermediate_size": FF_EXPERT,
        "shared_intermediate_size": FF_SHARED,
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "num_local_experts": N_EXPERT if experts else 0,
        "num_experts_per_tok": USED if experts else 0,
        "max_position_embeddings": 256,
        "position_embedding_type": "rope" if rotated else "nope",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.6,
        "mamba_chunk_size": 16,
        "mamba_conv_bias": True,
        "mamba_d_conv": M_TAPS,
        "mamba_d_head": M_SIZE,
        "mamba_d_state": M_STATE,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": M_HEADS,
        "mamba_proj_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    return Tiny(name, config, lambda: granite_hybrid_shapes(kinds, experts=experts))


GRANITE_HYBRID = granite_hybrid("granite-hybrid", GRANITE_KINDS, experts=False, rotated=False)
GRANITE_HYBRID_MOE = granite_hybrid("granite-hybrid-moe", GRANITE_KINDS, experts=True, rotated=False)
GRANITE_SHARED = granite_hybrid("granite-shared", ["attention"] * 2, experts=False, rotated=True)

# Falcon-H1


def falcon_h1_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes: Shapes = {
        "model.embed_tokens.weight": (V, D),
        "model.final_layernorm.weight": (D,),
        "lm_head.weight": (V, D),
    }
    for il in range(2):
        p = f"model.layers.{il}"
        shapes |= {f"{p}.{name}.weight": (D,) for name in ("input_layernorm", "pre_ff_layernorm")}
        heads = {"q_proj": (HEADS * HEAD, D), "k_proj": (KV * HEAD, D), "v_proj": (KV * HEAD, D)}
        shapes |= {f"{p}.self_attn.{name}.weight": shape for name, shape in heads.items()}
        shapes[f"{p}.self_attn.o_proj.weight"] = (D, HEADS * HEAD)
        shapes |= {k: v for k, v in mamba2_shapes(f"{p}.mamba", M_GROUPS).items() if not k.endswith("norm.weight")}
        shapes |= gated(f"{p}.feed_forward", FF, ("gate_proj", "up_proj", "down_proj"))
    return shapes


FALCON_H1 = Tiny(
    "falcon-h1",
    {
        **head("FalconH1", "falcon_h1"),
        "hidden_act": "silu",
        "intermediate_size": FF,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": HEAD,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e11,
        "mamba_chunk_size": 16,
        "mamba_conv_bias": True,
        "mamba_d_conv": M_TAPS,
        "mamba_d_head": M_SIZE,
        "mamba_d_ssm": M_HEADS * M_SIZE,
        "mamba_d_state": M_STATE,
        "mamba_expand": 2,
        "mamba_n_groups": M_GROUPS,
        "mamba_n_heads": M_HEADS,
        "mamba_norm_before_gate": False,
        "mamba_proj_bias": False,
        "mamba_rms_norm": False,
        "attention_in_multiplier": 1.25,
        "attention_out_multiplier": 0.75,
        "embedding_multiplier": 2.5,
        "key_multiplier": 0.5,
        "lm_head_multiplier": 3.0,
        "mlp_multipliers": [0.8, 0.4],
        "ssm_in_multiplier": 1.5,
        "ssm_multipliers": [0.9, 1.2, 0.7, 0.6, 1.1],
        "ssm_out_multiplier": 0.65,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    falcon_h1_shapes,
)

# Mamba-2 alone


def mamba2_alone_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes: Shapes = {"backbone.embeddings.weight": (V, D), "backbone.norm_f.weight": (D,), "lm_head.weight": (V, D)}
    for il in range(2):
        shapes[f"backbone.layers.{il}.norm.weight"] = (D,)
        shapes |= mamba2_shapes(f"backbone.layers.{il}.mixer", M_GROUPS)
    return shapes


MAMBA2 = Tiny(
    "mamba2",
    {
        **head("Mamba2", "mamba2"),
        "hidden_act": "silu",
        "num_hidden_layers": 2,
        "num_heads": M_HEADS,
        "head_dim": M_SIZE,
        "n_groups": M_GROUPS,
        "state_size": M_STATE,
        "conv_kernel": M_TAPS,
        "expand": 2,
        "chunk_size": 16,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    mamba2_alone_shapes,
)

CHECKPOINTS = (
    NEMOTRON_H,
    NEMOTRON_H_MOE,
    GRANITE_HYBRID,
    GRANITE_HYBRID_MOE,
    GRANITE_SHARED,
    FALCON_H1,
    MAMBA2,
)
