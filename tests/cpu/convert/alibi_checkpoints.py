"""Tiny checkpoints of models with linear biases of attention; made as those of seeded_checkpoints.py."""

from __future__ import annotations

from typing import Any

from tests.cpu.convert.plain_checkpoints import N_LAYER, biased, gpt2_config, gpt2_shapes
from tests.cpu.convert.seeded_checkpoints import FF, HEADS, D, Shapes, Tiny, V, head

WIDE, MANY = 96, 6
"""Heads that are no power of two."""


def bloom_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    t = "transformer"
    shapes: Shapes = {f"{t}.word_embeddings.weight": (V, WIDE)}
    shapes |= {f"{t}.{name}.weight": (WIDE,) for name in ("word_embeddings_layernorm", "ln_f")}
    for il in range(N_LAYER):
        p = f"{t}.h.{il}"
        matrices: Shapes = {"self_attention.query_key_value": (3 * WIDE, WIDE), "self_attention.dense": (WIDE, WIDE)}
        matrices |= {"mlp.dense_h_to_4h": (4 * WIDE, WIDE), "mlp.dense_4h_to_h": (WIDE, 4 * WIDE)}
        matrices |= {"input_layernorm": (WIDE,), "post_attention_layernorm": (WIDE,)}
        shapes |= {f"{p}.{name}.weight": shape for name, shape in matrices.items()}
    return biased(shapes, "layernorm", "ln_f", "query_key_value", "dense", "h_to_4h", "4h_to_h")


BLOOM = Tiny(
    "bloom",
    {
        **head("Bloom", "bloom"),
        "apply_residual_connection_post_layernorm": False,
        "hidden_size": WIDE,
        "layer_norm_epsilon": 1e-5,
        "n_head": MANY,
        "n_layer": N_LAYER,
        "torch_dtype": "float32",
    },
    bloom_shapes,
)


def mpt_shapes(kv: int = MANY, *, normed: bool = False) -> Shapes:
    """Names and shapes of all tensors, without biases; normed: with norms of q and k."""
    t, size = "transformer", WIDE // MANY
    shapes: Shapes = {f"{t}.wte.weight": (V, WIDE), f"{t}.norm_f.weight": (WIDE,)}
    for il in range(N_LAYER):
        p = f"{t}.blocks.{il}"
        matrices: Shapes = {"attn.Wqkv": (WIDE + 2 * kv * size, WIDE), "attn.out_proj": (WIDE, WIDE)}
        matrices |= {"ffn.up_proj": (4 * WIDE, WIDE), "ffn.down_proj": (WIDE, 4 * WIDE)}
        matrices |= {"norm_1": (WIDE,), "norm_2": (WIDE,)}
        matrices |= {"attn.q_ln": (WIDE,), "attn.k_ln": (kv * size,)} if normed else {}
        shapes |= {f"{p}.{name}.weight": shape for name, shape in matrices.items()}
    return shapes


def mpt_config(**attention: Any) -> dict[str, Any]:
    """The configuration of a model without biases."""
    made = {
        **head("Mpt", "mpt"),
        "attn_config": {"alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "clip_qkv": 0.4, **attention},
        "d_model": WIDE,
        "expansion_ratio": 4,
        "learned_pos_emb": True,
        "max_seq_len": 256,
        "n_heads": MANY,
        "n_layers": N_LAYER,
        "no_bias": True,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    del made["hidden_size"]
    return made


MPT = Tiny("mpt", mpt_config(), mpt_shapes)
MPT_GROUPED = Tiny(
    "mpt-grouped",
    mpt_config(attn_type="grouped_query_attention", kv_n_heads=2, qk_ln=True, clip_qkv=None, alibi_bias_max=6),
    lambda: mpt_shapes(2, normed=True),
)
MPT_EMBEDDED = Tiny(
    "mpt-embedded", mpt_config(alibi=False), lambda: mpt_shapes() | {"transformer.wpe.weight": (256, WIDE)}
)


def jais_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes = gpt2_shapes(HEADS, turned=True, positions=False)
    shapes |= {"transformer.relative_pe.slopes": (HEADS, 1, 1)}
    for il in range(N_LAYER):
        p = f"transformer.h.{il}.mlp.c_fc2"
        shapes |= {f"{p}.weight": (D, FF), f"{p}.bias": (FF,)}
    return shapes


JAIS = Tiny(
    "jais",
    gpt2_config(
        "JAISLMHead",
        "jais",
        activation_function="swiglu",
        architectures=["JAISLMHeadModel"],
        mup_embeddings_scale=3.0,
        mup_output_alpha=2.5,
        mup_scale_qk_dot_by_d=True,
        mup_width_scale=0.5,
        position_embedding_type="alibi",
        scale_attn_weights=True,
    ),
    jais_shapes,
)
REFACT_FF = 256


def refact_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    t, size = "transformer", D // HEADS
    shapes: Shapes = {f"{t}.wte.weight": (V, D), f"{t}.ln_f.weight": (D,), "lm_head.weight": (V, D)}
    for il in range(N_LAYER):
        p = f"{t}.h.{il}"
        matrices: Shapes = {"attn.q": (D, D), "attn.kv": (2 * size, D), "attn.c_proj": (D, D)}
        matrices |= {"mlp.gate_up_proj": (2 * REFACT_FF, D), "mlp.c_proj": (D, REFACT_FF)}
        matrices |= {"ln_1": (D,), "ln_2": (D,)}
        shapes |= {f"{p}.{name}.weight": shape for name, shape in matrices.items()}
    return shapes


REFACT = Tiny(
    "refact",
    gpt2_config(
        "GPTRefact", "gpt_refact", multi_query=True, n_inner=None, tie_word_embeddings=False, layer_norm_epsilon=1e-5
    ),
    refact_shapes,
)
CHECKPOINTS = (BLOOM, MPT)
"""Whose logits transformers recorded."""
