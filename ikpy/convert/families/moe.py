"""Mixtures of experts: dots1, Hunyuan MoE, Ling 1 (bailingmoe) and 2.0 (bailingmoe2), MiniMax M2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ikpy.convert.config import Config
from ikpy.convert.families.base import (
    ATTENTION,
    DENSE,
    EXPERTS,
    HEAD_NORMS,
    MIXTRAL_EXPERTS,
    SELECTION_BIAS,
    SHARED,
    Family,
    Keys,
    Modules,
    View,
    feed_forward,
    group_note,
    routing_keys,
)
from ikpy.convert.families.prediction import WITH_LAYER_NORM


class Dots1(Family):
    """Leading dense layers, routed and shared experts."""

    arch = "dots1"
    needs_output = True
    modules: ClassVar[Modules] = {**ATTENTION, **HEAD_NORMS, **DENSE, **EXPERTS, **SELECTION_BIAS, **SHARED}

    def keys(self) -> Keys:
        return super().keys() | routing_keys(self.config, gating=2)

    def notes(self) -> list[str]:
        return group_note(self.config)


class HunyuanDense(Family):
    """NTK scaling is a larger base."""

    arch = "hunyuan-dense"
    modules: ClassVar[Modules] = {
        **ATTENTION,
        **DENSE,
        "self_attn.query_layernorm": "attn_q_norm",
        "self_attn.key_layernorm": "attn_k_norm",
    }

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        rope = config.rope()
        if rope["rope_type"] == "dynamic" and rope.get("alpha"):
            # alpha stretches the base once and for all: base * alpha^(n / (n - 2)).
            n = config.head_dim
            base = float(rope["rope_theta"]) * float(rope["alpha"]) ** (n / (n - 2))
            config.values["rope_parameters"] = {"rope_type": "default", "rope_theta": base}

    def check(self) -> None:
        super().check()
        self.config.require("use_qk_norm false", bool(self.config.get("use_qk_norm", default=True)))


class HunyuanMoe(HunyuanDense):
    """Experts of width intermediate_size."""

    arch = "hunyuan-moe"
    modules: ClassVar[Modules] = {
        **HunyuanDense.modules,
        **EXPERTS,
        **feed_forward("mlp.shared_mlp", "_shexp"),
        "mlp.gate.wg": "ffn_gate_inp",
    }

    def keys(self) -> Keys:
        config, width = self.config, self.config.integer("intermediate_size")
        return super().keys() | {
            "expert_feed_forward_length": width,
            "expert_shared_feed_forward_length": width * config.integer("num_shared_expert", default=1),
        }


_BAILING_OUTER = {"model.word_embeddings": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


class BailingMoe(Family):
    """Ling 1: q, k and v in one matrix, experts in every layer; columns of the output matrix may have length 1."""

    arch = "bailingmoe"
    rotates_pairs = True
    needs_output = True
    outer: ClassVar[Mapping[str, str]] = _BAILING_OUTER
    modules: ClassVar[Modules] = {
        **EXPERTS,
        **SHARED,
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "attention.query_key_value": ("attn_q", "attn_k", "attn_v"),
        "attention.dense": "attn_output",
    }

    def check(self) -> None:
        super().check()
        config = self.config
        classes = config.get("architectures", default=["BailingMoeForCausalLM"])
        config.require(f"architectures {classes}", classes == ["BailingMoeForCausalLM"])
        routing = routing_keys(config, gating=1)
        n_dense = routing["leading_dense_block_count"]
        config.require(f"first_k_dense_replace {n_dense}", n_dense == 0)
        config.require("experts chosen by sigmoid", routing["expert_gating_func"] == 1)
        for name in ("norm_softmax", "multi_gate", "use_sliding_window"):
            config.require(f"{name} true", not config.get(name, default=False))

    def keys(self) -> Keys:
        keys = super().keys() | routing_keys(self.config, gating=1)
        del keys["expert_gating_func"]
        return keys

    def view(self, target: str, source: str) -> View | None:
        pairs = super().view(target, source)
        if source != "attention.query_key_value":
            return pairs
        size = self.config.head_dim
        ends = {
            "attn_q": self.n_head,
            "attn_k": self.n_head + self.n_head_kv,
            "attn_v": self.n_head + 2 * self.n_head_kv,
        }
        stop = ends[target] * size
        start = stop - size * (self.n_head if target == "attn_q" else self.n_head_kv)
        return lambda rows: pairs(rows[start:stop]) if pairs else rows[start:stop]

    def unit_columns(self, target: str) -> bool:
        return target == "output" and bool(self.config.get("norm_head", default=False))


class BailingMoe2(Family):
    """Fused q, k and v; routing keys of Ling 2.0."""

    arch = "bailingmoe2"
    prediction_modules: ClassVar[Modules] = WITH_LAYER_NORM
    rotates_part = True
    needs_output = True
    outer: ClassVar[Mapping[str, str]] = _BAILING_OUTER
    modules: ClassVar[Modules] = {
        **DENSE,
        **EXPERTS,
        **SHARED,
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "attention.query_key_value": "attn_qkv",
        "attention.dense": "attn_output",
        "attention.query_layernorm": "attn_q_norm",
        "attention.key_layernorm": "attn_k_norm",
        "mlp.gate.expert_bias": "exp_probs_b.bias",
    }

    def keys(self) -> Keys:
        config, routing = self.config, routing_keys(self.config, gating=2)
        width = config.integer("moe_shared_expert_intermediate_size", default=routing["expert_feed_forward_length"])
        return (
            super().keys()
            | routing
            | {
                "expert_shared_feed_forward_length": width,
                "expert_group_count": config.integer("n_group", default=1),
                "expert_group_used_count": config.integer("topk_group", default=1),
            }
        )

    def notes(self) -> list[str]:
        return [f"{note} (unless -ger is given)" for note in group_note(self.config)]


class MiniMaxM2(Family):
    """Experts of width intermediate_size; one norm over all heads of q, one over those of k."""

    arch = "minimax-m2"
    rotates_part = True
    modules: ClassVar[Modules] = {
        **ATTENTION,
        **HEAD_NORMS,
        **MIXTRAL_EXPERTS,
        "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
    }

    @property
    def n_rot(self) -> int:
        return self.config.integer("rotary_dim", default=super().n_rot)

    def keys(self) -> Keys:
        return super().keys() | {
            "expert_feed_forward_length": self.config.integer("intermediate_size"),
            "expert_gating_func": 2,
        }
