"""exaone4: EXAONE 4.0, norms behind the branches only; window layers alone know positions (arXiv:2507.11407)."""

from __future__ import annotations

from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.transformer import Transformer
from ikpy.models.windows import window_layers

FULL_LAYER_PERIOD = 4  # of files with a window and no pattern


class Exaone4(Transformer):
    """Files without a window (1.2B) rotate every layer."""

    pre_norms = "none"
    post_norms = "required"
    qk_norm = "required"
    rope_neox = True
    rope_freqs_weight = "optional"

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.n_swa = keys.u32("attention.sliding_window", 0)
        if hp.n_swa:
            self.has_window = window_layers(keys, hp.n_layer, FULL_LAYER_PERIOD)
        return hp

    def is_rotated(self, layer: int) -> bool:
        return not self.has_window or self.has_window[layer]
