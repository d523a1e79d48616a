"""DeepSeek V4 (deepseek4): residual streams, compressed attention, experts chosen by token in the first layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ikpy.convert.families.base import Family, Keys, Modules, Targets, View, expert_half, routing_keys
from ikpy.convert.families.prediction import columns
from ikpy.convert.rope import yarn_corners
from ikpy.errors import FileFormatError

_RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
_GATE_UP = ("ffn_gate_exps", "ffn_up_exps")
_SQRT_SOFTPLUS = 4
_PARTS = ("fn", "base", "scale")
"""Of what mixes residual streams."""


def streams(module: str, target: str, join: str) -> dict[str, Targets]:
    """Projection, offsets and scales that mix the residual streams around a branch."""
    return {f"{module}{join}{part}": f"{target}_{part}" for part in _PARTS}


def _compressor(module: str, target: str, names: tuple[str, str, str, str]) -> dict[str, Targets]:
    """Tensors of a compressor by the checkpoint's names of values, gates, positions and norm."""
    parts = ("kv", "gate", "ape", "norm")
    return {f"{module}.{name}": f"{target}_{part}" for name, part in zip(names, parts, strict=True)}


_OFFICIAL = ("wkv", "wgate", "ape", "norm")
_PUBLISHED = ("kv_proj", "gate_proj", "position_bias", "kv_norm")


