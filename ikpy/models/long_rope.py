"""LongRoPE (arXiv:2402.13753): divisors of the frequencies for short contexts and for long ones."""

from __future__ import annotations

from ikpy.graph.ir import Value
from ikpy.models.base import Decoder
from ikpy.models.batch import GraphParams
from ikpy.models.weights import WeightSource


class LongRope(Decoder):
    """Factors depend on the context size: long ones beyond the original context length."""

    has_long_rope = True

    def load_global(self, weights: WeightSource) -> None:
        super().load_global(weights)
        self.long_factors = self._take_factors(weights, "rope_factors_long.weight")
        self.short_factors = self._take_factors(weights, "rope_factors_short.weight")

    def _take_factors(self, weights: WeightSource, name: str) -> Value | None:
        """A factor per rotated pair; files of partly rotated heads may have one per pair of the whole head."""
        n, whole = self.hp.n_rot // 2, self.hp.n_embd // self.hp.n_head[0] // 2
        shapes = [(n,), (whole,)] if whole > n else [(n,)]
        factors = weights.take(name, *shapes, required=False)
        return None if factors is None else factors.slice0(0, n)

    def rope_factors(self, layer: int, params: GraphParams) -> Value | None:
        found = self.long_factors if self._is_beyond(params) else self.short_factors
        return found or super().rope_factors(layer, params)

    def rotation_name(self, params: GraphParams) -> str:
        return "long factors" if self._is_beyond(params) and self.long_factors else ""

    def _is_beyond(self, params: GraphParams) -> bool:
        return params.n_ctx // params.n_seq_max > self.hp.n_ctx_orig
