"""KV cache: cells with positions and sequences, and the memory of every layer.

Tokens may go to any empty cell, so sequences never need defragmentation to keep going. Layers that attend to a window
have cells of their own, only as many as the window needs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ikpy._native.batches import Batch
from ikpy._native.tables import CellTables, Taken
from ikpy.engine.cells import MAX_SEQUENCES, Cells, KVCacheFullError, PlannedCells, WindowCells, whole_from
from ikpy.engine.recurrent import RecurrentStates, pieces_by_state
from ikpy.errors import ResourceError, UsageError
from ikpy.gguf.huge_pages import zeroed_bytes
from ikpy.graph.ir import PLANNED_ADDRESS, Value, external
from ikpy.machine.memory import check_memory
from ikpy.models.batch import EVERY, FULL, CacheSpec, StateSpec, Window
from ikpy.quants import registry

__all__ = ["MAX_SEQUENCES", "KVCache", "KVCacheFullError"]

CELL_BYTES = 16
"""Of position, sequences and shift of a cell."""
ALIGNMENT = 64


class KVCache:
    """n_ctx cells, and fewer for every kind of window in `windows` (window -> number of cells), of "every" windows for
    the last tokens of stretches only. Recurrent layers have
    states of their own (`recurrent`, None without any) for n_sequences sequences, and n_kept copies of each sequence's:
    so many of its last tokens can be removed. n_tokens: of a micro-batch, at most.

    pos: int32 [n_ctx], -1 = empty; seq: uint64 [n_ctx] bit mask of sequence ids; delta: int32 [n_ctx] pending position
    shifts; those of a window's cells are in cells[window]. allocate=False plans the memory without taking it. Raises
    ResourceError for a cache larger than the machine's memory.
    """

    def __init__(
        self,
        n_ctx: int,
        specs: Sequence[Sequence[CacheSpec]],
        *,
        can_shift: bool,
        windows: dict[Window, int] | None = None,
        states: Sequence[Sequence[StateSpec]] = (),
        n_sequences: int = 1,
        n_kept: int = 0,
        n_tokens: int = 0,
        allocate: bool = True,
    ) -> None:
        if allocate:
            n_elements = sum(spec.n_elements for layer in states for spec in layer)
            check_cache_memory(n_ctx, specs, windows or {}, 4 * n_elements * n_sequences * (1 + n_kept))
        self.n_ctx = n_ctx
        self.can_shift = can_shift
        self.n_sequences = n_sequences
        make = Cells if allocate else PlannedCells
        self.full = make(n_ctx)
        every = {window: n for window, n in (windows or {}).items() if window[0] == EVERY}
        self.windows = {window: WindowCells(n, *window) for window, n in (windows or {}).items() if window not in every}
        self.stretches = {window: make(n, window[1]) for window, n in every.items()}
        self.cells: dict[Window, Cells] = {FULL: self.full, **self.windows, **self.stretches}
        self.tables = CellTables(list(self.cells.values()))
        self.tensors: dict[tuple[int, str], Value] = {}
        self.window_of: dict[tuple[int, str], Window] = {}
        for layer, layer_specs in enumerate(specs):
            for spec in layer_specs:
                self.window_of[layer, spec.name] = spec.window if spec.window in self.cells else FULL
        self._make_tensors(specs, allocate)
        self.recurrent = None
        if any(states):
            self.recurrent = RecurrentStates(states, n_sequences, n_kept=n_kept, n_tokens=n_tokens, allocate=allocate)
        self.allocated_bytes += self.recurrent.nbytes if self.recurrent and allocate else 0

    def _make_tensors(self, specs: Sequence[Sequence[CacheSpec]], allocate: bool) -> None:
        """All tensors in one block of memory, so that hardly any of it lies outside of huge pages."""
        joined: dict[tuple[int, CacheSpec], list[CacheSpec]] = {}
        for layer, layer_specs in enumerate(specs):
            for spec in layer_specs:
                first = next((s for s in layer_specs if s.name == spec.behind), spec)
                joined.setdefault((layer, first), []).append(spec)
        sizes = {
            (layer, first): (first.n, first.n_heads, sum(self._n_cells(layer, part) for part in parts))
            for (layer, first), parts in joined.items()
        }
        nbytes = [registry.by_id(first.type_id).tensor_nbytes((*shape, 1)) for (_, first), shape in sizes.items()]
        steps = [-(-n // ALIGNMENT) * ALIGNMENT for n in nbytes]
        memory = zeroed_bytes(sum(steps)) if allocate else None
        self.allocated_bytes = sum(nbytes) if allocate else 0
        address = PLANNED_ADDRESS if memory is None else memory.ctypes.data
        for ((layer, first), shape), step in zip(sizes.items(), steps, strict=True):
            whole = external(address, memory, first.type_id, shape, f"cache_{first.name}_l{layer}", "cache")
            start = 0
            for part in joined[layer, first]:
                n_cells = self._n_cells(layer, part)
                self.tensors[layer, part.name] = whole if n_cells == shape[2] else whole.slice(2, start, n_cells)
                start += n_cells
            address += step  # planned ones too: attention takes V at the place of K for a part of it

    def _n_cells(self, layer: int, spec: CacheSpec) -> int:
        return self.cells[self.window_of[layer, spec.name]].n_cells

    def nbytes(self, name: str | None = None) -> int:
        """Bytes of the cache tensors with this name, or of all with the states of recurrent layers."""
        states = self.recurrent.nbytes if self.recurrent and name is None else 0
        chosen = [t for (_, n), t in self.tensors.items() if name in (None, n)]
        return states + sum(registry.by_id(t.type_id).tensor_nbytes(t.shape) for t in chosen)

    # cells

    @property
    def pos(self) -> np.ndarray:
        """Position in every full cell, -1 = empty."""
        return self.full.pos

    @property
    def seq(self) -> np.ndarray:
        """Mask of sequences in every full cell."""
        return self.full.seq

    @property
    def delta(self) -> np.ndarray:
        """Pending shift of every full cell."""
        return self.full.delta

    @property
    def shifted(self) -> bool:
        """Whether shifts of positions are pending."""
        return self.tables.shifted

    @property
    def removable(self) -> int:
        """So many of the last tokens of a sequence that got no more than one above at once can be removed for others.

        With recurrent layers those whose states are kept, else all.
        """
        return self.recurrent.n_kept if self.recurrent else self.n_ctx

    @property
    def used_cells(self) -> int:
        """Full cells that hold a token."""
        return self.full.used

    def pieces(self, batch: Batch, n: int) -> list[Batch]:
        """The batch in micro-batches of at most n tokens.

        KVCacheFullError if there are too few cells for the whole batch: one that ends half-way loses states, and the
        tokens that windows dropped for its beginning. With states UsageError if it does not go on where its sequences
        end, ResourceError for one whose state is lost.
        """
        if self.recurrent:
            self.recurrent.check(batch)
        if self.stretches:
            self._check_continues(batch)
        if self.used_cells + len(batch) > self.n_ctx:
            self.place(batch)
        if self.recurrent is None:
            return batch.pieces(n)
        return pieces_by_state(batch, n, 1 + self.recurrent.n_kept)

    def _check_continues(self, batch: Batch) -> None:
        """UsageError unless every token follows the one before it in its sequences, of which there are at most
        n_sequences: stretches of positions are compressed as they end, in as many cells.
        """
        following = self.tables.next_positions()
        for pos, ids in zip(batch.pos.tolist(), batch.seq_ids, strict=True):
            for seq in ids:
                if seq >= self.n_sequences:
                    raise UsageError(f"sequence {seq}: the context has {self.n_sequences} (n_seq_max)")
                if pos != following.get(seq, 0):
                    raise UsageError(
                        f"sequence {seq} goes on at position {following.get(seq, 0)}, not at {pos}: this model "
                        "compresses its cache in the order of the positions"
                    )
                following[seq] = pos + 1

    def place(self, batch: Batch) -> Taken:
        """Takes empty cells of every kind for the tokens of a batch, and makes the states of its sequences ready.

        Every sequence fills blocks of its own while there are empty ones. KVCacheFullError if there are too few cells,
        and nothing is taken then.
        """
        taken = self.tables.place(batch)
        if taken.full >= 0:
            raise self._too_full(taken, len(batch))
        if self.recurrent:
            self.recurrent.start(batch)
        return taken

    def evaluated(self, batch: Batch) -> None:
        """To be said of every placed batch that has run: states of recurrent layers hold its tokens now."""
        if self.recurrent:
            self.recurrent.finish(batch)

    def _too_full(self, taken: Taken, n: int) -> KVCacheFullError:
        window, cells = list(self.cells.items())[taken.full]
        kinds = {FULL[0]: "KV cache", EVERY: f"KV cache of compressed stretches of {window[1]}"}
        what = kinds.get(window[0], f"KV cache of the {window[0]} window of {window[1]}")
        return KVCacheFullError(
            f"the {what} is full: {n} tokens need a place and {len(taken[taken.full])} of {cells.n_cells} cells "
            "are empty; use a larger -c or remove sequences"
        )

    def restore(self, seq_id: int, positions: dict[Window, np.ndarray]) -> dict[Window, list[int]]:
        """Takes cells for a saved sequence whose rising positions int32 [n] are given for each kind of cells.

        KVCacheFullError if there are too few, and nothing is taken then.
        """
        others = self.tables.next_positions()
        mask = 1 << seq_id
        found = {}
        for window, pos in positions.items():
            cells = self.cells[window]
            if isinstance(cells, WindowCells):
                cells.make_room(len(pos), others)
            found[window] = cells.find([mask] * len(pos))
            if len(found[window]) < len(pos):
                raise KVCacheFullError(f"{len(pos)} tokens need a place and {len(found[window])} cells are empty")
        for window, indices in found.items():
            self.cells[window].fill(indices, positions[window].tolist(), [mask] * len(indices))
        self.tables.forget(seq_id)
        following = self.seq_pos_max(seq_id) + 1
        for window, cells in self.windows.items():
            cells.lost[seq_id] = whole_from(positions[window], positions[FULL], following)
        return found

    def make_room_to_unshare(self, seq_id: int) -> None:
        """Empties window cells as a sequence needs them to have its own for those it shares with others.

        It lets go of tokens that it needs no more, then other sequences do.
        """
        following = self.tables.next_positions()
        for cells in self.windows.values():
            if len(cells.shared(seq_id)) > cells.n_cells - cells.used:
                cells.forget(seq_id, cells.lowest_kept(following.get(seq_id, 0)))
                cells.make_room(len(cells.shared(seq_id)), following)

    def release(self, taken: Taken) -> None:
        """Empties cells again (a failed batch)."""
        self.tables.release(taken)
        if self.recurrent:
            for seq_id in range(self.recurrent.n_sequences):
                self.recurrent.released(seq_id, self.seq_pos_max(seq_id) + 1)

    # sequences

    def clear(self) -> None:
        """Empties all cells."""
        self.tables.forget()
        for cells in self.cells.values():
            cells.clear()
        if self.recurrent:
            self.recurrent.clear()

    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> None:
        """Removes the sequence (all if negative) from cells with p0 <= pos < p1."""
        before = self._lengths(seq_id)
        self.tables.forget(seq_id)
        for cells in self.cells.values():
            cells.remove(seq_id, p0, p1)
        if self.recurrent:
            for seq, (n, _) in before.items():
                left, following = self._lengths(seq)[seq]
                if left < n:
                    self.recurrent.removed(seq, p0, following)
                else:  # an interruption may have come between cells and states
                    self.recurrent.released(seq, following)

    def _lengths(self, seq_id: int) -> dict[int, tuple[int, int]]:
        """Tokens and next position of the sequences (all if negative) that have a state."""
        everyone = range(self.recurrent.n_sequences if self.recurrent else 0)
        chosen = everyone[seq_id : seq_id + 1] if seq_id >= 0 else everyone
        return {seq: (int(self.full.matching(seq, -1, -1).sum()), self.seq_pos_max(seq) + 1) for seq in chosen}

    def reusable(self, seq_id: int, length: int) -> int:
        """Tokens of a sequence, at most `length`, behind which it can go on.

        None if a window layer has dropped tokens which the next one attends to; with recurrent layers those before the
        end of its state or of a checkpoint.
        """
        if self.recurrent:
            length = self.recurrent.reusable(seq_id, length)
        return length if all(cells.holds_window(seq_id, length) for cells in self.windows.values()) else 0

    def rewind(self, seq_id: int, length: int) -> int:
        """Shortens a sequence to the `reusable` of `length` tokens to go on from there; returns how many are left."""
        # An interrupted call may have left fewer cells than the caller knows of.
        length = self.reusable(seq_id, max(0, min(length, self.seq_pos_max(seq_id) + 1)))
        self.seq_rm(seq_id, length, -1)
        return length

    def keep_checkpoint(self, seq_id: int) -> None:
        """Lets a sequence come back to where it ends now, until the next checkpoint; others are dropped."""
        if self.recurrent:
            self.recurrent.keep_checkpoint(seq_id, 1)

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Adds sequence dst to the matching cells of src; nothing but states of recurrent layers is copied."""
        for cells in self.cells.values():
            cells.share(src, dst, p0, p1)
        self.tables.forget(dst)
        if self.recurrent:
            self.recurrent.copy(src, dst, self.seq_pos_max(dst) + 1)

    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Moves positions by delta; cells that fall below 0 are emptied. Keys are re-rotated by the next decode."""
        self._check_shift()
        for cells in self.cells.values():
            match = cells.matching(seq_id, p0, p1)
            cells.move(match, cells.pos[match] + np.int32(delta))
        for window in self.windows.values():
            window.note_move(seq_id, p0, p1, delta)
        self.tables.forget()

    def _check_shift(self) -> None:
        if not self.can_shift:
            raise ResourceError(
                "the cached positions of this model cannot be shifted: its cached keys are not plainly rotated"
            )

    def seq_pos_max(self, seq_id: int) -> int:
        """Largest position of the sequence, -1 if it is empty."""
        match = self.full.matching(seq_id, -1, -1)
        return int(self.pos[match].max()) if match.any() else -1

    def seq_pos_min(self, seq_id: int) -> int:
        """Smallest position of the sequence, -1 if it is empty."""
        match = self.full.matching(seq_id, -1, -1)
        return int(self.pos[match].min()) if match.any() else -1


def check_cache_memory(
    n_ctx: int, specs: Sequence[Sequence[CacheSpec]], windows: dict[Window, int], state_nbytes: int = 0
) -> None:
    """ResourceError if a cache is larger than the machine's memory."""
    needed = (n_ctx + sum(windows.values())) * CELL_BYTES + state_nbytes
    for spec in (spec for layer in specs for spec in layer):
        n_cells = windows.get(spec.window, n_ctx)
        needed += registry.by_id(spec.type_id).tensor_nbytes((spec.n, spec.n_heads, n_cells, 1))
    remedy = "a smaller context (-c), fewer sequences or a smaller cache type need less"
    check_memory(needed, f"a KV cache for {n_ctx} tokens takes", remedy)
