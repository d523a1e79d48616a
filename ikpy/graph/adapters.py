"""Low-rank additions to matrix products: y = W x + scale * B (A x), with a scale for every token.

The graph builder asks for the adapters of each weight it multiplies with; weights are told apart by their buffer, so
that parts of a fused tensor get the rows of B that belong to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ikpy.graph.ir import Buffer, Value


def adapted_tensor(name: str) -> str:
    """Name of the tensor that a weight belongs to: its own, or the one that it is a low-rank part of."""
    return name.partition(".lora_")[0]


@dataclass(frozen=True)
class LowRank:
    """A [n_in, rank] and B [rank, n_out] of one weight (with a third dimension for experts); index of the adapter."""

    a: Value
    b: Value
    adapter: int
    tensor: str


@dataclass
class GraphAdapters:
    """Adapters of a context as one graph sees them.

    ``scales``: f32 [1, n_tokens] per adapter. ``outputs``: i32 [n_outputs], the rows that the last layer keeps.
    """

    weights: Mapping[Buffer, Sequence[LowRank]]
    scales: Sequence[Value]
    n_tokens: int
    outputs: Value
    used: set[tuple[int, str]] = field(default_factory=set)

    def of(self, weight: Value) -> list[LowRank]:
        """Adapters of a weight or of a range of its rows."""
        found = []
        for pair in self.weights.get(weight.buffer, ()):
            self.used.add((pair.adapter, pair.tensor))
            b = pair.b
            if weight.shape[1] != b.shape[1]:
                b = b.slice(1, weight.offset // weight.strides[1], weight.shape[1])
            found.append(LowRank(pair.a, b, pair.adapter, pair.tensor))
        return found
