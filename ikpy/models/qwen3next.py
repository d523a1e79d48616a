"""qwen3next: Qwen3-Next and Qwen3-Coder-Next, gated delta rule and gated attention with experts."""

from __future__ import annotations

from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph
from ikpy.models.delta_net import DeltaInputs, DeltaNet
from ikpy.models.qwen35 import Qwen35Moe
from ikpy.models.recurrent_layers import rows_as_heads
from ikpy.models.weights import WeightSource


class Qwen3Next(Qwen35Moe):
    """What belongs to a head of keys lies together: in ssm_ba and, in older files, in ssm_in."""

    interleaved_heads = True

    def take_inputs(self, weights: WeightSource, prefix: str) -> dict[str, Value]:
        d, s = self.hp.n_embd, self.delta
        sizes = {"ssm_in": s.n_channels + s.n_values, "ssm_ba": 2 * s.heads}
        if not weights.has(f"{prefix}.ssm_in.weight"):
            sizes = {"attn_qkv": s.n_channels, "attn_gate": s.n_values, "ssm_ba": 2 * s.heads}
        return {name: weights.take(f"{prefix}.{name}.weight", (d, n)) for name, n in sizes.items()}

    def delta_inputs(self, b: BatchGraph, net: DeltaNet, h: Value) -> DeltaInputs:
        products = {name: b.graph.mul_mat(weight, h) for name, weight in net.projections.items()}
        s = self.delta
        r = s.heads // s.key_heads
        beta, alpha = (self._joined(b, part) for part in self._parts(products["ssm_ba"], (r, r)))
        if "ssm_in" not in products:
            return DeltaInputs(products["attn_qkv"], products["attn_gate"], beta, alpha)
        q, k, v, z = self._parts(products["ssm_in"], (s.dk, s.dk, r * s.dv, r * s.dv))
        mixed = b.graph.new(s.n_channels, b.n_tokens)
        for start, part in ((0, q), (s.n_keys, k), (2 * s.n_keys, v)):
            b.graph.copy(part, rows_as_heads(mixed, start, part.shape[0], s.key_heads))
        return DeltaInputs(mixed, self._joined(b, z), beta, alpha)

    def _parts(self, x: Value, sizes: tuple[int, ...]) -> list[Value]:
        """Views [n, Hk, T] of x [sum of sizes * Hk, T] for every size n."""
        grouped = x.reshape(sum(sizes), self.delta.key_heads, x.shape[1])
        return [grouped.slice0(sum(sizes[:i]), n) for i, n in enumerate(sizes)]

    def _joined(self, b: BatchGraph, part: Value) -> Value:
        """A view [n, Hk, T] as a contiguous value [n * Hk, T]."""
        return b.graph.copy(part, b.graph.new(*part.shape[:3])).reshape(part.shape[0] * part.shape[1], part.shape[2])
