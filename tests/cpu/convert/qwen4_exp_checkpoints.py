"""A tiny checkpoint of Qwen4-Exp, made as those of seeded_checkpoints.py."""

from __future__ import annotations

from tests.cpu.convert.seeded_checkpoints import (
    FF_EXPERT,
    HEADS,
    N_EXPERT,
    USED,
    D,
    Shapes,
    Tiny,
    V,
    gated,
    head,
    tokens,
)

N_LAYER, ATTENDS, NGRAM_LAYER = 5, (1, 3), 0
"""ATTENDS: layers of attention. NGRAM_LAYER: the one with embeddings of n-grams."""
KV, HEAD, ROTATED = 2, 32, 0.5
KEY_HEADS, VALUE_HEADS, SIZE, TAPS = 2, 4, 16, 4
STREAMS, RANK, POOL, TOP_K, INDEX_HEADS, INDEX_SIZE = 4, 32, 4, 16, 16, 32
NGRAM, PER_LENGTH, WIDTH, KERNEL, N_SHARDS, ROWS = 3, 2, 128, 4, 4, (53, 59, 61, 67)
"""ROWS: of each head of n-grams, together with some more 256. Few index heads would leave many pools without a score,
of which transformers chooses any.
"""
EOS = int(tokens()[20])
_NAMES = ("gate_proj", "up_proj", "down_proj")
_ROOT = "model.language_model"
_HASHES = f"{_ROOT}.layers.{NGRAM_LAYER}.ple.ple_embedding"


def _mixer(p: str, *, last: bool = False) -> Shapes:
    wide = STREAMS * D
    shapes: Shapes = {f"{p}.hc_norm.weight": (wide,), f"{p}.input_mix_weight_down.weight": (RANK, wide)}
    shapes[f"{p}.input_mix_weight_up.weight"] = (wide, RANK)
    return shapes if last else {**shapes, f"{p}.block_inject_weight.weight": (STREAMS, wide)}


def _linear(p: str) -> Shapes:
    keys, values = KEY_HEADS * SIZE, VALUE_HEADS * SIZE
    matrices: Shapes = {"in_proj_qkv": (2 * keys + values, D), "in_proj_z": (values, D), "out_proj": (D, values)}
    matrices |= {f"in_proj_{x}": (VALUE_HEADS, D) for x in "ab"}
    matrices |= {"conv1d": (2 * keys + values, 1, TAPS), "norm": (SIZE,)}
    shapes = {f"{p}.{name}.weight": shape for name, shape in matrices.items()}
    return shapes | {f"{p}.A_log": (VALUE_HEADS,), f"{p}.dt_bias": (VALUE_HEADS,)}


def _indexed(p: str) -> Shapes:
    matrices: Shapes = {
        "q_proj": (2 * HEADS * HEAD, D),
        "k_proj": (KV * HEAD, D),
        "v_proj": (KV * HEAD, D),
        "o_proj": (D, HEADS * HEAD),
        "q_norm": (HEAD,),
        "k_norm": (HEAD,),
        "indexer.index_qk_proj": ((INDEX_HEADS + 1) * INDEX_SIZE, D),
        "indexer.q_layernorm": (INDEX_SIZE,),
        "indexer.k_layernorm": (INDEX_SIZE,),
    }
    return {f"{p}.{name}.weight": shape for name, shape in matrices.items()}


def _ngrams(p: str) -> Shapes:
    wide = STREAMS * D
    shapes: Shapes = {
        f"{p}.key_proj.weight": (wide, WIDTH),
        f"{p}.value_proj.weight": (D, WIDTH),
        f"{p}.conv1d.weight": (wide, 1, KERNEL),
        **{f"{p}.norm_{name}.weight": (wide,) for name in ("key", "query", "conv")},
    }
    row = WIDTH // len(ROWS)
    return shapes | {f"{_HASHES}.ngram_embedding.shard_{i}.weight": (256 // N_SHARDS, row) for i in range(N_SHARDS)}


def shapes() -> Shapes:
    """Names and shapes of all tensors of the text model."""
    shapes: Shapes = {f"{_ROOT}.embed_tokens.weight": (V, D), "lm_head.weight": (V, D)}
    shapes |= _mixer(f"{_ROOT}.hyper_connection_mixer", last=True)
    for il in range(N_LAYER):
        p = f"{_ROOT}.layers.{il}"
        shapes |= _mixer(f"{p}.attn_hyper_connection") | _mixer(f"{p}.mlp_hyper_connection")
        shapes |= _indexed(f"{p}.self_attn") if il in ATTENDS else _linear(f"{p}.linear_attn")
        shapes |= {f"{p}.mlp.gate.weight": (N_EXPERT, D), f"{p}.mlp.shared_expert_gate.weight": (1, D)}
        shapes |= gated(f"{p}.mlp.shared_expert", FF_EXPERT, _NAMES)
        shapes[f"{p}.mlp.experts.gate_up_proj"] = (N_EXPERT, 2 * FF_EXPERT, D)
        shapes[f"{p}.mlp.experts.down_proj"] = (N_EXPERT, D, FF_EXPERT)
        if il == NGRAM_LAYER:
            shapes |= _ngrams(f"{p}.ple")
    return shapes


def integers() -> dict[str, list[int]]:
    """Constants of the hashes."""
    return {
        f"{_HASHES}.layer_multipliers": [23456248059221, 30118000423551, 8123498732117],
        f"{_HASHES}.ngram_heads_vocab_sizes": list(ROWS),
        f"{_HASHES}.ngram_heads_offsets": [sum(ROWS[:i]) for i in range(len(ROWS))],
    }


TEXT = {
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": D,
    "moe_intermediate_size": FF_EXPERT,
    "shared_expert_intermediate_size": FF_EXPERT,
    "num_hidden_layers": N_LAYER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": HEAD,
    "num_experts": N_EXPERT,
    "num_experts_per_tok": USED,
    "norm_topk_prob": True,
    "linear_conv_kernel_dim": TAPS,
    "linear_key_head_dim": SIZE,
    "linear_value_head_dim": SIZE,
    "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": VALUE_HEADS,
    "layer_types": ["full_attention" if il in ATTENDS else "linear_attention" for il in range(N_LAYER)],
    "output_gate_type": "sigmoid",
    "hc_count": STREAMS,
    "hc_lowrank": RANK,
    "ple_layer_ids": [NGRAM_LAYER + 1],
    "ple_embed_dim": WIDTH,
    "ple_conv_kernel_size": KERNEL,
    "ngram_size": NGRAM,
    "heads_per_ngram": PER_LENGTH,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": N_SHARDS,
    "indexer_n_heads": INDEX_HEADS,
    "indexer_kv_heads": 1,
    "indexer_head_dim": INDEX_SIZE,
    "indexer_budget": TOP_K,
    "indexer_compress_ratio": POOL,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": ROTATED,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "model_type": "qwen4_exp_text",
    "vocab_size": V,
    "eos_token_id": EOS,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
}
QWEN4_EXP = Tiny(
    "qwen4-exp",
    {
        **head("Qwen4Exp", "qwen4_exp"),
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "text_config": TEXT,
        "vision_config": {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": D},
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    shapes,
    integers=integers,
)
CHECKPOINTS = (QWEN4_EXP,)
