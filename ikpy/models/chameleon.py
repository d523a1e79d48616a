"""chameleon: Chameleon 7B and 34B (text), llama blocks with LayerNorms of the heads of q and k (arXiv:2405.09818)."""

from __future__ import annotations

import numpy as np

from ikpy.graph.ir import F32, Value, external
from ikpy.models.batch import BatchGraph
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.transformer import Layer, Transformer
from ikpy.models.weights import WeightSource

HEAD_EPSILON = 1e-5
IMAGE_TOKENS = range(4, 8196)
"""Tokens of pictures, which texts never have."""


class Chameleon(Transformer):
    """Norms stand behind the branches where the file says so (34B)."""

    fused_qkv = "optional"
    qk_norm = "required"
    head_norm_bias = "optional"
    norms_heads_apart = True

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        self.norms_behind = keys.boolean("swin_norm", False)
        return hp

    def load_global(self, weights: WeightSource) -> None:
        super().load_global(weights)
        bias = np.zeros(self.hp.n_vocab, np.float32)
        bias[IMAGE_TOKENS.start : IMAGE_TOKENS.stop] = -np.finfo(np.float32).max
        self.logit_bias = external(bias.ctypes.data, bias, F32, (self.hp.n_vocab,), "picture_tokens.bias", "weight")

    def load_layer(self, weights: WeightSource, il: int, prefix: str) -> Layer:
        layer = super().load_layer(weights, il, prefix)
        if self.norms_behind:
            layer.attn_norm, layer.attn_post_norm = None, layer.attn_norm
            layer.ffn_norm, layer.ffn_post_norm = None, layer.ffn_norm
        return layer

    def norm_head(self, b: BatchGraph, x: Value, weight: Value | None) -> Value:
        assert weight is not None
        return b.graph.layer_norm(x, weight, self.norm_biases.get(weight.name), HEAD_EPSILON)
