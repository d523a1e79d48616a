"""phi3: fused projections, LongRoPE factors, optional sliding window."""

from __future__ import annotations

from ikpy.graph.ir import Value
from ikpy.models.batch import GraphParams
from ikpy.models.hparams import HParams
from ikpy.models.keys import REQUIRED, Keys
from ikpy.models.transformer import Transformer
from ikpy.models.weights import WeightSource


class Phi3(Transformer):
    """Frequency factors depend on the context size: long ones beyond the original context length."""

    output_weight = "required"
    fused_qkv = True
    fused_ffn = True
    rope_neox = True
    rotates_whole_head = False

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.n_swa = keys.u32("attention.sliding_window", _old_file_window(hp) or REQUIRED)
        return hp

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
        return self.long_factors if self._is_beyond(params) else self.short_factors

    def rotation_name(self, params: GraphParams) -> str:
        return "long factors" if self._is_beyond(params) and self.long_factors else ""

    def _is_beyond(self, params: GraphParams) -> bool:
        return params.n_ctx // params.n_seq_max > self.hp.n_ctx_orig

    def window(self, layer: int) -> tuple[str, int]:
        return ("sliding", self.hp.n_swa) if self.hp.n_swa else ("none", 0)


def _old_file_window(hp: HParams) -> int:
    """Window of published models whose files predate the key; 0 if the model is none of them."""
    if hp.n_layer in (32, 40) and hp.n_ctx_train == 4096:
        return 2047
    if hp.n_layer == 32 and hp.n_head_kv[0] == 32 and hp.n_ctx_train == 131072:
        return 262144
    return 131072 if hp.n_layer == 40 and hp.n_ctx_train == 131072 else 0
