"""Results of micro-batches: rows of the plan's memory, copied and joined."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Results = tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]
"""Logits float32 [n_outputs, n_vocab], embeddings [n_outputs, n_embd] and token states [n, n_embd] as far as wanted."""


def first_rows(result: np.ndarray | None, n: int) -> np.ndarray | None:
    """The rows that were asked for; those behind them belong to repeated tokens."""
    return None if result is None else result[:n]


def copied(result: np.ndarray | None) -> np.ndarray | None:
    """Memory that the next run does not overwrite."""
    return None if result is None else result.copy()


def joined(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Rows of several micro-batches, of which some have none."""
    rows = [part for part in parts if part is not None]
    if len(rows) > 1:
        return np.concatenate(rows)
    return rows[0] if rows else None
