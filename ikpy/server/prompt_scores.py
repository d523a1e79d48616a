"""Probabilities of a prompt's own tokens, from the logits of the tokens before them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ikpy.server.tasks import TokenProbability
from ikpy.tools.logprobs import for_blocks, log_sum_exp


class PromptScores:
    """Collects what a prompt's tokens scored, micro-batch by micro-batch. ``n_top``: most probable tokens per place."""

    def __init__(self, prompt: Sequence[int], n_top: int) -> None:
        self.found: list[TokenProbability] = []
        """Of the tokens behind the first, as far as they are known."""
        self._prompt = prompt
        self._n_top = n_top

    def add(self, logits: NDArray[np.float32]) -> None:
        """Takes the logits [n, n_vocab] of the next n tokens; those of the last token belong to no other of the prompt.

        Raises NotANumberError.
        """
        first = 1 + len(self.found)
        targets = np.array(self._prompt[first : first + len(logits)], np.int64)
        rows = logits[: len(targets)]
        for_blocks(len(rows), rows.shape[1] * 4, 1, lambda part: self._score(rows[part], targets[part]))

    def _score(self, logits: NDArray[np.float32], targets: NDArray[np.int64]) -> None:
        largest, lse = log_sum_exp(logits)
        ids = np.concatenate([targets[:, None], self._top(logits)], axis=1)
        p = np.exp((np.take_along_axis(logits, ids, 1) - largest[:, None]).astype(np.float64) - lse[:, None])
        for row, values in zip(ids.tolist(), p.tolist(), strict=True):
            self.found.append(TokenProbability(row[0], values[0], tuple(zip(row[1:], values[1:], strict=True))))

    def _top(self, logits: NDArray[np.float32]) -> NDArray[np.int64]:
        """Ids of the largest logits of every row, in descending order, [n, n_top].

        A row of 151,936 is searched in 33 us; partitioning it takes 2300.
        """
        n = min(self._n_top, logits.shape[1])
        ids = np.empty((len(logits), n), np.int64)
        rest, rows = logits.copy() if n > 1 else logits, np.arange(len(logits))
        for i in range(n):
            ids[:, i] = rest.argmax(axis=1)
            if i < n - 1:
                rest[rows, ids[:, i]] = -np.inf
        return ids
