"""The text part of HunyuanOCR and HunyuanVL."""

from __future__ import annotations

from ikpy.convert.config import Config
from ikpy.convert.families.base import Keys
from ikpy.convert.families.moe import HunyuanDense

_TYPES = {"xdrope": "dynamic"}


class HunyuanVL(HunyuanDense):
    """Pictures are rotated by position, column, row and number, each of which turns a section of the pairs."""

    arch = "hunyuan_vl"

    def __init__(self, config: Config) -> None:
        rope = config.rope()
        self.sections = self._sections(config, rope.get("mrope_section") or rope.get("xdrope_section"))
        kind = _TYPES.get(rope["rope_type"], rope["rope_type"])
        config.values["rope_parameters"] = {**rope, "rope_type": kind}
        if config.get("num_experts", default=1) == 1:
            config.values["num_experts"] = None  # of models without any
        super().__init__(config)

    @staticmethod
    def _sections(config: Config, given: object) -> list[int]:
        """Pairs of every section; published files have them as parts of a head, too."""
        half = config.head_dim // 2
        numbers = given if isinstance(given, list) else []
        is_number = [isinstance(n, int | float) and not isinstance(n, bool) and 0 <= n <= half for n in numbers]
        config.require(f"mrope_section {given}", len(numbers) == 4 and all(is_number))
        found = [n * half if all(n < 1 for n in numbers) else n for n in numbers]
        config.require(f"mrope_section {given} of {half} pairs", sum(found) == half and all(n == int(n) for n in found))
        return [int(n) for n in found]

    def check(self) -> None:
        n_expert = self.config.get("num_experts", default=None)
        self.config.require(f"{n_expert} experts", n_expert is None)
        super().check()

    def keys(self) -> Keys:
        return super().keys() | {"rope.dimension_sections": self.sections}
