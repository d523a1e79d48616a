"""Tiny checkpoints of Phi-3.5-MoE, DBRX, Arctic, SmallThinker, OpenELM, PLM, GroveMoE and Grok-1; made as those of
seeded_checkpoints.py.
"""

from __future__ import annotations

from tests.cpu.convert.cohere_checkpoints import NAMES, OUTER, OUTPUT, attention, norms
from tests.cpu.convert.plain_checkpoints import biased, config
from tests.cpu.convert.seeded_checkpoints import (
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

N_LAYER, N_THINKER, WINDOW = 2, 5, 16
ELM_HEADS, ELM_KV = (3, 4, 6), (1, 2, 3)
NOPE, ROT, VALUE, RANK, PLM_FF = 64, 32, 64, 32, 100


def dbrx_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes: Shapes = {"transformer.wte.weight": (V, D), "transformer.norm_f.weight": (D,), **OUTPUT}
    for il in range(N_LAYER):
        p = f"transformer.blocks.{il}"
        shapes |= {f"{p}.norm_attn_norm.norm_{i}.weight": (D,) for i in (1, 2)}
        shapes[f"{p}.norm_attn_norm.attn.Wqkv.weight"] = ((HEADS + 2 * KV) * HEAD, D)
        shapes[f"{p}.norm_attn_norm.attn.out_proj.weight"] = (D, D)
        shapes[f"{p}.ffn.router.layer.weight"] = (N_EXPERT, D)
        shapes |= {f"{p}.ffn.experts.mlp.{name}": (N_EXPERT * FF_EXPERT, D) for name in ("w1", "v1", "w2")}
    return shapes


_DBRX = head("Dbrx", "dbrx")
del _DBRX["hidden_size"]
DBRX = Tiny(
    "dbrx",
    {
        **_DBRX,
        "attn_config": {"attn_pdrop": 0.0, "clip_qkv": 1.5, "kv_n_heads": KV, "rope_theta": 10000.0},
        "d_model": D,
        "ffn_config": {
            "ffn_act_fn": {"name": "silu"},
            "ffn_hidden_size": FF_EXPERT,
            "hidden_size": D,
            "moe_normalize_expert_weights": 1.0,
            "moe_num_experts": N_EXPERT,
            "moe_top_k": USED,
        },
        "max_seq_len": 256,
        "n_heads": HEADS,
        "n_layers": N_LAYER,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    dbrx_shapes,
)


def arctic_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes = {**OUTER, **OUTPUT}
    for il in range(N_LAYER):
        p = f"model.layers.{il}"
        shapes |= {**norms(p), f"{p}.residual_layernorm.weight": (D,), **attention(p)}
        shapes |= gated(f"{p}.residual_mlp", D, ("w1", "w3", "w2"))
        shapes[f"{p}.block_sparse_moe.gate.weight"] = (N_EXPERT, D)
        for e in range(N_EXPERT):
            shapes |= gated(f"{p}.block_sparse_moe.experts.{e}", FF_EXPERT, ("w1", "w3", "w2"))
    return shapes


ARCTIC = Tiny(
    "arctic",
    config(
        "Arctic",
        "arctic",
        hidden_act="silu",
        intermediate_size=FF_EXPERT,
        moe_layer_frequency=1,
        num_experts_per_tok=2,
        num_local_experts=N_EXPERT,
        parallel_attn_mlp_res=True,
        rms_norm_eps=1e-5,
        use_residual=True,
    ),
    arctic_shapes,
)


def smallthinker_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes = {**OUTER, **OUTPUT}
    for il in range(N_THINKER):
        p = f"model.layers.{il}"
        shapes |= {**norms(p), **attention(p), f"{p}.block_sparse_moe.primary_router.weight": (N_EXPERT, D)}
        for e in range(N_EXPERT):
            shapes |= gated(f"{p}.block_sparse_moe.experts.{e}", FF_EXPERT, ("gate", "up", "down"))
    return shapes


_THINKER = config(
    "SmallThinker",
    "smallthinker",
    head_dim=HEAD,
    moe_enable_secondary_experts=False,
    moe_ffn_hidden_size=FF_EXPERT,
    moe_layer_layout=[1] * N_THINKER,
    moe_num_active_primary_experts=2,
    moe_num_primary_experts=N_EXPERT,
    moe_primary_router_apply_softmax=False,
    norm_topk_prob=True,
    num_hidden_layers=N_THINKER,
    rms_norm_eps=1e-5,
    rope_layout=[int(il % 4 != 0) for il in range(N_THINKER)],
    sliding_window_layout=[int(il % 4 != 0) for il in range(N_THINKER)],
    sliding_window_size=WINDOW,
)
del _THINKER["intermediate_size"]
SMALLTHINKER = Tiny("smallthinker", _THINKER, smallthinker_shapes)

ELM_HEAD, ELM_FF = 16, (32, 64, 96)


def openelm_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes: Shapes = {"transformer.token_embeddings.weight": (V, D), "transformer.norm.weight": (D,)}
    for il, (heads, kv, f) in enumerate(zip(ELM_HEADS, ELM_KV, ELM_FF, strict=True)):
        p = f"transformer.layers.{il}"
        shapes |= {f"{p}.{name}.weight": (D,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"{p}.attn.{x}_norm.weight": (ELM_HEAD,) for x in "qk"}
        shapes[f"{p}.attn.qkv_proj.weight"] = ((heads + 2 * kv) * ELM_HEAD, D)
        shapes[f"{p}.attn.out_proj.weight"] = (D, heads * ELM_HEAD)
        shapes |= {f"{p}.ffn.proj_1.weight": (2 * f, D), f"{p}.ffn.proj_2.weight": (D, f)}
    return shapes


_ELM = head("OpenELM", "openelm")
del _ELM["hidden_size"]
OPENELM = Tiny(
    "openelm",
    {
        **_ELM,
        "activation_fn_name": "swish",
        "ffn_dim_divisor": 32,
        "ffn_multipliers": [f / D for f in ELM_FF],
        "ffn_with_glu": True,
        "head_dim": ELM_HEAD,
        "max_context_length": 256,
        "model_dim": D,
        "normalize_qk_projections": True,
        "num_kv_heads": list(ELM_KV),
        "num_query_heads": list(ELM_HEADS),
        "num_transformer_layers": len(ELM_FF),
        "rope_freq_constant": 10000,
        "share_input_output_layers": True,
        "torch_dtype": "bfloat16",
    },
    openelm_shapes,
)


def plm_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes = dict(OUTER)
    for il in range(N_LAYER):
        p = f"model.layers.{il}"
        matrices: Shapes = {"q_proj": (HEADS * (NOPE + ROT), D), "kv_a_proj_with_mqa": (RANK + ROT, D)}
        matrices |= {
            "kv_b_proj": (HEADS * (NOPE + VALUE), RANK),
            "o_proj": (D, HEADS * VALUE),
            "kv_a_layernorm": (RANK,),
        }
        shapes |= {**norms(p), **{f"{p}.self_attn.{name}.weight": shape for name, shape in matrices.items()}}
        shapes |= {f"{p}.mlp.up_proj.weight": (PLM_FF, D), f"{p}.mlp.down_proj.weight": (D, PLM_FF)}
    return shapes


PLM = Tiny(
    "plm",
    config(
        "PLM",
        "plm",
        attention_bias=False,
        hidden_act="relu2",
        intermediate_size=PLM_FF,
        kv_lora_rank=RANK,
        num_key_value_heads=HEADS,
        q_lora_rank=None,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        v_head_dim=VALUE,
    ),
    plm_shapes,
)


def phimoe_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes = {**OUTER, **OUTPUT}
    for il in range(N_LAYER):
        p = f"model.layers.{il}"
        shapes |= {**norms(p), **attention(p), f"{p}.block_sparse_moe.gate.weight": (N_EXPERT, D)}
        for e in range(N_EXPERT):
            shapes |= gated(f"{p}.block_sparse_moe.experts.{e}", FF_EXPERT, ("w1", "w3", "w2"))
    return biased(shapes, "norm", "proj", "lm_head")


PHIMOE = Tiny(
    "phimoe",
    config(
        "Phimoe",
        "phimoe",
        architectures=["PhimoeForCausalLM"],
        attention_bias=True,
        hidden_act="silu",
        input_jitter_noise=0.01,
        intermediate_size=FF_EXPERT,
        lm_head_bias=True,
        num_experts_per_tok=2,
        num_local_experts=N_EXPERT,
        original_max_position_embeddings=256,
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        rope_scaling={
            "long_factor": [1.5 + i / 8 for i in range(HEAD // 2)],
            "long_mscale": 1.2,
            "original_max_position_embeddings": 256,
            "short_factor": [1.0 + i / 16 for i in range(HEAD // 2)],
            "short_mscale": 1.2,
            "type": "longrope",
        },
        router_jitter_noise=0.01,
        sliding_window=1024,
    ),
    phimoe_shapes,
)

# GroveMoE, whose small experts always have this width

GROVE_WIDTH = 128


def grovemoe_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes = {**OUTER, **OUTPUT}
    for il in range(N_LAYER):
        p = f"model.layers.{il}"
        shapes |= {**norms(p), **attention(p), f"{p}.mlp.gate.weight": (N_EXPERT, D)}
        shapes |= {f"{p}.self_attn.{x}_norm.weight": (HEAD,) for x in "qk"}
        shapes[f"{p}.mlp.expert_bias"] = (N_EXPERT,)
        for e in range(N_EXPERT):
            shapes |= gated(f"{p}.mlp.experts.{e}", FF_EXPERT, NAMES)
        for e in range(N_EXPERT // 2):
            shapes |= gated(f"{p}.mlp.chunk_experts.{e}", GROVE_WIDTH, NAMES)
    return shapes


GROVEMOE = Tiny(
    "grovemoe",
    config(
        "GroveMoe",
        "grove_moe",
        decoder_sparse_step=1,
        head_dim=HEAD,
        hidden_act="silu",
        mlp_only_layers=[],
        moe_intermediate_size=FF_EXPERT,
        norm_topk_prob=True,
        num_experts=N_EXPERT,
        num_experts_per_tok=USED,
        rms_norm_eps=1e-5,
    ),
    grovemoe_shapes,
)

# Grok-1 in two kinds of names


def grok_shapes(
    prefix: str, outer: Shapes, attention: dict[str, str], norms: tuple[str, ...], moe: tuple[str, str]
) -> Shapes:
    """Names and shapes of all tensors. attention: of q, k, v and output; moe: router and prefix of experts."""
    shapes = dict(outer)
    router, experts = moe
    for il in range(N_LAYER):
        p = f"{prefix}.{il}"
        shapes |= {f"{p}.{name}": (D,) for name in norms}
        for x, n in (("q", HEADS), ("k", KV), ("v", KV)):
            shapes[f"{p}.{attention[x]}.weight"] = (n * HEAD, D)
        shapes[f"{p}.{attention['o']}.weight"] = (D, HEADS * HEAD)
        shapes[f"{p}.{router}.weight"] = (N_EXPERT, D)
        for e in range(N_EXPERT):
            shapes |= gated(f"{p}.{experts}.{e}", FF_EXPERT, ("linear", "linear_v", "linear_1"))
    return shapes


_GROK = config(
    "Grok1Model",
    "grok-1",
    attn_output_multiplier=0.1,
    embedding_multiplier_scale=3.0,
    intermediate_size=FF_EXPERT,
    max_attn_value=2.0,
    num_experts=N_EXPERT,
    num_experts_per_tok=USED,
    output_multiplier_scale=0.7,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
)
GROK = Tiny(
    "grok",
    _GROK,
    lambda: grok_shapes(
        "model.layers",
        {"model.embed_tokens.weight": (V, D), "model.norm.scale": (D,)},
        {x: f"attn.{x}_proj" for x in "qkvo"},
        tuple(f"{x}.scale" for x in ("pre_attn_norm", "post_attn_norm", "pre_moe_norm", "post_moe_norm")),
        ("moe_block.gate", "moe_block.experts"),
    ),
)
GROK_XAI = Tiny(
    "grok-xai",
    {**_GROK, "architectures": ["GrokForCausalLM"], "model_type": "grok"},
    lambda: grok_shapes(
        "transformer.decoder_layer",
        {"transformer.in_out_embed.weight": (V, D), "transformer.rms_norm.weight": (D,)},
        {x[0]: f"multi_head_attention.{x}" for x in ("query", "key", "value")} | {"o": "multi_head_attention.linear"},
        tuple(f"rms_norm{x}.weight" for x in ("", "_1", "_2", "_3")),
        ("router", "moe"),
    ),
)

CHECKPOINTS = (PHIMOE, DBRX)
