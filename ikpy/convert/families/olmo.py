"""OLMo 1 to 3, OLMoE, EXAONE 4: norms of q and k, norms behind the branches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ikpy.convert.families.base import ATTENTION, DENSE, EXPERTS, HEAD_NORMS, Family, Keys, Modules, WindowFamily

BEHIND: Modules = {
    **{module: target for module, target in ATTENTION.items() if module.startswith("self_attn")},
    **HEAD_NORMS,
    **DENSE,
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


class Olmo(Family):
    """Norms without weights; q, k and v may be bounded."""

    arch = "olmo"
    norm_key = "attention.layer_norm_epsilon"
    rotates_pairs = True
    modules: ClassVar[Modules] = {
        **{module: target for module, target in ATTENTION.items() if module.startswith("self_attn")},
        **DENSE,
    }
    defaults: ClassVar[Mapping[str, int | float]] = {"layer_norm_eps": 1e-5}

    def keys(self) -> Keys:
        clip = self.config.get("clip_qkv", default=None)
        return super().keys() | ({} if clip is None else {"attention.clamp_kqv": self.config.number("clip_qkv")})


class Olmo2(Family):
    """One norm over all heads of q, one over those of k."""

    arch = "olmo2"
    modules: ClassVar[Modules] = BEHIND

    def check(self) -> None:
        super().check()
        clip = self.config.get("clip_qkv", default=None)
        self.config.require(f"clip_qkv {clip}", clip is None)


class Olmo3(WindowFamily, Olmo2):
    """Layers with a window are not reached by YaRN."""


class Olmoe(Olmo2):
    """Experts of width intermediate_size, their weights not renormalised."""

    arch = "olmoe"
    modules: ClassVar[Modules] = {**ATTENTION, **HEAD_NORMS, **EXPERTS}

    def check(self) -> None:
        super().check()
        norm = bool(self.config.get("norm_topk_prob", default=False))
        self.config.require(f"norm_topk_prob {norm}", not norm)


class Exaone4(WindowFamily):
    """A norm of every head of q and k; with windows, full layers do not know positions."""

    arch = "exaone4"
    rope_scalings = ("llama3",)
    modules: ClassVar[Modules] = BEHIND
