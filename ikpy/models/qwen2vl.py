"""qwen2vl: the text part of Qwen2-VL and Qwen2.5-VL (arXiv:2409.12191)."""

from __future__ import annotations

from ikpy.models.qwen2 import Qwen2


class Qwen2VL(Qwen2):
    """Positions have three parts that are equal for text: rotation in sections is that of qwen2 then."""
