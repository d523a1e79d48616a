"""hy_v4: Tencent Hy4. Latent attention with sinks and a gate, indexers that layers share, and residual streams that are
not mixed (independent hyper-connections).
"""

from __future__ import annotations

from ikpy.errors import FileFormatError
from ikpy.models.blocks import DenseFFN, Experts
from ikpy.models.deepseek32 import DeepSeek32
from ikpy.models.feed_forward import swiglu_limits
from ikpy.models.hparams import HParams
from ikpy.models.hyper_connections import StreamSizes
from ikpy.models.keys import Keys
from ikpy.models.latent_attention import LatentAttention
from ikpy.models.rope import RopeParams
from ikpy.models.sparse_attention import Indexer, take_indexer
from ikpy.models.stream_latent import StreamLatentDecoder
from ikpy.models.weights import WeightSource


class HyV4(StreamLatentDecoder, DeepSeek32):
    """DeepSeek V3.2 with residual streams. Its prediction layers are left out."""

    output_weight = "required"
    default_n_dense = 0
    indexer_neox = False
    indexer_rotates_last = True
    runs_prediction_layers = False

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

    # tensors

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
