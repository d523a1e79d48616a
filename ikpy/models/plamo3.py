"""plamo3: PLaMo 3. Norms before and behind both branches, norms of q and k, windows with a RoPE base of their own."""

from __future__ import annotations

from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.plamo import take_post_norms
from ikpy.models.transformer import Layer, Transformer
from ikpy.models.weights import WeightSource
from ikpy.models.windows import periodic_window_layers

PERIOD = 8


class Plamo3(Transformer):
    """Fused matrices; the last layer of each period attends to everything."""

    fused_qkv = "required"
    fused_ffn = True
    qk_norm = "required"
    rope_neox = True

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.n_swa = keys.u32("attention.sliding_window", 0)
        if hp.n_swa:
            self.has_window = periodic_window_layers(keys, hp.n_layer, PERIOD)
        return hp

    def load_layer(self, weights: WeightSource, il: int, prefix: str) -> Layer:
        layer = super().load_layer(weights, il, prefix)
        take_post_norms(layer, weights, self.hp.n_embd, prefix)
        return layer
