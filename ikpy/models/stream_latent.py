"""Latent attention and networks in several residual streams (Tencent Hy4, GLM-5.3)."""

from __future__ import annotations

from dataclasses import dataclass

from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph
from ikpy.models.blocks import DenseFFN, Experts
from ikpy.models.deepseek2 import DeepSeek2
from ikpy.models.hyper_connections import HyperConnection, StreamDecoder, join_streams, take_connection
from ikpy.models.latent_attention import LatentAttention
from ikpy.models.weights import WeightSource


@dataclass
class StreamLayer:
    """The two branches of a layer, each with its norm and its hyper-connection."""

    attn_streams: HyperConnection
    attn_norm: Value
    attn: LatentAttention
    ffn_streams: HyperConnection
    ffn_norm: Value
    ffn: DenseFFN | Experts


class StreamLatentDecoder(StreamDecoder, DeepSeek2):
    """Layers of DeepSeek V2 and its kin that read and write residual streams."""

    def load_layer(self, weights: WeightSource, il: int, prefix: str) -> StreamLayer:  # type: ignore[override]
        d = self.hp.n_embd
        return StreamLayer(
            attn_streams=take_connection(weights, f"{prefix}.hc_attn", d, self.stream_sizes),
            attn_norm=weights.take(f"{prefix}.attn_norm.weight", (d,)),
            attn=self._load_attention(weights, il, prefix),
            ffn_streams=take_connection(weights, f"{prefix}.hc_ffn", d, self.stream_sizes),
            ffn_norm=weights.take(f"{prefix}.ffn_norm.weight", (d,)),
            ffn=self._load_ffn(weights, il, prefix),
        )

    def layer(self, b: BatchGraph, il: int, x: Value) -> Value:
        """One layer on the residual streams x [D, n, T] (only the output rows in the last layer)."""
        layer: StreamLayer = self.layers[il]  # type: ignore[assignment]
        g, eps = b.graph, self.hp.norm_eps
        h, back = join_streams(b, layer.attn_streams, self.stream_sizes, eps, x)
        attended = self.attention(b, il, layer.attn, self.norm(b, h, layer.attn_norm))

        def rest(x: Value, attended: Value, back: Value) -> Value:
            x = g.hyper_expand(x, g.mul_mat(layer.attn.out, attended), back)
            h, back = join_streams(b, layer.ffn_streams, self.stream_sizes, eps, x)
            return g.hyper_expand(x, self._ffn(b, layer.ffn, self.norm(b, h, layer.ffn_norm)), back)

        return self.with_kept_rows(b, il, rest, x, attended, back)
