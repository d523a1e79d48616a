"""PLaMo 2 and 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from ikpy.convert.config import Config
from ikpy.convert.families.base import Change, Family, Keys, Modules, View, decay_rates

# Norm weights of checkpoints are differences from these.
_USUAL = {
    "attn_norm": 1.0,
    "post_attention_norm": 1.0 / 5,
    "ffn_norm": 1.0,
    "post_ffw_norm": 1.0 / 5**1.5,
    "output_norm": 1.0,
}
_MODULES: Modules = {
    "pre_mixer_norm": "attn_norm",
    "mixer.qkv_proj": "attn_qkv",
    "mixer.o_proj": "attn_output",
    "post_mixer_norm": "post_attention_norm",
    "pre_mlp_norm": "ffn_norm",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_mlp_norm": "post_ffw_norm",
}
_BARE = frozenset({"post_attention_norm", "post_ffw_norm", "ssm_a", "ssm_d"})


class Plamo3(Family):
    """Windows in all but the last layer of a period."""

    arch = "plamo3"
    modules: ClassVar[Modules] = {
        **_MODULES,
        "mixer.q_norm": "attn_q_norm",
        "mixer.k_norm": "attn_k_norm",
    }
    bare = _BARE
    has_windows = True
    aliases: ClassVar[Mapping[str, str]] = {"rope_global_theta": "rope_theta"}
    defaults: ClassVar[Mapping[str, int | float]] = {
        "head_dim": 128,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_local_theta": 10000,
        "sliding_window_pattern": 8,
    }

    def check(self) -> None:
        super().check()
        config = self.config
        factor = config.number("rope_scaling_factor", default=1.0)
        config.require(f"rope_scaling_factor {factor:g}", factor == 1.0)
        config.require("scale_embedding true", not config.get("scale_embedding", default=False))
        config.require("attention_bias true", not config.get("attention_bias", default=False))
        window = config.values.get("window_size", config.values.get("sliding_window"))
        config.require(f"a window of {window}", isinstance(window, int) and not isinstance(window, bool))

    def notes(self) -> list[str]:
        return [
            "texts are cut into tokens as a whole: the model's own tokenizer first divides them by rules of its own"
        ]

    def keys(self) -> Keys:
        config = self.config
        return super().keys() | {
            "attention.sliding_window": config.integer("window_size", "sliding_window"),
            "attention.sliding_window_pattern": config.count("sliding_window_pattern"),
            "rope.freq_base": config.number("rope_theta", default=1e6),
            "rope.freq_base_swa": config.number("rope_local_theta"),
        }

    def change(self, target: str) -> Change | None:
        usual = {**_USUAL, "attn_q_norm": 1.0, "attn_k_norm": 1.0}.get(target)
        return None if usual is None else lambda values: values + np.float32(usual)


class Plamo2(Family):
    """Layers of Mamba with gate and inputs side by side for every head; norms inside of them have no suffix."""

    arch = "plamo2"
    modules: ClassVar[Modules] = {
        **_MODULES,
        "mixer.q_weight": "attn_q_norm.weight",
        "mixer.k_weight": "attn_k_norm.weight",
        "mixer.in_proj": "ssm_in",
        "mixer.conv1d": "ssm_conv1d",
        "mixer.bcdt_proj": "ssm_x",
        "mixer.dt_proj": "ssm_dt",
        "mixer.dt_bias": "ssm_dt.bias",
        "mixer.A_log": "ssm_a",
        "mixer.D": "ssm_d",
        "mixer.dt_norm_weight": "ssm_dt_norm",
        "mixer.B_norm_weight": "ssm_b_norm",
        "mixer.C_norm_weight": "ssm_c_norm",
        "mixer.out_proj": "ssm_out",
    }
    bare = _BARE | {f"ssm_{x}_norm" for x in ("dt", "b", "c")} | {"attn_q_norm.weight", "attn_k_norm.weight"}
    aliases: ClassVar[Mapping[str, str]] = {"hidden_size_per_head": "head_dim"}
    defaults: ClassVar[Mapping[str, int | float]] = {
        "head_dim": 128,
        "mamba_d_conv": 4,
        "mamba_d_state": 64,
        "mamba_num_heads": 64,
        "mamba_step": 2,
        "max_position_embeddings": 2048,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
    }

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.step = config.count("mamba_step")
        config.require(f"mamba_step {self.step}", self.step > 1)

    def attends(self, layer: int) -> bool:
        """Whether a layer has no state."""
        n_layer, half = self.config.n_layer, self.step // 2
        return layer == n_layer - 1 if n_layer <= half else layer % self.step == half

    def check(self) -> None:
        super().check()
        self.config.require("mamba_enabled false", bool(self.config.get("mamba_enabled", default=True)))

    def notes(self) -> list[str]:
        length, window = (
            self.config.integer(name, default=0) for name in ("max_position_embeddings", "attention_window_size")
        )
        if not 0 < window < length:
            return []
        return [f"windows of {window} tokens, which files cannot say, are left out: every token sees its whole text"]

    def keys(self) -> Keys:
        config, n_layer = self.config, self.config.n_layer
        heads = config.count("mamba_num_heads")
        return super().keys() | {
            "attention.head_count": [self.n_head if self.attends(il) else 0 for il in range(n_layer)],
            "attention.head_count_kv": [self.n_head_kv if self.attends(il) else 0 for il in range(n_layer)],
            "ssm.conv_kernel": config.count("mamba_d_conv"),
            "ssm.group_count": 0,
            "ssm.inner_size": heads * config.head_dim,
            "ssm.state_size": config.count("mamba_d_state"),
            "ssm.time_step_rank": heads,
        }

    def view(self, target: str, source: str) -> View | None:
        if target == "ssm_conv1d":
            return lambda values: values.reshape(values.shape[0], values.shape[-1])
        return super().view(target, source)

    def change(self, target: str) -> Change | None:
        if target == "ssm_a":
            return decay_rates
        usual = _USUAL.get(target)
        return None if usual is None else lambda values: values + np.float32(usual)
