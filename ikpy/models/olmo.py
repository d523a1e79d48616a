"""olmo: OLMo 1 and 1.7. LayerNorm without weights, q, k and v bounded where the file says so (arXiv:2402.00838)."""

from __future__ import annotations

from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.transformer import Transformer


class Olmo(Transformer):
    """The blocks of llama under norms that have no tensors."""

    layer_norm = True
    pre_norms = "none"
    output_norm_weight = "none"
    fused_qkv = "optional"

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.qkv_clamp = keys.f32("attention.clamp_kqv", 0.0)
        return hp

    def norm(self, b: BatchGraph, x: Value, weight: Value | None) -> Value:
        return b.graph.layer_norm(x, None, None, self.hp.norm_eps)
