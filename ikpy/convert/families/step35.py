"""Step 3.5 and 3.7 Flash: a gate per head, windows with more heads, bounded SwiGLU (step35)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ikpy.convert.config import Config
from ikpy.convert.families.base import ATTENTION, DENSE, HEAD_NORMS, Keys, Modules, WindowFamily, feed_forward
from ikpy.convert.families.prediction import BEHIND
from ikpy.convert.rope import llama3_factors

# Names of the published configuration -> those of its relatives.
_NAMES = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
}
# Values of a configuration that the architecture takes for granted.
_ALWAYS: dict[str, tuple[object, ...]] = {
    "gating": (True, "per-head"),
    "use_head_wise_attn_gate": (True,),
    "moe_router_activation": ("sigmoid",),
    "norm_expert_weight": (True,),
    "moe_every_n_layer": (1,),
    "use_bidirectional_attention": (False,),
    "yarn_only_types": (["full_attention"],),
}
_LIMITS = ("swiglu_limits", "swiglu_clamp_exp"), ("swiglu_limits_shared", "swiglu_clamp_shexp")
"""Bounds in the configuration, and their keys."""
_FULL, _SLIDING = "full_attention", "sliding_attention"
_FRACTIONS = {_FULL: 0.5, _SLIDING: 1.0}
"""Which part of a head the layers rotate."""


def rope_by_kind(config: Config, kinds: list[str]) -> dict[str, dict[str, Any]]:
    """RoPE parameters of either kind of layers, which published configurations list layer by layer."""
    given = config.get("rope_parameters", default={})
    config.require("rope_parameters that are no object", isinstance(given, dict))
    if any(isinstance(given.get(kind), dict) for kind in _FRACTIONS):
        return {kind: dict(given.get(kind) or {}) for kind in _FRACTIONS}
    scaling = dict(config.get("rope_scaling", default=given) or {})
    bases = _per_layer(config, "rope_theta", len(kinds), 10000.0)
    fractions = _per_layer(config, "partial_rotary_factors", len(kinds), None)
    found: dict[str, dict[str, Any]] = {}
    for kind, fraction in _FRACTIONS.items():
        seen = {(base, part or fraction) for base, part, of in zip(bases, fractions, kinds, strict=True) if of == kind}
        config.require(f"rope_theta and partial_rotary_factors that differ among {kind} layers", len(seen) < 2)
        base, part = next(iter(seen), (10000.0, fraction))
        found[kind] = {"rope_theta": base, "partial_rotary_factor": part}
    found[_FULL] |= {name: value for name, value in scaling.items() if name not in found[_FULL]}
    return found


def _per_layer(config: Config, name: str, n_layer: int, default: float | None) -> list[Any]:
    """A value or a list of at least one per layer (prediction layers may be listed as well)."""
    values = config.get(name, default=default)
    values = values if isinstance(values, list) else [values] * n_layer
    is_list = len(values) >= n_layer and all(isinstance(value, int | float | None) for value in values)
    config.require(f"{name} {values!r} of {n_layer} layers", is_list)
    return values[:n_layer]


class Step35(WindowFamily):
    """The experts of a layer are stored together; norms are stored as differences from 1."""

    arch = "step35"
    prediction_modules: ClassVar[Modules] = {
        **BEHIND,
        "transformer.shared_head.norm": "nextn.shared_head_norm",
        "transformer.shared_head.output": "nextn.shared_head_head",
    }
    needs_output = True
    norm_offset = 1.0
    rope_scalings = ("llama3",)
    modules: ClassVar[Modules] = {
        **ATTENTION,
        **HEAD_NORMS,
        "self_attn.g_proj": "attn_gate",
        **DENSE,
        "moe.gate": "ffn_gate_inp",
        "moe.router_bias": "exp_probs_b.bias",
        **feed_forward("moe", "_exps"),
        **feed_forward("share_expert", "_shexp"),
    }

    def __init__(self, config: Config) -> None:
        values = config.values
        config.values = {new: values[old] for old, new in _NAMES.items() if old in values} | values
        kinds = config.get("layer_types", default=[_FULL] * config.n_layer)
        config.require(f"layer_types of {config.n_layer} layers", len(kinds) >= config.n_layer)
        self.kinds_behind = list(kinds[config.n_layer :])
        kinds = list(kinds[: config.n_layer])
        config.values |= {"layer_types": kinds, "rope_parameters": rope_by_kind(config, kinds), "rope_theta": None}
        super().__init__(config)

    @property
    def windowed(self) -> Config:
        """What layers with a window have of their own."""
        given = self.config.get("attention_other_setting", default={})
        heads = self.config.get("num_sliding_attention_heads", default=None)
        return Config({**given, **({} if heads is None else {"num_attention_heads": heads})}, self.config.path)

    @property
    def n_dense(self) -> int:
        """Leading layers without experts; three where the configuration does not say."""
        config = self.config
        n, kinds = config.n_layer, config.get("mlp_layer_types", default=None)
        if kinds is None:
            listed = config.get("moe_layers_enum", default=[*range(3, n)])
            numbers = listed.split(",") if isinstance(listed, str) else listed
            try:
                with_experts = {int(number) for number in numbers}
            except (TypeError, ValueError):
                config.require(f"moe_layers_enum {listed!r}", False)
            kinds = ["sparse" if il in with_experts else "dense" for il in range(n)]
        n_dense = next((il for il, kind in enumerate(kinds[:n]) if kind == "sparse"), n)
        is_known = len(kinds) >= n and all(kind == "sparse" for kind in kinds[n_dense:n])
        config.require("dense layers among the expert layers", is_known)
        return n_dense

    def check(self) -> None:
        super().check()
        config = self.config
        for name, usual in _ALWAYS.items():
            value = config.get(name, default=usual[0])
            config.require(f"{name} {value}", value in usual)
        for name in ("query_pre_attn_scalar", "attention_other_setting.head_dim"):
            source = self.windowed if "." in name else config
            value = source.get(name.rpartition(".")[2], default=config.head_dim)
            config.require(f"{name} {value} with heads of {config.head_dim}", value == config.head_dim)
        for kind, fraction in _FRACTIONS.items():
            rope = config.rope(kind)
            value, scaling = rope.get("partial_rotary_factor") or fraction, rope["rope_type"]
            config.require(f"partial_rotary_factor {value} of {kind} layers", value == fraction)
            known = ("default", "llama3") if kind == _FULL else ("default",)
            config.require(f"RoPE scaling '{scaling}' of {kind} layers", scaling in known)

    @property
    def heads(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Heads of q, and of k and v, of full layers and of those with a window."""
        own = self.windowed
        heads = self.n_head, own.integer("num_attention_heads", default=self.n_head)
        return heads, (self.n_head_kv, own.integer("num_attention_groups", default=self.n_head_kv))

    def prediction_lists(self) -> Mapping[str, list[Any]]:
        """Kinds of layers that are not listed are full ones."""
        kinds, n = [*self.kinds_behind, *[_FULL] * self.n_predict][: self.n_predict], self.config.n_layer
        windows, (heads, kv) = [kind == _SLIDING for kind in kinds], self.heads
        lists: dict[str, list[Any]] = {
            "attention.head_count": [heads[window] for window in windows],
            "attention.head_count_kv": [kv[window] for window in windows],
            "attention.sliding_window_pattern": [int(window) for window in windows],
        }
        for name, key in _LIMITS:
            values = self.config.get(name, default=[])
            listed = values[n : n + self.n_predict] if isinstance(values, list) else [values] * self.n_predict
            lists[key] = [float(bound or 0) for bound in listed] + [0.0] * (self.n_predict - len(listed))
        return lists

    def keys(self) -> Keys:
        config, windows, (heads, kv) = self.config, self.window_layers, self.heads
        keys = super().keys() | {
            "attention.head_count": [heads[window] for window in windows],
            "attention.head_count_kv": [kv[window] for window in windows],
            "rope.freq_base_swa": float(config.rope(_SLIDING)["rope_theta"]),
            "leading_dense_block_count": self.n_dense,
            "expert_feed_forward_length": config.integer("moe_intermediate_size"),
            "expert_shared_feed_forward_length": config.integer("share_expert_dim"),
            "expert_weights_scale": config.number("moe_router_scaling_factor", default=1.0),
            "expert_weights_norm": True,
            "expert_gating_func": 2,
        }
        for name, key in _LIMITS:
            if config.get(name, default=None):
                keys[key] = [float(bound or 0) for bound in _per_layer(config, name, config.n_layer, 0.0)]
        return keys

    def extra_tensors(self) -> dict[str, np.ndarray]:
        rope, n_pairs = self.config.rope(), self.config.head_dim // 2
        if rope["rope_type"] != "llama3":
            return {}
        factors = np.ones(n_pairs, np.float32)
        factors[: n_pairs // 2] = llama3_factors(rope, n_pairs)
        return {"rope_freqs.weight": factors}
