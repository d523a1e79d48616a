"""Gemma 4, the text part: two head sizes, shared caches, inputs for every layer, experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from ikpy.convert.families.base import EXPERTS, Keys, Modules, View, WindowFamily, expert_half
from ikpy.convert.families.gemma import Gemma3

NOT_ROTATED = 1e30
"""Divisor of the frequency of pairs that stay as they are."""


class Gemma4(WindowFamily):
    """Norm weights are stored as they are used."""

    arch = "gemma4"
    rotates_part = True
    activations = ("gelu_pytorch_tanh",)
    activation_names = ("hidden_activation",)
    rope_scalings = ("proportional",)
    usual_pre = "gemma4"
    outer: ClassVar[Mapping[str, str]] = {
        **WindowFamily.outer,
        "model.embed_tokens_per_layer": "per_layer_token_embd",
        "model.per_layer_model_projection": "per_layer_model_proj",
        "model.per_layer_projection_norm": "per_layer_proj_norm",
    }
    modules: ClassVar[Modules] = {
        **Gemma3.modules,
        **EXPERTS,
        "router.proj": "ffn_gate_inp",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
        "experts.down_proj": "ffn_down_exps",
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
        "layer_scalar": "layer_output_scale",
    }
    defaults: ClassVar[Mapping[str, int | float]] = {"head_dim": 256, "global_head_dim": 512, "sliding_window": 512}

    @property
    def n_shared(self) -> int:
        """Last layers, which attend to the caches of others."""
        return self.config.count("num_kv_shared_layers", default=0)

    @property
    def n_rot(self) -> int:
        config = self.config
        newer = config.get("per_layer_config", default=None) is not None
        return self._of_full_layers("head_dim", config.head_dim if newer else config.integer("global_head_dim"))

    def _of_full_layers(self, name: str, value: int) -> int:
        """A size of layers without a window, which newer files list by layer."""
        listed = self.config.get("per_layer_config", default={})
        return next((int(sizes[name]) for sizes in listed.values() if name in sizes), value)

    def check(self) -> None:
        super().check()
        config = self.config
        both = config.get("use_bidirectional_attention", default=None)
        config.require("use_bidirectional_attention all", both != "all")
        config.require("no list of layer_types", bool(config.sliding_layers()))
        kind = config.rope("sliding_attention")["rope_type"]
        config.require(f"RoPE scaling '{kind}' of window layers", kind == "default")
        kind = config.rope()["rope_type"]
        config.require(f"RoPE scaling '{kind}'", kind in ("default", "proportional"))

    def keys(self) -> Keys:
        config, windows = self.config, self.config.sliding_layers() or []
        width = config.integer("intermediate_size")
        wide = self.n_shared if config.get("use_double_wide_mlp", default=False) else 0
        n_window, n_full = self.n_head_kv, self.n_head_kv
        if config.get("attention_k_eq_v", default=False):
            n_full = config.integer("num_global_key_value_heads", default=n_full)
        n_full = self._of_full_layers("num_key_value_heads", n_full)
        keys = super().keys() | {
            "feed_forward_length": [width] * (config.n_layer - wide) + [2 * width] * wide,
            "attention.head_count_kv": [n_window if window else n_full for window in windows],
            "attention.key_length": self.n_rot,
            "attention.value_length": self.n_rot,
            "attention.key_length_swa": config.head_dim,
            "attention.value_length_swa": config.head_dim,
            "attention.shared_kv_layers": self.n_shared,
            "embedding_length_per_layer_input": config.integer("hidden_size_per_layer_input", default=0),
            "rope.dimension_count_swa": config.head_dim,
            "rope.freq_base_swa": float(config.rope("sliding_attention")["rope_theta"]),
        }
        if config.get("final_logit_softcapping", default=None):
            keys["final_logit_softcapping"] = config.number("final_logit_softcapping")
        if self.n_expert:
            keys["expert_feed_forward_length"] = config.integer("moe_intermediate_size")
        return keys

    def view(self, target: str, source: str) -> View | None:
        if source == "experts.gate_up_proj":
            return expert_half(target)
        return super().view(target, source)

    def may_lack(self, target: str, layer: int) -> bool:
        same = self.config.get("attention_k_eq_v", default=False)
        return target == "attn_v.weight" and bool(same) and not (self.config.sliding_layers() or [])[layer]

    def extra_tensors(self) -> dict[str, np.ndarray]:
        rope = self.config.rope()
        n_rot = self.config.bounded("head_dim", self.n_rot)
        pairs = n_rot // 2
        n_rotated = int(float(rope.get("partial_rotary_factor", 1.0)) * n_rot) // 2
        factors = np.full(pairs, NOT_ROTATED, np.float32)
        factors[:n_rotated] = float(rope.get("factor", 1.0))
        return {"rope_freqs.weight": factors}
