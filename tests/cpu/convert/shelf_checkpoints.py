"""Tiny checkpoints of models whose layers differ, and of further encoders, made as those of seeded_checkpoints.py."""

from __future__ import annotations

from typing import Any

from tests.cpu.convert import older_checkpoints as older
from tests.cpu.convert import plain_checkpoints as plain
from tests.cpu.convert.seeded_checkpoints import FF, FF_EXPERT, N_EXPERT, OUTER, USED, D, Shapes, Tiny, V, gated, head

# Llama-Nemotron and DeciLM

DECI_HEADS, DECI_HEAD, UNIT = 4, 16, 256
# KV heads (0: a matrix, -1: nothing) and width of the network of every layer.
DECI_LAYERS = ((2, 256), (0, 512), (-1, 256), (-1, 0), (4, 256), (1, 0))


def deci_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes = dict(OUTER)
    for il, (kv, f) in enumerate(DECI_LAYERS):
        p = f"model.layers.{il}"
        if kv >= 0:
            shapes[f"{p}.input_layernorm.weight"] = (D,)
        if kv == 0:
            shapes[f"{p}.self_attn.linear_attn.weight"] = (D, D)
        elif kv > 0:
            sizes = {"q_proj": (DECI_HEADS * DECI_HEAD, D), "o_proj": (D, DECI_HEADS * DECI_HEAD)}
            sizes |= {"k_proj": (kv * DECI_HEAD, D), "v_proj": (kv * DECI_HEAD, D)}
            shapes |= {f"{p}.self_attn.{name}.weight": shape for name, shape in sizes.items()}
        if f:
            shapes |= {f"{p}.post_attention_layernorm.weight": (D,)}
            shapes |= gated(f"{p}.mlp", f, ("gate_proj", "up_proj", "down_proj"))
    return shapes


def deci_block(kv: int, f: int) -> dict[str, Any]:
    """What the configuration says of a layer; widths are rounded up to whole units."""
    rest = {"sparsify": None, "num_sink_tokens": None, "unshifted_sink": False, "window_length": None}
    return {
        "attention": {
            "n_heads_in_group": DECI_HEADS // kv if kv > 0 else None,
            "no_op": kv < 0,
            "replace_with_linear": kv == 0,
            **rest,
        },
        "ffn": {
            "ffn_mult": (f - UNIT + 8) * 1.5 / D if f else None,
            "no_op": not f,
            "replace_with_linear": False,
            "sparsify": None,
        },
    }


DECI_ROPE = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 256,
    "rope_type": "llama3",
}
DECI = Tiny(
    "deci",
    {
        **head("DeciLM", "nemotron-nas"),
        "hidden_act": "silu",
        "intermediate_size": None,
        "num_hidden_layers": len(DECI_LAYERS),
        "num_attention_heads": DECI_HEADS,
        "num_key_value_heads": None,
        "block_configs": [deci_block(*layer) for layer in DECI_LAYERS],
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": DECI_ROPE,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    deci_shapes,
)

# EmbeddingGemma

N_GEMMA, GEMMA_HEADS, GEMMA_HEAD, GEMMA_WINDOW, WIDE = 7, 4, 32, 20, 96


def gemma_embedding_shapes() -> Shapes:
    """Names and shapes of all tensors of the model itself, as published: without a prefix."""
    shapes: Shapes = {"embed_tokens.weight": (V, D), "norm.weight": (D,)}
    for il in range(N_GEMMA):
        p = f"layers.{il}"
        norms = (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )
        shapes |= {f"{p}.{name}.weight": (D,) for name in norms}
        sizes = {"q_proj": (GEMMA_HEADS * GEMMA_HEAD, D), "o_proj": (D, GEMMA_HEADS * GEMMA_HEAD)}
        sizes |= {f"{name}_proj": (GEMMA_HEAD, D) for name in "kv"} | {f"{x}_norm": (GEMMA_HEAD,) for x in "qk"}
        shapes |= {f"{p}.self_attn.{name}.weight": shape for name, shape in sizes.items()}
        shapes |= gated(f"{p}.mlp", FF, ("gate_proj", "up_proj", "down_proj"))
    return shapes


GEMMA_EMBEDDING = Tiny(
    "gemma-embedding",
    {
        **head("Gemma3", "gemma3_text"),
        "architectures": ["Gemma3TextModel"],
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": FF,
        "num_hidden_layers": N_GEMMA,
        "num_attention_heads": GEMMA_HEADS,
        "num_key_value_heads": 1,
        "head_dim": GEMMA_HEAD,
        "query_pre_attn_scalar": GEMMA_HEAD,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window": GEMMA_WINDOW,
        "use_bidirectional_attention": True,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
    },
    gemma_embedding_shapes,
    is_encoder=True,
)

# EuroBERT

EUROBERT = Tiny(
    "eurobert",
    plain.config("EuroBert", "eurobert", architectures=["EuroBertModel"], hidden_act="silu", rms_norm_eps=1e-5),
    lambda: {
        name.removeprefix("model."): shape
        for name, shape in older.llama_shapes(norm_biases=False).items()
        if name.startswith("model.")
    },
    is_encoder=True,
)

# ModernBERT

N_MODERN, MODERN_HEADS, MODERN_WINDOW = 5, 2, 20


def modern_bert_shapes(prefix: str = "") -> Shapes:
    """Names and shapes of all tensors of the model itself."""
    shapes: Shapes = {
        "embeddings.tok_embeddings.weight": (V, D),
        "embeddings.norm.weight": (D,),
        "final_norm.weight": (D,),
    }
    for il in range(N_MODERN):
        p = f"layers.{il}"
        norms = ("attn_norm", "mlp_norm") if il else ("mlp_norm",)
        shapes |= {f"{p}.{name}.weight": (D,) for name in norms}
        shapes |= {f"{p}.attn.Wqkv.weight": (3 * D, D), f"{p}.attn.Wo.weight": (D, D)}
        shapes |= {f"{p}.mlp.Wi.weight": (2 * FF, D), f"{p}.mlp.Wo.weight": (D, FF)}
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}


