"""Tiny checkpoints of plain blocks: Phi, StarCoder, Pythia, Falcon, GPT-2, GLM, OLMo and others; made as those of
seeded_checkpoints.py.
"""

from __future__ import annotations

from typing import Any

from tests.cpu.convert.cohere_checkpoints import NAMES, OUTER, OUTPUT, attention, norms
from tests.cpu.convert.seeded_checkpoints import FF, HEAD, HEADS, KV, D, Shapes, Tiny, V, gated, head

N_LAYER = 2


def biased(shapes: Shapes, *names: str) -> Shapes:
    """Shapes with a bias for each weight whose module ends so."""
    biases: Shapes = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if module.endswith(names):
            biases[f"{module}.bias"] = shape[:1]
    return shapes | biases


def config(name: str, model_type: str, **values: Any) -> dict[str, Any]:
    """The usual configuration."""
    return {
        **head(name, model_type),
        "intermediate_size": FF,
        "max_position_embeddings": 256,
        "num_attention_heads": HEADS,
        "num_hidden_layers": N_LAYER,
        "num_key_value_heads": KV,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **values,
    }


def phi_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes: Shapes = {"model.embed_tokens.weight": (V, D), "model.final_layernorm.weight": (D,), **OUTPUT}
    for il in range(N_LAYER):
        p = f"model.layers.{il}"
        shapes |= {f"{p}.input_layernorm.weight": (D,), **attention(p)}
        shapes[f"{p}.self_attn.dense.weight"] = shapes.pop(f"{p}.self_attn.o_proj.weight")
        shapes |= {f"{p}.mlp.fc1.weight": (FF, D), f"{p}.mlp.fc2.weight": (D, FF)}
    return biased(shapes, "norm", "proj", "dense", "fc1", "fc2", "lm_head")


PHI = Tiny("phi", config("Phi", "phi", hidden_act="gelu_new", partial_rotary_factor=0.5), phi_shapes)


def starcoder2_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes = dict(OUTER)
    for il in range(N_LAYER):
        p = f"model.layers.{il}"
        shapes |= {**norms(p), **attention(p)}
        shapes |= {f"{p}.mlp.c_fc.weight": (FF, D), f"{p}.mlp.c_proj.weight": (D, FF)}
    return biased(shapes, "norm", "proj", "c_fc")


STARCODER2 = Tiny(
    "starcoder2",
    config(
        "Starcoder2",
        "starcoder2",
        hidden_act="gelu_pytorch_tanh",
        norm_epsilon=1e-5,
        sliding_window=128,
        tie_word_embeddings=True,
        use_bias=True,
    ),
    starcoder2_shapes,
)


def stablelm_shapes(*, parallel: bool) -> Shapes:
    """Names and shapes of all tensors; of both branches side by side with norms of heads, too."""
    shapes = {**OUTER, **OUTPUT}
    for il in range(N_LAYER):
        p = f"model.layers.{il}"
        shapes |= {**norms(p), **attention(p), **gated(f"{p}.mlp", FF, NAMES)}
        if parallel:
            del shapes[f"{p}.post_attention_layernorm.weight"]
            for x, n in (("q", HEADS), ("k", KV)):
                shapes |= {f"{p}.self_attn.{x}_layernorm.norms.{i}.weight": (HEAD,) for i in range(n)}
    return biased(
        shapes,
        "input_layernorm",
        "post_attention_layernorm",
        "model.norm",
        *(() if parallel else ("q_proj", "k_proj", "v_proj")),
    )


STABLELM = Tiny(
    "stablelm",
    config("StableLm", "stablelm", hidden_act="silu", partial_rotary_factor=0.25, use_qkv_bias=True),
    lambda: stablelm_shapes(parallel=False),
)
STABLELM_12B = Tiny(
    "stablelm-parallel",
    config(
        "StableLm",
        "stablelm",
        hidden_act="silu",
        partial_rotary_factor=0.25,
        qk_layernorm=True,
        use_parallel_residual=True,
    ),
    lambda: stablelm_shapes(parallel=True),
)


def neox_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes: Shapes = {
        "gpt_neox.embed_in.weight": (V, D),
        "gpt_neox.final_layer_norm.weight": (D,),
        "embed_out.weight": (V, D),
    }
    for il in range(N_LAYER):
        p = f"gpt_neox.layers.{il}"
        matrices: Shapes = {"attention.query_key_value": (3 * D, D), "attention.dense": (D, D)}
        matrices |= {"mlp.dense_h_to_4h": (FF, D), "mlp.dense_4h_to_h": (D, FF)}
        shapes |= {f"{p}.{name}.weight": shape for name, shape in matrices.items()} | norms(p)
    return biased(shapes, "norm", "query_key_value", "dense", "h_to_4h", "4h_to_h")


_NEOX: dict[str, Any] = {
    "num_key_value_heads": None,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
}
PYTHIA = Tiny("pythia", config("GPTNeoX", "gpt_neox", **_NEOX, use_parallel_residual=True), neox_shapes)
NEOX_IN_TURN = Tiny(
    "gpt-neox-in-turn", config("GPTNeoX", "gpt_neox", **_NEOX, use_parallel_residual=False), neox_shapes
)


def falcon_shapes(*, newer: bool) -> Shapes:
    """Names and shapes of all tensors; of the newer layout with several KV heads and two norms."""
    kv = KV if newer else 1
    shapes: Shapes = {"transformer.word_embeddings.weight": (V, D), "transformer.ln_f.weight": (D,)}
    for il in range(N_LAYER):
        p = f"transformer.h.{il}"
        matrices: Shapes = {"self_attention.query_key_value": ((HEADS + 2 * kv) * HEAD, D)}
        matrices |= {"self_attention.dense": (D, D), "mlp.dense_h_to_4h": (4 * D, D), "mlp.dense_4h_to_h": (D, 4 * D)}
        shapes |= {f"{p}.{name}.weight": shape for name, shape in matrices.items()}
        shapes |= {f"{p}.{name}.weight": (D,) for name in (("ln_attn", "ln_mlp") if newer else ("input_layernorm",))}
    return biased(shapes, "input_layernorm", "ln_attn", "ln_mlp", "ln_f")


