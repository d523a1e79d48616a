"""Models with linear biases of attention (ALiBi, arXiv:2108.12409) instead of rotated heads."""

from __future__ import annotations

from typing import Any, ClassVar

from ikpy.errors import FileFormatError
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.transformer import Transformer

MAX_BIAS = 8.0
"""Exponent of the smallest slope, of which the slopes of nearly all models are made."""
KEY = "attention.max_alibi_bias"


def read_max_bias(keys: Keys, default: Any = 0.0) -> float:
    """The key; FileFormatError for one that no slopes are made of."""
    value: float = keys.f32(KEY, default)
    if not 0.0 <= value < 1e3:
        raise FileFormatError(f"{keys.gguf.path}: {keys.arch}.{KEY} is {value:g}")
    return value


class LinearBiases(Transformer):
    """usual_max_bias: of architectures whose files do not say it."""

    has_rope = False
    usual_max_bias: ClassVar[float] = 0.0

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.max_alibi_bias = self.usual_max_bias or read_max_bias(keys)
        return hp
