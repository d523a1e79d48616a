"""Low-rank additions to matrix products: y = W x + scale * B (A x), with a scale for every token.

The graph builder asks for the adapters of each weight it multiplies with. Weights are told apart by their place in
memory; parts of a fused tensor, found by its buffer, get the rows of B that belong to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ikpy.graph.ir import Buffer, Value

_MARK = ".lora_"


def pair_name(tensor: str, number: int) -> str:
    """Name of the memory of one half of a pair for a tensor, of which several adapters may have some."""
    return f"{tensor}{_MARK}{number}"


def adapted_tensor(name: str) -> str:
    """Name of the tensor that a weight belongs to: its own, or the one that it is a low-rank part of."""
    return name.partition(_MARK)[0]


@dataclass(frozen=True)
class LowRank:
    """A [n_in, rank] and B [rank, n_out] of one weight (with a third dimension for experts and heads).

    ``rows``: A transposed, for an embedding, whose rows are looked up. ``adapter``: its index; ``tensor``: what the
    file of the adapter calls the weight.
    """

    a: Value
    b: Value
    adapter: int
    tensor: str
    rows: Value | None = None


Place = tuple[Buffer, int, tuple[int, int, int, int]]


def place(weight: Value) -> Place:
    """What tells a weight from other views of its buffer."""
    return weight.buffer, weight.offset, weight.shape


@dataclass
class LowRankWeights:
    """Pairs by the weight they act on: of whole tensors by buffer, and of all weights by their exact place."""

    tensors: dict[Buffer, list[LowRank]] = field(default_factory=dict)
    places: dict[Place, list[LowRank]] = field(default_factory=dict)

    def add(self, weight: Value, pair: LowRank, *, whole: bool) -> None:
        """Registers a pair; ``whole``: of a tensor as the file has it, whose parts it acts on as well."""
        self.places.setdefault(place(weight), []).append(pair)
        if whole:
            self.tensors.setdefault(weight.buffer, []).append(pair)

    def of(self, weight: Value) -> Sequence[LowRank]:
        """Pairs of a weight or of a range of a tensor's rows."""
        exact = self.places.get(place(weight))
        return exact or [_of_rows(pair, weight) for pair in self.tensors.get(weight.buffer, ())]


def _of_rows(pair: LowRank, part: Value) -> LowRank:
    """The pair of a range of the rows of its weight."""
    return replace(pair, b=pair.b.slice(1, part.offset // part.strides[1], part.shape[1]))


@dataclass
class GraphAdapters:
    """Adapters of a context as one graph sees them.

    ``scales``: f32 [1, n_tokens] per adapter. ``outputs``: i32 [n_outputs], the rows that the last layer keeps.
    """

    weights: LowRankWeights
    scales: Sequence[Value]
    n_tokens: int
    outputs: Value
    used: set[tuple[int, str]] = field(default_factory=set)

    def of(self, weight: Value) -> Sequence[LowRank]:
        """Pairs of a weight or of a range of its rows, which count as used."""
        found = self.weights.of(weight)
        self.used.update((pair.adapter, pair.tensor) for pair in found)
        return found
