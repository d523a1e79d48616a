"""A tiny checkpoint of MiniMax M3, made as those of seeded_checkpoints.py."""

from __future__ import annotations

from tests.cpu.convert.seeded_checkpoints import FF, FF_EXPERT, HEADS, N_EXPERT, USED, D, Shapes, Tiny, V, gated, head

N_LAYER, SPARSE, KV, HEAD, BLOCK, TOP_K = 3, (1, 2), 2, 32, 4, 5
"""SPARSE: layers with an indexer, which chooses TOP_K blocks."""
INDEX_SIZE = 32


def shapes() -> Shapes:
    """Names and shapes of all tensors of the text model."""
    root = "language_model.model"
    shapes: Shapes = {f"{root}.embed_tokens.weight": (V, D), f"{root}.norm.weight": (D,)}
    shapes["language_model.lm_head.weight"] = (V, D)
    for il in range(N_LAYER):
        p = f"{root}.layers.{il}"
        shapes |= {f"{p}.{name}.weight": (D,) for name in ("input_layernorm", "post_attention_layernorm")}
        matrices: Shapes = {"q_proj": (HEADS * HEAD, D), "k_proj": (KV * HEAD, D), "v_proj": (KV * HEAD, D)}
        matrices |= {"o_proj": (D, HEADS * HEAD), "q_norm": (HEAD,), "k_norm": (HEAD,)}
        if il in SPARSE:
            matrices |= {"index_q_proj": (KV * INDEX_SIZE, D), "index_k_proj": (INDEX_SIZE, D)}
            matrices |= {"index_q_norm": (INDEX_SIZE,), "index_k_norm": (INDEX_SIZE,)}
        shapes |= {f"{p}.self_attn.{name}.weight": shape for name, shape in matrices.items()}
        names = ("gate_proj", "up_proj", "down_proj")
        if il == 0:
            shapes |= gated(f"{p}.mlp", FF, names)
            continue
        p = f"{p}.block_sparse_moe"
        shapes |= {f"{p}.gate.weight": (N_EXPERT, D), f"{p}.e_score_correction_bias": (N_EXPERT,)}
        shapes |= gated(f"{p}.shared_experts", FF_EXPERT, names)
        for e in range(N_EXPERT):
            shapes |= gated(f"{p}.experts.{e}", FF_EXPERT, ("w1", "w3", "w2"))
    return shapes


TEXT = {
    "hidden_act": "swigluoai",
    "hidden_size": D,
    "dense_intermediate_size": FF,
    "intermediate_size": FF_EXPERT,
    "shared_intermediate_size": FF_EXPERT,
    "num_hidden_layers": N_LAYER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": HEAD,
    "num_local_experts": N_EXPERT,
    "num_experts_per_tok": USED,
    "routed_scaling_factor": 2.0,
    "moe_layer_freq": [0, *[1] * (N_LAYER - 1)],
    "sparse_attention_config": {
        "sparse_num_index_heads": KV,
        "sparse_index_dim": INDEX_SIZE,
        "sparse_block_size": BLOCK,
        "sparse_topk_blocks": TOP_K,
        "sparse_local_block": 1,
        "sparse_attention_freq": [int(il in SPARSE) for il in range(N_LAYER)],
    },
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "rotary_dim": HEAD // 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "model_type": "minimax_m3_vl_text",
    "vocab_size": V,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
}
MINIMAX_M3 = Tiny(
    "minimax-m3",
    {
        **head("MiniMaxM3", "minimax_m3_vl"),
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "text_config": TEXT,
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
        "projector_hidden_size": 32,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    shapes,
)
CHECKPOINTS = (MINIMAX_M3,)
