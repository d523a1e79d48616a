"""mistral3 (Ministral 3): llama with YaRN and queries that sharpen with the position."""

from __future__ import annotations

import math

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.llama import Llama
from ikpy.models.transformer import Attention


class Mistral3(Llama):
    """q *= 1 + temperature_scale * ln(1 + floor(pos / original context))."""

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        self.temperature_scale = keys.f32("attention.temperature_scale", 0.1)
        if self.temperature_scale and not hp.n_ctx_orig:
            raise FileFormatError(f"{keys.gguf.path}: the attention temperature needs an original context length")
        hp.yarn_beta_fast = keys.f32("rope.scaling.yarn_beta_fast", 32.0)
        hp.yarn_beta_slow = keys.f32("rope.scaling.yarn_beta_slow", 1.0)
        hp.yarn_log_multiplier = keys.f32("rope.scaling.yarn_log_multiplier", 0.0)
        if hp.yarn_log_multiplier and hp.rope_scaling_type == "yarn":
            hp.yarn_attn_factor = 1.0 / _yarn_magnitude(hp, hp.yarn_log_multiplier)
        return hp

    def place_heads(self, b: BatchGraph, il: int, attn: Attention, q: Value, k: Value) -> tuple[Value, Value]:
        q, k = super().place_heads(b, il, attn, q, k)
        if self.temperature_scale:
            q = b.graph.mul(q, b.attention_temperature(self.temperature_scale, self.hp.n_ctx_orig, offset=0))
        return q, k


def _yarn_magnitude(hp: HParams, multiplier: float) -> float:
    """1 + 0.1 m ln(factor). The rotation itself brings the one for m = 1, so the ratio of the two results."""
    return 1.0 + 0.1 * multiplier * math.log(1.0 / hp.rope_freq_scale) if hp.rope_freq_scale < 1 else 1.0
