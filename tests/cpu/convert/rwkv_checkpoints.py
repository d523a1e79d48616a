"""Checkpoints of RWKV World, ARWKV and QRWKV6 that hold the numbers of random models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ikpy.convert.world_tokens import WORLD
from tests.cpu.convert import checkpoints as made
from tests.cpu.models.reference_models import RandomModel

V = 300
WORDS = ("\n\n", "Hello", "Hel", "lo", " world", "こん", "にちは", "it's", "\\n", b"\xe3\x81", "User:", " the")
SHARES7, SHARES6 = "rwkvag", "wkvrg"
Named = Iterator[tuple[str, np.ndarray]]


def world_lines() -> list[str]:
    """Lines of the vocabulary: bytes, words, and fillers."""
    tokens: list[str | bytes] = [bytes([i]) for i in range(256)]
    tokens += [*WORDS, *(f"word{i}" for i in range(20))]
    literals = [chr(t[0]) if isinstance(t, bytes) and len(t) == 1 and t[0] < 128 else t for t in tokens]
    size = [len(t.encode()) if isinstance(t, str) else len(t) for t in tokens]
    return [f"{i} {literal!r} {n}" for i, (literal, n) in enumerate(zip(literals, size, strict=True), 1)]


def head(name: str, model_type: str, m: RandomModel) -> dict[str, Any]:
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": model_type,
        "hidden_size": m.keys["embedding_length"],
        "intermediate_size": m.keys["feed_forward_length"],
        "num_hidden_layers": m.keys["block_count"],
        "tie_word_embeddings": False,
        "vocab_size": V,
        "torch_dtype": "float32",
    }


def rwkv7_config(m: RandomModel) -> dict[str, Any]:
    """As those of flash-linear-attention."""
    ranks = {"decay": "decay", "a": "iclr", "v": "value_residual_mix", "gate": "gate"}
    return {
        **head("RWKV7", "rwkv7", m),
        "head_dim": m.keys["wkv.head_size"],
        "norm_eps": 64e-5 / m.keys["wkv.head_size"],
        "hidden_act": "sqrelu",
        "norm_first": True,
        "norm_bias": True,
        "attn": None,
        "value_dim": [m.keys["embedding_length"]] * m.keys["block_count"],
        **{f"{name}_low_rank_dim": m.keys[f"attention.{key}_lora_rank"] for name, key in ranks.items()},
    }


def arwkv7_config(m: RandomModel) -> dict[str, Any]:
    size = m.keys["wkv.head_size"]
    return {
        **head("RwkvHybrid", "rwkv_hybrid", m),
        "head_size": size,
        "num_wkv_heads": m.keys["embedding_length"] // size,
        "num_attention_heads": 2,
        "rms_norm_eps": 1e-5,
        "wkv_version": 7,
        "wkv_has_gate": "attention.gate_lora_rank" in m.keys,
        "wkv_has_group_norm": "blk.0.time_mix_ln" in m.weights,
        "hidden_act": "silu",
    }


def rwkv6_config(m: RandomModel) -> dict[str, Any]:
    return {
        **head("Rwkv6", "rwkv6", m),
        "head_size": m.keys["wkv.head_size"],
        "head_size_divisor": 8,
        "layer_norm_epsilon": 1e-5,
        "num_attention_heads": 64,  # elements of a head, as published
        "rescale_every": 6,
    }


def rwkv6qwen2_config(m: RandomModel) -> dict[str, Any]:
    return {
        **head("RWKV6Qwen2", "rwkv6qwen2", m),
        "num_attention_heads": m.keys["embedding_length"] // m.keys["wkv.head_size"],
        "num_key_value_heads": m.keys["attention.head_count_kv"],
        "lora_rank_tokenshift": m.keys["time_mix_extra_dim"],
        "lora_rank_decay": m.keys["time_decay_extra_dim"],
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    }


QWEN2 = {
    "attn_norm": "input_layernorm.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    **{f"ffn_{name}": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
}
OUTER_QWEN2 = {
    "token_embd": "model.embed_tokens.weight",
    "output_norm": "model.norm.weight",
    "output": "lm_head.weight",
}
_SUFFIXES = {"weight": "", "bias": ".bias"}


def _normed(names: dict[str, str]) -> dict[str, str]:
    """Weights and biases of norms."""
    return {f"{target}{end}": f"{name}.{kind}" for target, name in names.items() for kind, end in _SUFFIXES.items()}


def rwkv7_tensors(base: str, il: int, w: np.ndarray) -> Named:
    """Tensors of a layer from one of a file."""
    names = _normed({"attn_norm": "attn_norm", "attn_norm_2": "ffn_norm", "time_mix_ln": "attn.g_norm"})
    matrices = {"receptance": "r_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
    names |= {f"time_mix_{name}": f"attn.{theirs}.weight" for name, theirs in matrices.items()}
    names |= {f"channel_mix_{name}": f"ffn.{name}.weight" for name in ("key", "value")}
    rank = re.fullmatch(r"time_mix_([wavg])([012])", base)
    if base == "time_mix_lerp_fused":
        yield from ((f"attn.x_{x}", part.reshape(1, 1, -1)) for x, part in zip(SHARES7, w, strict=False))
    elif rank and (il > 0 or rank[1] != "v"):
        yield f"attn.{rank[1]}_lora.lora.{('2.bias', '0.weight', '2.weight')[int(rank[2])]}", w
    elif base in names:
        yield names[base], w
    elif base == "channel_mix_lerp_k":
        yield "ffn.x_k", w
    elif not rank:
        yield f"attn.{base.removeprefix('time_mix_')}", w.reshape(2, -1) if base == "time_mix_r_k" else w


def arwkv7_tensors(base: str, il: int, w: np.ndarray) -> Named:
    """Tensors of a layer from one of a file."""
    p = "self_attn.time_mixer"
    names = {**QWEN2, **_normed({"time_mix_ln": f"{p}.ln_x"})}
    names |= {f"time_mix_{name}": f"{p}.{name}.weight" for name in ("receptance", "key", "value", "output")}
    if base == "time_mix_lerp_fused":
        yield from ((f"{p}.x_{x}", part.reshape(1, 1, -1)) for x, part in zip(SHARES7, w, strict=False))
    elif base in names:
        yield names[base], w
    else:
        shaped = w.T if w.ndim == 2 else w.reshape(2, -1) if base == "time_mix_r_k" else w.reshape(1, 1, -1)
        yield f"{p}.{base.removeprefix('time_mix_')}", shaped


def _time_mix6(base: str, w: np.ndarray, prefix: str, order: str) -> Named:
    """Parameters of a time mix of RWKV-6; order: of the parts of its first matrices."""
    parts = [SHARES6.index(letter) for letter in order]
    kind = base.removeprefix("time_mix_")
    if kind == "lerp_fused":
        yield from ((f"{prefix}.time_maa_{x}", part.reshape(1, 1, -1)) for x, part in zip(SHARES6, w, strict=True))
    elif kind == "w1":
        yield f"{prefix}.time_maa_w1", w.reshape(5, -1, w.shape[1])[parts].reshape(w.shape).T
    elif kind == "w2":
        yield f"{prefix}.time_maa_w2", w[parts].swapaxes(1, 2)
    elif kind in ("decay_w1", "decay_w2"):
        yield f"{prefix}.time_{kind}", w.T
    elif kind in ("decay", "lerp_x"):
        yield f"{prefix}.time_{'decay' if kind == 'decay' else 'maa_x'}", w.reshape(1, 1, -1)


def rwkv6_tensors(base: str, il: int, w: np.ndarray) -> Named:
    """Tensors of a layer from one of a file."""
    names = _normed({"attn_norm": "ln1", "attn_norm_2": "ln2", "time_mix_ln": "attention.ln_x"})
    names |= {f"time_mix_{n}": f"attention.{n}.weight" for n in ("receptance", "key", "value", "gate", "output")}
    names |= {f"channel_mix_{n}": f"feed_forward.{n}.weight" for n in ("key", "value", "receptance")}
    names["time_mix_first"] = "attention.time_faaaa"
    if base in names:
        yield names[base], w
    elif base.startswith("channel_mix_lerp"):
        yield f"feed_forward.time_maa_{base[-1]}", w.reshape(1, 1, -1)
    else:
        yield from _time_mix6(base, w, "attention", SHARES6)


def rwkv6qwen2_tensors(base: str, il: int, w: np.ndarray) -> Named:
    """Tensors of a layer from one of a file."""
    names = dict(QWEN2)
    for name, theirs in (("receptance", "q_proj"), ("key", "k_proj"), ("value", "v_proj"), ("output", "o_proj")):
        names |= _normed({f"time_mix_{name}": f"self_attn.{theirs}"})
    names["time_mix_gate"] = "self_attn.gate.weight"
    if base in names:
        yield names[base], w
    else:
        yield from _time_mix6(base, w, "self_attn", "rkvwg")


OUTER7 = {
    **_normed({"token_embd_norm": "model.layers.0.pre_norm", "output_norm": "model.norm"}),
    "token_embd": "model.embeddings.weight",
    "output": "lm_head.weight",
}
OUTER6 = {
    **_normed({"token_embd_norm": "rwkv.blocks.0.pre_ln", "output_norm": "rwkv.ln_out"}),
    "token_embd": "rwkv.embeddings.weight",
    "output": "head.weight",
}
KINDS: dict[str, tuple[Callable[[RandomModel], dict[str, Any]], dict[str, str], str, Callable[..., Named]]] = {
    "rwkv7": (rwkv7_config, OUTER7, "model.layers", rwkv7_tensors),
    "arwkv7": (arwkv7_config, OUTER_QWEN2, "model.layers", arwkv7_tensors),
    "rwkv6": (rwkv6_config, OUTER6, "rwkv.blocks", rwkv6_tensors),
    "rwkv6qwen2": (rwkv6qwen2_config, OUTER_QWEN2, "model.layers", rwkv6qwen2_tensors),
}


def tensors_of(m: RandomModel) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint of a model; rows of tokens are repeated."""
    _, outer, layers, named = KINDS[m.arch]
    found = {}
    for name, w in m.weights.items():
        layer = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        if layer is None:
            found[outer[name]] = np.resize(w, (V, w.shape[1])) if w.ndim == 2 else w
        else:
            il = int(layer[1])
            found |= {f"{layers}.{il}.{theirs}": values for theirs, values in named(layer[2], il, w)}
    return found


def write(m: RandomModel, folder: Path, tensors: dict[str, np.ndarray] | None = None, **config: Any) -> Path:
    """A checkpoint of a model with a vocabulary of RWKV World."""
    folder.mkdir(parents=True)
    stored = tensors_of(m) if tensors is None else tensors
    packed = {n: ("F32", v.shape, np.ascontiguousarray(v, np.float32).tobytes()) for n, v in stored.items()}
    made.write_tensors(folder / "model.safetensors", packed)
    (folder / "config.json").write_text(json.dumps({**KINDS[m.arch][0](m), **config}))
    (folder / WORLD).write_text("\n".join(world_lines()) + "\n", encoding="utf-8")
    return folder
