"""qwen3vl and qwen3vlmoe: the text part of Qwen3-VL (arXiv:2511.21631)."""

from __future__ import annotations

from ikpy.models.qwen3 import Qwen3
from ikpy.models.qwen3moe import Qwen3Moe


class Qwen3VL(Qwen3):
    """Sections of the rotation are equal for text; only images add features behind the first layers."""


class Qwen3VLMoe(Qwen3Moe):
    """As qwen3vl, with the experts of qwen3moe."""
