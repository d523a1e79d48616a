"""Nemotron-H, Nemotron Nano 2 and Nemotron 3: every layer is one of Mamba-2, attention or a network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ikpy.convert.config import Config
from ikpy.convert.families.base import Change, Family, Keys, Modules, View
from ikpy.convert.families.mamba2 import CONV, mamba2, mamba2_change, mamba2_view
from ikpy.convert.families.prediction import BEHIND

_NETWORK_NORM = "network_norm"
"""Norm of the experts of a prediction layer, whose other norm is called alike in checkpoints."""
# Names of the published configurations -> those of others.
_NAMES = {"layer_norm_epsilon": "rms_norm_eps", "attention_head_dim": "head_dim"}
_KINDS = {
    **{letter: letter for letter in "M*-E"},
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
}


def _pattern(config: Config) -> str:
    """A letter per layer: M recurrent, * attends, - dense, E experts."""
    kinds = config.get("hybrid_override_pattern", "layers_block_type", "layer_types")
    unknown = next((kind for kind in kinds if kind not in _KINDS), "")
    config.require(f"layers of kind '{unknown}'", not unknown)
    return "".join(_KINDS[kind] for kind in kinds)


class NemotronH(Family):
    """Dense networks by squared ReLU."""

    arch = "nemotron_h"
    activations = ("relu2",)
    activation_names = ("mlp_hidden_act",)
    rotates_part = True  # nothing is
    biases = frozenset({CONV, "ffn_up", "ffn_down", "attn_output"})
    outer: ClassVar[Mapping[str, str]] = {
        **{
            f"{model}.{name}": target
            for model in ("backbone", "model")
            for name, target in (("embeddings", "token_embd"), ("norm_f", "output_norm"))
        },
        "lm_head": "output",
    }
    modules: ClassVar[Modules] = {
        "norm": "attn_norm",
        **mamba2("mixer"),
        **{f"mixer.{name}_proj": f"attn_{name}" for name in "qkv"},
        "mixer.o_proj": "attn_output",
        "mixer.up_proj": "ffn_up",
        "mixer.down_proj": "ffn_down",
    }

    @classmethod
    def chosen(cls, config: Config) -> type[Family]:
        return NemotronHMoe if "E" in _pattern(config) else NemotronH

    def __init__(self, config: Config) -> None:
        values = config.values
        self.pattern = _pattern(config)
        renamed = {new: values[old] for old, new in _NAMES.items() if values.get(old) is not None}
        # Of transformers the kinds of layers alone say how many there are.
        config.values = {"num_hidden_layers": len(self.pattern), **values, **renamed, "layer_types": None}
        super().__init__(config)

    def check(self) -> None:
        super().check()
        config = self.config
        n_layer, activation = config.n_layer, config.get("mamba_hidden_act", default="silu")
        config.require(f"{len(self.pattern)} kinds of {n_layer} layers", len(self.pattern) == n_layer)
        config.require(f"activation '{activation}' of recurrent layers", activation in ("silu", "swish"))

    def n_ff(self, kind: str) -> int:
        """Width of the network of a layer, 0 where there is none."""
        return self.config.integer("intermediate_size") if kind == "-" else 0

    def keys(self) -> Keys:
        config = self.config
        heads, size = config.integer("mamba_num_heads"), config.integer("mamba_head_dim")
        return super().keys() | {
            # llama.cpp asks for this one too.
            "attention.layer_norm_epsilon": config.epsilon("rms_norm_eps"),
            "attention.head_count_kv": [self.n_head_kv if kind == "*" else 0 for kind in self.pattern],
            "feed_forward_length": [self.n_ff(kind) for kind in self.pattern],
            "ssm.conv_kernel": config.integer("conv_kernel", default=4),
            "ssm.inner_size": heads * size,
            "ssm.state_size": config.integer("ssm_state_size"),
            "ssm.time_step_rank": heads,
            "ssm.group_count": config.integer("n_groups"),
        }

    def view(self, target: str, source: str) -> View | None:
        return mamba2_view(target, self.config.integer("n_groups")) or super().view(target, source)

    def change(self, target: str) -> Change | None:
        return mamba2_change(target) or super().change(target)


class NemotronHMoe(NemotronH):
    """Routed experts, which may read latents, and a shared one."""

    arch = "nemotron_h_moe"
    prediction_modules: ClassVar[Modules] = {
        **BEHIND,
        _NETWORK_NORM: "post_attention_norm",
        "final_layernorm": "nextn.shared_head_norm",
    }
    biases = frozenset({CONV, "attn_output"})
    modules: ClassVar[Modules] = {
        **{
            name: target
            for name, target in NemotronH.modules.items()
            if not name.startswith(("mixer.up", "mixer.down"))
        },
        "mixer.gate": "ffn_gate_inp",
        "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
        "mixer.fc1_latent_proj": "ffn_latent_down",
        "mixer.fc2_latent_proj": "ffn_latent_up",
        **{f"mixer.experts.{{e}}.{name}_proj": f"ffn_{name}_exps" for name in ("up", "down")},
        **{f"mixer.experts.{name}_proj": f"ffn_{name}_exps" for name in ("up", "down")},  # stored together
        **{f"mixer.shared_experts.{name}_proj": f"ffn_{name}_shexp" for name in ("up", "down")},
    }

    def check(self) -> None:
        super().check()
        config = self.config
        n_group = config.integer("n_group", default=1)
        config.require("dense layers beside layers of experts", "-" not in self.pattern)
        config.require(f"n_group {n_group}", n_group <= max(1, config.integer("topk_group", default=1)))

    def prediction_place(self, path: str) -> tuple[int | None, str] | None:
        """Two layers of a checkpoint, one that attends and one with experts, are one."""
        number, name = super().prediction_place(path) or (None, "")
        if number is None:
            return None
        return number // 2, f"{_NETWORK_NORM}.weight" if number % 2 and name == "norm.weight" else name

    def prediction_lists(self) -> Mapping[str, list[Any]]:
        return {
            "attention.head_count_kv": [self.n_head_kv] * self.n_predict,
            "feed_forward_length": [self.n_ff("E")] * self.n_predict,
        }

    def n_ff(self, kind: str) -> int:
        return self.config.integer("moe_intermediate_size") if kind == "E" else 0

    def keys(self) -> Keys:
        config = self.config
        latent = config.integer("moe_latent_size", default=0)
        return super().keys() | {
            "expert_feed_forward_length": config.integer("moe_intermediate_size"),
            "expert_shared_feed_forward_length": config.integer("moe_shared_expert_intermediate_size"),
            "expert_shared_count": config.integer("n_shared_experts", default=1),
            "expert_weights_norm": bool(config.get("norm_topk_prob", default=True)),
            "expert_weights_scale": config.number("routed_scaling_factor", default=1.0),
            "expert_gating_func": 2,
            "expert_group_count": 1,
            **({"moe_latent_size": latent} if latent else {}),
        }
