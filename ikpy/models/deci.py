"""deci: DeciLM, Llama-Nemotron Super and Ultra. Blocks of llama whose parts a search has chosen layer by layer
(arXiv:2411.19146): heads, KV heads and width of the network, or none of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph, CacheSpec, GraphParams
from ikpy.models.blocks import DenseFFN
from ikpy.models.feed_forward import take_dense
from ikpy.models.llama import Llama
from ikpy.models.transformer import Attention, Layer
from ikpy.models.weights import WeightSource


@dataclass
class Linear:
    """A matrix [D, D] in place of attention."""

    out: Value
    out_bias: Value | None = None


@dataclass
class Block:
    """Norms and branches of a layer, None where it has none."""

    attn_norm: Value | None
    attn: Attention | Linear | None
    ffn_norm: Value | None
    ffn: DenseFFN | None


class Deci(Llama):
    """Layers without KV heads have a matrix in place of attention if the file counts heads for them, else nothing;
    layers without feed_forward_length have no network.
    """

    may_lack_heads = True

    def attends(self, layer: int) -> bool:
        """Whether a layer attends."""
        return self.hp.n_head_kv[layer] > 0

    def cache_specs(self, layer: int, params: GraphParams) -> list[CacheSpec]:
        return super().cache_specs(layer, params) if self.attends(layer) else []

    # tensors

    def load_layer(self, weights: WeightSource, il: int, prefix: str) -> Block:  # type: ignore[override]
        hp, d = self.hp, self.hp.n_embd
        block = Block(None, None, None, None)
        if hp.n_head[il] > 0:
            block.attn_norm = weights.take(f"{prefix}.attn_norm.weight", (d,))
            block.attn = self.load_mixing(weights, il, prefix)
        if hp.n_ff[il]:
            block.ffn_norm = weights.take(f"{prefix}.ffn_norm.weight", (d,))
            block.ffn = take_dense(weights, prefix, d, hp.n_ff[il], bias=self.ffn_bias)
        return block

    def load_mixing(self, weights: WeightSource, il: int, prefix: str) -> Attention | Linear:
        """Attention of a layer, or the matrix in its place."""
        if self.attends(il):
            return self.load_attention(weights, il, prefix)
        return Linear(weights.take(f"{prefix}.attn_output.weight", (self.hp.n_embd, self.hp.n_embd)))

    # graph

    def attention(self, b: BatchGraph, il: int, attn: Attention | Linear | None, h: Value) -> Value:
        """What `behind_attention` multiplies: the input itself where the layer does not attend."""
        return super().attention(b, il, attn, h) if isinstance(attn, Attention) else h

    def behind_attention(self, b: BatchGraph, layer: Layer | Block, attended: Value, x: Value, *inputs: Value) -> Value:
        if layer.attn is not None:
            branch = b.graph.mul_mat(layer.attn.out, attended, layer.attn.out_bias)
            x = self.add_branch(b, x, branch, None)
        if layer.ffn is None:
            return x
        return self.add_branch(b, x, self.ffn(b, layer.ffn, self.norm(b, x, layer.ffn_norm)), None)
