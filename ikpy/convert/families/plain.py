"""Phi 1 to 2 (phi2), StarCoder 2, StableLM, GPT-NeoX and Pythia, Falcon: LayerNorm with biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from ikpy.convert.config import Config
from ikpy.convert.families.base import ATTENTION, DENSE, QKV, Family, Keys, Modules, View, full_window_note

NORMS = frozenset({"attn_norm", "attn_norm_2", "ffn_norm", "output_norm"})
UNGATED = frozenset({"ffn_up", "ffn_down"})
BLOOM_NAMES: Modules = {
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}


def interleaved_heads(n_head_kv: int, group: int, size: int) -> View:
    """Rows of q, k and v one behind the other, of a matrix or a bias that has for each KV head its `group` heads of q,
    that of k and that of v.
    """

    def view(rows: np.ndarray) -> np.ndarray:
        heads = rows.reshape(n_head_kv, group + 2, size, *rows.shape[1:])
        parts = heads[:, :group], heads[:, group], heads[:, group + 1]
        return np.concatenate([part.reshape(-1, *rows.shape[1:]) for part in parts])

    return view


class LayerNormFamily(Family):
    """Every LayerNorm has a bias."""

    norm_key = "attention.layer_norm_epsilon"
    biases = NORMS
    needed_biases = NORMS


class Phi(LayerNormFamily):
    """Phi-1, 1.5 and 2: one norm for both branches, biases everywhere."""

    arch = "phi2"
    biases = NORMS | QKV | UNGATED | {"attn_output", "output"}
    needed_biases = biases
    needs_output = True
    rotates_part = True
    rotary_fraction = 0.5
    activations = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
    outer: ClassVar[Mapping[str, str]] = {**Family.outer, "model.final_layernorm": "output_norm"}
    modules: ClassVar[Modules] = {
        "input_layernorm": "attn_norm",
        **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
        "self_attn.dense": "attn_output",
        "mlp.fc1": "ffn_up",
        "mlp.fc2": "ffn_down",
    }
    defaults: ClassVar[Mapping[str, int | float]] = {"layer_norm_eps": 1e-5}

    def check(self) -> None:
        super().check()
        self.config.require("qk_layernorm true", not self.config.get("qk_layernorm", default=False))


class StarCoder2(LayerNormFamily):
    """StarCoder 2 and Granite Code 20B and 34B that were converted to it."""

    arch = "starcoder2"
    biases = NORMS | QKV | UNGATED | {"attn_output"}
    activations = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
    has_windows = True  # told by a note
    aliases: ClassVar[Mapping[str, str]] = {"norm_epsilon": "layer_norm_eps"}
    defaults: ClassVar[Mapping[str, int | float]] = {"layer_norm_eps": 1e-5}
    modules: ClassVar[Modules] = {**ATTENTION, "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}

    def notes(self) -> list[str]:
        return full_window_note(self.config)


class StableLM(LayerNormFamily):
    """Heads of q and k may have norms of their own, which become rows of one tensor."""

    arch = "stablelm"
    biases = NORMS | QKV
    needs_output = True
    rotates_part = True
    rotary_fraction = 0.25
    aliases: ClassVar[Mapping[str, str]] = {"norm_eps": "layer_norm_eps", "rope_pct": "partial_rotary_factor"}
    defaults: ClassVar[Mapping[str, int | float]] = {"layer_norm_eps": 1e-5}
    modules: ClassVar[Modules] = {
        **ATTENTION,
        **DENSE,
        "self_attn.q_layernorm.norms.{e}": "attn_q_norm",
        "self_attn.k_layernorm.norms.{e}": "attn_k_norm",
    }

    def n_parts(self, target: str) -> int:
        return {"attn_q_norm": self.n_head, "attn_k_norm": self.n_head_kv}.get(target, 0)

    def has(self, name: str) -> bool:
        """A value that is true or false."""
        return bool(self.config.get(name, default=False))

    def must_lack(self, target: str, layer: int) -> bool:
        name = target.partition(".")[0]
        if name in ("attn_q_norm", "attn_k_norm"):
            return not self.has("qk_layernorm")
        return name == "ffn_norm" and self.has("use_parallel_residual")

    def needed_tensors(self) -> frozenset[str]:
        head_norms = ("attn_q_norm.weight", "attn_k_norm.weight") if self.has("qk_layernorm") else ()
        between = () if self.has("use_parallel_residual") else ("ffn_norm.weight",)
        return frozenset((*head_norms, *between))


class GptNeoX(LayerNormFamily):
    """GPT-NeoX 20B, Pythia, Dolly, RedPajama-INCITE: q, k and v in turns, head by head."""

    arch = "gptneox"
    biases = NORMS | UNGATED | {"attn_qkv", "attn_output"}
    needed_biases = biases - {"attn_norm_2"}
    needs_output = True
    rotates_part = True
    rotary_fraction = 0.25
    activations = ("gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh")  # told by a note
    aliases: ClassVar[Mapping[str, str]] = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
    defaults: ClassVar[Mapping[str, int | float]] = {"layer_norm_eps": 1e-5, "max_position_embeddings": 2048}
    outer: ClassVar[Mapping[str, str]] = {
        "gpt_neox.embed_in": "token_embd",
        "gpt_neox.final_layer_norm": "output_norm",
        "embed_out": "output",
        "lm_head": "output",
    }
    modules: ClassVar[Modules] = {
        "input_layernorm": "attn_norm",
        "attention.query_key_value": "attn_qkv",
        "attention.dense": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.dense_h_to_4h": "ffn_up",
        "mlp.dense_4h_to_h": "ffn_down",
    }

    def notes(self) -> list[str]:
        kind = self.config.get("hidden_act", default="gelu")
        if kind == "gelu":
            return []
        return [f"files of this architecture mean the exact GELU, of which '{kind}' is an approximation (within 5e-4)"]

    def keys(self) -> Keys:
        parallel = bool(self.config.get("use_parallel_residual", default=True))
        return super().keys() | {"use_parallel_residual": parallel}

    def view(self, target: str, source: str) -> View | None:
        if target == "attn_qkv":
            return interleaved_heads(self.n_head, 1, self.config.head_dim)
        return super().view(target, source)


class Falcon(LayerNormFamily):
    """q, k and v of every KV head in turns; two norms in the newer layout unless it says one."""

    arch = "falcon"
    activations = ("gelu",)
    aliases: ClassVar[Mapping[str, str]] = {
        "activation": "hidden_act",
        "layer_norm_epsilon": "layer_norm_eps",
        "n_head": "num_attention_heads",
        "n_head_kv": "num_kv_heads",
        "n_layer": "num_hidden_layers",
    }
    defaults: ClassVar[Mapping[str, int | float]] = {"layer_norm_eps": 1e-5, "max_position_embeddings": 2048}
    outer: ClassVar[Mapping[str, str]] = {
        "transformer.word_embeddings": "token_embd",
        "transformer.ln_f": "output_norm",
        "lm_head": "output",
    }
    modules: ClassVar[Modules] = {
        "input_layernorm": "attn_norm",
        "ln_mlp": "attn_norm",
        "ln_attn": "attn_norm_2",
        **BLOOM_NAMES,
    }

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        is_newer = bool(config.get("new_decoder_architecture", default=False))
        is_shared = bool(config.get("multi_query", default=True))
        every = config.integer("num_kv_heads", default=self.n_head)
        self.n_head_kv = every if is_newer else 1 if is_shared else self.n_head
        config.values.setdefault(
            "intermediate_size", config.get("ffn_hidden_size", default=0) or 4 * config.integer("hidden_size")
        )

    def check(self) -> None:
        super().check()
        config = self.config
        for name, needed in (("alibi", False), ("parallel_attn", True), ("bias", False)):
            value = bool(config.get(name, default=needed))
            config.require(f"{name} {str(value).lower()}", value == needed)

    def view(self, target: str, source: str) -> View | None:
        if target == "attn_qkv":
            return interleaved_heads(self.n_head_kv, self.n_head // self.n_head_kv, self.config.head_dim)
        return super().view(target, source)

    def needed_tensors(self) -> frozenset[str]:
        is_newer = bool(self.config.get("new_decoder_architecture", default=False))
        n_norms = self.config.integer("num_ln_in_parallel_attn", default=2 if is_newer else 1)
        return frozenset({"attn_norm_2.weight"} if is_newer and n_norms == 2 else ())
