"""gpt-oss: attention sinks; experts in MXFP4, or in bf16 after fine-tuning."""

from __future__ import annotations

from typing import ClassVar

from ikpy.convert.families.base import ATTENTION, QKV, Family, Keys, Modules, View

_GATE_UP = ("ffn_gate_exps", "ffn_up_exps")


class GptOss(Family):
    """Gate and up rows of the experts take turns: even rows are gates."""

    arch = "gpt-oss"
    biases = needed_biases = QKV | {"attn_output", "ffn_gate_inp"}
    has_windows = True
    needs_output = True
    modules: ClassVar[Modules] = {
        **ATTENTION,
        "post_attention_layernorm": "post_attention_norm",
        "self_attn.sinks": "attn_sinks",
        "mlp.router": "ffn_gate_inp",
        "mlp.experts.gate_up_proj_blocks": _GATE_UP,
        "mlp.experts.down_proj_blocks": "ffn_down_exps",
        "mlp.experts.gate_up_proj": _GATE_UP,
        "mlp.experts.down_proj": "ffn_down_exps",
        "mlp.experts.gate_up_proj_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
        "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
    }

    def check(self) -> None:
        super().check()
        layers = self.config.sliding_layers()
        expected = [il % 2 == 0 for il in range(self.config.n_layer)]
        self.config.require("another order of window layers", layers is None or layers == expected)
        limit = self.config.number("swiglu_limit", default=7.0)
        self.config.require(f"swiglu_limit {limit:g} instead of 7", limit == 7)

    def keys(self) -> Keys:
        return super().keys() | {
            "expert_feed_forward_length": self.config.integer("intermediate_size"),
            "attention.sliding_window": self.config.integer("sliding_window"),
        }

    def view(self, target: str, source: str) -> View | None:
        if "experts." not in source:
            return super().view(target, source)
        first = 1 if target.startswith("ffn_up") else 0
        is_split = "gate_up" in source
        if source.endswith("_bias"):
            return (lambda values: values[:, first::2]) if is_split else None
        if source.endswith("_blocks"):
            return (lambda rows: rows[:, first::2]) if is_split else None
        if is_split:  # [E, D, 2F]
            return lambda values: values.swapaxes(1, 2)[:, first::2]
        return lambda values: values.swapaxes(1, 2)
