"""Tiny checkpoints made from a seed, in the names that models are published with.

scripts/make_seeded_golden.py records the logits that transformers gives for them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.cpu import checkpoints as made
from tests.cpu.deepseek4_checkpoints import bf16_values

V, D, HEADS, FF = 384, 64, 4, 96
N_EXPERT, USED, FF_EXPERT = 8, 3, 32
N_TOKENS = 70
Shapes = dict[str, tuple[int, ...]]

OUTER: Shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,), "lm_head.weight": (V, D)}


@dataclass(frozen=True)
class Tiny:
    """A kind of checkpoint: its config.json and the shapes of its tensors."""

    name: str
    config: dict[str, Any]
    shapes: Callable[[], Shapes]

    @property
    def golden(self) -> Path:
        """Rows (i32 [R]) and logits (f32 [R, C]) after these rows, of the first C tokens of the vocabulary."""
        return made.DATA / f"{self.name}.npz"


# Kimi Linear

N_LAYER, ATTENDS, SIZE, RANK, NOPE, ROT, VALUE, TAPS = 5, 4, 32, 64, 32, 32, 32, 4
"""ATTENDS: number of the layer that attends, counted from 1."""


def kimi_linear_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes = dict(OUTER)
    for il in range(N_LAYER):
        p = f"model.layers.{il}"
        shapes |= {f"{p}.{name}.weight": (D,) for name in ("input_layernorm", "post_attention_layernorm")}
        matrices: Shapes = {"o_proj": (D, HEADS * VALUE)}
        if il + 1 == ATTENDS:
            matrices |= {"q_proj": (HEADS * (NOPE + ROT), D), "kv_a_proj_with_mqa": (RANK + ROT, D)}
            matrices |= {"kv_b_proj": (HEADS * (NOPE + VALUE), RANK), "kv_a_layernorm": (RANK,)}
        else:
            n = HEADS * SIZE
            matrices |= {f"{x}_proj": (n, D) for x in "qkv"} | {f"{x}_conv1d": (n, 1, TAPS) for x in "qkv"}
            matrices |= {f"{x}_a_proj": (SIZE, D) for x in "fg"} | {f"{x}_b_proj": (n, SIZE) for x in "fg"}
            matrices |= {"b_proj": (HEADS, D), "o_norm": (SIZE,)}
            shapes |= {f"{p}.self_attn.A_log": (1, 1, HEADS, 1), f"{p}.self_attn.dt_bias": (n,)}
        shapes |= {f"{p}.self_attn.{name}.weight": shape for name, shape in matrices.items()}
        if il == 0:
            shapes |= gated(f"{p}.mlp", FF, ("gate_proj", "up_proj", "down_proj"))
            continue
        p = f"{p}.block_sparse_moe"
        shapes |= {f"{p}.gate.weight": (N_EXPERT, D), f"{p}.gate.e_score_correction_bias": (N_EXPERT,)}
        shapes |= gated(f"{p}.shared_experts", FF_EXPERT, ("gate_proj", "up_proj", "down_proj"))
        for e in range(N_EXPERT):
            shapes |= gated(f"{p}.experts.{e}", FF_EXPERT, ("w1", "w3", "w2"))
    return shapes


def gated(prefix: str, n: int, names: tuple[str, str, str]) -> Shapes:
    """Gate, up and down of a network."""
    gate, up, down = (f"{prefix}.{name}.weight" for name in names)
    return {gate: (n, D), up: (n, D), down: (D, n)}


KIMI_LINEAR = Tiny(
    "kimi-linear",
    {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
        "vocab_size": V,
        "hidden_size": D,
        "head_dim": 16,
        "hidden_act": "silu",
        "intermediate_size": FF,
        "kv_lora_rank": RANK,
        "linear_attn_config": {
            "full_attn_layers": [ATTENDS],
            "head_dim": SIZE,
            "kda_layers": [il for il in range(1, N_LAYER + 1) if il != ATTENDS],
            "num_heads": HEADS,
            "short_conv_kernel_size": TAPS,
        },
        "mla_use_nope": True,
        "model_max_length": 256,
        "moe_intermediate_size": FF_EXPERT,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": HEADS,
        "num_expert_group": 1,
        "num_experts": N_EXPERT,
        "num_experts_per_token": USED,
        "num_hidden_layers": N_LAYER,
        "num_key_value_heads": HEADS,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROT,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 2.446,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_grouped_topk": True,
        "v_head_dim": VALUE,
        "torch_dtype": "bfloat16",
    },
    kimi_linear_shapes,
)

# LFM2

KV, HEAD, LFM2_TAPS = 2, 16, 3
FF_GIVEN, FF_UNIT = 130, 32
"""Two thirds of the width that the configuration gives, in whole units, are FF."""
N_LFM2, N_DENSE, LFM2_ATTENDS = 4, 1, (1, 3)


def lfm2_shapes(*, experts: bool) -> Shapes:
    """Names and shapes of all tensors."""
    shapes: Shapes = {"model.embed_tokens.weight": (V, D), "model.embedding_norm.weight": (D,)}
    for il in range(N_LFM2):
        p = f"model.layers.{il}"
        shapes |= {f"{p}.{name}.weight": (D,) for name in ("operator_norm", "ffn_norm")}
        if il in LFM2_ATTENDS:
            heads = {"q_proj": (HEADS * HEAD, D), "k_proj": (KV * HEAD, D), "v_proj": (KV * HEAD, D)}
            heads |= {"out_proj": (D, HEADS * HEAD), "q_layernorm": (HEAD,), "k_layernorm": (HEAD,)}
            shapes |= {f"{p}.self_attn.{name}.weight": shape for name, shape in heads.items()}
        else:
            parts = {"in_proj": (3 * D, D), "conv": (D, 1, LFM2_TAPS), "out_proj": (D, D)}
            shapes |= {f"{p}.conv.{name}.weight": shape for name, shape in parts.items()}
        p = f"{p}.feed_forward"
        if not experts or il < N_DENSE:
            shapes |= gated(p, FF, ("w1", "w3", "w2"))
            continue
        shapes |= {f"{p}.gate.weight": (N_EXPERT, D), f"{p}.expert_bias": (N_EXPERT,)}
        for e in range(N_EXPERT):
            shapes |= gated(f"{p}.experts.{e}", FF_EXPERT, ("w1", "w3", "w2"))
    return shapes


_LFM2: dict[str, Any] = {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": N_LFM2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "max_position_embeddings": 256,
    "norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "conv_L_cache": LFM2_TAPS,
    "conv_bias": False,
    "torch_dtype": "bfloat16",
}
LFM2 = Tiny(
    "lfm2",
    {
        **_LFM2,
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "block_auto_adjust_ff_dim": True,
        "block_dim": D,
        "block_ff_dim": FF_GIVEN,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": FF_UNIT,
        "block_norm_eps": 1e-5,
        "full_attn_idxs": list(LFM2_ATTENDS),
        "num_heads": HEADS,
        "use_pos_enc": True,
    },
    lambda: lfm2_shapes(experts=False),
)
LFM2_MOE = Tiny(
    "lfm2-moe",
    {
        **_LFM2,
        "architectures": ["Lfm2MoeForCausalLM"],
        "model_type": "lfm2_moe",
        "intermediate_size": FF,
        "moe_intermediate_size": FF_EXPERT,
        "layer_types": ["full_attention" if il in LFM2_ATTENDS else "conv" for il in range(N_LFM2)],
        "norm_topk_prob": True,
        "num_dense_layers": N_DENSE,
        "num_experts": N_EXPERT,
        "num_experts_per_tok": USED,
        "routed_scaling_factor": 1.0,
        "tie_embedding": True,
        "use_expert_bias": True,
    },
    lambda: lfm2_shapes(experts=True),
)

# Mistral Small 4

N_MISTRAL4, Q_RANK, STRETCHED = 3, 32, 16
"""STRETCHED: tokens of the original context, after as many of which queries grow."""


def mistral4_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes = dict(OUTER)
    for il in range(N_MISTRAL4):
        p = f"model.layers.{il}"
        shapes |= {f"{p}.{name}.weight": (D,) for name in ("input_layernorm", "post_attention_layernorm")}
        matrices = {"q_a_proj": (Q_RANK, D), "q_b_proj": (HEADS * (NOPE + ROT), Q_RANK), "o_proj": (D, HEADS * VALUE)}
        matrices |= {"kv_a_proj_with_mqa": (RANK + ROT, D), "kv_b_proj": (HEADS * (NOPE + VALUE), RANK)}
        shapes |= {f"{p}.self_attn.{name}.weight": shape for name, shape in matrices.items()}
        shapes |= {f"{p}.self_attn.q_a_layernorm.weight": (Q_RANK,), f"{p}.self_attn.kv_a_layernorm.weight": (RANK,)}
        names = ("gate_proj", "up_proj", "down_proj")
        if il == 0:
            shapes |= gated(f"{p}.mlp", FF, names)
            continue
        shapes |= {f"{p}.mlp.gate.weight": (N_EXPERT, D), **gated(f"{p}.mlp.shared_experts", FF_EXPERT, names)}
        shapes[f"{p}.mlp.experts.gate_up_proj"] = (N_EXPERT, 2 * FF_EXPERT, D)
        shapes[f"{p}.mlp.experts.down_proj"] = (N_EXPERT, D, FF_EXPERT)
    return shapes


MISTRAL4 = Tiny(
    "mistral4",
    {
        "architectures": ["Mistral4ForCausalLM"],
        "model_type": "mistral4",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
        "vocab_size": V,
        "hidden_size": D,
        "hidden_act": "silu",
        "intermediate_size": FF,
        "moe_intermediate_size": FF_EXPERT,
        "num_hidden_layers": N_MISTRAL4,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "n_routed_experts": N_EXPERT,
        "n_shared_experts": 1,
        "num_experts_per_tok": USED,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": Q_RANK,
        "kv_lora_rank": RANK,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROT,
        "v_head_dim": VALUE,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_interleave": True,
        "rope_parameters": {
            "type": "yarn",
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": STRETCHED,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    mistral4_shapes,
)

# Mamba-2: Nemotron-H, Granite 4.0 H

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
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "vocab_size": V,
    "hidden_size": D,
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
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
        "vocab_size": V,
        "hidden_size": D,
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
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
        "vocab_size": V,
        "hidden_size": D,
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
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
        "vocab_size": V,
        "hidden_size": D,
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
    KIMI_LINEAR,
    LFM2,
    LFM2_MOE,
    MISTRAL4,
    NEMOTRON_H,
    NEMOTRON_H_MOE,
    GRANITE_HYBRID,
    GRANITE_HYBRID_MOE,
    GRANITE_SHARED,
    FALCON_H1,
    MAMBA2,
)
IS_F32 = ("A_log", "bias")


def weights(tiny: Tiny) -> dict[str, np.ndarray]:
    """Tensors f32 by name, rounded to bf16 where repositories have it."""
    random = np.random.RandomState(7)  # its numbers never change
    made_weights = {}
    for name, shape in sorted(tiny.shapes().items()):
        values = random.standard_normal(shape)
        if "norm" in name:
            values = 1 + 0.2 * values
        elif name.endswith("A_log"):
            values = np.log(1 + 3 * random.random_sample(shape))
        elif name.endswith("bias"):
            values = 0.3 * values
        elif "embed" not in name:
            values *= 1.5 / math.sqrt(shape[-1])
        made_weights[name] = values.astype(np.float32) if name.endswith(IS_F32) else bf16_values(values)
    return made_weights


def tokens() -> np.ndarray:
    """The tokens i32 [T] of the golden logits."""
    return np.random.RandomState(6).randint(0, V, N_TOKENS).astype(np.int32)


def entry(name: str, values: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    """A tensor as it is stored."""
    return ("F32", values.shape, values.tobytes()) if name.endswith(IS_F32) else made.bf16(values)


def write(tiny: Tiny, folder: Path, **config: Any) -> Path:
    """The checkpoint with the tokenizer of DeepSeek V3; config: further values of config.json."""
    made.copy("deepseek-v3", folder.parent).rename(folder)
    (folder / "golden.npz").unlink()
    (folder / "config.json").write_text(json.dumps({**tiny.config, **config}))
    stored = {name: entry(name, values) for name, values in weights(tiny).items()}
    made.write_tensors(folder / "model.safetensors", stored)
    return folder
