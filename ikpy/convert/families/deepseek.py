"""DeepSeek V2, V2-Lite, V3, R1 and Kimi K2 (deepseek2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from ikpy.convert.config import Config
from ikpy.convert.families.base import (
    ATTENTION,
    DENSE,
    EXPERTS,
    SELECTION_BIAS,
    SHARED,
    Family,
    Keys,
    Modules,
    Targets,
    View,
    full_window_note,
    group_note,
    routing_keys,
)
from ikpy.convert.families.prediction import BEHIND
from ikpy.convert.rope import yarn_corners


class DeepSeekV2(Family):
    """Latent attention. attn_kv_b is written as it is, and split and transposed for the absorbed form too."""

    arch = "deepseek2"
    rotates_part = True
    needs_output = True
    own_yarn_magnitude = True
    gating = 1
    usual_pre = "deepseek-llm"  # cuts digits one by one, the rule of that name does not
    modules: ClassVar[Modules] = {
        **DENSE,
        **EXPERTS,
        **SELECTION_BIAS,
        **SHARED,
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.kv_b_proj": ("attn_kv_b", "attn_k_b", "attn_v_b"),
        "self_attn.o_proj": "attn_output",
    }

    @classmethod
    def chosen(cls, config: Config) -> type[Family]:
        return DeepSeekOcr if config.get("use_mla", default=True) is False else cls

    @property
    def n_rot(self) -> int:
        return self.config.integer("qk_rope_head_dim")

    def check(self) -> None:
        super().check()
        self.config.require("rope_interleave false", bool(self.config.get("rope_interleave", default=True)))
        rope = self.config.rope()
        # Files of this architecture shrink q and k by the magnitude of YaRN with every scaling.
        self.config.require("linear RoPE scaling", rope["rope_type"] != "linear")
        if rope["rope_type"] == "yarn":
            scales = rope.get("mscale"), rope.get("mscale_all_dim")
            is_known = bool(scales[0]) and scales[0] == scales[1]
            self.config.require(f"YaRN with mscale {scales[0]} and mscale_all_dim {scales[1]}", is_known)
            given = rope.get("attention_factor")
            self.config.require(f"YaRN with attention_factor {given}", given in (None, 1))

    def keys(self) -> Keys:
        config, rope = self.config, self.config.rope()
        n_nope, n_value = config.integer("qk_nope_head_dim"), config.integer("v_head_dim")
        keys = super().keys() | routing_keys(config, gating=self.gating)
        keys |= {
            "attention.kv_lora_rank": config.integer("kv_lora_rank"),
            "attention.key_length": n_nope + self.n_rot,
            "attention.value_length": n_value,
            "attention.head_count_kv": self.n_head,
            "expert_group_count": config.integer("n_group", default=1),
            "expert_group_used_count": config.integer("topk_group", default=1),
        }
        if config.get("q_lora_rank", default=None):
            keys["attention.q_lora_rank"] = config.integer("q_lora_rank")
        if rope["rope_type"] == "yarn":
            keys |= yarn_corners(rope) | {"rope.scaling.yarn_log_multiplier": 0.1 * float(rope["mscale_all_dim"])}
        return keys

    def view(self, target: str, source: str) -> View | None:
        n_nope, n_value = self.config.integer("qk_nope_head_dim"), self.config.integer("v_head_dim")
        if target == "attn_k_b":  # rows [H * rkv], columns n_nope: the K rows of each head, transposed
            return lambda kv: self._by_head(kv)[:, :n_nope].swapaxes(1, 2).reshape(-1, n_nope)
        if target == "attn_v_b":
            return lambda kv: self._by_head(kv)[:, n_nope:].reshape(self.n_head * n_value, -1)
        return super().view(target, source)

    def _by_head(self, kv: np.ndarray) -> np.ndarray:
        """Rows of attn_kv_b [H, n_nope + n_value, columns]. ValueError if there are others."""
        n_rows = self.config.integer("qk_nope_head_dim") + self.config.integer("v_head_dim")
        if kv.shape[-2:-1] != (self.n_head * n_rows,):
            raise ValueError(f"shape {kv.shape} of kv_b_proj")
        return kv.reshape(self.n_head, n_rows, -1)

    def notes(self) -> list[str]:
        return group_note(self.config)


class DeepSeekOcr(Family):
    """The text part of DeepSeek-OCR: V2 with plain attention."""

    arch = "deepseek2-ocr"
    needs_output = True
    defaults: ClassVar[Mapping[str, int | float]] = {"rms_norm_eps": 1e-6}
    modules: ClassVar[Modules] = {**ATTENTION, **DENSE, **EXPERTS, **SHARED}

    def keys(self) -> Keys:
        return super().keys() | routing_keys(self.config, gating=1)

    def notes(self) -> list[str]:
        return group_note(self.config) + full_window_note(self.config)


class LatentHead(DeepSeekV2):
    """As files of llama.cpp: layers that attend have one KV head of latents, and attn_kv_b in two parts only."""

    def keys(self) -> Keys:
        keys, rank = super().keys(), self.config.integer("kv_lora_rank")
        return keys | {
            "attention.head_count_kv": 1,
            "attention.key_length_mla": keys["attention.key_length"],
            "attention.value_length_mla": keys["attention.value_length"],
            "attention.key_length": rank + self.n_rot,
            "attention.value_length": rank,
        }

    def view(self, target: str, source: str) -> View | None:
        view = super().view(target, source)
        if target not in ("attn_k_b", "attn_v_b"):
            return view
        n_rows = self.config.integer("kv_lora_rank" if target == "attn_k_b" else "v_head_dim")
        return self._per_head(view, n_rows)

    def _per_head(self, view: View | None, n_rows: int) -> View:
        """A view with a matrix of so many rows per head."""
        assert view is not None
        return lambda values: view(values).reshape(self.n_head, n_rows, -1)


class DeepSeekV3(DeepSeekV2):
    """Sigmoid routing with a selection bias."""

    gating = 2
    prediction_modules: ClassVar[Modules] = BEHIND


INDEXER: dict[str, Targets] = {
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
}


def indexer_keys(config: Config) -> Keys:
    """Sizes of indexers."""
    return {
        "attention.indexer.head_count": config.integer("index_n_heads"),
        "attention.indexer.key_length": config.integer("index_head_dim"),
        "attention.indexer.top_k": config.integer("index_topk"),
    }


def full_indexers(config: Config) -> list[bool]:
    """Of every layer whether its own indexer chooses: listed, or every freq-th from layer offset - 1 on."""
    types = config.get("indexer_types", "index_topk_pattern", default=None)
    if types is not None:
        config.require(f"{len(types)} indexer types", len(types) == config.n_layer)
        return [kind in ("full", "F") for kind in types]
    freq = max(config.integer("index_topk_freq", default=1), 1)
    offset = config.integer("index_skip_topk_offset", default=2)
    return [max(il - offset + 1, 0) % freq == 0 for il in range(config.n_layer)]


class DeepSeekV32(DeepSeekV3):
    """V3 with indexers, which choose the cells that attention sees."""

    arch = "deepseek32"
    biases = needed_biases = frozenset({"indexer.k_norm"})
    modules: ClassVar[Modules] = {
        **DeepSeekV3.modules,
        **INDEXER,
    }

    def keys(self) -> Keys:
        return super().keys() | indexer_keys(self.config)


class GlmMoeDsa(DeepSeekV32):
    """GLM-5, where layers without an indexer take the cells that the one before has chosen (GLM-5.2)."""

    arch = "glm-dsa"

    def keys(self) -> Keys:
        full = full_indexers(self.config)
        return super().keys() | ({} if all(full) else {"attention.indexer.types": full})
