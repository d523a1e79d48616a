"""Tiny checkpoints of plain blocks of which transformers has no class: ChatGLM, Baichuan, Qwen and others."""

from __future__ import annotations

from typing import Any

from tests.cpu.convert.cohere_checkpoints import NAMES, OUTER, OUTPUT, attention, norms
from tests.cpu.convert.plain_checkpoints import N_LAYER, biased, config, gpt2_config, gpt2_shapes
from tests.cpu.convert.seeded_checkpoints import FF, HEAD, HEADS, KV, D, Shapes, Tiny, V, gated, head


def chatglm_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    t = "transformer"
    shapes: Shapes = {f"{t}.embedding.word_embeddings.weight": (V, D), f"{t}.encoder.final_layernorm.weight": (D,)}
    shapes |= {f"{t}.output_layer.weight": (V, D)}
    for il in range(N_LAYER):
        p = f"{t}.encoder.layers.{il}"
        matrices: Shapes = {
            "self_attention.query_key_value": ((HEADS + 2 * KV) * HEAD, D),
            "self_attention.dense": (D, D),
        }
        matrices |= {"mlp.dense_h_to_4h": (2 * FF, D), "mlp.dense_4h_to_h": (D, FF)}
        shapes |= {f"{p}.{name}.weight": shape for name, shape in matrices.items()} | norms(p)
    return biased(shapes, "query_key_value")


CHATGLM = Tiny(
    "chatglm",
    {
        **head("ChatGLM", "chatglm"),
        "add_qkv_bias": True,
        "ffn_hidden_size": FF,
        "kv_channels": HEAD,
        "layernorm_epsilon": 1e-5,
        "multi_query_attention": True,
        "multi_query_group_num": KV,
        "num_attention_heads": HEADS,
        "num_layers": N_LAYER,
        "padded_vocab_size": V,
        "rope_ratio": 500,
        "seq_length": 256,
        "tie_word_embeddings": False,
    },
    chatglm_shapes,
)


def baichuan_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes = {**OUTER, **OUTPUT}
    for il in range(N_LAYER):
        p = f"model.layers.{il}"
        shapes |= {**norms(p), **gated(f"{p}.mlp", FF, NAMES), f"{p}.self_attn.W_pack.weight": (3 * D, D)}
        shapes[f"{p}.self_attn.o_proj.weight"] = (D, D)
    return shapes


_LLAMA_LIKE: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-5}
BAICHUAN = Tiny("baichuan", config("Baichuan", "baichuan", **_LLAMA_LIKE, num_key_value_heads=None), baichuan_shapes)


def llama_shapes(*, norm_biases: bool) -> Shapes:
    """Names and shapes of all tensors."""
    shapes = {**OUTER, **OUTPUT}
    for il in range(N_LAYER):
        p = f"model.layers.{il}"
        shapes |= {**norms(p), **attention(p), **gated(f"{p}.mlp", FF, NAMES)}
    return biased(shapes, *(("norm",) if norm_biases else ()))


XVERSE = Tiny("xverse", config("Xverse", "xverse", **_LLAMA_LIKE), lambda: llama_shapes(norm_biases=False))
LLAMA_EMBED = Tiny(
    "llama-embed",
    config("LlamaBidirectionalModel", "llama_bidirec", **_LLAMA_LIKE, pooling="avg"),
    lambda: {
        name.removeprefix("model."): shape
        for name, shape in llama_shapes(norm_biases=False).items()
        if name.startswith("model.")
    },
    is_encoder=True,
)
PANGU = Tiny(
    "pangu",
    config("PanguEmbedded", "PanguEmbedded", **_LLAMA_LIKE, bias=True),
    lambda: biased(llama_shapes(norm_biases=False), "q_proj", "k_proj", "v_proj", "o_proj"),
)


def maincoder_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes = {name.replace(".mlp.", ".feed_forward."): x for name, x in llama_shapes(norm_biases=False).items()}
    del shapes["lm_head.weight"]
    return shapes | {f"model.layers.{il}.self_attn.{x}_norm.weight": (HEAD,) for il in range(N_LAYER) for x in "qk"}


MAINCODER = Tiny(
    "maincoder",
    config(
        "Maincoder",
        "maincoder",
        **_LLAMA_LIKE,
        head_dim=HEAD,
        intermediate_size=2 * FF,
        intermediate_size_mlp=FF,
        tie_word_embeddings=True,
        use_qk_norm=True,
    ),
    maincoder_shapes,
)
ORION = Tiny("orion", config("Orion", "orion", **_LLAMA_LIKE), lambda: llama_shapes(norm_biases=True))


def qwen_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes: Shapes = {"transformer.wte.weight": (V, D), "transformer.ln_f.weight": (D,), **OUTPUT}
    for il in range(N_LAYER):
        p = f"transformer.h.{il}"
        matrices: Shapes = {"attn.c_attn": (3 * D, D), "attn.c_proj": (D, D)}
        matrices |= {"mlp.w1": (FF, D), "mlp.w2": (FF, D), "mlp.c_proj": (D, FF)}
        shapes |= {f"{p}.{name}.weight": shape for name, shape in matrices.items()}
        shapes |= {f"{p}.{name}.weight": (D,) for name in ("ln_1", "ln_2")}
    return biased(shapes, "c_attn")


QWEN = Tiny(
    "qwen",
    {
        **head("QWen", "qwen"),
        "architectures": ["QWenLMHeadModel"],
        "intermediate_size": 2 * FF,
        "layer_norm_epsilon": 1e-6,
        "max_position_embeddings": 32768,
        "no_bias": True,
        "num_attention_heads": HEADS,
        "num_hidden_layers": N_LAYER,
        "rotary_emb_base": 10000,
        "rotary_pct": 1.0,
        "seq_length": 256,
        "tie_word_embeddings": False,
        "use_dynamic_ntk": True,
        "use_logn_attn": True,
    },
    qwen_shapes,
)


def plamo_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes = {**OUTER, **OUTPUT}
    for il in range(N_LAYER):
        p = f"model.layers.layers.{il}"
        shapes |= {f"{p}.norm.weight": (D,), **attention(p), **gated(f"{p}.mlp", FF, NAMES)}
    return shapes


_PLAMO = config("Plamo", "plamo", **_LLAMA_LIKE, n_shared_head=HEADS // KV)
_PLAMO |= {"num_key_value_heads": 99}  # as the published configuration, which does not mean it
del _PLAMO["max_position_embeddings"]
PLAMO = Tiny("plamo", _PLAMO, plamo_shapes)
CODESHELL = Tiny(
    "codeshell",
    gpt2_config(
        "CodeShell",
        "codeshell",
        activation_function="gelu_pytorch_tanh",
        group_query_attention=True,
        num_query_groups=KV,
        position_embedding_type="rope",
        tie_word_embeddings=False,
    ),
    lambda: {**gpt2_shapes(KV, turned=False, positions=False), **OUTPUT},
)