class DeepSeekV4(Family):
    """Names are those of the official repository and of transformers, which writes either and a mixture of them."""

    arch = "deepseek4"
    prediction_modules: ClassVar[Modules] = {
        "enorm": "nextn.enorm",
        "hnorm": "nextn.hnorm",
        "norm": "nextn.shared_head_norm",
    }
    prediction_columns: ClassVar[Mapping[str, int]] = columns("e_proj", "h_proj")
    prediction_ends: ClassVar[Mapping[str, str]] = {f"hc_head_{part}": f"output_hc_{part}" for part in _PARTS}
    needs_output = True
    has_windows = True
    rotates_part = True
    tables = frozenset({"ffn_gate_tid2eid"})
    usual_pre = "joyai-llm"
    outer: ClassVar[dict[str, str]] = {
        **Family.outer,
        "embed": "token_embd",
        "norm": "output_norm",
        "head": "output",
        **{f"hc_head_{part}": f"output_hc_{part}" for part in _PARTS},
        **{f"model.hc_head.hc_{part}": f"output_hc_{part}" for part in _PARTS},
    }
    modules: ClassVar[Modules] = {
        "attn_norm": "attn_norm",
        "attn.attn_sink": "attn_sinks",
        "attn.wq_a": "attn_q_a",
        "attn.q_norm": "attn_q_a_norm",
        "attn.wq_b": "attn_q_b",
        "attn.wkv": "attn_kv",
        "attn.kv_norm": "attn_kv_a_norm",
        "attn.norm": "attn_kv_a_norm",  # as transformers writes it back
        "attn.wo_a": "attn_output_a",
        "attn.wo_b": "attn_output_b",
        **streams("hc_attn", "hc_attn", "_"),
        **_compressor("attn.compressor", "attn_compressor", _OFFICIAL),
        "attn.indexer.weights_proj": "indexer.proj",
        "attn.indexer.wq_b": "indexer.attn_q_b",
        **_compressor("attn.indexer.compressor", "indexer_compressor", _OFFICIAL),
        "ffn_norm": "ffn_norm",
        **streams("hc_ffn", "hc_ffn", "_"),
        "ffn.gate": "ffn_gate_inp",
        "ffn.gate.bias": "exp_probs_b.bias",
        "ffn.gate.tid2eid": "ffn_gate_tid2eid",
        "ffn.experts.{e}.w1": "ffn_gate_exps",
        "ffn.experts.{e}.w2": "ffn_down_exps",
        "ffn.experts.{e}.w3": "ffn_up_exps",
        "ffn.shared_experts.w1": "ffn_gate_shexp",
        "ffn.shared_experts.w2": "ffn_down_shexp",
        "ffn.shared_experts.w3": "ffn_up_shexp",
        "input_layernorm": "attn_norm",
        "self_attn.sinks": "attn_sinks",
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_norm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_proj": "attn_kv",
        "self_attn.kv_norm": "attn_kv_a_norm",
        "self_attn.o_a_proj": "attn_output_a",
        "self_attn.o_b_proj": "attn_output_b",
        **streams("attn_hc", "hc_attn", "."),
        **_compressor("self_attn.compressor", "attn_compressor", _PUBLISHED),
        "self_attn.compressor.indexer.scorer.weights_proj": "indexer.proj",
        "self_attn.compressor.indexer.q_b_proj": "indexer.attn_q_b",
        **_compressor("self_attn.compressor.indexer", "indexer_compressor", _PUBLISHED),
        "post_attention_layernorm": "ffn_norm",
        **streams("ffn_hc", "hc_ffn", "."),
        "mlp.gate": "ffn_gate_inp",
        "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
        "mlp.gate.tid2eid": "ffn_gate_tid2eid",
        "mlp.experts.gate_up_proj": _GATE_UP,
        "mlp.experts.down_proj": "ffn_down_exps",
        "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
        "mlp.shared_experts.down_proj": "ffn_down_shexp",
        "mlp.shared_experts.up_proj": "ffn_up_shexp",
    }

    @property
    def n_rot(self) -> int:
        return self.config.count("qk_rope_head_dim", default=super().n_rot)

    @property
    def n_hash_layers(self) -> int:
        """Leading layers whose experts a table gives for each token."""
        kinds = self.config.get("mlp_layer_types", default=None)
        if kinds is None:
            return self.config.count("num_hash_layers")
        hashed = [kind == "hash_moe" for kind in kinds[: self.config.n_layer]]
        self.config.require("tables of experts behind the first layers", all(hashed[: sum(hashed)]))
        return sum(hashed)

    @property
    def compress_ratios(self) -> list[int]:
        """Tokens per compressed one of each layer, 0 for a window alone."""
        config = self.config
        kinds, listed = config.get("layer_types", default=None), config.get("compress_ratios", default=None)
        if kinds is not None:
            config.require("another kind of layers", set(kinds) <= set(_RATIOS))
            rates = config.get("compress_rates", default={})
            given = {kind: rates.get(kind, ratio) for kind, ratio in _RATIOS.items()}
            listed = [given[kind] for kind in kinds]
        elif listed is None:
            raise FileFormatError(f"{config.path}: 'compress_ratios' is missing")
        listed = listed[: config.n_layer]  # prediction layers may be counted
        config.require(f"{len(listed)} compression ratios for {config.n_layer} layers", len(listed) == config.n_layer)
        config.require("compression ratios other than 0, 4 and 128", set(listed) <= set(_RATIOS.values()))
        return listed

    @property
    def _compressed_rope(self) -> dict[str, Any]:
        """RoPE of the layers with compression."""
        rope = self.config.rope("compress")
        if "compress" not in self.config.get("rope_parameters", "rope_scaling", default={}):
            rope["rope_theta"] = self.config.number("compress_rope_theta")
        return rope

    def check(self) -> None:
        super().check()
        config, rope = self.config, self._compressed_rope
        scoring = config.get("scoring_func", default="sqrtsoftplus")
        config.require(f"scoring_func '{scoring}'", scoring == "sqrtsoftplus")
        kinds = self.config.rope("main")["rope_type"], rope["rope_type"]
        is_nested = "main" in config.get("rope_parameters", "rope_scaling", default={})
        config.require(f"RoPE scaling '{kinds[0]}' without compression", not is_nested or kinds[0] == "default")
        config.require(f"RoPE scaling '{kinds[1]}'", kinds[1] in ("default", "yarn"))
        factor = rope.get("attention_factor")
        config.require(f"YaRN with attention_factor {factor}", factor in (None, 1))

    def keys(self) -> Keys:
        config, rope = self.config, self._compressed_rope
        # Experts are all there is: no width of a dense network.
        config.values.setdefault("intermediate_size", 0)
        keys = super().keys() | routing_keys(config, gating=_SQRT_SOFTPLUS)
        keys = {name: value for name, value in keys.items() if not name.startswith("rope.scaling.")}
        for absent in ("feed_forward_length", "leading_dense_block_count"):
            del keys[absent]
        keys |= {
            "attention.head_count_kv": 1,
            "attention.q_lora_rank": config.integer("q_lora_rank"),
            "attention.output_lora_rank": config.integer("o_lora_rank"),
            "attention.output_group_count": config.integer("o_groups"),
            "attention.sliding_window": config.integer("sliding_window"),
            "attention.compress_ratios": self.compress_ratios,
            "attention.compress_rope_freq_base": float(rope["rope_theta"]),
            "attention.indexer.head_count": config.integer("index_n_heads"),
            "attention.indexer.key_length": config.integer("index_head_dim"),
            "attention.indexer.top_k": config.integer("index_topk"),
            "expert_weights_norm": True,  # whatever norm_topk_prob says
            "hash_layer_count": self.n_hash_layers,
            "swiglu_clamp_exp": [config.number("swiglu_limit")] * config.n_layer,
            "hyper_connection.count": config.integer("hc_mult"),
            "hyper_connection.sinkhorn_iterations": config.integer("hc_sinkhorn_iters"),
            "hyper_connection.epsilon": config.epsilon("hc_eps"),
            "rope.freq_base": float(config.rope("main")["rope_theta"]),
        }
        if rope["rope_type"] == "yarn":
            original = rope.get("original_max_position_embeddings") or config.n_context
            keys |= {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": float(rope["factor"]),
                "rope.scaling.original_context_length": int(original),
                **yarn_corners(rope),
            }
        return keys

    def prediction_lists(self) -> Mapping[str, list[Any]]:
        return {
            "attention.compress_ratios": [0] * self.n_predict,  # they attend to a window alone
            "swiglu_clamp_exp": [self.config.number("swiglu_limit")] * self.n_predict,
        }

    def view(self, target: str, source: str) -> View | None:
        if source == "mlp.experts.gate_up_proj":
            return expert_half(target)
        return self._known_experts if target == "ffn_gate_tid2eid" else super().view(target, source)

    def _known_experts(self, table: np.ndarray) -> np.ndarray:
        """The table of experts by token [V, used]; FileFormatError if it names one that does not exist."""
        for expert in (int(table.min()), int(table.max())):
            if not 0 <= expert < self.n_expert:
                raise FileFormatError(
                    f"{self.config.path.parent}: a table of experts (tid2eid) names expert {expert} of {self.n_expert}"
                )
        return table

    def may_lack(self, target: str, layer: int) -> bool:
        return target == "exp_probs_b.bias" and layer < self.n_hash_layers
