"""Pictures in texts of token ids: ids that stand for rows of an encoder instead of tokens of the vocabulary."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import ResourceError

MAX_ID = (1 << 31) - 1
"""Ids of batches have 32 bits."""


class Rows(Protocol):
    """What an encoder makes of a picture: ikpy.vision.rows.MediaRows, which explains it."""

    def __len__(self) -> int: ...
    @property
    def values(self) -> NDArray[np.float32]: ...
    @property
    def grid(self) -> tuple[int, int] | None: ...
    @property
    def both_ways(self) -> bool: ...
    @property
    def turn(self) -> int: ...


@dataclass(frozen=True)
class Picture:
    """What is known of a picture for ever: its ids are start .. start + n - 1. turn: what it adds to that of the tokens
    behind it."""

    start: int
    n: int
    grid: tuple[int, int] | None
    both_ways: bool
    turn: int

    @classmethod
    def of(cls, start: int, rows: Rows) -> Picture:
        """The picture of these rows."""
        return cls(start, len(rows), rows.grid, rows.both_ways, rows.turn)

    @property
    def ids(self) -> list[int]:
        """Of its rows."""
        return list(range(self.start, self.start + self.n))


class MediaStore:
    """Rows of pictures and the ids that stand for them, by a key of their contents.

    n_vocab: ids below are tokens. max_bytes: rows kept at most, but for those of the picture added last; those that
    were used longest ago go first. Ids are never given to another picture. projector: tells projectors apart, whose
    rows of one picture differ.

    A text is a list of ids as any other: equal beginnings can be shared, and positions are indices. A part of one is
    `Batch.add(tokens[a:b], a, seq_id, turn=store.turn(tokens[:a]))`, where a and b are places at which `cut` allows to
    cut it. Positions of cached tokens cannot be moved in a text with pictures that turn them (`Context.moves_media`).

    Several threads may use it, one to encode and others to evaluate.
    """

    def __init__(self, n_vocab: int, max_bytes: int, projector: str = "") -> None:
        self.n_vocab = n_vocab
        self.projector = projector
        self.end = n_vocab
        """Behind the last id of all."""
        self.n_bytes = 0
        """Bytes of the rows that are kept."""
        self._max_bytes = max_bytes
        self._pictures: list[Picture] = []
        self._by_key: dict[bytes, Picture] = {}
        self._rows: OrderedDict[int, NDArray[np.float32]] = OrderedDict()
        self._table = np.empty((0, 5), np.int64)
        self._lock = threading.RLock()

    def add(self, key: bytes, make: Callable[[], Rows]) -> list[int]:
        """The ids of a picture, one for every row; its rows are made if they are not kept.

        ResourceError if all ids are taken.
        """
        with self._lock:
            picture = self._by_key.get(key)
            if picture is not None and picture.start in self._rows:
                self._rows.move_to_end(picture.start)
                return picture.ids
        rows = make()
        if not len(rows):
            raise ValueError("a picture without rows")
        with self._lock:
            return self._known(key, rows).ids

    def _known(self, key: bytes, rows: Rows) -> Picture:
        """The picture of this key, whose rows are kept now."""
        picture = self._named(key, Picture.of(0, rows))
        self._keep(picture.start, rows.values)
        return picture

    def _named(self, key: bytes, shape: Picture) -> Picture:
        """The picture of this key, which gets its ids if it has none."""
        picture = self._by_key.get(key)
        made = replace(shape, start=self.end if picture is None else picture.start)
        if picture is None:
            self._check_room(made.n)
            self._by_key[key] = picture = made
            self._pictures.append(made)
            self.end += made.n
        elif made != picture:
            raise ValueError(f"rows of another shape under one key: {made} instead of {picture}")
        return picture

    def announce(self, pictures: Sequence[tuple[bytes, Picture]]) -> list[int]:
        """First ids of the pictures of a saved text, whose rows are made when they are asked for.

        All of them, or none: ResourceError if not enough ids are left, ValueError if a picture is known in another
        shape or two have one key.
        """
        with self._lock:
            if len(dict(pictures)) < len(pictures):
                raise ValueError("two pictures have one key")
            new = 0
            for key, shape in pictures:
                known = self._by_key.get(key)
                if known is None:
                    new += shape.n
                elif replace(shape, start=known.start) != known:
                    raise ValueError(f"rows of another shape under one key: {shape} instead of {known}")
            self._check_room(new)
            return [self._named(key, shape).start for key, shape in pictures]

    def _check_room(self, n: int) -> None:
        if self.end + n - 1 > MAX_ID:
            raise ResourceError(f"all {MAX_ID - self.n_vocab} ids of rows of pictures and sounds are taken: start anew")

    def pictures_of(self, tokens: Sequence[int]) -> list[tuple[bytes, Picture]]:
        """Keys of the pictures that some of these ids stand for, in the order of their ids."""
        with self._lock:
            starts = self.table()[:, 0]
            ids = np.unique(np.asarray(tokens, np.int64))
            places = set((np.searchsorted(starts, ids[ids >= self.n_vocab], "right") - 1).tolist())
            return [(key, p) for place, (key, p) in enumerate(self._by_key.items()) if place in places]

    def _keep(self, start: int, values: NDArray[np.float32]) -> None:
        if start in self._rows:
            self.n_bytes -= self._rows.pop(start).nbytes
        self._rows[start] = values
        self.n_bytes += values.nbytes
        while self.n_bytes > self._max_bytes and len(self._rows) > 1:
            self.n_bytes -= self._rows.popitem(last=False)[1].nbytes

    def rows(self, start: int) -> NDArray[np.float32]:
        """Rows float32 [n, width] of the picture whose first id this is. ResourceError if they are not kept."""
        with self._lock:
            if start not in self._rows:
                raise ResourceError(
                    f"the rows of a picture or a sound are no longer kept: those of one text take more than "
                    f"{self._max_bytes >> 20} MiB, or many others were added since"
                )
            self._rows.move_to_end(start)
            return self._rows[start]

    @property
    def holds_texts(self) -> bool:
        """Whether ids are those of texts for an encoder, which mean the same in every process."""
        return False

    # ids

    def is_media(self, token: int) -> bool:
        """Whether an id stands for a row."""
        return self.n_vocab <= token < self.end

    def has_media(self, tokens: Sequence[int]) -> bool:
        """Whether one of these ids stands for a row."""
        return bool(self._pictures) and max(tokens, default=0) >= self.n_vocab

    def without(self, tokens: Sequence[int]) -> list[int]:
        """These ids but for those that stand for rows."""
        return [token for token in tokens if token < self.n_vocab]

    def table(self) -> NDArray[np.int64]:
        """Of every picture its first id, rows, columns of its grid (0: none), whether its rows see each other, and its
        turn; int64 [pictures, 5], rising.
        """
        with self._lock:
            known = len(self._table)
            if known < len(self._pictures):
                added = [
                    (p.start, p.n, p.grid[1] if p.grid else 0, p.both_ways, p.turn) for p in self._pictures[known:]
                ]
                self._table = np.concatenate([self._table, np.array(added, np.int64)])
            return self._table

    def turn(self, tokens: Sequence[int]) -> int:
        """What the pictures that end in these tokens add: rotation position minus position of a token behind them, or
        for architectures that count pictures their number."""
        if not self.has_media(tokens):
            return 0
        ids = np.asarray(tokens, np.int64)
        ids = ids[ids >= self.n_vocab]
        table = self.table()
        start, n, _, _, turn = table[np.searchsorted(table[:, 0], ids, "right") - 1].T
        return int(turn[ids == start + n - 1].sum())

    def kept(self, ours: Sequence[int], theirs: Sequence[int], n: int) -> int:
        """How many of the n tokens that two texts begin with can serve the second one as they are."""
        return min(n, self.cut(theirs, n)) if n else 0

    def whole(self, tokens: Sequence[int], start: int, end: int) -> tuple[int, int]:
        """A part of a text with all of the pictures that it begins or ends in; its end may lie behind the tokens."""
        return self._picture(tokens, start)[0], self._picture(tokens, end)[1]

    def kept_whole(self, tokens: Sequence[int], n: int, most: int) -> int:
        """The first n tokens of a text with all of the picture that they end in, if that makes no more than `most`."""
        end = self._picture(tokens, n)[1]
        return end if end <= most else n

    def _picture(self, tokens: Sequence[int], n: int) -> tuple[int, int]:
        """Where the picture begins and ends that lies on both sides of place n of a text; n and n if there is none."""
        if not 0 < n <= len(tokens) or not self.is_media(tokens[n - 1]):
            return n, n
        table = self.table()
        start, n_rows, *_ = table[np.searchsorted(table[:, 0], tokens[n - 1], "right") - 1].tolist()
        row = tokens[n - 1] - start
        if row == n_rows - 1 or (n < len(tokens) and tokens[n] != tokens[n - 1] + 1):
            return n, n
        return n - 1 - row, n - 1 - row + n_rows

    def cut(self, tokens: Sequence[int], n: int) -> int:
        """About n of these tokens, behind which the text may be cut: not between rows that see each other.

        At most n, or all of a picture that the tokens begin with.
        """
        if not 0 < n < len(tokens) or not self.is_media(tokens[n]) or tokens[n] != tokens[n - 1] + 1:
            return min(n, len(tokens))
        table = self.table()
        start, n_rows, _, both_ways, _ = table[np.searchsorted(table[:, 0], tokens[n], "right") - 1].tolist()
        if not both_ways:
            return n
        before = n - min(n, tokens[n] - start)
        return before or n + start + n_rows - tokens[n]
