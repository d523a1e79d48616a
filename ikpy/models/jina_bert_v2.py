"""jina-bert-v2: Jina Embeddings v2 and Reranker v1, BERT with linear biases to both sides (arXiv:2310.19923)."""

from __future__ import annotations

from ikpy.graph.ir import Value
from ikpy.models.alibi import MAX_BIAS, LinearBiases
from ikpy.models.batch import BatchGraph
from ikpy.models.blocks import DenseFFN, Experts
from ikpy.models.encoder import Encoder
from ikpy.models.weights import WeightSource, split_rows


class JinaBertV2(LinearBiases, Encoder):
    """GEGLU with the gate in a tensor of its own or ahead of up, or GELU without a gate. Models of code norm q and k of
    all heads together, and the sum of a layer's input and what attention made of it once more.
    """

    usual_max_bias = MAX_BIAS
    qk_norm = "optional"
    head_norm_bias = "optional"
    norms_all_heads = True

    def load(self, weights: WeightSource) -> None:
        self.second_norms: dict[int, tuple[Value, Value | None]] = {}
        super().load(weights)

    def load_network(self, weights: WeightSource, il: int, prefix: str) -> DenseFFN | Experts:
        n, f, d = self.hp.n_embd, self.hp.n_ff[il], (self.hp.n_embd,)
        norm = weights.take(f"{prefix}.attn_norm_2.weight", d, required=False)
        if norm is not None:
            self.second_norms[il] = norm, weights.take(f"{prefix}.attn_norm_2.bias", d, required=False)
        gate = weights.take(f"{prefix}.ffn_gate.weight", (n, f), required=False)
        name = f"{prefix}.ffn_up.weight"
        is_fused = gate is None and weights.rows(name, f) == 2 * f
        up = weights.take(name, (n, 2 * f if is_fused else f), parts=(f, f) if is_fused else ())
        bias = weights.take(f"{prefix}.ffn_up.bias", (up.shape[1],), required=False)
        down = weights.take(f"{prefix}.ffn_down.weight", (f, n))
        down_bias = weights.take_if(self.bias, f"{prefix}.ffn_down.bias", d)
        if not is_fused:
            return DenseFFN(gate=gate, up=up, down=down, up_bias=bias, down_bias=down_bias)
        gate, up = split_rows(up, f, f)
        biases = (None, None) if bias is None else (bias.slice0(0, f), bias.slice0(f, f))
        return DenseFFN(gate=gate, up=up, down=down, gate_bias=biases[0], up_bias=biases[1], down_bias=down_bias)

    def between(self, b: BatchGraph, il: int, before: Value, x: Value) -> Value:
        if il not in self.second_norms:
            return x
        return b.graph.layer_norm(b.graph.add(before, x), *self.second_norms[il], self.hp.norm_eps)
