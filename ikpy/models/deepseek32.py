"""deepseek32: DeepSeek V3.2. deepseek2 with sigmoid routing, indexers and prediction layers."""

from __future__ import annotations

from typing import ClassVar

from ikpy.models.deepseek2 import DeepSeek2
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.sparse_attention import KEY_NORM_EPS, TENSORS, Indexer, IndexerSizes, check_sizes, take_indexer
from ikpy.models.weights import Presence, WeightSource


class DeepSeek32(DeepSeek2):
    """What its files may leave out, and how its indexers rotate."""

    output_weight: ClassVar[Presence] = "optional"
    default_weights_scale = 1.0
    expects_kv_b = False
    indexer_neox: ClassVar[bool] = True
    """Pairing of rotated elements in the heads of indexers."""
    indexer_rotates_last: ClassVar[bool] = False

    def default_gating(self, hp: HParams) -> int:
        return 2

    def indexer_norm_eps(self, hp: HParams) -> float:
        """Epsilon of the LayerNorm of index keys."""
        return KEY_NORM_EPS

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        if any(".indexer." in name for name in keys.gguf.tensors):
            self.indexer_sizes = IndexerSizes(
                n_heads=keys.u32("attention.indexer.head_count"),
                size=keys.u32("attention.indexer.key_length"),
                top_k=keys.u32("attention.indexer.top_k"),
                neox=self.indexer_neox,
                full=tuple(map(bool, keys.per_layer("attention.indexer.types", hp.n_layer, 1))),
                rotates_last=self.indexer_rotates_last,
                norm_eps=self.indexer_norm_eps(hp),
            )
            sizes = self.indexer_sizes
            check_sizes(keys.gguf.path, sizes.n_heads, sizes.size, sizes.top_k, hp.n_rot)
        return hp

    def _load_indexer(self, weights: WeightSource, il: int, prefix: str) -> Indexer | None:
        sizes = self.indexer_sizes
        is_shared = sizes is not None and il < len(sizes.full) and not sizes.full[il]
        if sizes is None or is_shared or not any(weights.has(f"{prefix}.indexer.{name}") for name in TENSORS):
            return super()._load_indexer(weights, il, prefix)
        return take_indexer(weights, prefix, sizes, self.hp.n_embd, self.hp.extra["q_lora_rank"])