_MODERN_BERT: dict[str, Any] = {
    **head("ModernBert", "modernbert"),
    "hidden_activation": "gelu",
    "intermediate_size": FF,
    "num_hidden_layers": N_MODERN,
    "num_attention_heads": MODERN_HEADS,
    "max_position_embeddings": 256,
    "norm_eps": 1e-5,
    "global_rope_theta": 160000.0,
    "local_rope_theta": 10000.0,
    "global_attn_every_n_layers": 3,
    "local_attention": MODERN_WINDOW,
    "norm_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "bfloat16",
}
MODERN_BERT = Tiny(
    "modern-bert", {**_MODERN_BERT, "architectures": ["ModernBertModel"]}, modern_bert_shapes, is_encoder=True
)
RANKER_HEAD: Shapes = {
    "head.dense.weight": (D, D),
    "head.norm.weight": (D,),
    "classifier.weight": (1, D),
    "classifier.bias": (1,),
}
MODERN_BERT_RANKER = Tiny(
    "modern-bert-ranker",
    {
        **_MODERN_BERT,
        "architectures": ["ModernBertForSequenceClassification"],
        "classifier_pooling": "mean",
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    },
    lambda: modern_bert_shapes("model.") | RANKER_HEAD,
)

# MiniCPM

N_MINICPM, CPM_HEADS, CPM_KV, CPM_HEAD = 3, 4, 2, 16
CPM_NOPE, CPM_ROT, CPM_VALUE, CPM_RANK, CPM_Q_RANK = 32, 16, 16, 32, 48
FACTORS = {"rope_type": "longrope", "original_max_position_embeddings": 256}
"""Of LongRoPE; golden tokens are fewer than the original context."""


def factors(n: int) -> dict[str, Any]:
    """rope_scaling with n factors of each kind."""
    return {**FACTORS, "long_factor": [2.0 + i for i in range(n)], "short_factor": [1.0 + 0.1 * i for i in range(n)]}


def minicpm_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes: Shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    for il in range(N_MINICPM):
        p = f"model.layers.{il}"
        shapes |= {f"{p}.{name}.weight": (D,) for name in ("input_layernorm", "post_attention_layernorm")}
        sizes = {"q_proj": (CPM_HEADS * CPM_HEAD, D), "o_proj": (D, CPM_HEADS * CPM_HEAD)}
        sizes |= {f"{name}_proj": (CPM_KV * CPM_HEAD, D) for name in "kv"}
        shapes |= {f"{p}.self_attn.{name}.weight": shape for name, shape in sizes.items()}
        shapes |= gated(f"{p}.mlp", FF, ("gate_proj", "up_proj", "down_proj"))
    return shapes


