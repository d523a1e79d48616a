"""Jamba, Mamba and Falcon Mamba: layers of Mamba."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ikpy.convert.config import Config
from ikpy.convert.families.base import (
    ATTENTION,
    Change,
    Family,
    Keys,
    Modules,
    Targets,
    View,
    decay_rates,
    expert_half,
    feed_forward,
)
from ikpy.convert.families.mamba2 import CONV, without_ones

CHANNELS_PER_STEP = 16
"""Elements of the residual stream per element of the steps' latents, where the configuration leaves that open."""


def mamba(prefix: str) -> dict[str, Targets]:
    """Modules of a layer of Mamba."""
    names = {"in_proj": "ssm_in", "conv1d": CONV, "x_proj": "ssm_x", "dt_proj": "ssm_dt", "out_proj": "ssm_out"}
    names |= {"A_log": "ssm_a", "D": "ssm_d"}
    return {f"{prefix}.{name}": target for name, target in names.items()}


class MambaFamily(Family):
    """What checkpoints with layers of Mamba share."""

    biases = frozenset({CONV, "ssm_dt"})
    needed_biases = frozenset({CONV, "ssm_dt"})

    def rank(self, name: str) -> int:
        """Elements of the steps' latents; "auto" follows from the width of the model."""
        value = self.config.get(name, default="auto")
        if value == "auto":
            return -(-self.config.integer("hidden_size") // CHANNELS_PER_STEP)
        return self.config.integer(name)

    def view(self, target: str, source: str) -> View | None:
        return without_ones if target == CONV else super().view(target, source)

    def change(self, target: str) -> Change | None:
        return decay_rates if target == "ssm_a" else super().change(target)


class Jamba(MambaFamily):
    """Every few layers attend, without positions, and every few have experts."""

    arch = "jamba"
    rotates_part = True  # nothing is
    outer: ClassVar[Mapping[str, str]] = {
        "model.embed_tokens": "token_embd",
        "model.final_layernorm": "output_norm",
        "lm_head": "output",
    }
    modules: ClassVar[Modules] = {
        **{name: target for name, target in ATTENTION.items() if target != "ffn_norm"},
        **mamba("mamba"),
        **{f"mamba.{name}_layernorm": f"ssm_{name}_norm" for name in ("dt", "b", "c")},
        "pre_ff_layernorm": "ffn_norm",
        "pre_moe_layernorm": "ffn_norm",  # of the first files
        **feed_forward("feed_forward"),
        "feed_forward.router": "ffn_gate_inp",
        **feed_forward("feed_forward.experts.{e}", "_exps"),
        "feed_forward.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),  # stored together
        "feed_forward.experts.down_proj": "ffn_down_exps",
    }

    @property
    def n_expert(self) -> int:
        n = self.config.count("num_experts", "num_local_experts", default=16)
        return n if n > 1 else 0

    def keys(self) -> Keys:
        config = self.config
        period = max(1, config.integer("attn_layer_period", default=8))
        offset = config.integer("attn_layer_offset", default=4)
        attends = [il % period == offset for il in range(config.n_layer)]
        return super().keys() | {
            "attention.head_count_kv": [self.n_head_kv if own else 0 for own in attends],
            "ssm.conv_kernel": config.integer("mamba_d_conv", default=4),
            "ssm.inner_size": config.integer("mamba_expand", default=2) * config.integer("hidden_size"),
            "ssm.state_size": config.integer("mamba_d_state", default=16),
            "ssm.time_step_rank": self.rank("mamba_dt_rank"),
        }

    def view(self, target: str, source: str) -> View | None:
        stacked = source == "feed_forward.experts.gate_up_proj"
        return expert_half(target) if stacked else super().view(target, source)


class Mamba(MambaFamily):
    """Every layer is recurrent: no heads, no network."""

    arch = "mamba"
    outer: ClassVar[Mapping[str, str]] = {
        "backbone.embeddings": "token_embd",
        "backbone.embedding": "token_embd",
        "backbone.norm_f": "output_norm",
        "lm_head": "output",
    }
    modules: ClassVar[Modules] = {"norm": "attn_norm", **mamba("mixer")}

    def __init__(self, config: Config) -> None:
        config.values = {**config.values, "num_attention_heads": 0}
        super().__init__(config)

    def check(self) -> None:
        activation = self.config.get("hidden_act", default="silu")
        self.config.require(f"activation '{activation}'", activation in self.activations)

    def keys(self) -> Keys:
        config = self.config
        width = config.integer("hidden_size")
        return {
            "block_count": config.n_layer,
            "context_length": 1 << 20,  # of any length, as llama.cpp writes it
            "embedding_length": width,
            "feed_forward_length": 0,
            "attention.head_count": 0,
            self.norm_key: config.epsilon("layer_norm_epsilon", default=1e-5),
            "ssm.conv_kernel": config.integer("conv_kernel", default=4),
            "ssm.inner_size": config.integer("intermediate_size", default=config.integer("expand", default=2) * width),
            "ssm.state_size": config.integer("state_size", default=16),
            "ssm.time_step_rank": self.rank("time_step_rank"),
        }


class FalconMamba(Mamba):
    """Steps, B and C are normed, without weights."""

    def keys(self) -> Keys:
        return super().keys() | {"ssm.dt_b_c_rms": True}

    def notes(self) -> list[str]:
        inner = self.config.epsilon("mixer_rms_eps", default=1e-6)
        outer = self.config.epsilon("layer_norm_epsilon", default=1e-5)
        if inner == outer:
            return []
        return [f"steps, B and C are normed with the epsilon of the other norms, {outer:g} instead of {inner:g}"]
