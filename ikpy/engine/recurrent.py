"""States of recurrent layers: a slot for every sequence, and where each sequence's state ends.

A state holds all tokens before its end; none of them can be taken back: a sequence goes on where it ends, from a copy
of its state that was kept behind one of its last tokens or as a checkpoint, or starts anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ikpy._native.batches import Batch
from ikpy.engine.state_memory import HostStates, StateMemory
from ikpy.errors import ResourceError, UsageError
from ikpy.gguf.huge_pages import zeroed_bytes
from ikpy.graph.ir import F32, PLANNED_ADDRESS, Value, external
from ikpy.models.batch import StateSpec

EMPTY = -1
LOST = -2
"""Ends of a sequence without tokens, and of one whose state does not belong to the tokens in its cells."""


@dataclass(frozen=True)
class Checkpoint:
    """State of a sequence behind its first `end` tokens: float32 [n] of every tensor."""

    end: int
    data: tuple[NDArray[np.float32], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(values.nbytes for values in self.data)


class Kept(NamedTuple):
    """A copy of a sequence's state behind its first `end` tokens, beside those of all sequences."""

    end: int
    slot: int


def sequences_of(mask: int) -> Iterator[int]:
    """Sequences of a bit mask in ascending order."""
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1


def pieces_by_state(batch: Batch, n: int, n_whole: int = 1) -> list[Batch]:
    """The batch in pieces of at most n tokens that belong to the same several sequences, or to one sequence each.

    What several sequences share is evaluated once; their states are copied before they part. Up to n_whole tokens of a
    sequence that follow each other stay together, as copies of states are kept within a piece.
    """
    masks = batch.masks.tolist()
    shared = [mask if mask & (mask - 1) else 0 for mask in masks]
    if not any(shared) and (len(masks) <= n or n_whole == 1):
        return batch.pieces(n)
    starts = [i for i in range(len(masks)) if i == 0 or shared[i] != shared[i - 1]]
    bounds = [0]
    for start, end in pairwise([*starts, len(masks)]):
        bounds += _cuts(masks, start, end, n, n_whole)
    return batch.cut(bounds[1:])


def _cuts(masks: Sequence[int], start: int, end: int, n: int, n_whole: int) -> Iterator[int]:
    """Where pieces of the tokens start .. end - 1 end."""
    while start < end:
        cut = min(start + n, end)
        first = cut
        while cut < end and first > start and masks[first - 1] == masks[cut]:
            first -= 1
        last = cut
        while last < end and masks[last] == masks[cut]:
            last += 1
        start = first if start < first < cut and last - first <= min(n, n_whole) else cut
        yield start


