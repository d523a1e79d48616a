"""falcon-h1: Falcon-H1, layers in which Mamba-2 and attention read the same input side by side (arXiv:2507.22448).

The factors of the published configurations are part of the weights of GGUF files.
"""

from __future__ import annotations

from dataclasses import dataclass

from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.mamba2_layers import Mamba2, Mamba2Layers
from ikpy.models.transformer import Attention, Layer, Transformer
from ikpy.models.weights import WeightSource


@dataclass
class SideBySide:
    """The two networks that mix tokens in a layer."""

    attention: Attention
    scan: Mamba2


class FalconH1(Mamba2Layers, Transformer):
    """Every layer has a state and a cache."""

    keeps_caches = True
    has_norm = False
    rope_neox = True
    out_bias = "optional"
    ffn_bias = "optional"

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        self.read_mamba2(keys)
        return hp

    def has_state(self, layer: int) -> bool:
        return True

    def load_layer(self, weights: WeightSource, il: int, prefix: str) -> Layer:
        norm = (self.hp.n_embd,)
        return Layer(
            attn_norm=weights.take(f"{prefix}.attn_norm.weight", norm),
            attn=SideBySide(self.load_attention(weights, il, prefix), self.load_mamba2(weights, prefix)),  # type: ignore[arg-type]
            ffn_norm=weights.take(weights.written(f"{prefix}.ffn_norm"), norm),
            ffn=self.load_ffn(weights, il, prefix),
        )

    def attention(self, b: BatchGraph, il: int, attn: Attention | SideBySide, h: Value) -> Value:
        """Sum of what both networks make of the normed input h [D, T]; [D, T]."""
        assert isinstance(attn, SideBySide)
        net = attn.scan
        scanned = b.graph.mul_mat(net.out, self.scan(b, il, net, h), net.out_bias)
        attended = super().attention(b, il, attn.attention, h)
        return b.graph.add(super().attention_output(b, attn.attention, attended), scanned)

    def attention_output(self, b: BatchGraph, attn: Attention | SideBySide, attended: Value) -> Value:
        return attended  # both have been multiplied with matrices of their own
