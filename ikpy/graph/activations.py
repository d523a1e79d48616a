"""Statistics of matmul inputs that a graph adds up while it runs: what an importance matrix is made of.

A collector is handed to the context; the graph builder asks it for every matmul whether and where to add.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ikpy.graph.ir import Value, external

_BLOCK = re.compile(r"blk\.(\d{1,9})\.")

F64 = 28
# A dense matmul over fewer rows adds nothing.
MIN_ROWS = 16
SIMILARITY_SLOTS = 64


@dataclass
class ActivationSums:
    """Sums of squares per input column of one weight; `n_matrices` is its number of experts or heads, else 1."""

    op: str
    n_inputs: int
    n_matrices: int
    memory: NDArray[np.float64] = field(init=False)
    value: Value = field(init=False)

    def __post_init__(self) -> None:
        self.memory = np.zeros(self.n_matrices * (self.n_inputs + 1) + 1, np.float64)
        self.value = external(self.memory.ctypes.data, self.memory, F64, self.memory.shape)

    @property
    def _table(self) -> NDArray[np.float64]:
        return self.memory[:-1].reshape(self.n_matrices, self.n_inputs + 1)

    @property
    def sums(self) -> NDArray[np.float64]:
        """Sums of squares, float64 [n_matrices, n_inputs] (a view)."""
        return self._table[:, :-1]

    @property
    def rows(self) -> NDArray[np.float64]:
        """Rows added, float64 [n_matrices] (a view)."""
        return self._table[:, -1]

    @property
    def calls(self) -> int:
        """Matmul calls added."""
        return int(self.memory[-1])


@dataclass
class SimilaritySums:
    """Sum of cosines between rows of two values, and their number."""

    n_slots: int = SIMILARITY_SLOTS
    memory: NDArray[np.float64] = field(init=False)
    value: Value = field(init=False)

    def __post_init__(self) -> None:
        self.memory = np.zeros((self.n_slots, 2), np.float64)
        self.value = external(self.memory.ctypes.data, self.memory, F64, (2, self.n_slots))

    @property
    def mean(self) -> float:
        """Mean cosine; NaN without rows."""
        total, n = self.memory.sum(axis=0)
        return float(total / n) if n else float("nan")


class ActivationCollector:
    """Collects for weights of blocks (`blk.*`) and, if `output_name` is given, for that tensor.

    stored: matrices (ne2) of every tensor in the model file. A weight that the program rearranged into heads gets
    statistics for the matrices the file has. similarity: also compare the inputs of consecutive blocks; this needs
    logits of every token. All sums may be read between two decode calls.
    """

    def __init__(
        self,
        stored: Mapping[str, int],
        *,
        output_name: str | None = None,
        head_name: str = "output.weight",
        similarity: bool = False,
    ) -> None:
        self.stored = stored
        self.output_name = output_name
        self.head_name = head_name
        self.similarity = similarity
        self.entries: dict[str, ActivationSums] = {}
        self.similarities: dict[tuple[str, int], SimilaritySums] = {}
        self._block_inputs: dict[int, Value] = {}
        self._ffn_inputs: dict[int, Value] = {}

    def start_graph(self) -> None:
        """Forgets the values of the graph built before."""
        self._block_inputs.clear()
        self._ffn_inputs.clear()

    def is_stored(self, name: str) -> bool:
        """Whether the model file has this tensor."""
        return name in self.stored

    def dense_entry(self, weight: Value, x: Value) -> ActivationSums | None:
        """Where a plain matmul with x [K, T, B] adds; None if it is not collected.

        Values whose extent changes from run to run (attended cells) are no tokens and never count.
        """
        wanted = weight.name.startswith("blk.") or (self.output_name is not None and weight.name == self.output_name)
        if not wanted or x.dynamic_dim is not None or x.shape[1] < MIN_ROWS:
            return None
        return self._entry("MUL_MAT", weight, x, self.stored.get(weight.name, x.shape[2]))

    def expert_entry(self, op: str, weight: Value, x: Value) -> ActivationSums | None:
        """Where an expert matmul with rows x [K, R] adds; None if it is not collected."""
        return self._entry(op, weight, x, weight.shape[2]) if weight.name.startswith("blk.") else None

    def _entry(self, op: str, weight: Value, x: Value, n_matrices: int) -> ActivationSums:
        entry = self.entries.get(weight.name)
        if entry is None:
            entry = self.entries[weight.name] = ActivationSums(op, x.shape[0], n_matrices)
        return entry

    def similarity_pairs(self, weight: Value, x: Value) -> Iterator[tuple[Value, Value, SimilaritySums]]:
        """Values to compare now that x is known to be the input of weight."""
        if not self.similarity or x.dynamic_dim is not None or x.shape[1] < MIN_ROWS:
            return
        block = block_of(weight.name)
        if block is None:
            if weight.name != self.head_name:
                return
            yield from self._block_end(max(self._block_inputs, default=-1), x)
            return
        if block not in self._block_inputs:
            self._block_inputs[block] = x
            yield from self._block_end(block - 1, x)
        if ".ffn_" in weight.name and block not in self._ffn_inputs:
            self._ffn_inputs[block] = x
            yield from self._pair("attention", block, self._block_inputs[block], x)

    def _block_end(self, block: int, x: Value) -> Iterator[tuple[Value, Value, SimilaritySums]]:
        if block in self._block_inputs:
            yield from self._pair("layer", block, self._block_inputs[block], x)
        if block in self._ffn_inputs:
            yield from self._pair("ffn", block, self._ffn_inputs[block], x)

    def _pair(self, kind: str, block: int, a: Value, b: Value) -> Iterator[tuple[Value, Value, SimilaritySums]]:
        if a.shape == b.shape:
            yield a, b, self.similarities.setdefault((kind, block), SimilaritySums())


def block_of(name: str) -> int | None:
    """The block that a weight is in; None for others."""
    block = _BLOCK.match(name)
    return int(block[1]) if block else None
