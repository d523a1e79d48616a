"""The arrays that the graphs of a context read, written before every run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ikpy.engine.batch import Batch
from ikpy.engine.cells import Cells
from ikpy.graph.ir import F32, I32, I64, Value, external
from ikpy.models.batch import Window


def as_input(array: np.ndarray, n: int, name: str) -> Value:
    """The first n entries of an array of 32-bit integers or sequence masks."""
    return external(array.ctypes.data, array, I64 if array.dtype == np.uint64 else I32, (n,), name, "input")


class BatchInputs:
    """Inputs of micro-batches of at most n tokens.

    cells: the kinds of cells that tokens are stored in. scales: float32 [number of adapters, n], one per token.
    states: float32 [n, n_embd], for graphs that read hidden states; None if n_embd is 0.
    """

    def __init__(self, n: int, cells: Mapping[Window, Cells], *, n_adapters: int, n_embd: int) -> None:
        self._cells = cells
        self._arrays = {name: np.zeros(n, np.int32) for name in ("tokens", "pos", "seq", "outputs")}
        self._indices = {window: np.zeros(n, np.int32) for window in cells}
        self._views = [array.data for array in self._arrays.values()]
        self._index_views = {window: array.data for window, array in self._indices.items()}
        self.scales = np.zeros((n_adapters, n), np.float32)
        self.states = np.zeros((n, n_embd), np.float32) if n_embd else None

    @property
    def arrays(self) -> list[np.ndarray]:
        """All arrays but the states, which only models in host memory read."""
        return [*self._arrays.values(), *self._indices.values(), *self.scales]

    def write(self, batch: Batch, taken: Mapping[Window, Sequence[int]], scales: np.ndarray) -> int:
        """Sets the tokens of a batch, the cells they are stored in, and their adapters' scales; returns the number of
        outputs.

        scales: float32 [64, number of adapters] by sequence.
        """
        tokens, pos, seq, outputs = self._views
        n_outputs = 0
        # Entry by entry costs less than an array operation for the few values of most batches.
        for i, ids in enumerate(batch.seq_ids):
            tokens[i] = batch.token_list[i]
            pos[i] = batch.positions[i]
            seq[i] = ids[0]
            if batch.wanted[i]:
                outputs[n_outputs] = i
                n_outputs += 1
        for window, cells in taken.items():
            view = self._index_views[window]
            for i, cell in enumerate(cells):
                view[i] = cell
        if len(self.scales):
            n = len(batch)
            self.scales[:, :n] = scales[self._arrays["seq"][:n]].T
        return n_outputs

    def write_states(self, states: np.ndarray) -> None:
        """Sets the hidden states float32 [n, n_embd] of the tokens."""
        assert self.states is not None
        self.states[: len(states)] = states

    def values(self, n_tokens: int, n_outputs: int) -> dict[str, Value]:
        """Tokens, positions, sequences and outputs as a graph of these sizes reads them."""
        values = {name: as_input(self._arrays[name], n_tokens, name) for name in ("tokens", "pos", "seq")}
        return {**values, "outputs": as_input(self._arrays["outputs"], max(1, n_outputs), "outputs")}

    def cell_values(self, n_tokens: int) -> dict[Window, tuple[Value, Value, Value]]:
        """Of every kind of cells those of the tokens, and positions and sequences of all of them."""
        return {
            window: (
                as_input(self._indices[window], n_tokens, "cells"),
                as_input(cells.pos, cells.n_cells, "cell_pos"),
                as_input(cells.seq, cells.n_cells, "cell_seq"),
            )
            for window, cells in self._cells.items()
        }

    def scale_values(self, n_tokens: int) -> list[Value]:
        """Scales of every adapter [1, n_tokens]."""
        return [external(row.ctypes.data, row, F32, (1, n_tokens), "scales", "input") for row in self.scales]

    def state_values(self, n_tokens: int) -> Value | None:
        """Hidden states [n_embd, n_tokens], if graphs read any."""
        states = self.states
        if states is None:
            return None
        return external(states.ctypes.data, states, F32, (states.shape[1], n_tokens), "states", "input")