_MINICPM: dict[str, Any] = {
    "hidden_act": "silu",
    "intermediate_size": FF,
    "num_hidden_layers": N_MINICPM,
    "num_attention_heads": CPM_HEADS,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
MINICPM = Tiny(
    "minicpm",
    {**head("MiniCPM", "minicpm"), **_MINICPM, "num_key_value_heads": CPM_KV, "rope_scaling": factors(CPM_HEAD // 2)},
    minicpm_shapes,
)


def minicpm3_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes = {name: shape for name, shape in minicpm_shapes().items() if "self_attn" not in name}
    for il in range(N_MINICPM):
        p = f"model.layers.{il}.self_attn"
        sizes = {"q_a_proj": (CPM_Q_RANK, D), "q_b_proj": (CPM_HEADS * (CPM_NOPE + CPM_ROT), CPM_Q_RANK)}
        sizes |= {"kv_a_proj_with_mqa": (CPM_RANK + CPM_ROT, D), "o_proj": (D, CPM_HEADS * CPM_VALUE)}
        sizes |= {"kv_b_proj": (CPM_HEADS * (CPM_NOPE + CPM_VALUE), CPM_RANK)}
        shapes |= {f"{p}.{name}.weight": shape for name, shape in sizes.items()}
        shapes |= {f"{p}.q_a_layernorm.weight": (CPM_Q_RANK,), f"{p}.kv_a_layernorm.weight": (CPM_RANK,)}
    return shapes


MINICPM3 = Tiny(
    "minicpm3",
    {
        **head("MiniCPM3", "minicpm3"),
        **_MINICPM,
        "num_key_value_heads": CPM_HEADS,
        "q_lora_rank": CPM_Q_RANK,
        "kv_lora_rank": CPM_RANK,
        "qk_nope_head_dim": CPM_NOPE,
        "qk_rope_head_dim": CPM_ROT,
        "v_head_dim": CPM_VALUE,
        "rope_scaling": factors(CPM_ROT // 2),
    },
    minicpm3_shapes,
)

# Jamba, Mamba

N_JAMBA, JAMBA_HEADS, JAMBA_KV, JAMBA_HEAD = 5, 2, 1, 32
RANK, STATE, JAMBA_TAPS, EXPAND = 4, 16, 4, 2
"""RANK: a sixteenth of D."""


def mamba_layer_shapes(prefix: str) -> Shapes:
    """A layer of Mamba."""
    inner = EXPAND * D
    return {
        f"{prefix}.in_proj.weight": (2 * inner, D),
        f"{prefix}.conv1d.weight": (inner, 1, JAMBA_TAPS),
        f"{prefix}.conv1d.bias": (inner,),
        f"{prefix}.x_proj.weight": (RANK + 2 * STATE, inner),
        f"{prefix}.dt_proj.weight": (inner, RANK),
        f"{prefix}.dt_proj.bias": (inner,),
        f"{prefix}.A_log": (inner, STATE),
        f"{prefix}.D": (inner,),
        f"{prefix}.out_proj.weight": (D, inner),
    }


def jamba_shapes() -> Shapes:
    """Names and shapes of all tensors: every third layer attends, every second one has experts."""
    shapes: Shapes = {f"model.{name}.weight": (D,) for name in ("final_layernorm",)}
    shapes |= {"model.embed_tokens.weight": (V, D), "lm_head.weight": (V, D)}
    for il in range(N_JAMBA):
        p = f"model.layers.{il}"
        shapes |= {f"{p}.{name}.weight": (D,) for name in ("input_layernorm", "pre_ff_layernorm")}
        if il % 3 == 1:
            sizes = {"q_proj": (JAMBA_HEADS * JAMBA_HEAD, D), "o_proj": (D, JAMBA_HEADS * JAMBA_HEAD)}
            sizes |= {f"{name}_proj": (JAMBA_KV * JAMBA_HEAD, D) for name in "kv"}
            shapes |= {f"{p}.self_attn.{name}.weight": shape for name, shape in sizes.items()}
        else:
            shapes |= mamba_layer_shapes(f"{p}.mamba")
            sizes = {"dt_layernorm": (RANK,), "b_layernorm": (STATE,), "c_layernorm": (STATE,)}
            shapes |= {f"{p}.mamba.{name}.weight": shape for name, shape in sizes.items()}
        names, p = ("gate_proj", "up_proj", "down_proj"), f"{p}.feed_forward"
        if il % 2 == 0:
            shapes |= gated(p, FF_EXPERT, names)
            continue
        shapes[f"{p}.router.weight"] = (N_EXPERT, D)
        for e in range(N_EXPERT):
            shapes |= gated(f"{p}.experts.{e}", FF_EXPERT, names)
    return shapes


JAMBA = Tiny(
    "jamba",
    {
        **head("Jamba", "jamba"),
        "hidden_act": "silu",
        "intermediate_size": FF_EXPERT,
        "num_hidden_layers": N_JAMBA,
        "num_attention_heads": JAMBA_HEADS,
        "num_key_value_heads": JAMBA_KV,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": N_EXPERT,
        "num_experts_per_tok": USED,
        "mamba_d_state": STATE,
        "mamba_d_conv": JAMBA_TAPS,
        "mamba_expand": EXPAND,
        "mamba_dt_rank": "auto",
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    jamba_shapes,
)


def mamba_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes: Shapes = {"backbone.embeddings.weight": (V, D), "backbone.norm_f.weight": (D,)}
    for il in range(2):
        shapes |= {f"backbone.layers.{il}.norm.weight": (D,)}
        shapes |= mamba_layer_shapes(f"backbone.layers.{il}.mixer")
    return shapes


_MAMBA: dict[str, Any] = {
    "hidden_act": "silu",
    "num_hidden_layers": 2,
    "state_size": STATE,
    "conv_kernel": JAMBA_TAPS,
    "expand": EXPAND,
    "time_step_rank": RANK,
    "layer_norm_epsilon": 1e-6,
    "use_bias": False,
    "use_conv_bias": True,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
MAMBA = Tiny("mamba", {**head("Mamba", "mamba"), **_MAMBA}, mamba_shapes)
FALCON_MAMBA = Tiny("falcon-mamba", {**head("FalconMamba", "falcon_mamba"), **_MAMBA}, mamba_shapes)

CHECKPOINTS = (GEMMA_EMBEDDING, EUROBERT, MODERN_BERT, MINICPM3, JAMBA, MAMBA, FALCON_MAMBA)
"""Those whose logits or states transformers records."""
