"""Qwen3-Next and Qwen3.5 (text): gated delta rule between layers of gated attention (arXiv:2412.06464)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from ikpy.convert.families.base import (
    ATTENTION,
    DENSE,
    HEAD_NORMS,
    Change,
    Keys,
    Modules,
    View,
    decay_rates,
    expert_half,
)
from ikpy.convert.families.prediction import APART
from ikpy.convert.families.qwen import Qwen2Moe, Qwen3

DELTA_NET: Modules = {
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
GATED_ATTENTION: Modules = {**ATTENTION, **HEAD_NORMS, "post_attention_layernorm": "post_attention_norm", **DELTA_NET}
INTERVAL = 4


class Qwen35(Qwen3):
    """Norm weights are stored less 1, but those of the recurrent layers.

    Heads of values that share a head of keys lie together in a checkpoint, and as many apart as there are heads of keys
    in a file.
    """

    arch = "qwen35"
    prediction_modules: ClassVar[Modules] = APART
    norm_offset = 1.0
    rotates_part = True
    rotary_fraction = 0.25
    usual_sections: ClassVar[Sequence[int]] = (11, 11, 10)  # rotated pairs of a time, a row and a column
    usual_pre = "qwen35"
    modules: ClassVar[Modules] = {**GATED_ATTENTION, **DENSE}

    @property
    def n_key_heads(self) -> int:
        """Heads of q and k of a recurrent layer."""
        return self.config.integer("linear_num_key_heads")

    @property
    def n_value_heads(self) -> int:
        """Heads of v and z of a recurrent layer."""
        return self.config.integer("linear_num_value_heads")

    def check(self) -> None:
        super().check()
        config = self.config
        self.check_order()
        groups = self.n_value_heads % self.n_key_heads == 0
        config.require(f"{self.n_value_heads} value heads for {self.n_key_heads} key heads", groups)
        config.require("attn_output_gate false", bool(config.get("attn_output_gate", default=True)))

    @property
    def usual_order(self) -> list[str]:
        """Kinds of layers as the interval says."""
        interval = self.config.integer("full_attention_interval", default=INTERVAL)
        self.config.require(f"full_attention_interval {interval}", interval > 0)
        return ["linear_attention" if (il + 1) % interval else "full_attention" for il in range(self.config.n_layer)]

    def check_order(self) -> None:
        """Refuses kinds of layers that the interval does not say."""
        usual = self.usual_order
        self.config.require("another order of layers", self.config.get("layer_types", default=usual) == usual)

    def keys(self) -> Keys:
        config = self.config
        keys = super().keys() | {
            "full_attention_interval": config.integer("full_attention_interval", default=INTERVAL),
            "ssm.conv_kernel": config.integer("linear_conv_kernel_dim"),
            "ssm.inner_size": self.n_value_heads * config.integer("linear_value_head_dim"),
            "ssm.state_size": config.integer("linear_key_head_dim"),
            "ssm.time_step_rank": self.n_value_heads,
            "ssm.group_count": self.n_key_heads,
        }
        sections = config.rope().get("mrope_section") or self._sections_by_default
        return keys | ({"rope.dimension_sections": [*sections, 0]} if sections else {})

    @property
    def _sections_by_default(self) -> Sequence[int]:
        """llama.cpp does not load files without any, though they change nothing for text."""
        return self.usual_sections if 2 * sum(self.usual_sections) <= self.n_rot else ()

    def may_lack(self, target: str, layer: int) -> bool:
        return target == "attn_gate.weight"  # of recurrent layers, which have no head norms

    def change(self, target: str) -> Change | None:
        if target == "ssm_a":
            return decay_rates
        return None if target == "ssm_norm" else super().change(target)

    def view(self, target: str, source: str) -> View | None:
        n_keys = self.n_key_heads * self.config.integer("linear_key_head_dim")
        if target == "ssm_conv1d":
            return lambda taps: self._spread_behind(2 * n_keys, taps.reshape(taps.shape[0], -1))
        if target == "attn_qkv":
            return lambda rows: self._spread_behind(2 * n_keys, rows)
        if target in ("attn_gate", "ssm_beta", "ssm_alpha", "ssm_dt.bias", "ssm_a"):
            return self._spread
        if target == "ssm_out":
            return lambda rows: self._spread(rows.T).T
        return super().view(target, source)

    def _spread(self, rows: np.ndarray) -> np.ndarray:
        """Rows of all value heads from the checkpoint's order to the file's."""
        grouped = rows.reshape(self.n_key_heads, self.n_value_heads // self.n_key_heads, -1, *rows.shape[1:])
        return grouped.swapaxes(0, 1).reshape(rows.shape)

    def _spread_behind(self, n: int, rows: np.ndarray) -> np.ndarray:
        """`_spread` of the rows behind the first n."""
        return np.concatenate([rows[:n], self._spread(rows[n:])])


class Qwen35Moe(Qwen2Moe, Qwen35):
    """Routed experts and a gated shared one; some checkpoints hold the experts of a layer together."""

    arch = "qwen35moe"
    normalizes = True
    normalizes_by_default = True
    defaults: ClassVar[Mapping[str, int | float]] = {"intermediate_size": 0}  # no layer is dense
    modules: ClassVar[Modules] = {
        **Qwen2Moe.modules,
        **GATED_ATTENTION,
        "mlp.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
        "mlp.experts.down_proj": "ffn_down_exps",
    }

    def view(self, target: str, source: str) -> View | None:
        if source == "mlp.experts.gate_up_proj":
            return expert_half(target)
        return super().view(target, source)


class Qwen3Next(Qwen35Moe):
    """Projections of a head of keys and its heads of values lie together; the file keeps the order of the heads."""

    arch = "qwen3next"
    usual_sections: ClassVar[Sequence[int]] = ()
    usual_pre = "qwen2"
    modules: ClassVar[Modules] = {
        **Qwen35Moe.modules,
        "linear_attn.in_proj_qkvz": ("attn_qkv", "attn_gate"),
        "linear_attn.in_proj_ba": "ssm_ba",
    }

    def view(self, target: str, source: str) -> View | None:
        if source == "linear_attn.in_proj_qkvz":
            return self._qkv if target == "attn_qkv" else self._z
        return super().view(target, source)

    def _spread(self, rows: np.ndarray) -> np.ndarray:
        return rows

    def _parts(self, rows: np.ndarray) -> list[np.ndarray]:
        """q, k, v and z, each with the rows of its heads one after the other."""
        dk, dv = self.config.integer("linear_key_head_dim"), self.config.integer("linear_value_head_dim")
        per_key = self.n_value_heads // self.n_key_heads * dv
        grouped = rows.reshape(self.n_key_heads, 2 * dk + 2 * per_key, *rows.shape[1:])
        parts = np.split(grouped, [dk, 2 * dk, 2 * dk + per_key], axis=1)
        return [part.reshape(-1, *rows.shape[1:]) for part in parts]

    def _qkv(self, rows: np.ndarray) -> np.ndarray:
        return np.concatenate(self._parts(rows)[:3])

    def _z(self, rows: np.ndarray) -> np.ndarray:
        return self._parts(rows)[3]
