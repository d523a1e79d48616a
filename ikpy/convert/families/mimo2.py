"""MiMo-V2-Flash: window layers with sinks, KV heads and RoPE base of their own, keys wider than values (mimo2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ikpy.convert.config import Config
from ikpy.convert.families.base import (
    ATTENTION,
    DENSE,
    EXPERTS,
    SELECTION_BIAS,
    Keys,
    Modules,
    View,
    WindowFamily,
    expert_half,
)
from ikpy.convert.families.prediction import WITH_LAYER_NORM

_FULL, _SLIDING = "full_attention", "sliding_attention"
_BASES = {_FULL: ("rope_theta", 5e6), _SLIDING: ("swa_rope_theta", 1e4)}
"""Name and usual value of the RoPE base of either kind of layers, where the configuration lists no kinds."""
_FRACTION = 0.334
_SAME = {
    "swa_head_dim": "head_dim",
    "swa_v_head_dim": "v_head_dim",
    "swa_num_attention_heads": "num_attention_heads",
}
"""Sizes of window layers that a file says once for all layers."""


class Mimo2(WindowFamily):
    """Names of repositories (`hybrid_layer_pattern`, `swa_*`) and of transformers. The window is the tokens before each
    one that the configuration counts (`sliding_window_size`), and the token itself.
    """

    arch = "mimo2"
    rotates_part = True
    needs_output = True
    rotary_fraction = _FRACTION
    aliases: ClassVar[Mapping[str, str]] = {"layernorm_epsilon": "rms_norm_eps"}
    modules: ClassVar[Modules] = {
        **ATTENTION,
        **DENSE,
        **EXPERTS,
        **SELECTION_BIAS,
        "self_attn.attention_sink_bias": "attn_sinks",
        "self_attn.sinks": "attn_sinks",
        "pre_mlp_layernorm": "ffn_norm",
        "mlp.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
        "mlp.experts.down_proj": "ffn_down_exps",
    }
    prediction_modules: ClassVar[Modules] = WITH_LAYER_NORM
    prediction_rows: ClassVar[Mapping[str, int]] = {f"self_attn.{x}_proj": place for place, x in enumerate("qkv")}
    defaults: ClassVar[Mapping[str, int | float]] = {"head_dim": 192, "v_head_dim": 128, "sliding_window": 129}

    def __init__(self, config: Config) -> None:
        values, n_layer = config.values, config.n_layer
        pattern = config.get("hybrid_layer_pattern", default=None)
        if pattern is not None:
            values["layer_types"] = [_SLIDING if flag else _FULL for flag in pattern]
        elif values.get("layer_types") is None:
            values["layer_types"] = [_SLIDING if il and (il + 1) % 6 else _FULL for il in range(n_layer)]
        size = config.get("sliding_window_size", default=None)
        if size is not None:
            values["sliding_window"] = config.integer("sliding_window_size") + 1
        given = values.get("rope_parameters") or {}
        if not any(isinstance(given.get(kind), dict) for kind in _BASES):
            fraction = config.number("partial_rotary_factor", default=_FRACTION)
            values["rope_parameters"] = {
                kind: {"rope_theta": config.number(name, default=usual), "partial_rotary_factor": fraction}
                for kind, (name, usual) in _BASES.items()
            }
        super().__init__(config)

    @property
    def n_shards(self) -> int:
        return len(self.prediction_rows)

    @property
    def n_rot(self) -> int:
        return int(self.config.head_dim * self._fraction(_FULL))

    def _fraction(self, kind: str) -> float:
        return float(self.config.rope(kind).get("partial_rotary_factor") or _FRACTION)

    @property
    def n_head_kv_window(self) -> int:
        """KV heads of window layers."""
        return self.config.count("swa_num_key_value_heads", default=2 * self.n_head_kv)

    def check(self) -> None:
        super().check()
        config = self.config
        config.require("layer_types of another number of layers", len(self.window_layers) == config.n_layer)
        for name, of_all in _SAME.items():
            value = config.get(name, default=None)
            config.require(f"{name} {value}", value is None or value == config.get(of_all))
        config.require("attention_bias true", not config.get("attention_bias", default=False))
        for name in ("n_shared_experts", "add_full_attention_sink_bias"):
            config.require(f"{name} {config.get(name, default=0)}", not config.get(name, default=0))
        for name, usual in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
            value = config.get(name, default=usual)
            config.require(f"{name} '{value}'", value == usual)
        for name, number in (("n_group", 1), ("topk_group", 1), ("routed_scaling_factor", 1)):
            value = config.get(name, default=number)
            config.require(f"{name} {value}", value == number)
        config.require("norm_topk_prob false", bool(config.get("norm_topk_prob", default=True)))
        for kind in _BASES:
            rope = config.rope(kind)["rope_type"]
            config.require(f"RoPE scaling '{rope}' of {kind} layers", rope == "default")
        config.require(
            "another partial_rotary_factor of window layers", self._fraction(_SLIDING) == self._fraction(_FULL)
        )

    def view(self, target: str, source: str) -> View | None:
        if source == "mlp.experts.gate_up_proj":
            return expert_half(target)
        return super().view(target, source)

    def prediction_lists(self) -> Mapping[str, list[Any]]:
        """These layers have a window."""
        n = self.n_predict
        return {"attention.head_count_kv": [self.n_head_kv_window] * n, "attention.sliding_window_pattern": [1] * n}

    def keys(self) -> Keys:
        config, kv = self.config, (self.n_head_kv, self.n_head_kv_window)
        keys = super().keys() | {
            "attention.head_count_kv": [kv[window] for window in self.window_layers],
            "attention.value_length": config.integer("v_head_dim"),
            "rope.freq_base_swa": float(config.rope(_SLIDING)["rope_theta"]),
            "expert_feed_forward_length": config.integer("moe_intermediate_size"),
        }
        scale = config.get("attention_value_scale", default=None)
        return keys if scale is None else keys | {"attention.value_scale": config.number("attention_value_scale")}
