"""command-r: LayerNorm, attention and feed-forward network side by side."""

from __future__ import annotations

from typing import ClassVar

from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.transformer import Attention, Layer, Transformer
from ikpy.models.weights import Presence, WeightSource

LAYERS_WITH_HEAD_NORMS = 64


class CommandR(Transformer):
    """x + attention(h) + ffn(h) with h = norm(x); the large model also normalises every head of q and k."""

    output_weight: ClassVar[Presence] = "none"
    layer_norm = True
    rotates_whole_head = False
    ffn_norm_name = "attn_norm"  # one norm feeds both branches
    may_norm_heads: ClassVar[bool] = True

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.logit_scale = keys.f32("logit_scale")
        return hp

    def load_attention(self, weights: WeightSource, il: int, prefix: str) -> Attention:
        attn = super().load_attention(weights, il, prefix)
        hp = self.hp
        if self.may_norm_heads and hp.n_layer >= LAYERS_WITH_HEAD_NORMS:
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
        rows = (attended, x, h)
        kept = b.keep_outputs(il, self.hp.n_layer, *rows)
        if b.keeps_states and kept[1] is not x:
            # Apart from the output rows: those must round as they do in a context that keeps no states.
            b.unreduced = self.behind_attention(b, layer, *rows)
        return self.behind_attention(b, layer, *kept)

    def behind_attention(self, b: BatchGraph, layer: Layer, attended: Value, x: Value, *inputs: Value) -> Value:
        """inputs: the normed rows that attention has read as well."""
        x = self.add_branch(b, x, self.attention_output(b, layer.attn, attended), layer.attn_post_norm)
        return self.add_branch(b, x, self.ffn(b, layer.ffn, inputs[0]), layer.ffn_post_norm)
