"""Tencent Hy4: latent attention with sinks, a gate and indexers, residual streams that are not mixed (hy_v4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ikpy.convert.config import Config
from ikpy.convert.families.base import Family, Keys, Modules, Targets, View, expert_half, feed_forward
from ikpy.convert.families.deepseek import DeepSeekV32, LatentHead

SHARED_AFTER, PERIOD = 1, 4
"""Layers with an indexer where the configuration does not list them: the first, and every fourth from the second on."""
SPARSE = {"indexed_attention", "sparse_attention", "deepseek_sparse_attention"}
PARTS = ("fn", "base", "scale")


def _streams(module: str, target: str) -> dict[str, Targets]:
    """What makes the weights of the streams at a branch, by the names of repositories and of transformers."""
    published = {f"hc_{'mlp' if module == 'ffn' else module}_layer.hc_pre.hc_{part}": part for part in PARTS}
    return {name: f"{target}_{part}" for name, part in (published | {f"{module}_hc.{p}": p for p in PARTS}).items()}


class HyV4(LatentHead, DeepSeekV32):
    """Names of the published checkpoints and those of transformers; prediction layers are left out."""

    arch = "hy_v4"
    usual_pre = "hunyuan-dense"
    outer: ClassVar[Mapping[str, str]] = {
        **Family.outer,
        **{f"model.hc_head.{prefix}{part}": f"output_hc_{part}" for part in PARTS for prefix in ("hc_head_", "hc_")},
    }
    modules: ClassVar[Modules] = {
        **DeepSeekV32.modules,
        **feed_forward("mlp.shared_mlp", "_shexp"),
        **_streams("attn", "hc_attn"),
        **_streams("ffn", "hc_ffn"),
        "self_attn.kv_b_proj": ("attn_k_b", "attn_v_b"),
        "self_attn.linear_gate": "attn_gate",
        "self_attn.gate_proj": "attn_gate",
        "self_attn.learnable_sink_param": "attn_sinks",
        "self_attn.sinks": "attn_sinks",
        "mlp.router.gate": "ffn_gate_inp",
        "mlp.expert_bias": "exp_probs_b.bias",
        "mlp.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
        "mlp.experts.down_proj": "ffn_down_exps",
    }
    defaults: ClassVar[Mapping[str, int | float]] = {
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "hc_mult": 4,
        "hc_magnitude": 2.0,
        "hc_eps": 1e-6,
        "swiglu_limit": 10.0,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 16,
    }

    def __init__(self, config: Config) -> None:
        # Published configurations count other KV heads; there is one of latents.
        config.values["num_key_value_heads"] = config.values.get("num_attention_heads")
        if "mlp_layer_types" not in config.values:
            config.values.setdefault("first_k_dense_replace", 1)
        super().__init__(config)

    @property
    def indexers(self) -> list[bool]:
        """Whether each layer has an indexer of its own."""
        config = self.config
        kinds, n = config.get("indexer_types", default=None), config.n_layer
        if kinds is None:
            return [il == 0 or (il - SHARED_AFTER) % PERIOD == 0 for il in range(n)]
        config.require(f"{len(kinds)} indexer types of {n} layers", len(kinds) == n)
        config.require(f"indexer_types {sorted(set(kinds))}", set(kinds) <= {"full", "shared"})
        return [kind == "full" for kind in kinds]

    @property
    def chooses(self) -> bool:
        """Whether indexers choose cells: in all layers, or in none."""
        config = self.config
        kinds = set(config.get("layer_types", default=None) or SPARSE)
        config.require(f"layers of kinds {sorted(kinds)}", kinds <= SPARSE or kinds == {"full_attention"})
        return kinds <= SPARSE

    def check(self) -> None:
        super().check()
        config = self.config
        rope = config.rope()["rope_type"]
        config.require(f"RoPE scaling '{rope}'", rope == "default")
        config.require(f"n_group {config.integer('n_group', default=1)}", config.integer("n_group", default=1) == 1)
        for name in ("learnable_sink", "gated_mla", "enable_ihc"):
            config.require(f"{name} false", bool(config.get(name, default=True)))
        gating = config.get("gating_type", default="elementwise")
        config.require(f"gating_type '{gating}'", gating == "elementwise")
        config.require("no indexer in the first layer", not self.chooses or self.indexers[0])

    def keys(self) -> Keys:
        config = self.config
        keys = super().keys()
        if self.chooses:
            keys["attention.indexer.types"] = self.indexers
        else:
            keys = {name: value for name, value in keys.items() if ".indexer." not in name}
        limit = config.number("swiglu_limit")
        if limit > 0:
            keys["swiglu_clamp_exp"] = [limit] * config.n_layer
        return keys | {
            "hyper_connection.count": config.integer("hc_mult"),
            "hyper_connection.epsilon": config.epsilon("hc_eps"),
            "hyper_connection.magnitude": config.number("hc_magnitude"),
        }

    def view(self, target: str, source: str) -> View | None:
        return expert_half(target) if source == "mlp.experts.gate_up_proj" else super().view(target, source)
