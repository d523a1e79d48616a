"""granitehybrid: Granite 4.0 H, layers of Mamba-2 between few that attend, dense or with experts."""

from __future__ import annotations

from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph
from ikpy.models.granite import Granite
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.mamba2_layers import Mamba2, Mamba2Layers
from ikpy.models.transformer import Attention
from ikpy.models.weights import WeightSource


class GraniteHybrid(Mamba2Layers, Granite):
    """Layers without KV heads are recurrent. A scale that a file lacks is 1, that of the scores the usual one."""

    may_lack_heads = True
    needs_scales = False

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        self.read_mamba2(keys)
        return hp

    def load_attention(self, weights: WeightSource, il: int, prefix: str) -> Attention | Mamba2:  # type: ignore[override]
        if self.has_state(il):
            return self.load_mamba2(weights, prefix)
        return super().load_attention(weights, il, prefix)

    def attention(self, b: BatchGraph, il: int, attn: Attention | Mamba2, h: Value) -> Value:
        if isinstance(attn, Mamba2):
            return self.scan(b, il, attn, h)
        return super().attention(b, il, attn, h)
