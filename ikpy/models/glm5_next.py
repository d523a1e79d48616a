"""glm5-next: GLM-5.3 Flash. Kimi Delta Attention with bounded decays between layers of sparse latent attention, several
residual streams, and experts with bounded gates. The text model alone.
"""

from __future__ import annotations

from dataclasses import replace

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.models.base import Decoder
from ikpy.models.batch import BatchGraph, CacheSpec, GraphParams, Window
from ikpy.models.blocks import DenseFFN, Experts
from ikpy.models.deepseek2 import DeepSeek2
from ikpy.models.feed_forward import swiglu_clamps
from ikpy.models.hparams import HParams
from ikpy.models.hyper_connections import StreamSizes
from ikpy.models.keys import Keys
from ikpy.models.kimi_linear import KimiLinear
from ikpy.models.pooled_indexer import PooledIndexer, PooledSizes, choose_pools, take_pooled_indexer
from ikpy.models.prediction import from_layer
from ikpy.models.sparse_attention import Indexer
from ikpy.models.stream_latent import StreamLatentDecoder
from ikpy.models.weights import WeightSource


class Glm5Next(StreamLatentDecoder, KimiLinear):
    """Layers without KV heads are KDA layers; heads of the others have no part for positions. A prediction layer has
    sparse latent attention and one residual stream.
    """

    may_lack_rope = True
    has_stream_head = False
    output_weight = "optional"
    default_weights_norm = False
    predicts_from_normed = True
    indexer_sizes: PooledSizes  # type: ignore[assignment]

    # hyper-parameters

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        path = keys.gguf.path
        if hp.n_rot:
            raise FileFormatError(f"{path}: rope.dimension_count is {hp.n_rot}; these models have no RoPE")
        self.stream_sizes = StreamSizes.read(keys)
        self.indexer_sizes = PooledSizes.read(keys, hp.n_layer)
        first = next((il for il in range(hp.n_layer) if hp.n_head_kv[il]), None)
        if first is not None and not self.indexer_sizes.full[first]:
            raise FileFormatError(f"{path}: layer {first} shares the choice of an indexer, and none is before it")
        self.indexer_sizes = replace(
            self.indexer_sizes, full=(*self.indexer_sizes.full, *[True] * self.n_predict_layers)
        )
        self.read_lower_bound(keys, None)
        self.limits, self.shared_limits = swiglu_clamps(keys, hp.n_layer)
        return hp

    # tensors

    def _load_ffn(self, weights: WeightSource, il: int, prefix: str) -> DenseFFN | Experts:
        ffn = super()._load_ffn(weights, il, prefix)
        limit, shared_limit = (from_layer(limits, il)[0] for limits in (self.limits, self.shared_limits))
        if isinstance(ffn, DenseFFN):
            ffn.input_limit = shared_limit
            return ffn
        ffn.input_limit = limit
        if ffn.shared:
            ffn.shared.input_limit = shared_limit
        return ffn

    def _load_indexer(self, weights: WeightSource, il: int, prefix: str) -> Indexer | None:
        if not self.indexer_sizes.full[il]:
            return None
        return take_pooled_indexer(weights, prefix, self.indexer_sizes, self.hp.n_embd, self.hp.extra["q_lora_rank"])

    def load_prediction_layer(self, weights: WeightSource, il: int, prefix: str) -> object:
        return DeepSeek2.load_layer(self, weights, il, prefix)

    def start_at(self, layer: int) -> None:
        super().start_at(layer)
        self.indexer_sizes = replace(self.indexer_sizes, full=self.indexer_sizes.full[layer:])

    # cache

    def has_indexer(self, layer: int) -> bool:
        return not self.has_state(layer) and self.indexer_sizes.full[layer]

    def windows(self, layer: int) -> list[Window]:
        return self.indexer_sizes.windows() if self.has_indexer(layer) else super().windows(layer)

    def stretch(self, layer: int) -> int:
        return self.indexer_sizes.pool if self.has_indexer(layer) else 0

    def index_specs(self, params: GraphParams) -> list[CacheSpec]:
        return self.indexer_sizes.caches(params)

    # graph

    def choose(self, b: BatchGraph, il: int, indexer: Indexer, h: Value, q_latent: Value, table: Value | None) -> None:
        assert isinstance(indexer, PooledIndexer)
        choose_pools(b, il, indexer, self.indexer_sizes, h, q_latent)

    def build(self, b: BatchGraph) -> Value | None:
        return Decoder.build(self, b) if self.reads_states else super().build(b)

    def layer(self, b: BatchGraph, il: int, x: Value) -> Value:
        return DeepSeek2.layer(self, b, il, x) if self.reads_states else super().layer(b, il, x)

    def collapsed(self, b: BatchGraph, streams: Value) -> Value:
        """The mean of the streams; the one of a prediction layer as it is."""
        if self.reads_states:
            return streams
        g, n = b.graph, streams.shape[1]
        parts = [streams.slice(1, i, 1).permute(0, 2, 1) for i in range(n)]
        total = parts[0]
        for part in parts[1:]:
            total = g.add(total, part)
        return g.scale(total, 1.0 / n)
