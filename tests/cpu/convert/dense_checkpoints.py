"""Tiny dense checkpoints: AFM, EXAONE 3, Minitron, Apertus; made as those of seeded_checkpoints.py."""

from __future__ import annotations

from tests.cpu.convert.cohere_checkpoints import OUTER, OUTPUT, STRETCHED, attention, norms
from tests.cpu.convert.seeded_checkpoints import FF, HEAD, HEADS, KV, D, Shapes, Tiny, V, gated, head

# AFM

ARCEE_LAYERS = 2


def arcee_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes = {**OUTER, **OUTPUT}
    for il in range(ARCEE_LAYERS):
        p = f"model.layers.{il}"
        shapes |= {**norms(p), **attention(p)}
        shapes |= {f"{p}.mlp.up_proj.weight": (FF, D), f"{p}.mlp.down_proj.weight": (D, FF)}
    return shapes


ARCEE = Tiny(
    "arcee",
    {
        **head("Arcee", "arcee"),
        "head_dim": HEAD,
        "hidden_act": "relu2",
        "intermediate_size": FF,
        "max_position_embeddings": 256,
        "num_attention_heads": HEADS,
        "num_hidden_layers": ARCEE_LAYERS,
        "num_key_value_heads": KV,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 4.0,
            "mscale": 1.0,
            "original_max_position_embeddings": STRETCHED,
            "rope_type": "yarn",
        },
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    arcee_shapes,
)

# EXAONE 3

EXAONE_LAYERS = 2


def exaone_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes: Shapes = {"transformer.wte.weight": (V, D), "transformer.ln_f.weight": (D,), **OUTPUT}
    for il in range(EXAONE_LAYERS):
        p = f"transformer.h.{il}"
        shapes |= {f"{p}.{name}.weight": (D,) for name in ("ln_1", "ln_2")}
        shapes |= {
            f"{p}.attn.attention.{x}_proj.weight": (n * HEAD, D) for x, n in (("q", HEADS), ("k", KV), ("v", KV))
        }
        shapes |= {f"{p}.attn.attention.out_proj.weight": (D, HEADS * HEAD)}
        shapes |= gated(f"{p}.mlp", FF, ("c_fc_0", "c_fc_1", "c_proj"))
    return shapes


EXAONE = Tiny(
    "exaone",
    {
        **head("Exaone", "exaone"),
        "activation_function": "silu",
        "head_dim": HEAD,
        "intermediate_size": FF,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 256,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "num_layers": EXAONE_LAYERS,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": STRETCHED,
            "rope_type": "llama3",
        },
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
    },
    exaone_shapes,
)

# Minitron

NEMOTRON_LAYERS = 2


def nemotron_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes: Shapes = {**OUTER, **OUTPUT, "model.norm.bias": (D,)}
    for il in range(NEMOTRON_LAYERS):
        p = f"model.layers.{il}"
        shapes |= {**norms(p), **attention(p)}
        shapes |= {f"{p}.{name}.bias": (D,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{p}.mlp.up_proj.weight": (FF, D), f"{p}.mlp.down_proj.weight": (D, FF)}
    return shapes


NEMOTRON = Tiny(
    "nemotron",
    {
        **head("Nemotron", "nemotron"),
        "head_dim": HEAD,
        "hidden_act": "relu2",
        "intermediate_size": FF,
        "max_position_embeddings": 256,
        "norm_eps": 1e-5,
        "num_attention_heads": HEADS,
        "num_hidden_layers": NEMOTRON_LAYERS,
        "num_key_value_heads": KV,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    nemotron_shapes,
)

# Apertus

APERTUS_LAYERS = 2


def apertus_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes = {**OUTER, **OUTPUT}
    for il in range(APERTUS_LAYERS):
        p = f"model.layers.{il}"
        shapes |= {f"{p}.{name}.weight": (D,) for name in ("attention_layernorm", "feedforward_layernorm")}
        shapes |= {**attention(p), **{f"{p}.self_attn.{x}_norm.weight": (HEAD,) for x in "qk"}}
        shapes |= {f"{p}.mlp.up_proj.weight": (FF, D), f"{p}.mlp.down_proj.weight": (D, FF)}
        shapes |= {f"{p}.mlp.act_fn.{name}": (1,) for name in ("alpha_p", "alpha_n")}
        shapes |= {f"{p}.mlp.act_fn.{name}": () for name in ("beta", "eps")}
    return shapes


APERTUS = Tiny(
    "apertus",
    {
        **head("Apertus", "apertus"),
        "head_dim": HEAD,
        "hidden_act": "xielu",
        "intermediate_size": FF,
        "max_position_embeddings": 256,
        "num_attention_heads": HEADS,
        "num_hidden_layers": APERTUS_LAYERS,
        "num_key_value_heads": KV,
        "post_norm": False,
        "qk_norm": True,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": STRETCHED,
            "rope_type": "llama3",
        },
        "rope_theta": 12000000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    apertus_shapes,
)

CHECKPOINTS = (ARCEE, EXAONE, NEMOTRON, APERTUS)
