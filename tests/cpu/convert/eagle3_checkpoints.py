"""Tiny drafters of EAGLE-3's kind for the tiny checkpoint of tests/data/convert/llama, as they are published.

Their layer is that of tests/cpu/models/eagle3_model.py; checkpoints have the rows of q and k in halves, not in pairs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.cpu.convert import checkpoints as made_of
from tests.cpu.convert.checkpoints import Tensors, read_json, write_tensors

HEADS, KV, HEAD, FF, GUESSED = 4, 2, 16, 80, 96
LAYERS = 8
"""Of the target."""
_LAYER = {
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
}
_OUTER = {"embed_tokens": "token_embd", "fc": "fc", "norm": "output_norm", "lm_head": "output"}


def target(folder: Path) -> Path:
    """The checkpoint of tests/data with more layers: those that it has, with rows moved."""
    made = made_of.copy("llama", folder)
    made_of.amend(made, num_hidden_layers=LAYERS)

    def grow(tensors: Tensors) -> None:
        for name, (kind, shape, data) in list(tensors.items()):
            for il in range(int(name.split(".")[2]) + 2, LAYERS, 2) if ".layers." in name else ():
                rows = np.frombuffer(data, np.uint8).reshape(shape[0], -1)
                again = name.replace(f".layers.{il % 2}.", f".layers.{il}.")
                tensors[again] = kind, shape, np.roll(rows, il, axis=0).tobytes()

    made_of.change_tensors(made, grow)
    return made


def config(target: Path, **more: Any) -> dict[str, Any]:
    """config.json as SpecForge writes it."""
    model = read_json(target / "config.json")
    values = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": model["hidden_size"],
        "intermediate_size": FF,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": HEAD,
        "num_hidden_layers": 1,
        "vocab_size": model["vocab_size"],
        "draft_vocab_size": GUESSED,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        **more,
    }
    return {name: value for name, value in values.items() if value is not None}


def weights(values: dict[str, Any], *, width: int, embeds: bool) -> dict[str, np.ndarray]:
    """By the names of GGUF files, f32: rows of q and k in halves. width: numbers of a state of the target."""
    random = np.random.default_rng(5)
    d, n_vocab, n_rows = values["hidden_size"], values["vocab_size"], values["draft_vocab_size"]
    shapes = {
        "fc": (d, 3 * width),
        "output_norm": (d,),
        "output": (n_rows, d),
        **{name: (d,) for name in ("attn_norm", "attn_norm_2", "ffn_norm")},
        "attn_q": (HEADS * HEAD, 2 * d),
        "attn_k": (KV * HEAD, 2 * d),
        "attn_v": (KV * HEAD, 2 * d),
        "attn_output": (d, HEADS * HEAD),
        **{f"ffn_{name}": (FF, d) for name in ("gate", "up")},
        "ffn_down": (d, FF),
    }
    shapes |= {"token_embd": (n_vocab, d)} if embeds else {}
    made = {n: random.standard_normal(s) / np.sqrt(s[-1]) if len(s) > 1 else random.uniform(0.5, 1.5, s)
            for n, s in shapes.items()}  # fmt: skip
    return {name: array.astype(np.float32) for name, array in made.items()}


def guessed(n_vocab: int, n_rows: int = GUESSED) -> np.ndarray:
    """Tokens of the target that the rows of the output matrix are."""
    return np.sort(np.random.default_rng(6).permutation(n_vocab)[:n_rows]).astype(np.int64)


def write(
    folder: Path, target: Path, *, layer: str = "midlayer.", prefix: str = "", embeds: bool = False, **more: Any
) -> dict[str, np.ndarray]:
    """The checkpoint; returns its weights. layer, prefix: before the names of the layer and of all."""
    folder.mkdir(parents=True, exist_ok=True)
    values = config(target, **more)
    (folder / "config.json").write_text(json.dumps(values))
    flat = {**values, **values.get("transformer_layer_config", {})}
    made = weights(flat, width=read_json(target / "config.json")["hidden_size"], embeds=embeds)
    names = {f"{layer}{module}": name for module, name in _LAYER.items()} | _OUTER
    tensors: Tensors = {}
    for module, name in names.items():
        if name in made:
            tensors[f"{prefix}{module}.weight"] = "F32", made[name].shape, made[name].tobytes()
    n_vocab, n_rows = flat["vocab_size"], flat["draft_vocab_size"]
    if n_rows != n_vocab:
        tokens, chosen = guessed(n_vocab, n_rows), np.zeros(n_vocab, np.uint8)
        chosen[tokens] = 1
        tensors[f"{prefix}d2t"] = "I64", (n_rows,), (tokens - np.arange(n_rows)).tobytes()
        tensors[f"{prefix}t2d"] = "BOOL", (n_vocab,), chosen.tobytes()
    write_tensors(folder / "model.safetensors", tensors)
    return made
