"""The text that a sequence of the context holds, with the caches of its drafters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ikpy.engine.kv_cache import KVCacheFullError
from ikpy.engine.sequence_state import unshare_sequence
from ikpy.engine.session import put_state, sequence_nbytes, take_state
from ikpy.server.prompt_cache import SavedText

if TYPE_CHECKING:
    from ikpy.engine.context import Context
    from ikpy.engine.speculative import Speculator
    from ikpy.server.pieces import Piece


class CachedText:
    """The ``tokens`` of sequence ``id`` whose cells are in the cache. Used by the engine thread; others may read it."""

    def __init__(self, index: int, context: Context, speculator: Speculator | None) -> None:
        self.id = index
        self.tokens: list[int] = []
        self.speculator = speculator
        self._context = context
        self._kv = context.kv

    def truncate(self, n: int) -> int:
        """Keeps as many of the first n cached tokens as the cache can go on from; returns their number."""
        if n < len(self.tokens) or n == 0:
            n = self._kv.rewind(self.id, n)
            del self.tokens[n:]
        return n

    def reusable(self, n: int) -> int:
        """Tokens of the text, at most n, behind which the cache can go on."""
        return self._kv.reusable(self.id, n)

    def drop_guesses(self) -> None:
        """Removes what was evaluated behind the tokens of the text."""
        self._kv.seq_rm(self.id, len(self.tokens), -1)

    def drop(self, keep: int, n: int) -> None:
        """Removes n tokens behind the first ``keep``; those that follow move up.

        Raises KVCacheFullError if cells that other sequences share cannot be copied.
        """
        unshare_sequence(self._context, self.id)
        n_past = len(self.tokens)
        self._kv.seq_rm(self.id, keep, keep + n)
        self._kv.seq_add(self.id, keep + n, n_past, -n)
        del self.tokens[keep : keep + n]
        if self.speculator is not None:
            self.speculator.shift(keep, n)

    @property
    def can_move(self) -> bool:
        """Whether pieces of the text may move with nothing lost: keys can be rotated, and no layer has a window."""
        return self._kv.can_shift and not self._kv.windows

    def move_pieces(self, keep: int, pieces: Sequence[Piece]) -> None:
        """Drops what is between the first ``keep`` tokens and the pieces, which move up behind them.

        Raises KVCacheFullError if cells that other sequences share cannot be copied.
        """
        end = keep
        for piece in pieces:
            self.drop(keep, piece.start - end)
            keep += piece.n_tokens
            end = piece.start + piece.n_tokens

    # other texts

    def adopt(self, other: CachedText, n: int) -> None:
        """Replaces the text by the reusable of the first n tokens of another; both use the same cells."""
        n = other.reusable(n)
        self.truncate(0)
        self._kv.seq_cp(other.id, self.id, -1, n)
        self.tokens = other.tokens[: self._kv.rewind(self.id, n)]
        self._adopt_drafts(other)

    def extend_from(self, other: CachedText, n: int) -> bool:
        """Goes on with another text, which begins with this one, up to its first n tokens; both use the same cells.

        False, and nothing is done, if the cache cannot go on behind them.
        """
        if other.reusable(n) != n:
            return False
        self._kv.seq_cp(other.id, self.id, len(self.tokens), n)
        self.tokens = other.tokens[:n]
        self._adopt_drafts(other)
        return True

    def _adopt_drafts(self, other: CachedText) -> None:
        """The drafters learn what those of another text know of the common beginning."""
        if self.speculator is not None and other.speculator is not None:
            self.speculator.adopt(other.speculator, len(self.tokens))

    # copies

    def take_state(self) -> SavedText:
        """A copy of what the cache holds, and the drafters' caches."""
        drafts = self.speculator.take_states() if self.speculator is not None else ()
        return SavedText(take_state(self._context, self.id, self.tokens), drafts, self.scales)

    @property
    def scales(self) -> tuple[float, ...]:
        """Scales of all adapters that the text is evaluated with."""
        return tuple(self._context.adapter_scales[self.id].tolist())

    @property
    def state_nbytes(self) -> int:
        """Bytes that `take_state` would copy."""
        drafts = self.speculator.state_nbytes if self.speculator is not None else 0
        return sequence_nbytes(self._context, self.id) + drafts

    def put_state(self, saved: SavedText) -> bool:
        """Replaces the text by a saved one; False, and the text is empty, if there is no room."""
        try:
            put_state(self._context, self.id, saved.state)
        except KVCacheFullError:
            self.tokens = []
            return False
        self.tokens = list(saved.tokens)
        if self.speculator is not None:
            self.speculator.put_states(saved.drafts)
        return True
