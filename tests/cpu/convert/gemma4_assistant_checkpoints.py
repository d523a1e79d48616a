"""A tiny drafter of Gemma 4 as it is published: the random one of tests/cpu/models/gemma4_assistant_model.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from tests.cpu.convert.checkpoints import CHECKPOINTS, Tensors, write_tensors
from tests.cpu.models import gemma4_assistant_model as assistant
from tests.cpu.models.reference_models import RandomModel

TOKENIZER = CHECKPOINTS / "gemma4"
N_VOCAB = 384
_LAYER = {
    "input_layernorm.weight": "attn_norm",
    "post_attention_layernorm.weight": "post_attention_norm",
    "pre_feedforward_layernorm.weight": "ffn_norm",
    "post_feedforward_layernorm.weight": "post_ffw_norm",
    "self_attn.q_proj.weight": "attn_q",
    "self_attn.o_proj.weight": "attn_output",
    "self_attn.q_norm.weight": "attn_q_norm",
    **{f"mlp.{name}_proj.weight": f"ffn_{name}" for name in ("gate", "up", "down")},
    "layer_scalar": "layer_output_scale",
}
_OUTER = {
    "model.embed_tokens.weight": "token_embd",
    "model.norm.weight": "output_norm",
    "pre_projection.weight": "nextn.pre_projection",
    "post_projection.weight": "nextn.post_projection",
}


def drafter() -> RandomModel:
    """Its weights by the names of GGUF files."""
    m = assistant.drafter()
    m.matrix("token_embd", N_VOCAB, assistant.OWN)
    return m


def config(**more: Any) -> dict[str, Any]:
    """config.json; values are those of the text part."""
    windows = assistant.OWN_WINDOWS
    text = {
        "model_type": "gemma4_text",
        "hidden_size": assistant.OWN,
        "intermediate_size": assistant.OWN_FF,
        "num_hidden_layers": len(windows),
        "num_kv_shared_layers": len(windows),
        "num_attention_heads": assistant.OWN_HEADS,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "head_dim": assistant.WINDOW_HEAD,
        "global_head_dim": assistant.FULL_HEAD,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        "sliding_window": assistant.WINDOW,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
        "num_experts": None,
        "final_logit_softcapping": None,
        "max_position_embeddings": 512,
        "rms_norm_eps": assistant.EPS,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "tie_word_embeddings": True,
        "vocab_size": N_VOCAB,
        **more,
    }
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": assistant.D,
        "use_ordered_embeddings": False,
        "tie_word_embeddings": True,
        "text_config": text,
    }


def write(folder: Path, *, tokenizer: bool = True, groups: bool = False, **more: Any) -> RandomModel:
    """The checkpoint; returns its weights. groups: with groups of tokens. more: values of the text part."""
    folder.mkdir(parents=True, exist_ok=True)
    values = config(**more) | ({"use_ordered_embeddings": True} if groups else {})
    (folder / "config.json").write_text(json.dumps(values))
    for path in TOKENIZER.glob("tokenizer*") if tokenizer else ():
        shutil.copy(path, folder)
    m = drafter()
    names = dict(_OUTER)
    for il in range(len(assistant.OWN_WINDOWS)):
        names |= {f"model.layers.{il}.{module}": f"blk.{il}.{name}" for module, name in _LAYER.items()}
    tensors: Tensors = {n: ("F32", m.weights[name].shape, m.weights[name].tobytes()) for n, name in names.items()}
    if groups:
        centroids = np.ones((8, assistant.OWN), np.float32)
        tensors["masked_embedding.centroids.weight"] = "F32", centroids.shape, centroids.tobytes()
        order = np.arange(N_VOCAB, dtype=np.int64)
        tensors["masked_embedding.token_ordering"] = "I64", order.shape, order.tobytes()
    write_tensors(folder / "model.safetensors", tensors)
    return m
