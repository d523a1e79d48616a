"""smollm3: every fourth layer has no RoPE."""

from __future__ import annotations

from ikpy.models.transformer import Transformer


class SmolLM3(Transformer):
    """The plain form but for the layers without RoPE."""

    rotates_whole_head = False

    def is_rotated(self, layer: int) -> bool:
        return (layer + 1) % 4 != 0
