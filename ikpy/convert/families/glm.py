"""GLM-4 9B and its forerunners (chatglm), GLM-4 (glm4), GLM-4.5/4.6 and Solar Open (glm4moe); text parts of their V."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from ikpy.convert.config import Config
from ikpy.convert.families.base import (
    ATTENTION,
    DENSE,
    EXPERTS,
    HEAD_NORMS,
    QKV,
    SELECTION_BIAS,
    SHARED,
    Family,
    Keys,
    Modules,
    View,
    group_note,
    routing_keys,
)
from ikpy.convert.families.prediction import BEHIND
from ikpy.convert.rope import section_keys


class Glm(Family):
    """GLM-4 9B and GLM-Edge in the names of transformers; half of each head is rotated, in adjacent pairs."""

    arch = "chatglm"
    biases: ClassVar[frozenset[str]] = QKV
    needs_output = True
    rotates_part = True
    rotary_fraction = 0.5
    modules: ClassVar[Modules] = {**ATTENTION, "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


class ChatGlm(Glm):
    """GLM-4 9B in the names of its repository."""

    biases = frozenset({"attn_qkv"})
    aliases: ClassVar[Mapping[str, str]] = {
        "ffn_hidden_size": "intermediate_size",
        "kv_channels": "head_dim",
        "layernorm_epsilon": "rms_norm_eps",
        "multi_query_group_num": "num_key_value_heads",
        "num_layers": "num_hidden_layers",
        "seq_length": "max_position_embeddings",
    }
    outer: ClassVar[Mapping[str, str]] = {
        "transformer.embedding.word_embeddings": "token_embd",
        "transformer.encoder.final_layernorm": "output_norm",
        "transformer.output_layer": "output",
    }
    modules: ClassVar[Modules] = {
        "input_layernorm": "attn_norm",
        "self_attention.query_key_value": "attn_qkv",
        "self_attention.dense": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.dense_h_to_4h": "ffn_up",
        "mlp.dense_4h_to_h": "ffn_down",
    }

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        config.values.setdefault("hidden_act", "silu")  # another one has no name in the configuration
        config.values["rope_theta"] = 10000.0 * config.number("rope_ratio", default=1.0)

    def check(self) -> None:
        super().check()
        usual = {
            "add_bias_linear": False,
            "apply_residual_connection_post_layernorm": False,
            "multi_query_attention": True,
            "original_rope": True,
            "post_layer_norm": True,
            "rmsnorm": True,
        }
        for name, needed in usual.items():
            value = bool(self.config.get(name, default=needed))
            self.config.require(f"{name} {str(value).lower()}", value == needed)

    def needed_tensors(self) -> frozenset[str]:
        return frozenset({"attn_qkv.bias"} if self.config.get("add_qkv_bias", default=False) else ())


class Glm4(Family):
    """Norms before and after both branches; half of each head is rotated, in adjacent pairs."""

    arch = "glm4"
    biases = QKV
    rotates_part = True
    rotary_fraction = 0.5
    modules: ClassVar[Modules] = {
        **ATTENTION,
        "post_self_attn_layernorm": "post_attention_norm",
        "post_mlp_layernorm": "post_ffw_norm",
        "mlp.gate_up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }


def halves_of_part(head_dim: int, n_rot: int) -> View:
    """Rows of q or k: the rotated elements of every head, which come first, from adjacent pairs to halves."""

    def view(rows: np.ndarray) -> np.ndarray:
        heads = rows.reshape(-1, head_dim, *rows.shape[1:])
        order = [*range(0, n_rot, 2), *range(1, n_rot, 2), *range(n_rot, head_dim)]
        return heads[:, order].reshape(rows.shape)

    return view


class Glm4v(Glm4):
    """Rotation in sections, for which files have halves of the rotated part."""

    def keys(self) -> Keys:
        return super().keys() | section_keys(self.config, self.n_rot)

    def view(self, target: str, source: str) -> View | None:
        is_rotated = target in ("attn_q", "attn_k")
        return halves_of_part(self.config.head_dim, self.n_rot) if is_rotated else super().view(target, source)


class Glm4Moe(Family):
    """Leading dense layers, sigmoid routing with a selection bias."""

    arch = "glm4moe"
    biases = needed_biases = QKV
    rotates_part = True
    rotary_fraction = 0.5
    prediction_modules: ClassVar[Modules] = BEHIND
    modules: ClassVar[Modules] = {
        **ATTENTION,
        **HEAD_NORMS,
        **DENSE,
        **EXPERTS,
        **SELECTION_BIAS,
        **SHARED,
        "post_attention_layernorm": "post_attention_norm",
    }

    def keys(self) -> Keys:
        return super().keys() | routing_keys(self.config, gating=2)

    def notes(self) -> list[str]:
        return group_note(self.config)


class SolarOpen(Glm4Moe):
    """Experts in every layer, whole heads rotated; biases of q, k and v only if the checkpoint has them."""

    needed_biases: ClassVar[frozenset[str]] = frozenset()
    rotary_fraction = 1.0
    defaults: ClassVar[Mapping[str, int | float]] = {
        "head_dim": 128,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "rope_theta": 1e6,
    }
    modules: ClassVar[Modules] = {
        **ATTENTION,
        **EXPERTS,
        **SELECTION_BIAS,
        **SHARED,
        "post_attention_layernorm": "post_attention_norm",
    }

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        # No layer has a dense network, but the key must be there.
        width = config.integer("intermediate_size", default=config.integer("moe_intermediate_size"))
        config.values["intermediate_size"] = width

    def check(self) -> None:
        super().check()
        n_dense = self.config.integer("first_k_dense_replace", default=0)
        self.config.require(f"first_k_dense_replace {n_dense}", n_dense == 0)


class Glm4vMoe(Glm4Moe):
    """Rotation in sections."""

    def keys(self) -> Keys:
        return super().keys() | section_keys(self.config, self.n_rot)
