"""A tiny checkpoint of dots3 note, made as those of seeded_checkpoints.py."""

from __future__ import annotations

from tests.cpu.convert.seeded_checkpoints import (
    FF,
    FF_EXPERT,
    HEADS,
    N_EXPERT,
    OUTER,
    USED,
    D,
    Shapes,
    Tiny,
    gated,
    head,
)

KINDS = ("indexed_attention", "sliding_attention", "indexed_attention", "sliding_attention")
WINDOW, TOP_K, INDEX_HEADS, INDEX_SIZE, Q_RANK = 9, 12, 16, 32, 32
RANK, NOPE, ROT, VALUE = 64, 32, 16, 32
LOCAL_HEADS, LOCAL_RANK, LOCAL_NOPE = 2, 96, 64


def shapes() -> Shapes:
    """Names and shapes of all tensors of the text model."""
    shapes = dict(OUTER)
    names = ("gate_proj", "up_proj", "down_proj")
    for il, kind in enumerate(KINDS):
        p = f"model.layers.{il}"
        shapes |= {f"{p}.{name}.weight": (D,) for name in ("input_layernorm", "post_attention_layernorm")}
        local = kind == "sliding_attention"
        heads, rank, nope = (LOCAL_HEADS, LOCAL_RANK, LOCAL_NOPE) if local else (HEADS, RANK, NOPE)
        matrices: Shapes = {
            "q_a_proj": (Q_RANK, D),
            "q_a_layernorm": (Q_RANK,),
            "q_b_proj": (heads * (nope + ROT), Q_RANK),
            "kv_a_proj_with_mqa": (rank + ROT, D),
            "kv_a_layernorm": (rank,),
            "k_rope_only_layernorm": (ROT,),
            "kv_b_proj": (heads * (nope + VALUE), rank),
            "g_proj": (heads, D),
            "o_proj": (D, heads * VALUE),
        }
        if not local:
            matrices |= {"indexer.wq_b": (INDEX_HEADS * INDEX_SIZE, Q_RANK), "indexer.wk": (INDEX_SIZE, D)}
            matrices |= {"indexer.k_norm": (INDEX_SIZE,), "indexer.weights_proj": (INDEX_HEADS, D)}
            shapes[f"{p}.self_attn.indexer.k_norm.bias"] = (INDEX_SIZE,)
        shapes |= {f"{p}.self_attn.{name}.weight": shape for name, shape in matrices.items()}
        if il == 0:
            shapes |= gated(f"{p}.mlp", FF, names)
            continue
        shapes |= {f"{p}.mlp.gate.weight": (N_EXPERT, D), f"{p}.mlp.gate.e_score_correction_bias": (N_EXPERT,)}
        shapes |= gated(f"{p}.mlp.shared_experts", FF_EXPERT, names)
        for e in range(N_EXPERT):
            shapes |= gated(f"{p}.mlp.experts.{e}", FF_EXPERT, names)
    return shapes


DOTS3_NOTE = Tiny(
    "dots3note",
    {
        **head("Dots3Note", "dots3_note_text"),
        "hidden_act": "silu",
        "intermediate_size": FF,
        "moe_intermediate_size": FF_EXPERT,
        "moe_shared_expert_intermediate_size": FF_EXPERT,
        "num_hidden_layers": len(KINDS),
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "n_routed_experts": N_EXPERT,
        "n_shared_experts": 1,
        "num_experts_per_tok": USED,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": Q_RANK,
        "kv_lora_rank": RANK,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROT,
        "v_head_dim": VALUE,
        "head_dim": NOPE + ROT,
        "swa_num_attention_heads": LOCAL_HEADS,
        "swa_num_key_value_heads": LOCAL_HEADS,
        "swa_q_lora_rank": Q_RANK,
        "swa_kv_lora_rank": LOCAL_RANK,
        "swa_head_dim": LOCAL_NOPE + ROT,
        "swa_qk_nope_head_dim": LOCAL_NOPE,
        "swa_v_head_dim": VALUE,
        "layer_types": list(KINDS),
        "sliding_window_size": WINDOW,
        "index_topk": TOP_K,
        "index_head_dim": INDEX_SIZE,
        "index_n_heads": INDEX_HEADS,
        "rope_theta": 10000.0,
        "swa_rope_theta": 500.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    shapes,
)
CHECKPOINTS = (DOTS3_NOTE,)
