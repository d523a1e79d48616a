"""A tiny checkpoint of GLM-5.3 Flash, made as those of seeded_checkpoints.py."""

from __future__ import annotations

from tests.cpu.convert.seeded_checkpoints import FF, FF_EXPERT, HEADS, N_EXPERT, USED, D, Shapes, Tiny, V, gated, head

N_LAYER, ATTENDS, RANK, Q_RANK, NOPE, VALUE = 5, (1, 3), 64, 32, 32, 32
SIZE, TAPS, STREAMS, POOL, TOP_K = 32, 4, 4, 4, 16
INDEX_HEADS, INDEX_SIZE = 16, 32
"""ATTENDS: layers of latent attention."""
_NAMES = ("gate_proj", "up_proj", "down_proj")


def _linear(p: str) -> Shapes:
    n = HEADS * SIZE
    shapes: Shapes = {f"{p}.{x}_proj.weight": (n, D) for x in "qkv"}
    shapes |= {f"{p}.{x}_conv1d.weight": (n, 1, TAPS) for x in "qkv"}
    shapes |= {f"{p}.{x}_a_proj.weight": (SIZE, D) for x in "fg"} | {f"{p}.{x}_b_proj.weight": (n, SIZE) for x in "fg"}
    shapes |= {f"{p}.A_log": (HEADS,), f"{p}.dt_bias": (n,), f"{p}.b_proj.weight": (HEADS, D)}
    return shapes | {f"{p}.o_norm.weight": (SIZE,), f"{p}.o_proj.weight": (D, n)}


def _indexed(p: str) -> Shapes:
    matrices: Shapes = {
        "q_a_proj": (Q_RANK, D),
        "q_a_layernorm": (Q_RANK,),
        "q_b_proj": (HEADS * NOPE, Q_RANK),
        "kv_a_proj_with_mqa": (RANK, D),
        "kv_a_layernorm": (RANK,),
        "kv_b_proj": (HEADS * (NOPE + VALUE), RANK),
        "o_proj": (D, HEADS * VALUE),
        "indexer.wq_b": (INDEX_HEADS * INDEX_SIZE, Q_RANK),
        "indexer.wk": (INDEX_SIZE, D),
        "indexer.k_norm": (INDEX_SIZE,),
        "indexer.weights_proj": (INDEX_HEADS, D),
    }
    shapes = {f"{p}.{name}.weight": shape for name, shape in matrices.items()}
    return shapes | {
        f"{p}.indexer.k_norm.bias": (INDEX_SIZE,),
        f"{p}.indexer.index_kpool_compress_ape": (POOL, INDEX_SIZE),
        f"{p}.indexer.index_kpool_compress_gate": (INDEX_SIZE, D),
    }


def shapes() -> Shapes:
    """Names and shapes of all tensors of the text model."""
    root, mixes = "model.language_model", (2 + STREAMS) * STREAMS
    shapes: Shapes = {f"{root}.embed_tokens.weight": (V, D), f"{root}.norm.weight": (D,), "lm_head.weight": (V, D)}
    for il in range(N_LAYER):
        p = f"{root}.layers.{il}"
        shapes |= {f"{p}.{name}.weight": (D,) for name in ("input_layernorm", "post_attention_layernorm")}
        for branch in ("attn", "ffn"):
            shapes |= {f"{p}.hc_{branch}_fn": (mixes, STREAMS * D), f"{p}.hc_{branch}_base": (mixes,)}
            shapes[f"{p}.hc_{branch}_scale"] = (3,)
        shapes |= (_indexed if il in ATTENDS else _linear)(f"{p}.self_attn")
        if il == 0:
            shapes |= gated(f"{p}.mlp", FF, _NAMES)
            continue
        shapes |= {f"{p}.mlp.gate.weight": (N_EXPERT, D), f"{p}.mlp.gate.e_score_correction_bias": (N_EXPERT,)}
        shapes |= gated(f"{p}.mlp.shared_experts", FF_EXPERT, _NAMES)
        for e in range(N_EXPERT):
            shapes |= gated(f"{p}.mlp.experts.{e}", FF_EXPERT, _NAMES)
    return shapes


TEXT = {
    "hidden_act": "silu",
    "hidden_size": D,
    "intermediate_size": FF,
    "moe_intermediate_size": FF_EXPERT,
    "num_hidden_layers": N_LAYER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "n_routed_experts": N_EXPERT,
    "n_shared_experts": 1,
    "num_experts_per_tok": USED,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": RANK,
    "q_lora_rank": Q_RANK,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": 0,
    "v_head_dim": VALUE,
    "head_dim": 0,
    "linear_head_dim": SIZE,
    "linear_num_heads": HEADS,
    "linear_conv_kernel_dim": TAPS,
    "linear_lower_bound": -5.0,
    "layer_types": ["indexed_attention" if il in ATTENDS else "linear_attention" for il in range(N_LAYER)],
    "mlp_layer_types": ["dense", *["sparse"] * (N_LAYER - 1)],
    "index_topk": TOP_K,
    "index_head_dim": INDEX_SIZE,
    "index_n_heads": INDEX_HEADS,
    "index_kpool": POOL,
    "index_kpool_always_select_tail": True,
    "indexer_types": ["full"] * N_LAYER,
    "swiglu_limit": 1.0,
    "hc_mult": STREAMS,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "model_type": "glm5_next_text",
    "vocab_size": V,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
}
GLM5_NEXT = Tiny(
    "glm5-next",
    {
        **head("Glm5Next", "glm5_next"),
        "architectures": ["Glm5NextForConditionalGeneration"],
        "text_config": TEXT,
        "vision_config": {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": D},
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    shapes,
)
CHECKPOINTS = (GLM5_NEXT,)
