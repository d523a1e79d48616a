"""The choice of cells by an indexer and what follows from it, in float64 (DeepSeek-V3.2, arXiv:2512.02556)."""

from __future__ import annotations

import numpy as np


def index_scores(q: np.ndarray, weights: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """q [T, H, n], weights [T, H], keys [cells, n] -> [T, cells]: sum_h w[t, h] relu(q[t, h] . k[c])."""
    products = np.einsum("thn,cn->thc", q.astype(np.float64), keys.astype(np.float64))
    return np.einsum("th,thc->tc", weights.astype(np.float64), np.maximum(products, 0))


def choose(scores: np.ndarray, visible: np.ndarray, top_k: int) -> np.ndarray:
    """bool [T, cells]: the top_k visible cells with the largest scores, the first ones where scores are equal."""
    chosen = np.zeros(visible.shape, bool)
    for t, (row, sees) in enumerate(zip(scores, visible, strict=True)):
        cells = np.flatnonzero(sees)
        chosen[t, cells[np.argsort(-row[cells], kind="stable")[:top_k]]] = True
    return chosen


def of_lists(lists: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """bool [T, cells] from what choose_cells gives: i32 [T, 1 + top_k], the number of cells (-1: all) and the cells."""
    chosen = visible.copy()
    for t, (count, *cells) in enumerate(lists.tolist()):
        if count >= 0:
            assert cells[:count] == sorted(set(cells[:count])), f"token {t}: cells in no rising order"
            chosen[t] = False
            chosen[t, cells[:count]] = True
    return chosen
