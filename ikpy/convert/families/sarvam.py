"""Sarvam 105B and 30B: mixtures of experts that become files of DeepSeek V3 (deepseek2) and Ling 2 (bailingmoe2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ikpy.convert.config import Config
from ikpy.convert.families.base import Keys
from ikpy.convert.families.deepseek import DeepSeekV3
from ikpy.convert.families.moe import BailingMoe2


class SarvamMla(DeepSeekV3):
    """Sarvam 105B: latent attention. Its repository has a name of its own for YaRN."""

    usual_pre = ""
    defaults: ClassVar[Mapping[str, int | float]] = {"norm_topk_prob": True}

    def __init__(self, config: Config) -> None:
        scaling = config.get("rope_scaling", default=None)
        if isinstance(scaling, dict) and "deepseek_yarn" in (scaling.get("type"), scaling.get("rope_type")):
            scaling = {name: value for name, value in scaling.items() if name != "type"}
            config.values = {**config.values, "rope_scaling": {**scaling, "rope_type": "yarn"}}
        super().__init__(config)

    def keys(self) -> Keys:
        # llama.cpp asks for the rank of all models that have not as many layers as DeepSeek V2 Lite.
        return {"attention.q_lora_rank": 0, **super().keys()}


class SarvamMoe(BailingMoe2):
    """Sarvam 30B: whole heads are rotated."""

    rotates_part = False
    defaults: ClassVar[Mapping[str, int | float]] = {"norm_topk_prob": True, "rope_theta": 8e6}

    def check(self) -> None:
        super().check()
        has_norms = bool(self.config.get("use_qk_norm", default=True))
        self.config.require("use_qk_norm false", has_norms)
