"""Drafts from the model's own prediction layers (multi-token prediction)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ikpy.engine.batch import Batch
from ikpy.engine.entry_numbers import EntryNumbers
from ikpy.engine.kv_cache import KVCacheFullError
from ikpy.engine.prefix import common_prefix
from ikpy.engine.sequence_state import load_sequence, save_sequence, unshare_sequence
from ikpy.engine.session import MAX_INT32, SequenceState, put_state, sequence_nbytes, take_state
from ikpy.engine.speculative import Drafter, probable_tokens
from ikpy.errors import FileFormatError
from ikpy.signals.held_interrupts import held_back

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from ikpy.engine.context import Context


@dataclass(frozen=True)
class HeadStates(SequenceState):
    """What heads that take turns have of a sequence: that of the first one, and of the others."""

    others: tuple[SequenceState, ...] = ()

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(state.nbytes for state in self.others)


class HeadDraft(Drafter):
    """The prediction heads' most likely tokens while their probability is at least ``p_min``.

    ``contexts``: of `Model.prediction_heads`, with embeddings; of them, sequence ``seq_id`` and at most ``n_ctx`` cells
    are used. Entry i of these caches joins the model's state behind token i of the text with token i + 1. Entries are
    missing where no states were observed (in a text restored without the heads' own state, at the seam of a context
    shift, or where a text goes on after it was shortened), and the oldest go when the cells are used up. For the second
    and further tokens of a draft one head reads its own states; of several, each guesses one token and reads those of
    the ones before it.
    """

    name = "mtp"
    needs_states = True
    guesses_from_entries: ClassVar[bool] = True
    """Whether the last entry gives the logits of the first guess."""

    def __init__(self, *contexts: Context, p_min: float, n_ctx: int, seq_id: int = 0) -> None:
        self._contexts, self._p_min, self._n_ctx, self._seq_id = contexts, p_min, n_ctx, seq_id
        self._n_batch = min(context.n_batch for context in contexts)
        self._media = contexts[0].params.media
        self._numbers = EntryNumbers(gapless=any(context.kv.stretches for context in contexts))
        self._text: list[int] = []
        self._oldest = 0
        """First entry that has not been dropped for lack of cells."""
        self._states: list[NDArray[np.float32]] = []
        """States behind the tokens from number ``_next`` on, whose entries are not made yet."""
        self._next = 0

    def observe(self, text: Sequence[int], states: NDArray[np.float32]) -> None:
        start = len(text) - len(states)
        agreed = common_prefix(self._text, list(text))
        kept = min(start, max(0, agreed - 1))
        if kept < len(self._text) - 1:
            self._remove(kept, -1)
            self._oldest = min(self._oldest, kept)
        del self._states[max(0, min(start, agreed) - self._next) :]
        self._text[agreed:] = text[agreed:]
        if self._next + len(self._states) != start:
            self._catch_up()
            self._states, self._next = [], start
        self._states += list(states)
        # Rows of pictures may not be kept for long.
        has_rows = self._media is not None and self._media.has_media(text[start:])
        if has_rows or len(self._states) > self._n_batch:
            self._catch_up()

    def draft(self, tokens: Sequence[int], n_max: int, p_min: float | None = None) -> list[int]:
        p_min = self._p_min if p_min is None else p_min
        n_max = min(n_max, self._n_ctx // 4, len(self._contexts) if len(self._contexts) > 1 else n_max)
        end = self._next + len(self._states)
        if n_max < 1 or not self._states or not end == len(self._text) == len(tokens) - 1:
            return []
        self._text.append(tokens[-1])
        logits = self._catch_up(n_max)
        assert logits is not None
        read: list[NDArray[np.float32]] = []
        try:
            return probable_tokens(logits, n_max, p_min, lambda found: self._logits_behind(found, end, read))
        finally:
            self._remove(end, -1)

    def adopt(self, other: Drafter, n: int) -> None:
        assert isinstance(other, HeadDraft)
        other._catch_up()
        n = min(n, len(other._text))
        self._remove(-1, -1)
        end = max(0, n - 1)
        for context in self._contexts:
            context.kv.seq_cp(other._seq_id, self._seq_id, -1, other._numbers.position(end))
        self._numbers.adopt(other._numbers, end)
        self._number_anew()
        self._text, self._oldest = other._text[:n], min(other._oldest, end)
        self._states, self._next = other._states[: max(0, n - other._next)], other._next

    def shift(self, keep: int, drop: int) -> None:
        self._catch_up()
        gap = max(0, keep - 1)  # the state in front of the gap has another token behind it now
        can_move = all(context.kv.can_shift for context in self._contexts) and self._next > keep + drop
        if can_move:
            try:
                for context in self._contexts:
                    unshare_sequence(context, self._seq_id)
            except KVCacheFullError:
                can_move = False
        self._remove(gap, keep + drop if can_move else -1)
        for context in self._contexts if can_move else ():
            context.kv.seq_add(self._seq_id, keep + drop, -1, -drop)
        self._oldest = self._oldest - drop if self._oldest >= keep + drop else min(self._oldest, keep)
        del self._text[keep : keep + drop]
        if self._next < keep + drop:
            self._states = []
        self._next = max(0, min(self._next, len(self._text) - 1) if self._next < keep + drop else self._next - drop)

    def take_state(self) -> SequenceState | None:
        self._catch_up()
        if not self._next:
            return None
        text = self._text[: self._next + 1]
        first, *others = (take_state(context, self._seq_id, text) for context in self._contexts)
        return HeadStates(**vars(first), others=tuple(others)) if others else first

    @property
    def state_nbytes(self) -> int:
        return sum(sequence_nbytes(context, self._seq_id) for context in self._contexts)

    def put_state(self, state: SequenceState) -> None:
        states = (state, *(state.others if isinstance(state, HeadStates) else ()))
        try:
            for context, each in zip(self._contexts, states, strict=True):
                put_state(context, self._seq_id, each)
        except KVCacheFullError:
            self._forget()
        else:
            self._follow(state.tokens)

    def write_state(self, path: Path) -> None:
        self._catch_up()
        for file, context in self._files(path):
            save_sequence(file, context, self._seq_id, self._text[: self._next + 1])

    def read_state(self, path: Path) -> None:
        self._forget()
        try:
            texts = [load_sequence(file, context, self._seq_id, MAX_INT32)[0] for file, context in self._files(path)]
            if any(text != texts[0] for text in texts):
                raise FileFormatError("the states of the prediction layers are of different texts")
        except BaseException:
            self._forget()
            raise
        self._follow(texts[0])

    def _files(self, path: Path) -> list[tuple[Path, Context]]:
        """The file of every head: this one, and others beside it."""
        names = [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, len(self._contexts)))]
        return list(zip(names, self._contexts, strict=True))

    def _forget(self) -> None:
        self._remove(-1, -1)
        self._follow([])

    def _remove(self, first: int, end: int) -> None:
        """Drops entries from all caches; -1: from the first, or to the last."""
        p0, p1 = (entry if entry < 0 else self._numbers.position(entry) for entry in (first, end))
        for context in self._contexts:
            context.kv.seq_rm(self._seq_id, p0, p1)
        if end < 0:
            self._numbers.cut(max(0, first))
        self._number_anew()

    def _number_anew(self) -> None:
        """A cache without gaps of which nothing is left begins with position 0 again."""
        if self._numbers.gapless and self._contexts[0].kv.seq_pos_max(self._seq_id) < 0:
            self._numbers.cut(0)

    def _follow(self, tokens: Sequence[int]) -> None:
        """The cache holds the entries of this text."""
        self._text, self._states = list(tokens), []
        self._next = max(0, len(tokens) - 1)
        kv = self._contexts[0].kv
        first, end = max(0, kv.seq_pos_min(self._seq_id)), kv.seq_pos_max(self._seq_id) + 1
        self._numbers.follow(end, self._next)
        self._oldest = self._next - end + first if self._numbers.gapless else first

    def _catch_up(self, n_drafted: int = 0) -> NDArray[np.float32] | None:
        """Makes the entries whose tokens are known, with room for ``n_drafted`` more; logits behind the last one if
        there is to be a draft."""
        n = min(len(self._states), len(self._text) - 1 - self._next)
        logits = None
        while n > 0:
            left = self._text[self._next + 1 : self._next + 1 + n]
            step = min(n, self._n_batch, max(1, self._n_ctx // 4))
            step = step if self._media is None else self._media.cut(left, step)
            end, tokens = self._next + step, left[:step]
            self._make_room(end + n_drafted)
            states = np.array(self._states[:step])
            first, *others = self._contexts
            with held_back():  # entries that are not known to be there would be made twice
                pos, turn = self._place(self._next)
                for context in others:
                    context.decode(Batch.single(tokens, pos, self._seq_id, "none", turn), states, copy=False)
                wanted = "last" if n_drafted and step == n and self.guesses_from_entries else "none"
                logits = first.decode(Batch.single(tokens, pos, self._seq_id, wanted, turn), states, copy=False)
                self._numbers.add(self._next, step)
                del self._states[:step]
                self._next = end
            n -= step
        return logits[-1] if logits is not None and len(logits) else None

    def _make_room(self, end: int) -> None:
        """Drops the oldest entries if those before ``end`` need more than the head's cells."""
        if end - self._oldest > self._n_ctx:
            self._oldest = end - self._n_ctx // 2
            self._remove(-1, self._oldest)

    def _logits_behind(self, found: list[int], end: int, read: list[NDArray[np.float32]]) -> NDArray[np.float32]:
        """Logits behind a draft whose first token makes entry ``end``, from the state that a head has made last.

        ``read``: those that were made before it for this draft.
        """
        n, (pos, turn) = len(found), self._place(end)
        made = self._contexts[(n - 1) % len(self._contexts)].embeddings
        assert made is not None
        if len(self._contexts) == 1:
            batch = Batch.one(found[-1], pos + n - 1, self._seq_id, turn)
            return self._contexts[0].decode(batch, made[-1:], copy=False)[-1]
        read.append(made[-1])
        batch = Batch.single(found, pos, self._seq_id, "last", turn)
        return self._contexts[n].decode(batch, np.array(read), copy=False)[-1]

    def _place(self, entry: int) -> tuple[int, int]:
        """The position of an entry behind all others, and the rotation position, which is that of its token, minus it;
        where no pictures may be, the position alone counts.
        """
        pos = self._numbers.end if self._numbers.gapless else entry
        return pos, 0 if self._media is None else self._media.turn(self._text[: entry + 1]) + entry - pos
