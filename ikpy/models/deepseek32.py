"""deepseek32: DeepSeek V3.2. deepseek2 with sigmoid routing, and prediction layers."""

from __future__ import annotations

from ikpy.models.deepseek2 import DeepSeek2
from ikpy.models.hparams import HParams


class DeepSeek32(DeepSeek2):
    """What its files may leave out."""

    output_weight = "optional"
    default_weights_scale = 1.0
    expects_kv_b = False

    def default_gating(self, hp: HParams) -> int:
        return 2
