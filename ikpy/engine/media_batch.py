"""The rows of pictures in a batch: where each token is, what it sees, and how the batch may be cut."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ikpy.engine.batch import Batch
from ikpy.engine.media import MediaStore
from ikpy.errors import UsageError


class MediaBatch:
    """The tokens of a batch, some of which are rows of pictures.

    is_row: bool [n]; first, row: int64 [n], the first id of a row's picture and its number in it. places: int32 [n, 4],
    rotation positions in time, height, width and the fourth of RopeSections. until: int32 [n], the last position that a
    token sees. joined: bool [n], whether a token sees the one before it and is seen by it. values: of the pictures by
    their first ids float32 [rows, width]. sees_each_other: whether any rows do so in the model; counts: as
    Architecture.counts_pictures. Raises ResourceError if rows are not kept, UsageError for another width.
    """

    def __init__(self, batch: Batch, store: MediaStore, width: int, *, sees_each_other: bool, counts: bool) -> None:
        tokens, pos, masks, turns = batch.tokens, batch.pos, batch.masks, batch.turns
        self._batch = batch
        self.is_row = is_row = tokens >= store.n_vocab
        table = store.table()
        of_token = table[np.where(is_row, np.searchsorted(table[:, 0], tokens, "right") - 1, 0)]
        self.first, self._n_rows, columns, both_ways, added = of_token.T
        self.values = {start: store.rows(start) for start in np.unique(self.first[is_row]).tolist()}
        if wrong := [values.shape[1] for values in self.values.values() if values.shape[1] != width]:
            raise UsageError(
                f"rows of a picture have {wrong[0]} elements and the model reads {width}: its projector belongs to "
                "another model"
            )
        self.row = row = np.where(is_row, tokens - self.first, 0)
        is_last = is_row & (row == self._n_rows - 1)
        follows = np.zeros(len(tokens), bool)
        follows[1:] = (masks[1:] == masks[:-1]) & (pos[1:] == pos[:-1] + 1) & (turns[1:] == turns[:-1])
        turned = turns + _added_before(np.where(is_last, added, 0), follows)
        place = pos if counts else pos + turned
        y, x = divmod(row, np.maximum(columns, 1))
        start = place - row
        inside = [pos, x, y, turned] if counts else [start, start + y, start + x, place]
        self.places = np.where(is_row & (columns > 0), inside, place).T.astype(np.int32)
        self._both_ways = is_row & (both_ways > 0) & sees_each_other
        self.until = np.where(self._both_ways, pos - row + self._n_rows - 1, pos).astype(np.int32)
        self.joined = follows & self._both_ways & (row > 0)
        self.joined[1:] &= tokens[1:] == tokens[:-1] + 1

    def pieces(self, pieces: list[Batch], n: int) -> list[Batch]:
        """Pieces of the batch of at most n tokens that cut no rows apart which see each other, these pieces if they do
        not. UsageError if it cannot be.
        """
        self._check_whole()
        bounds = list(accumulate(map(len, pieces)))
        if not any(self.joined[bounds[:-1]]):
            return pieces
        return self._batch.cut(self._bounds(n))

    def _check_whole(self) -> None:
        """UsageError if rows are there that see others which are not."""
        goes_on = np.append(self.joined[1:], False)
        cut = np.flatnonzero(self._both_ways & ~goes_on & (self.row < self._n_rows - 1))
        if len(cut):
            n, n_rows = int(self.row[cut[0]]) + 1, int(self._n_rows[cut[0]])
            raise UsageError(f"a batch ends behind {n} of the {n_rows} rows of a picture, which see each other")

    def _bounds(self, n: int) -> list[int]:
        """Ends of pieces of at most n tokens."""
        bounds: list[int] = []
        start = 0
        while start < len(self.joined):
            end = min(start + n, len(self.joined))
            while start < end < len(self.joined) and self.joined[end]:
                end -= 1
            if end == start:
                raise UsageError(
                    f"the {int(self._n_rows[start])} rows of a picture see each other and must fit one micro-batch "
                    f"of {n}: raise n_ubatch (-ub)"
                )
            bounds.append(end)
            start = end
        return bounds


def _added_before(added: NDArray[np.int64], follows: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Sums of what was added before each token since the last one that does not follow the token before it."""
    before = np.cumsum(added) - added
    starts = np.maximum.accumulate(np.where(follows, 0, np.arange(len(added))))
    return before - before[starts]
