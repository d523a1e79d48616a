"""afmoe: Trinity, gated attention, norms around both branches, sigmoid-routed and shared experts."""

from __future__ import annotations

import math

from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.routed_moe import RoutedMoe
from ikpy.models.windows import window_layers

FULL_LAYER_PERIOD = 4  # of files without a pattern


class Afmoe(RoutedMoe):
    """Three window layers with RoPE for every full one without; embeddings are multiplied by sqrt(D)."""

    post_norms = "required"
    attn_gate = "required"
    usually_sigmoid = True
    default_scale = 1.0

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.n_swa = keys.u32("attention.sliding_window", 0)
        hp.embedding_scale = math.sqrt(hp.n_embd)
        self.rotated = window_layers(keys, hp.n_layer, FULL_LAYER_PERIOD)
        if hp.n_swa:
            self.has_window = self.rotated
        return hp

    def is_rotated(self, layer: int) -> bool:
        return self.rotated[layer]