_FALCON = {
    **config("Falcon", "falcon", tie_word_embeddings=True),
    "alibi": False,
    "bias": False,
    "layer_norm_epsilon": 1e-5,
    "parallel_attn": True,
}
del _FALCON["num_key_value_heads"], _FALCON["intermediate_size"]
FALCON = Tiny(
    "falcon", {**_FALCON, "multi_query": True, "new_decoder_architecture": False}, lambda: falcon_shapes(newer=False)
)
FALCON_40B = Tiny(
    "falcon-40b",
    {**_FALCON, "multi_query": True, "new_decoder_architecture": True, "num_kv_heads": KV},
    lambda: falcon_shapes(newer=True),
)

# GPT-2, StarCoder


def gpt2_shapes(kv: int, *, turned: bool, prefix: str = "transformer.", positions: bool = True) -> Shapes:
    """Names and shapes of all tensors; turned: matrices are stored the other way round."""
    shapes: Shapes = {f"{prefix}wte.weight": (V, D), f"{prefix}ln_f.weight": (D,)}
    if positions:
        shapes[f"{prefix}wpe.weight"] = (256, D)
    for il in range(N_LAYER):
        p = f"{prefix}h.{il}"
        matrices: Shapes = {"attn.c_attn": ((HEADS + 2 * kv) * HEAD, D), "attn.c_proj": (D, D)}
        matrices |= {"mlp.c_fc": (FF, D), "mlp.c_proj": (D, FF)}
        shapes |= {f"{p}.{name}.weight": (D,) for name in ("ln_1", "ln_2")}
        shapes |= {f"{p}.{name}.weight": shape for name, shape in matrices.items()}
    shapes = biased(shapes, "ln_1", "ln_2", "ln_f", "c_attn", "c_proj", "c_fc")
    is_turned = {name: turned and name.startswith(f"{prefix}h.") and len(shape) == 2 for name, shape in shapes.items()}
    return {name: shape[::-1] if is_turned[name] else shape for name, shape in shapes.items()}


def gpt2_config(name: str, model_type: str, **values: Any) -> dict[str, Any]:
    """The configuration in the words of GPT-2."""
    usual = {
        "layer_norm_epsilon": 1e-5,
        "n_embd": D,
        "n_head": HEADS,
        "n_inner": FF,
        "n_layer": N_LAYER,
        "n_positions": 256,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    made = {**head(name, model_type), **usual, **values}
    del made["hidden_size"]
    return made


GPT2 = Tiny(
    "gpt2",
    gpt2_config("GPT2LMHead", "gpt2", activation_function="gelu_new", architectures=["GPT2LMHeadModel"]),
    lambda: gpt2_shapes(HEADS, turned=True),
)
STARCODER = Tiny(
    "starcoder",
    gpt2_config("GPTBigCode", "gpt_bigcode", activation_function="gelu_pytorch_tanh", multi_query=True),
    lambda: gpt2_shapes(1, turned=False),
)
STARCODER_HEADS = Tiny(
    "starcoder-heads",
    gpt2_config("GPTBigCode", "gpt_bigcode", activation_function="gelu_pytorch_tanh", multi_query=False),
    lambda: gpt2_shapes(HEADS, turned=False),
)

# GLM-4 9B, OLMo


def glm_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes = {**OUTER, **OUTPUT}
    for il in range(N_LAYER):
        p = f"model.layers.{il}"
        shapes |= {**norms(p), **attention(p)}
        shapes |= {f"{p}.mlp.gate_up_proj.weight": (2 * FF, D), f"{p}.mlp.down_proj.weight": (D, FF)}
    return biased(shapes, "q_proj", "k_proj", "v_proj")


GLM = Tiny(
    "glm",
    config(
        "Glm",
        "glm",
        attention_bias=True,
        head_dim=HEAD,
        hidden_act="silu",
        partial_rotary_factor=0.5,
        rms_norm_eps=1e-5,
    ),
    glm_shapes,
)


def olmo_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes: Shapes = {"model.embed_tokens.weight": (V, D), **OUTPUT}
    for il in range(N_LAYER):
        p = f"model.layers.{il}"
        shapes |= {**attention(p), **gated(f"{p}.mlp", FF, NAMES)}
    return shapes


OLMO = Tiny("olmo", config("Olmo", "olmo", hidden_act="silu", clip_qkv=1.5), olmo_shapes)


def jais2_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes = {**OUTER, **OUTPUT}
    for il in range(N_LAYER):
        p = f"model.layers.{il}"
        shapes |= {**norms(p), **attention(p)}
        shapes |= {f"{p}.mlp.up_proj.weight": (FF, D), f"{p}.mlp.down_proj.weight": (D, FF)}
    return biased(shapes, "norm", "proj")


JAIS2 = Tiny(
    "jais2",
    config(
        "Jais2", "jais2", attention_bias=True, head_dim=HEAD, hidden_act="relu2", layer_norm_eps=1e-5, mlp_bias=True
    ),
    jais2_shapes,
)

CHECKPOINTS = (
    PHI,
    STARCODER2,
    STABLELM,
    STABLELM_12B,
    PYTHIA,
    NEOX_IN_TURN,
    FALCON,
    FALCON_40B,
    GPT2,
    STARCODER,
    STARCODER_HEADS,
    GLM,
    OLMO,
    JAIS2,
)
