"""qwen3: RMS norm of every query and key head before RoPE."""

from __future__ import annotations

from ikpy.models.transformer import Transformer


class Qwen3(Transformer):
    """Per-head q/k norms, NEOX rotation."""

    qk_norm = "required"
    rope_neox = True
