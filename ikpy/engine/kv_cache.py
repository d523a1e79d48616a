"""KV cache: cells with positions and sequences (model semantics 7), and the memory of every layer.

Tokens may go to any empty cell, so sequences never need defragmentation to keep going.
"""

from __future__ import annotations

import numpy as np

from ikpy.errors import ResourceError
from ikpy.graph.ir import Value, external
from ikpy.models.batch import CacheSpec
from ikpy.quants import registry

MAX_SEQUENCES = 64


class KVCacheFullError(ResourceError):
    """No empty cells are left for the tokens of a batch."""


class KVCache:
    """n_ctx cells. pos: int32, -1 = empty; seq: uint64 bit mask of sequence ids; delta: pending position shifts."""

    def __init__(self, n_ctx: int, specs: list[list[CacheSpec]], *, can_shift: bool) -> None:
        self.n_ctx = n_ctx
        self.can_shift = can_shift
        self.pos = np.full(n_ctx, -1, np.int32)
        self.seq = np.zeros(n_ctx, np.uint64)
        self.delta = np.zeros(n_ctx, np.int32)
        self.head = 0
        self.tensors: dict[tuple[int, str], Value] = {}
        self._memory: list[np.ndarray] = []
        for layer, layer_specs in enumerate(specs):
            for spec in layer_specs:
                self.tensors[layer, spec.name] = self._allocate(layer, spec)

    def _allocate(self, layer: int, spec: CacheSpec) -> Value:
        shape = (spec.n, spec.n_heads, self.n_ctx)
        nbytes = registry.by_id(spec.type_id).tensor_nbytes((*shape, 1))
        memory = np.zeros(nbytes + 64, np.uint8)
        self._memory.append(memory)
        address = (memory.ctypes.data + 63) & ~63
        return external(address, memory, spec.type_id, shape, f"cache_{spec.name}_l{layer}")

    def nbytes(self, name: str | None = None) -> int:
        """Bytes of the cache tensors with this name, or of all."""
        return sum(t.buffer.nbytes for (_, n), t in self.tensors.items() if name in (None, n))

    # --- cells ------------------------------------------------------------------------------------------------

    @property
    def used_cells(self) -> int:
        """Cells that hold a token."""
        return int(np.count_nonzero(self.pos >= 0))

    def n_kv(self, pad: int) -> int:
        """Attended length: up to the last used cell, rounded up to pad."""
        used = np.flatnonzero(self.pos >= 0)
        last = int(used[-1]) + 1 if len(used) else 0
        return min(self.n_ctx, max(pad, -(-last // pad) * pad))

    def place(self, pos: np.ndarray, masks: np.ndarray) -> np.ndarray:
        """Takes empty cells for tokens at these positions; returns cell indices int32 [T].

        Contiguous cells from the head are preferred; any empty cells serve otherwise. KVCacheFullError if too few.
        """
        n = len(pos)
        cells = np.arange(self.head, self.head + n)
        if self.head + n > self.n_ctx or (self.pos[cells] >= 0).any():
            cells = np.flatnonzero(self.pos < 0)[:n]
            if len(cells) < n:
                raise KVCacheFullError(
                    f"the KV cache is full: {n} tokens need a place and {len(cells)} of {self.n_ctx} cells are empty; "
                    "use a larger -c or remove sequences"
                )
        self.pos[cells] = pos
        self.seq[cells] = masks
        self.delta[cells] = 0
        self.head = int(cells[-1]) + 1 if n else self.head
        return cells.astype(np.int32)

    def release(self, cells: np.ndarray) -> None:
        """Empties cells again (a failed batch)."""
        self._empty(cells)

    def _empty(self, cells: np.ndarray) -> None:
        self.pos[cells] = -1
        self.seq[cells] = 0
        self.delta[cells] = 0
        if len(cells):
            self.head = min(self.head, int(cells[0]))

    def _matching(self, seq_id: int, p0: int, p1: int) -> np.ndarray:
        """Boolean [n_ctx]: cells of the sequence (any if negative) with p0 <= pos < p1; negative bounds are open."""
        match = self.pos >= 0
        if seq_id >= 0:
            match &= (self.seq & self._bit(seq_id)) != 0
        if p0 > 0:
            match &= self.pos >= p0
        if p1 >= 0:
            match &= self.pos < p1
        return match

    @staticmethod
    def _bit(seq_id: int) -> np.uint64:
        if not 0 <= seq_id < MAX_SEQUENCES:
            raise ValueError(f"sequence id {seq_id} is outside 0..{MAX_SEQUENCES - 1}")
        return np.uint64(1 << seq_id)

    # --- sequences --------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Empties all cells."""
        self._empty(np.arange(self.n_ctx))
        self.head = 0

    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> None:
        """Removes the sequence (all if negative) from cells with p0 <= pos < p1."""
        match = self._matching(seq_id, p0, p1)
        if seq_id >= 0:
            self.seq[match] &= ~self._bit(seq_id)
            match &= self.seq == 0
        self._empty(np.flatnonzero(match))

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Adds sequence dst to the matching cells of src; nothing is copied."""
        self.seq[self._matching(src, p0, p1)] |= self._bit(dst)

    def seq_keep(self, seq_id: int) -> None:
        """Empties every cell that does not belong to the sequence; the others belong to it alone."""
        kept = self._matching(seq_id, -1, -1)
        self._empty(np.flatnonzero(~kept))
        self.seq[kept] = self._bit(seq_id)

    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Moves positions by delta; cells that fall below 0 are emptied. Keys are re-rotated by the next decode."""
        match = self._matching(seq_id, p0, p1)
        self._move(match, self.pos[match] + np.int32(delta))

    def seq_div(self, seq_id: int, p0: int, p1: int, divisor: int) -> None:
        """Divides positions (integer division)."""
        match = self._matching(seq_id, p0, p1)
        self._move(match, self.pos[match] // np.int32(divisor))

    def _move(self, match: np.ndarray, moved: np.ndarray) -> None:
        if not self.can_shift:
            raise ResourceError(
                "the cached positions of this model cannot be shifted: its cached keys are not plainly rotated"
            )
        self.delta[match] += moved - self.pos[match]
        self.pos[match] = moved
        self._empty(np.flatnonzero(match & (self.pos < 0)))

    def seq_pos_max(self, seq_id: int) -> int:
        """Largest position of the sequence, -1 if it is empty."""
        match = self._matching(seq_id, -1, -1)
        return int(self.pos[match].max()) if match.any() else -1

    def seq_pos_min(self, seq_id: int) -> int:
        """Smallest position of the sequence, -1 if it is empty."""
        match = self._matching(seq_id, -1, -1)
        return int(self.pos[match].min()) if match.any() else -1
