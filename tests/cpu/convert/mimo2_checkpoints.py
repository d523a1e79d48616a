"""A tiny MiMo-V2-Flash in the names of its repository."""

from __future__ import annotations

from typing import Any

from tests.cpu.convert.seeded_checkpoints import FF, FF_EXPERT, HEADS, N_EXPERT, USED, D, Shapes, Tiny, V, gated, head

N, KV, KV_WINDOW, KEY, VALUE, WINDOW = 6, 1, 2, 96, 32, 8
PATTERN = [0, 1, 1, 1, 1, 0]
NAMES = ("gate_proj", "up_proj", "down_proj")


def attention(p: str, *, window: bool) -> Shapes:
    """Norms of a layer, projections, sinks."""
    kv = KV_WINDOW if window else KV
    rows = {"q_proj": HEADS * KEY, "k_proj": kv * KEY, "v_proj": kv * VALUE}
    shapes: Shapes = {f"{p}.self_attn.{name}.weight": (n, D) for name, n in rows.items()}
    shapes[f"{p}.self_attn.o_proj.weight"] = (D, HEADS * VALUE)
    return shapes | ({f"{p}.self_attn.attention_sink_bias": (HEADS,)} if window else {})


def shapes() -> Shapes:
    """Names and shapes of all tensors."""
    found: Shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,), "lm_head.weight": (V, D)}
    for il, window in enumerate(PATTERN):
        p = f"model.layers.{il}"
        found |= {f"{p}.{name}.weight": (D,) for name in ("input_layernorm", "post_attention_layernorm")}
        found |= attention(p, window=bool(window))
        p = f"{p}.mlp"
        if il == 0:
            found |= gated(p, FF, NAMES)
            continue
        found |= {f"{p}.gate.weight": (N_EXPERT, D), f"{p}.gate.e_score_correction_bias": (N_EXPERT,)}
        for e in range(N_EXPERT):
            found |= gated(f"{p}.experts.{e}", FF_EXPERT, NAMES)
    return found


def layer_shapes(number: int) -> Shapes:
    """Those of a layer that predicts further tokens."""
    p = f"model.mtp.layers.{number}"
    norms = ("enorm", "hnorm", "input_layernorm", "pre_mlp_layernorm", "final_layernorm")
    found: Shapes = {f"{p}.{name}.weight": (D,) for name in norms} | {f"{p}.eh_proj.weight": (D, 2 * D)}
    return found | attention(p, window=True) | gated(f"{p}.mlp", FF, NAMES)


CONFIG: dict[str, Any] = {
    **head("MiMoV2Flash", "mimo_v2_flash"),
    "hidden_act": "silu",
    "intermediate_size": FF,
    "moe_intermediate_size": FF_EXPERT,
    "num_hidden_layers": N,
    "num_attention_heads": HEADS,
    "swa_num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "swa_num_key_value_heads": KV_WINDOW,
    "head_dim": KEY,
    "swa_head_dim": KEY,
    "v_head_dim": VALUE,
    "swa_v_head_dim": VALUE,
    "n_routed_experts": N_EXPERT,
    "n_shared_experts": None,
    "num_experts_per_tok": USED,
    "routed_scaling_factor": None,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "hybrid_layer_pattern": PATTERN,
    "moe_layer_freq": [0, 1, 1, 1, 1, 1],
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW,
    "attention_value_scale": 0.707,
    "attention_bias": False,
    "layernorm_epsilon": 1e-5,
    "partial_rotary_factor": 0.334,
    "rope_theta": 5e6,
    "swa_rope_theta": 1e4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
MIMO2 = Tiny("mimo-v2-flash", CONFIG, shapes)
CHECKPOINTS = (MIMO2,)
