"""Vision transformers with fewer heads of keys and values than of queries."""

from __future__ import annotations

from ikpy.errors import FileFormatError
from ikpy.models.weights import split_rows
from ikpy.vision.encoder import VisionTransformer
from ikpy.vision.params import VisionParams
from ikpy.vision.weights import Linear, ProjectorWeights


class GroupedTransformer(VisionTransformer):
    """RMSNorm; queries, keys and values are one matrix, whose rows say how large heads are.

    n_kv: heads that have keys and values.
    """

    def __init__(self, weights: ProjectorWeights, params: VisionParams, n_kv: int) -> None:
        self._n_kv = n_kv
        super().__init__(weights, params, rms=True)

    def read_head_size(self, weights: ProjectorWeights) -> int:
        name = "v.blk.0.attn_qkv.weight"
        rows, heads = weights.shape(name)[-1], self.params.n_head + 2 * self._n_kv
        if rows % heads:
            raise FileFormatError(f"{weights.gguf.path}: {name} has {rows} rows, no multiple of {heads} heads")
        return rows // heads

    def _load_qkv(self, weights: ProjectorWeights, prefix: str) -> list[Linear]:
        sizes = [self.head_size * n for n in (self.params.n_head, self._n_kv, self._n_kv)]
        fused = weights.linear(f"{prefix}.attn_qkv", self.params.n_embd, sum(sizes))
        parts = split_rows(fused.weight, *sizes)
        if fused.bias is None:
            return [Linear(part) for part in parts]
        starts = 0, sizes[0], sizes[0] + sizes[1]
        return [Linear(p, fused.bias.slice0(start, n)) for p, start, n in zip(parts, starts, sizes, strict=True)]
