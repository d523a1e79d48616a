"""qwen3vl and qwen3vlmoe: the text part of Qwen3-VL (arXiv:2511.21631)."""

from __future__ import annotations

from ikpy.models.media import ReadsPictures
from ikpy.models.qwen3 import Qwen3
from ikpy.models.qwen3moe import Qwen3Moe


class Qwen3VL(ReadsPictures, Qwen3):
    """Pictures are rotated in interleaved sections and add features behind the first layers."""

    interleaves_sections = True


class Qwen3VLMoe(ReadsPictures, Qwen3Moe):
    """As qwen3vl, with the experts of qwen3moe."""

    interleaves_sections = True
