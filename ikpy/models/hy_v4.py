"""hy_v4: Tencent Hy4. Latent attention with sinks and a gate, indexers that layers share, and residual streams that are
not mixed (independent hyper-connections).
"""

from __future__ import annotations

from dataclasses import dataclass

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.models.base import Architecture
from ikpy.models.batch import BatchGraph
from ikpy.models.blocks import DenseFFN, Experts
from ikpy.models.deepseek2 import Layer
from ikpy.models.deepseek32 import DeepSeek32
from ikpy.models.feed_forward import swiglu_limits
from ikpy.models.hparams import HParams
from ikpy.models.hyper_connections import HyperConnection, StreamDecoder, StreamSizes, join_streams, take_connection
from ikpy.models.keys import Keys
from ikpy.models.latent_attention import LatentAttention
from ikpy.models.rope import RopeParams
from ikpy.models.sparse_attention import Indexer, take_indexer
from ikpy.models.weights import WeightSource


@dataclass
class StreamLayer(Layer):
    """Each branch has a hyper-connection."""

    attn_streams: HyperConnection
    ffn_streams: HyperConnection


class HyV4(StreamDecoder, DeepSeek32):
    """DeepSeek V3.2 with residual streams. Its prediction layers are left out."""

    output_weight = "required"
    default_n_dense = 0
    indexer_neox = False
    indexer_rotates_last = True

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        self.stream_sizes = StreamSizes.read_independent(keys)
        self.limits = swiglu_limits(keys, hp.n_layer + self.n_predict_layers, "swiglu_clamp_exp")
        sizes = self.indexer_sizes
        if sizes is not None and not sizes.full[0]:
            raise FileFormatError(f"{keys.gguf.path}: layer 0 has no layer before it whose choice it could take")
        return hp

    def indexer_norm_eps(self, hp: HParams) -> float:
        return hp.norm_eps

    def divisible_heads(self, layer: int) -> int:
        # Gates and sinks are not divided.
        return 0

    def prediction_head(self, weights: WeightSource) -> Architecture:
        return Architecture.prediction_head(self, weights)

    # tensors

    def load_layer(self, weights: WeightSource, il: int, prefix: str) -> StreamLayer:
        d, sizes = self.hp.n_embd, self.stream_sizes
        return StreamLayer(
            **vars(super().load_layer(weights, il, prefix)),
            attn_streams=take_connection(weights, f"{prefix}.hc_attn", d, sizes),
            ffn_streams=take_connection(weights, f"{prefix}.hc_ffn", d, sizes),
        )

    def _load_attention(self, weights: WeightSource, il: int, prefix: str) -> LatentAttention:
        hp = self.hp
        attn = super()._load_attention(weights, il, prefix)
        attn.sinks = weights.take(f"{prefix}.attn_sinks.weight", (hp.n_head[0],))
        attn.gate = weights.take(f"{prefix}.attn_gate.weight", (hp.n_embd, hp.n_head[0] * hp.n_embd_head_v))
        return attn

    def _load_indexer(self, weights: WeightSource, il: int, prefix: str) -> Indexer | None:
        sizes = self.indexer_sizes
        if sizes is None or not sizes.full[il]:
            return super()._load_indexer(weights, il, prefix)
        return take_indexer(weights, prefix, sizes, self.hp.n_embd, self.hp.extra["q_lora_rank"])

    def _load_ffn(self, weights: WeightSource, il: int, prefix: str) -> DenseFFN | Experts:
        ffn = super()._load_ffn(weights, il, prefix)
        if isinstance(ffn, Experts):
            ffn.input_limit = self.limits[il]
        return ffn

    # graph

    def _scales(self, rope: RopeParams, k: int) -> tuple[float, RopeParams]:
        # A magnitude of YaRN is that of the rotated elements alone.
        return k**-0.5, rope

    def layer(self, b: BatchGraph, il: int, x: Value) -> Value:
        """One layer on the residual streams x [D, n, T] (only the output rows in the last layer)."""
        layer: StreamLayer = self.layers[il]  # type: ignore[assignment]
        g, eps = b.graph, self.hp.norm_eps
        h, back = join_streams(b, layer.attn_streams, self.stream_sizes, eps, x)
        attended = self.attention(b, il, layer.attn, self.norm(b, h, layer.attn_norm))
        x, attended, back = self.keep_rows(b, il, x, attended, back)
        x = g.hyper_expand(x, g.mul_mat(layer.attn.out, attended), back)
        h, back = join_streams(b, layer.ffn_streams, self.stream_sizes, eps, x)
        return g.hyper_expand(x, self._ffn(b, layer.ffn, self.norm(b, h, layer.ffn_norm)), back)
