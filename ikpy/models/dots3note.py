"""dots3note: dots3 note, the text model. Sparse latent attention beside latent attention to a window, whose heads and
latents have sizes of their own; a gate for every head. Prediction layers are left out.
"""

from __future__ import annotations

from typing import ClassVar

from ikpy.errors import FileFormatError, UsageError
from ikpy.models.base import Architecture
from ikpy.models.batch import FULL, Window
from ikpy.models.deepseek2 import DeepSeek2
from ikpy.models.hparams import HeadSizes, HParams
from ikpy.models.keys import Keys
from ikpy.models.latent_attention import LatentAttention
from ikpy.models.latent_tensors import LatentSizes
from ikpy.models.sparse_attention import Indexer, IndexerSizes, check_sizes, take_indexer
from ikpy.models.weights import WeightSource


class Dots3Note(DeepSeek2):
    """Every layer without a window has an indexer."""

    output_weight = "required"
    heads_differ: ClassVar[bool] = True
    expects_kv_b = False
    default_weights_scale = 1.0
    indexer_sizes: IndexerSizes

    def default_gating(self, hp: HParams) -> int:
        return 2

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        path = keys.gguf.path
        n_listed = keys.n_listed("attention.sliding_window_pattern", hp.n_layer)
        self.has_window = tuple(map(bool, keys.per_layer("attention.sliding_window_pattern", n_listed)[: hp.n_layer]))
        hp.n_swa = keys.u32("attention.sliding_window")
        rotated = hp.window_heads.rotated
        hp.window_heads = HeadSizes(
            keys.u32("attention.key_length_mla_swa"), keys.u32("attention.value_length_mla_swa"), rotated
        )
        self.window_rank = keys.u32("attention.kv_lora_rank_swa")
        if hp.n_swa < 1 or rotated >= hp.window_heads.k or min(self.window_rank, hp.window_heads.v) < 1:
            raise FileFormatError(
                f"{path}: a window of {hp.n_swa} tokens, heads of {hp.window_heads} and latents of "
                f"{self.window_rank} elements are not possible"
            )
        n_listed = keys.n_listed("attention.indexer.types", hp.n_layer)
        sizes = IndexerSizes(
            n_heads=keys.u32("attention.indexer.head_count"),
            size=keys.u32("attention.indexer.key_length"),
            top_k=keys.u32("attention.indexer.top_k"),
            neox=True,
            full=tuple(map(bool, keys.per_layer("attention.indexer.types", n_listed)[: hp.n_layer])),
        )
        check_sizes(path, sizes.n_heads, sizes.size, sizes.top_k, hp.n_rot)
        if any(own == local for own, local in zip(sizes.full, self.has_window, strict=True)):
            raise FileFormatError(f"{path}: layers have either a window or an indexer")
        self.indexer_sizes = sizes
        return hp

    def window(self, layer: int) -> Window:
        return ("sliding", self.hp.n_swa) if self.has_window[layer] else FULL

    def latent_sizes(self, layer: int) -> LatentSizes:
        heads = self.hp.n_head[layer]
        if not self.has_window[layer]:
            hp = self.hp
            return LatentSizes(heads, hp.n_embd_head_k, hp.n_rot, hp.n_embd_head_v, hp.extra["kv_lora_rank"])
        sizes = self.hp.window_heads
        return LatentSizes(heads, sizes.k, sizes.rotated, sizes.v, self.window_rank)

    # tensors

    def _load_attention(self, weights: WeightSource, il: int, prefix: str) -> LatentAttention:
        attn = super()._load_attention(weights, il, prefix)
        attn.kr_norm = weights.take(f"{prefix}.attn_k_norm.weight", (attn.sizes.rotated,))
        attn.gate = weights.take(f"{prefix}.attn_gate.weight", (self.hp.n_embd, attn.sizes.heads))
        return attn

    def _load_indexer(self, weights: WeightSource, il: int, prefix: str) -> Indexer | None:
        if self.has_window[il]:
            return None
        return take_indexer(weights, prefix, self.indexer_sizes, self.hp.n_embd, self.hp.extra["q_lora_rank"])

    def prediction_head(self, weights: WeightSource, number: int = 0) -> Architecture:
        raise UsageError(f"{weights.gguf.path}: layers of {self.hp.arch} models that predict further tokens do not run")
