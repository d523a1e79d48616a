"""mellum: Mellum 2, the blocks of qwen3moe with windows in some layers."""

from __future__ import annotations

from dataclasses import replace

from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.qwen3moe import Qwen3Moe
from ikpy.models.rope import RopeParams
from ikpy.models.windows import periodic_window_layers


class Mellum(Qwen3Moe):
    """Scaling of RoPE reaches full layers only; window layers may have a base of their own."""

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.n_swa = keys.u32("attention.sliding_window", 0)
        if hp.n_swa:
            self.has_window = periodic_window_layers(keys, hp.n_layer)
        return hp

    def rope_params(self, layer: int, context: RopeParams) -> RopeParams:
        if self.window(layer)[0] == "none":
            return context
        base = self.hp.window_freq_base or context.freq_base
        return replace(context, freq_base=base, freq_scale=1.0, ext_factor=0.0, attn_factor=1.0)
