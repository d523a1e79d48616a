"""olmo2: OLMo 2 and OLMo 3, norms behind the branches only (arXiv:2501.00656)."""

from __future__ import annotations

from dataclasses import replace

from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.rope import RopeParams
from ikpy.models.transformer import Transformer
from ikpy.models.windows import window_layers

FULL_LAYER_PERIOD = 4  # of files with a window and no pattern


class Olmo2(Transformer):
    """q and k are normalised over all heads together; OLMo 3 has windows in three of four layers."""

    pre_norms = "none"
    post_norms = "required"
    qk_norm = "required"
    norms_all_heads = True
    rope_neox = True

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.n_swa = keys.u32("attention.sliding_window", 0)
        if hp.n_swa:
            self.has_window = window_layers(keys, hp.n_layer, FULL_LAYER_PERIOD)
        return hp

    def rope_params(self, layer: int, context: RopeParams) -> RopeParams:
        if self.window(layer)[0] == "none":
            return context
        return replace(context, freq_scale=1.0, ext_factor=0.0, attn_factor=1.0)  # YaRN reaches full layers only
