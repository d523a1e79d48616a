"""poolside Laguna: heads, windows and RoPE layer by layer, a gate of what was attended to (laguna)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ikpy.convert.config import Config
from ikpy.convert.families.base import (
    ATTENTION,
    DENSE,
    EXPERTS,
    HEAD_NORMS,
    SELECTION_BIAS,
    SHARED,
    Family,
    Keys,
    Modules,
    View,
    expert_half,
    feed_forward,
    routing_keys,
)
from ikpy.convert.rope import yarn_corners, yarn_magnitude
from ikpy.errors import FileFormatError

PERIOD = 4
"""Every which layer is a full one, from the first on, in files that do not say it."""
GATES = {True: "per-head", "per_head": "per-head", "per_element": "per-element"}
UNUSED = ("moe_router_logit_softcapping", "moe_apply_router_weight_on_input", "swa_attention_sink_enabled", "qkv_bias")
"""Of other models of the class: no file can say them."""


class Laguna(Family):
    """Experts one by one or those of a layer together, with the names of repositories and of transformers."""

    arch = "laguna"
    rotates_part = True
    has_windows = True
    own_yarn_magnitude = True
    usual_pre = "laguna"
    defaults: ClassVar[Mapping[str, int | float]] = {"sliding_window": 512}
    modules: ClassVar[Modules] = {
        **ATTENTION,
        **HEAD_NORMS,
        **DENSE,
        **EXPERTS,
        **SELECTION_BIAS,
        **SHARED,
        **feed_forward("mlp.shared_expert", "_shexp"),
        "self_attn.g_proj": "attn_gate",
        "mlp.experts.e_score_correction_bias": "exp_probs_b.bias",
        "mlp.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
        "mlp.experts.down_proj": "ffn_down_exps",
    }

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if "mlp_layer_types" not in config.values:
            config.values.setdefault("first_k_dense_replace", 1)
        self.kinds = config.get("layer_types", default=None) or ["full_attention"] * config.n_layer
        self.windows = [kind == "sliding_attention" for kind in self.kinds]
        self.heads = config.get("num_attention_heads_per_layer", default=None) or [self.n_head] * config.n_layer

    def _rope(self, kind: str) -> dict[str, Any]:
        """RoPE of one kind of layers. FileFormatError if the configuration has none."""
        if not isinstance(self.config.get("rope_parameters").get(kind), dict):
            raise FileFormatError(f"{self.config.path}: '{kind}' of 'rope_parameters' is missing")
        return self.config.rope(kind)

    def _n_rot(self, kind: str) -> int:
        return int(self.config.head_dim * float(self._rope(kind).get("partial_rotary_factor") or 1.0))

    @property
    def n_rot(self) -> int:
        return self._n_rot("full_attention")

    def check(self) -> None:
        super().check()
        config, n_layer = self.config, self.config.n_layer
        for name in UNUSED:
            config.require(f"{name} {config.values.get(name)}", not config.values.get(name))
        config.require("norm_topk_prob false", bool(config.get("norm_topk_prob", default=True)))
        for what, values in (("kinds", self.windows), ("numbers of heads", self.heads)):
            config.require(f"{len(values)} {what} of {n_layer} layers", len(values) == n_layer)
        full = self._rope("full_attention")
        strange = sorted(set(self.kinds) - {"full_attention", "sliding_attention"})
        config.require(f"layers of kind {strange}", not strange)
        if any(self.windows):
            n = config.integer("sliding_window")
            config.require(f"a window of {n} tokens", n > 0)
            kind = self._rope("sliding_attention")["rope_type"]
            config.require(f"RoPE scaling '{kind}' of layers with a window", kind == "default")
        config.require("YaRN with mscale", not (full.get("mscale") or full.get("mscale_all_dim")))
        gates = set(config.get("gating_types", default=None) or [config.get("gating", default=True)])
        known = {GATES.get(gate, gate) for gate in gates}
        config.require(f"gating {sorted(map(str, gates))}", known <= set(GATES.values()))

    def keys(self) -> Keys:
        config, rope = self.config, self._rope("full_attention")
        keys = super().keys() | routing_keys(config, gating=2)
        keys |= {
            "attention.head_count": self.heads if len(set(self.heads)) > 1 else self.heads[0],
            "expert_shared_count": 1,
            "expert_shared_feed_forward_length": config.integer("shared_expert_intermediate_size"),
            "expert_weights_scale": config.number("moe_routed_scaling_factor", default=1.0),
            "expert_weights_norm": True,
        }
        if rope["rope_type"] == "yarn":
            keys |= self._yarn(rope)
        if any(self.windows):
            keys["attention.sliding_window"] = config.integer("sliding_window")
            keys["rope.freq_base_swa"] = float(self._rope("sliding_attention")["rope_theta"])
            keys["rope.dimension_count_swa"] = self._n_rot("sliding_attention")
            if self.windows != [il % PERIOD != 0 for il in range(config.n_layer)]:
                keys["attention.sliding_window_pattern"] = self.windows
        return keys

    @staticmethod
    def _yarn(rope: dict[str, Any]) -> Keys:
        """The corners, and the magnitude as a multiple of the usual one."""
        usual = yarn_magnitude(float(rope["factor"]))
        given = float(rope.get("attention_factor") or usual)
        keys: Keys = {**yarn_corners(rope)}
        return keys if given == usual else keys | {"rope.scaling.attn_factor": given / usual}

    def view(self, target: str, source: str) -> View | None:
        return expert_half(target) if source == "mlp.experts.gate_up_proj" else super().view(target, source)
