"""Log-softmax over rows of logits, in blocks that stay in cache and on a bounded number of threads."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from ikpy.engine.sampling import NotANumberError

MAX_EXPONENT = math.log(sys.float_info.max)
BLOCK_BYTES = 1 << 20  # a block and its exponentials fit in a core's L2 cache


def for_blocks(n_rows: int, row_bytes: int, n_threads: int, work: Callable[[slice], None]) -> None:
    """Calls ``work`` for row slices of about :data:`BLOCK_BYTES` each, on up to ``n_threads`` threads."""
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    slices = [slice(i, min(i + step, n_rows)) for i in range(0, n_rows, step)]
    if n_threads <= 1 or len(slices) <= 1:
        for rows in slices:
            work(rows)
        return
    with ThreadPoolExecutor(min(n_threads, len(slices))) as pool:
        list(pool.map(work, slices))


def log_sum_exp(logits: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Row maxima (float32 [n]) and ``log(sum(exp(row - max)))`` (float64 [n]) of logits [n, n_vocab].

    Exponentials are taken in float32 and summed in float64, as in the reference. Raises NotANumberError.
    """
    top = logits.max(axis=-1)
    if not np.isfinite(top).all():
        raise NotANumberError
    exponentials = np.exp(logits - top[:, None])
    return top, np.log(exponentials.sum(axis=-1, dtype=np.float64))


def exponential(x: float) -> float:
    """e^x, infinite where that is no number of 64 bits: what a broken model makes of a loss."""
    return math.exp(x) if x < MAX_EXPONENT else math.inf


def token_log_probs(logits: NDArray[np.float32], targets: NDArray[np.int32], n_threads: int = 1) -> NDArray[np.float64]:
    """Log-probability of ``targets[i]`` under row i of ``logits`` [n, n_vocab]; float64 [n]."""
    result = np.empty(len(targets), dtype=np.float64)

    def work(rows: slice) -> None:
        block = logits[rows]
        top, lse = log_sum_exp(block)
        chosen = block[np.arange(len(block)), targets[rows]]
        result[rows] = (chosen - top).astype(np.float64) - lse

    for_blocks(len(targets), logits.shape[1] * 4, n_threads, work)
    return result
