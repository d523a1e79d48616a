"""The arrays that the graphs of a context read, written before every run."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ikpy._native.inputs import InputArrays
from ikpy.engine.cells import Cells
from ikpy.engine.encoded_texts import TextBatch
from ikpy.engine.media_batch import MediaBatch
from ikpy.graph.ir import F32, I32, I64, Value, external
from ikpy.models.batch import MediaInputs, Window


def as_input(array: np.ndarray, n: int, name: str) -> Value:
    """The first n entries of an array of 32-bit integers or sequence masks."""
    return external(array.ctypes.data, array, I64 if array.dtype == np.uint64 else I32, (n,), name, "input")


class MediaArrays:
    """What graphs read of pictures among n tokens: arrays as of MediaInputs, rows being float32 [n, width]."""

    def __init__(self, n: int, width: int) -> None:
        self.rows = np.zeros((n, width), np.float32)
        self.slots = np.full(n, -1, np.int32)
        self.keep = np.ones(n, np.float32)
        self.places = np.zeros((n, 4), np.int32)
        self.until = np.zeros(n, np.int32)

    @property
    def arrays(self) -> list[np.ndarray]:
        """All but the rows, with an entry for every token."""
        return [self.slots, self.keep, self.places, self.until]

    def write(self, media: MediaBatch, part: slice) -> None:
        """Sets the tokens of a part of a batch."""
        is_row, n = media.is_row[part], part.stop - part.start
        self.slots[:n] = np.where(is_row, np.arange(n), -1)
        self.keep[:n] = ~is_row
        self.places[:n], self.until[:n] = media.places[part], media.until[part]
        first, row = media.first[part], media.row[part]
        for start in np.unique(first[is_row]).tolist():
            where = np.flatnonzero(is_row & (first == start))
            self.rows[where] = media.values[start][row[where]]


class BatchInputs(InputArrays):
    """Inputs of micro-batches of at most n tokens.

    cells: the kinds of cells that tokens are stored in. states: float32 [n, state_size], for graphs that read hidden
    states; None if that is 0. keep_slots: where states of recurrent layers are copied to, int32 [n]. media_width:
    elements of a picture's row, 0 without pictures; turns: whether these turn the positions of what follows.
    """

    def __init__(
        self,
        n: int,
        cells: Mapping[Window, Cells],
        *,
        n_adapters: int,
        state_size: int,
        keep_slots: np.ndarray | None,
        media_width: int = 0,
        turns: bool = False,
    ) -> None:
        super().__init__(n, [each.stretch for each in cells.values()], n_adapters, turns)
        self.media = MediaArrays(n, media_width) if media_width else None
        self._cells = cells
        self._keep_slots = keep_slots
        self.states = np.zeros((n, state_size), np.float32) if state_size else None

    @property
    def all_arrays(self) -> list[np.ndarray]:
        """All arrays but the states, which stay in host memory."""
        found = [*self.arrays, *self.scales, *([] if self._keep_slots is None else [self._keep_slots])]
        return [*found, *self._turned_rows(), *(array.reshape(-1) for array in self._media_arrays())]

    @property
    def row_bytes(self) -> int:
        """Bytes of the rows of pictures."""
        return self.media.rows.nbytes if self.media else 0

    def _media_arrays(self) -> list[np.ndarray]:
        return self.media.arrays if self.media else []

    def _turned_rows(self) -> list[np.ndarray]:
        """Rotation positions, if they may differ from the positions."""
        return [self.turned] if len(self.turned) else []

    def write_media(self, media: MediaBatch, part: slice, *, has_rows: bool) -> None:
        """Sets what differs with pictures from what `write` has set, for a part of a batch."""
        n = part.stop - part.start
        self.arrays[0, :n][media.is_row[part]] = 0
        if len(self.turned):
            self.turned[:n] = media.places[part, 0]
        if self.media and has_rows:
            self.media.write(media, part)

    def write_texts(self, texts: TextBatch, part: slice) -> None:
        """Sets what differs from what `write` has set for a part of a batch of a model with an encoder."""
        n, is_text = part.stop - part.start, texts.is_text[part]
        self.arrays[0, :n][is_text] -= texts.n_vocab
        self.turned[:n] = self.arrays[1, :n] + np.where(is_text, 0, texts.lengths[part])

    def pad(self, sizes: tuple[int, int], padded: tuple[int, int]) -> None:
        """Repeats the last of the tokens and outputs that were written, up to other numbers of them."""
        (n_tokens, n_outputs), (end, end_of_outputs) = sizes, padded
        repeated = [row for row, each in zip(self.arrays[4:], self._cells.values(), strict=False) if each.stretch == 1]
        for row in (*self.arrays[:3], *repeated, *self.scales, *self._turned_rows(), *self._media_arrays()):
            row[n_tokens:end] = row[n_tokens - 1]
        if self.states is not None:
            self.states[n_tokens:end] = self.states[n_tokens - 1]
        if n_outputs:
            self.arrays[3, n_outputs:end_of_outputs] = self.arrays[3, n_outputs - 1]

    def write_states(self, states: np.ndarray) -> None:
        """Sets the hidden states float32 [n, state_size] of the tokens."""
        assert self.states is not None
        self.states[: len(states)] = states

    def values(self, n_tokens: int, n_outputs: int) -> dict[str, Value]:
        """Tokens, positions, sequences, outputs and where states are copied, as a graph of these sizes reads them."""
        sizes = {"tokens": n_tokens, "pos": n_tokens, "seq": n_tokens, "outputs": max(1, n_outputs)}
        found = {name: as_input(row, n, name) for row, (name, n) in zip(self.arrays, sizes.items(), strict=False)}
        if self._keep_slots is not None:
            found["keep"] = as_input(self._keep_slots, n_tokens, "keep")
        if len(self.turned):
            found["turned"] = as_input(self.turned, n_tokens, "turned")
        return found

    def media_values(self, n_tokens: int) -> MediaInputs:
        """Rows of pictures among so many tokens, and what belongs to the tokens."""
        assert self.media
        rows, keep, places = self.media.rows, self.media.keep, self.media.places
        return MediaInputs(
            rows=external(rows.ctypes.data, rows, F32, rows.shape[::-1], "media_rows", "host"),
            slots=as_input(self.media.slots, n_tokens, "media_slots"),
            keep=external(keep.ctypes.data, keep, F32, (1, n_tokens), "media_keep", "input"),
            places=external(places.ctypes.data, places, I32, (4, n_tokens), "places", "input"),
            until=as_input(self.media.until, n_tokens, "until"),
        )

    def cell_values(self, n_tokens: int) -> dict[Window, tuple[Value, Value, Value]]:
        """Of every kind of cells those of the tokens, and positions and sequences of all of them."""
        return {
            window: (
                as_input(taken, n_tokens, "cells"),
                as_input(cells.pos, cells.n_cells, "cell_pos"),
                as_input(cells.seq, cells.n_cells, "cell_seq"),
            )
            for (window, cells), taken in zip(self._cells.items(), self.arrays[4:], strict=False)
        }

    def stretch_values(self, n_tokens: int) -> dict[Window, tuple[Value, Value]]:
        """Of every kind of cells with stretches the tokens that end one, and the first positions of these, as inputs of
        a batch of so many tokens; behind them -1 and 0.
        """
        found = {}
        rows = iter(self.arrays[4 + len(self._cells) :])
        for window, cells in self._cells.items():
            if cells.stretch > 1:
                found[window] = as_input(next(rows), n_tokens, "ends"), as_input(next(rows), n_tokens, "starts")
        return found

    def scale_values(self, n_tokens: int) -> list[Value]:
        """Scales of every adapter [1, n_tokens]."""
        return [external(row.ctypes.data, row, F32, (1, n_tokens), "scales", "input") for row in self.scales]

    def state_values(self, n_tokens: int) -> Value | None:
        """Hidden states [state_size, n_tokens], if graphs read any."""
        states = self.states
        if states is None:
            return None
        return external(states.ctypes.data, states, F32, (states.shape[1], n_tokens), "states", "host")