class RecurrentStates:
    """State tensors float32 of every recurrent layer, zero for sequences that start.

    tensors: (layer, name) -> value [*shape, n_slots], a slot for each of n_sequences sequences, then n_kept for the
    copies of each; slots: these two parts, the latter None without any; shapes: of a slot, in three dimensions. ends:
    position behind the last token of every sequence, or EMPTY or LOST. checkpoints: of every sequence, in the order of
    their ends. n_kept: so many of a sequence's last tokens can be taken back, if it got no more than n_kept + 1 at
    once; keep_slots, int32 [n_tokens], says of every token of a micro-batch which of those further slots gets a copy,
    -1: none. allocate=False plans the memory without taking it.
    """

    def __init__(
        self,
        specs: Sequence[Sequence[StateSpec]],
        n_sequences: int,
        *,
        n_kept: int = 0,
        n_tokens: int = 0,
        allocate: bool = True,
    ) -> None:
        self.n_sequences = n_sequences
        self.n_kept = n_kept
        self.n_slots = n_slots = n_sequences * (1 + n_kept)
        self.ends = [EMPTY] * n_sequences
        self.checkpoints: list[list[Checkpoint]] = [[] for _ in range(n_sequences)]
        self.keep_slots = np.full(n_tokens, -1, np.int32) if n_kept else None
        self._kept: list[list[Kept]] = [[] for _ in range(n_sequences)]
        self._coming: list[list[Kept]] = [[] for _ in range(n_sequences)]
        self._origin = list(range(n_sequences))
        self._n_origins = n_sequences
        keyed = [(layer, spec) for layer, layer_specs in enumerate(specs) for spec in layer_specs]
        sizes = [4 * spec.n_elements * n_slots for _, spec in keyed]
        memory = zeroed_bytes(sum(sizes)) if allocate else None
        self.nbytes = sum(sizes)
        self.shapes = {(layer, spec.name): (*spec.shape, 1, 1)[:3] for layer, spec in keyed}
        self.tensors: dict[tuple[int, str], Value] = {}
        self.slots: dict[tuple[int, str], tuple[Value, Value | None]] = {}
        self._memory: dict[tuple[int, str], StateMemory] = {}
        start = 0
        for (layer, spec), nbytes in zip(keyed, sizes, strict=True):
            address = PLANNED_ADDRESS if memory is None else memory.ctypes.data + start
            shape = (*spec.shape, n_slots)
            name = f"state_{spec.name}_l{layer}"
            whole = external(address, memory, F32, shape, name, "cache")
            own = whole.slice(len(spec.shape), 0, n_sequences)
            copies = whole.slice(len(spec.shape), n_sequences, n_slots - n_sequences) if n_kept else None
            self.tensors[layer, spec.name], self.slots[layer, spec.name] = whole, (own, copies)
            if memory is not None:
                rows = memory[start : start + nbytes].view(np.float32).reshape(n_slots, -1)
                self._memory[layer, spec.name] = HostStates(rows)
            start += nbytes

    def move(self, memory: Mapping[tuple[int, str], StateMemory]) -> None:
        """These states are elsewhere from now on; what they held in host memory is not taken along."""
        self._memory |= memory

    @property
    def sizes(self) -> list[int]:
        """Values of every tensor for one sequence."""
        return [value.n_elements // self.n_slots for value in self.tensors.values()]

    @property
    def slot_nbytes(self) -> int:
        """Bytes of the state of one sequence."""
        return self.nbytes // self.n_slots

    # batches

    def check(self, batch: Batch) -> None:
        """UsageError unless every token follows the one before it in its sequences. ResourceError for a lost state."""
        ends = list(self.ends)
        origins = [EMPTY if end == EMPTY else origin for end, origin in zip(self.ends, self._origin, strict=True)]
        for pos, mask in zip(batch.pos.tolist(), batch.masks.tolist(), strict=True):
            members = list(sequences_of(mask))
            for seq in members:
                self._check_place(seq, pos, ends)
                ends[seq] = pos + 1
            if len({origins[seq] for seq in members}) > 1:
                raise UsageError(f"sequences {members} of a recurrent model have parted and cannot share a token")
            for seq in members:
                origins[seq] = self._n_origins + members[0]

    def _check_place(self, seq: int, pos: int, ends: list[int]) -> None:
        if seq >= self.n_sequences:
            raise UsageError(f"sequence {seq} of a recurrent model: the context has {self.n_sequences} (n_seq_max)")
        if ends[seq] == LOST:
            raise ResourceError(
                f"the state of sequence {seq} was lost: tokens were taken back from a recurrent model, or a batch "
                "failed; remove the sequence and evaluate it again"
            )
        if ends[seq] not in (EMPTY, pos):
            raise UsageError(
                f"sequence {seq} of a recurrent model ends before position {ends[seq]}: it cannot go on at {pos}"
            )

    def start(self, batch: Batch) -> None:
        """Makes the states ready for a checked batch that is about to run; they count as lost until `finish`."""
        for seq in sequences_of(_all_sequences(batch)):
            if self.ends[seq] == EMPTY:
                for memory in self._memory.values():
                    memory.zero(seq)
            self.ends[seq] = LOST
        if self.keep_slots is not None:
            self._choose_copies(batch, self.keep_slots)

    def _choose_copies(self, batch: Batch, keep_slots: NDArray[np.int32]) -> None:
        """Which tokens of a batch have their states copied: all but the last of a sequence that gets few, as drafts
        do. The oldest copies make room."""
        keep_slots[: len(batch)] = -1
        masks = batch.masks
        for seq in sequences_of(_all_sequences(batch)):
            self._coming[seq] = []
            own = np.flatnonzero(masks == np.uint64(1 << seq))[:-1]
            if not 0 < len(own) <= self.n_kept:
                continue
            kept = self._kept[seq]
            del kept[: max(0, len(kept) + len(own) - self.n_kept)]
            first, used = self.n_kept * seq, {copy.slot for copy in kept}
            free = [slot for slot in range(first, first + self.n_kept) if slot not in used]
            keep_slots[own] = free[: len(own)]
            ends = (batch.pos[own] + 1).tolist()
            self._coming[seq] = [Kept(end, slot) for end, slot in zip(ends, free, strict=False)]

    def finish(self, batch: Batch) -> None:
        """Notes the ends behind a batch that has run, one of `pieces_by_state`."""
        masks = batch.masks.tolist()
        if masks[0] & (masks[0] - 1):
            self._part(*batch.seq_ids[0])
        else:
            for seq in sequences_of(_all_sequences(batch)):
                self._part(seq)
        for pos, mask in zip(batch.pos.tolist(), masks, strict=True):
            for seq in sequences_of(mask):
                self.ends[seq] = pos + 1
        for seq in sequences_of(_all_sequences(batch)):
            self._kept[seq] += self._coming[seq]
            self._coming[seq] = []

    def _part(self, leader: int, *members: int) -> None:
        """Gives members what the leader's state has become."""
        self._origin[leader] = self._n_origins
        self._n_origins += 1
        for seq in members:
            self._share(leader, seq)

    def _share(self, source: int, target: int) -> None:
        self._copy(source, target)
        self._origin[target] = self._origin[source]

    def _copy(self, source: int, target: int) -> None:
        for memory in self._memory.values():
            memory.copy(source, target)

    # sequences

    def clear(self) -> None:
        """All sequences are empty."""
        self.ends = [EMPTY] * self.n_sequences
        self.checkpoints = [[] for _ in range(self.n_sequences)]
        self._kept = [[] for _ in range(self.n_sequences)]

    def removed(self, seq: int, p0: int, following: int) -> None:
        """Tokens from position p0 on were removed from a sequence, whose next position is `following` now.

        The state is that of the copy or checkpoint which ends there; without one it is lost.
        """
        whole = min(max(p0, 0), following)
        self.checkpoints[seq] = [checkpoint for checkpoint in self.checkpoints[seq] if checkpoint.end <= whole]
        self._kept[seq] = [copy for copy in self._kept[seq] if copy.end <= whole]
        last = self.checkpoints[seq][-1] if self.checkpoints[seq] else None
        slot = self._copy_slot(seq, following)
        if following == 0:
            self.ends[seq] = EMPTY
        elif slot is not None:
            self._go_on_from(slot, seq, following)
        elif last is not None and last.end == following:
            self._set(seq, last)
        else:
            self.ends[seq] = LOST

    def _go_on_from(self, slot: int, seq: int, end: int) -> None:
        """The state of a sequence becomes that in a slot, which ends there."""
        self._copy(slot, seq)
        self._part(seq)
        self.ends[seq] = end

    def _copy_slot(self, seq: int, end: int) -> int | None:
        """Slot of the copy of a sequence's state that ends there."""
        return next((self.n_sequences + copy.slot for copy in self._kept[seq] if copy.end == end), None)

    def released(self, seq: int, following: int) -> None:
        """Tokens of a failed batch were removed; what its next position is."""
        if following != self.ends[seq]:
            self.removed(seq, following, following)

    def copy(self, source: int, target: int, following: int) -> None:
        """Target has the tokens of source up to the position `following`; its state is lost if source has none that
        ends there."""
        if max(source, target) >= self.n_sequences:
            raise UsageError(f"sequence {max(source, target)}: the context has {self.n_sequences} (n_seq_max)")
        if source == target:
            return
        slot = self._copy_slot(source, following)
        self._kept[target] = []
        self.checkpoints[target] = list(self.checkpoints[source])
        self.ends[target] = self.ends[source]
        if following and self.ends[source] == following:
            self._share(source, target)
        elif slot is not None:
            self._go_on_from(slot, target, following)
            self.checkpoints[target] = [saved for saved in self.checkpoints[source] if saved.end <= following]
        else:
            self.removed(target, following, following)

    def _set(self, seq: int, checkpoint: Checkpoint) -> None:
        for memory, data in zip(self._memory.values(), checkpoint.data, strict=True):
            memory.write(seq, data)
        self._part(seq)
        self.ends[seq] = checkpoint.end

    # checkpoints

    def reusable(self, seq: int, length: int) -> int:
        """Tokens of a sequence, at most `length`, behind which it can go on: its end, that of a copy or checkpoint, or
        0."""
        ends = [checkpoint.end for checkpoint in self.checkpoints[seq]] + [copy.end for copy in self._kept[seq]]
        ends.append(self.ends[seq])
        return max((end for end in ends if 0 < end <= length), default=0)

    def keep_checkpoint(self, seq: int, most: int) -> None:
        """Makes a checkpoint of a sequence's state, unless it is empty or lost. Of more than `most`, at least 1, the
        one goes that leaves the shortest gap, never the last."""
        kept, end = self.checkpoints[seq], self.ends[seq]
        if end in (EMPTY, LOST) or (kept and kept[-1].end == end):
            return
        kept.append(self._read(seq))
        while len(kept) > most:
            ends = [0] + [checkpoint.end for checkpoint in kept]
            del kept[min(range(len(kept) - 1), key=lambda i: ends[i + 2] - ends[i], default=0)]

    def _read(self, seq: int) -> Checkpoint:
        return Checkpoint(self.ends[seq], tuple(memory.read(seq) for memory in self._memory.values()))

    def take(self, seq: int) -> tuple[Checkpoint, ...]:
        """Checkpoints of a sequence and, as the last one, a copy of its state. Nothing of an empty one, ResourceError
        for one whose state is lost."""
        if self.ends[seq] == EMPTY:
            return ()
        if self.ends[seq] == LOST:
            raise ResourceError(f"the state of sequence {seq} was lost and cannot be saved")
        return *(checkpoint for checkpoint in self.checkpoints[seq] if checkpoint.end < self.ends[seq]), self._read(seq)

    def nbytes_of(self, seq: int) -> int:
        """Bytes of what `take` gives."""
        end = self.ends[seq]
        n = 0 if end in (EMPTY, LOST) else 1 + sum(checkpoint.end < end for checkpoint in self.checkpoints[seq])
        return n * self.slot_nbytes

    def put(self, seq: int, saved: Sequence[Checkpoint]) -> None:
        """Sets the state of a sequence and its checkpoints to what `take` gave."""
        self.ends[seq] = EMPTY
        self._kept[seq] = []
        self.checkpoints[seq] = list(saved)
        if saved:
            self._set(seq, saved[-1])


def _all_sequences(batch: Batch) -> int:
    return int(np.bitwise_or.reduce(batch.masks))
