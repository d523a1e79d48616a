"""exaone-moe: K-EXAONE, window layers with RoPE, full ones without; sigmoid-routed and shared experts."""

from __future__ import annotations

from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.routed_moe import RoutedMoe
from ikpy.models.windows import window_layers

FULL_LAYER_PERIOD = 4  # of files without a pattern


class ExaoneMoe(RoutedMoe):
    """Only window layers know positions."""

    rope_freqs_weight = "optional"
    default_n_dense = 0
    dense_without_router = True
    usually_sigmoid = True

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.n_swa = keys.u32("attention.sliding_window")
        self.has_window = window_layers(keys, hp.n_layer + self.n_predict_layers, FULL_LAYER_PERIOD)
        hp.n_ff_shared = keys.u32("expert_shared_feed_forward_length", hp.n_ff_shared)
        return hp

    def is_rotated(self, layer: int) -> bool:
        return self.has_window[layer]
