"""command-r: LayerNorm, attention and feed-forward network side by side."""

from __future__ import annotations

from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.transformer import Attention, Layer, Transformer
from ikpy.models.weights import WeightSource

LAYERS_WITH_HEAD_NORMS = 64


class CommandR(Transformer):
    """x + attention(h) + ffn(h) with h = norm(x); the large model also normalises every head of q and k."""

    output_weight = "none"
    layer_norm = True
    rotates_whole_head = False
    ffn_norm_name = "attn_norm"  # one norm feeds both branches

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.logit_scale = keys.f32("logit_scale")
        return hp

    def load_attention(self, weights: WeightSource, il: int, prefix: str) -> Attention:
        attn = super().load_attention(weights, il, prefix)
        hp = self.hp
        if hp.n_layer >= LAYERS_WITH_HEAD_NORMS:
            attn.q_norm = weights.take(f"{prefix}.attn_q_norm.weight", (hp.n_embd_head_k, hp.n_head[il]))
            attn.k_norm = weights.take(f"{prefix}.attn_k_norm.weight", (hp.n_embd_head_k, hp.n_head_kv[il]))
        return attn

    def norm(self, b: BatchGraph, x: Value, weight: Value | None) -> Value:
        return x if weight is None else b.graph.layer_norm(x, weight, None, self.hp.norm_eps)

    def norm_head(self, b: BatchGraph, x: Value, weight: Value | None) -> Value:
        return self.norm(b, x, weight)

    def layer(self, b: BatchGraph, il: int, x: Value) -> Value:
        layer: Layer = self.layers[il]  # type: ignore[assignment]
        h = self.norm(b, x, layer.attn_norm)
        attended = self.attention(b, il, layer.attn, h)
        attended, h, x = b.keep_outputs(il, self.hp.n_layer, attended, h, x)
        x = self.add_branch(b, x, self.attention_output(b, layer.attn, attended), None)
        return self.add_branch(b, x, self.ffn(b, layer.ffn, h), None)
