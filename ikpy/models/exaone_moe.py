"""exaone-moe: K-EXAONE, window layers with RoPE, full ones without; sigmoid-routed and shared experts."""

from __future__ import annotations

from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.routed_moe import RoutedMoe
from ikpy.models.windows import PATTERN, usual_window_layers, window_layers

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
        self.has_window = self._window_layers(keys, hp.n_layer, hp.n_layer + self.n_predict_layers)
        hp.n_ff_shared = keys.u32("expert_shared_feed_forward_length", hp.n_ff_shared)
        return hp

    @staticmethod
    def _window_layers(keys: Keys, n_layer: int, n_all: int) -> list[bool]:
        """Whether each layer has a window, prediction layers included, which files need not list."""
        listed = window_layers(keys, keys.n_listed(PATTERN, n_layer), FULL_LAYER_PERIOD)
        return [*listed, *usual_window_layers(n_all, FULL_LAYER_PERIOD)[len(listed) :]][:n_all]

    def is_rotated(self, layer: int) -> bool:
        return self.has_window[layer]
