"""MiniCPM 1, 2 and 4 (minicpm), and MiniCPM 3 (minicpm3)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from ikpy.convert.families.base import DENSE, Keys, Modules
from ikpy.convert.families.long_rope import LongRope
from ikpy.models.minicpm import BASE_WIDTH, DEPTH_SCALE, EMBEDDING_SCALE


class MiniCPM(LongRope):
    """Blocks of llama; scales of embeddings, branches and logits are keys."""

    arch = "minicpm"
    rotates_pairs = True
    defaults: ClassVar[Mapping[str, int | float]] = {"scale_emb": 1, "scale_depth": 1, "dim_model_base": 1}

    def check(self) -> None:
        super().check()
        self.config.require("experts", not self.n_expert)
        self.config.require("dim_model_base 0", self.config.number("dim_model_base") != 0)

    def keys(self) -> Keys:
        config = self.config
        width, n_layer = config.integer("hidden_size"), max(1, config.n_layer)
        keys = super().keys() | {
            "embedding_scale": config.number("scale_emb"),
            "residual_scale": config.number("scale_depth") / math.sqrt(n_layer),
            "logit_scale": width / config.number("dim_model_base"),
        }
        if "long_factor" not in config.rope():
            return keys
        return keys | self.long_keys() | {"rope.scaling.type": "longrope"}

    def notes(self) -> list[str]:
        if not self.config.get("sparse_config", default=None):
            return []
        return ["long texts are attended to as a whole: sparse attention (InfLLM) is no part of this architecture"]


class MiniCPM3(LongRope):
    """Latent attention. The scales are those that the architecture knows."""

    arch = "minicpm3"
    rotates_part = True
    defaults: ClassVar[Mapping[str, int | float]] = {
        "scale_emb": EMBEDDING_SCALE,
        "scale_depth": DEPTH_SCALE,
        "dim_model_base": BASE_WIDTH,
    }
    modules: ClassVar[Modules] = {
        **DENSE,
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.kv_b_proj": "attn_kv_b",
        "self_attn.o_proj": "attn_output",
    }

    @property
    def n_rot(self) -> int:
        return self.config.integer("qk_rope_head_dim")

    def check(self) -> None:
        super().check()
        config = self.config
        for name, known in self.defaults.items():
            value = config.number(name)
            config.require(f"{name} {value:g} instead of {known:g}", math.isclose(value, known))
        kind = config.rope()["rope_type"]
        config.require(f"RoPE scaling '{kind}'", kind in ("default", *self.rope_scalings))
        groups = config.integer("num_key_value_heads", default=self.n_head)
        config.require(f"{groups} KV heads of {self.n_head} heads", groups == self.n_head)

    def keys(self) -> Keys:
        config = self.config
        n_value = config.integer("v_head_dim", default=config.integer("hidden_size") // self.n_head)
        keys = super().keys() | {
            "attention.q_lora_rank": config.integer("q_lora_rank"),
            "attention.kv_lora_rank": config.integer("kv_lora_rank"),
            "attention.key_length": config.integer("qk_nope_head_dim") + self.n_rot,
            "attention.value_length": n_value,
        }
        return keys | (self.long_keys() if "long_factor" in config.rope() else {})
