"""Tiny DFlash and DSpark drafters for the checkpoint of eagle3_checkpoints.py, as they are published: the random ones
of tests/cpu/models/dflash_model.py with another vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.cpu.convert.checkpoints import Tensors, write_tensors
from tests.cpu.models import dflash_model as dflash
from tests.cpu.models.reference_models import RandomModel

N_VOCAB, MASK = 384, 380
IDS = [1, 2, 4]
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    **{f"self_attn.{x}_norm": f"attn_{x}_norm" for x in "qk"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
    **{f"{x}_conv.kernel_projection": f"{y}_conv_proj" for x, y in (("attention", "attn"), ("mlp", "ffn"))},
}
_OUTER = {
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "norm": "output_norm",
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
    "candidate_selector.hidden_projection": "selector_hidden",
}
# Without ".weight" in their names.
_BARE_LAYER = {"attention_conv.base_kernel": "attn_conv_base", "mlp_conv.base_kernel": "ffn_conv_base"}
_BARE = {f"candidate_selector.{name}_codebook": f"selector_{name}" for name in ("predecessor", "successor")}


def config(**more: Any) -> dict[str, Any]:
    """config.json; None takes a value away."""
    values = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": dflash.D,
        "intermediate_size": dflash.FF,
        "num_hidden_layers": dflash.LAYERS,
        "num_attention_heads": dflash.HEADS,
        "num_key_value_heads": dflash.KV,
        "head_dim": dflash.HEAD,
        "num_target_layers": 8,
        "block_size": dflash.BLOCK,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": IDS},
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": dflash.EPS,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "vocab_size": N_VOCAB,
        **more,
    }
    return {name: value for name, value in values.items() if value is not None}


def write(
    folder: Path, *, markov: bool = False, own: bool = False, selector: bool = False, prefix: str = "", **more: Any
) -> RandomModel:
    """The checkpoint; returns its weights. own: with an output matrix of 96 of the tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    m = dflash.drafter(markov="anchor" if markov else "", selector=selector)
    for name in _BARE.values() if selector else ():
        m.matrix(name, N_VOCAB, dflash.RANK)
    tensors: Tensors = {}
    if own:
        m.matrix("output", 96, dflash.D)
        tokens, chosen = np.sort(m.random.permutation(N_VOCAB)[:96]), np.zeros(N_VOCAB, np.uint8)
        chosen[tokens] = 1
        tensors[f"{prefix}d2t"] = "I64", (96,), (tokens - np.arange(96)).astype(np.int64).tobytes()
        tensors[f"{prefix}t2d"] = "BOOL", (N_VOCAB,), chosen.tobytes()
    if markov:
        m.matrix("markov_w1", N_VOCAB, dflash.RANK)
        m.matrix("markov_w2", 96 if own else N_VOCAB, dflash.RANK)
    (folder / "config.json").write_text(json.dumps(config(**({"draft_vocab_size": 96} if own else {}), **more)))
    names = dict(_OUTER)
    for il in range(dflash.LAYERS):
        names |= {f"layers.{il}.{module}": f"blk.{il}.{name}" for module, name in _LAYER.items()}
    for module, name in names.items():
        for suffix, end in (("weight", ""), ("bias", ".bias")):
            values = m.weights.get(f"{name}{end}")
            if values is not None:
                tensors[f"{prefix}{module}.{suffix}"] = "F32", values.shape, values.tobytes()
    bare = dict(_BARE)
    for il in range(dflash.LAYERS):
        bare |= {f"layers.{il}.{module}": f"blk.{il}.{name}" for module, name in _BARE_LAYER.items()}
    for module, name in bare.items():
        if name in m.weights:
            tensors[f"{prefix}{module}"] = "F32", m.weights[name].shape, m.weights[name].tobytes()
    write_tensors(folder / "model.safetensors", tensors)
    return m
