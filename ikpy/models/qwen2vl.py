"""qwen2vl: the text part of Qwen2-VL and Qwen2.5-VL (arXiv:2409.12191)."""

from __future__ import annotations

from ikpy.models.media import ReadsPictures
from ikpy.models.qwen2 import Qwen2


class Qwen2VL(ReadsPictures, Qwen2):
    """Rotated in sections where there are pictures."""
