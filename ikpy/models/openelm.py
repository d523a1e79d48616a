"""openelm: OpenELM 270M to 3B. Heads, KV heads and networks of every layer, normed heads (arXiv:2404.14619)."""

from __future__ import annotations

from typing import ClassVar

from ikpy.models.transformer import Transformer
from ikpy.models.weights import Presence


class OpenElm(Transformer):
    """The token embedding is the output matrix."""

    output_weight: ClassVar[Presence] = "none"
    fused_qkv = "optional"
    qk_norm = "required"
    rope_neox = True
