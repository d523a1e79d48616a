"""Common beginnings of token lists."""

from __future__ import annotations

from collections.abc import Sequence

PROMPT_TAIL = 5
"""Tokens of a prompt behind its checkpoint: those that open an answer, which later prompts may write otherwise."""


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning of two token lists of the same kind."""
    n, step = min(len(a), len(b)), 256
    for start in range(0, n, step):
        end = min(start + step, n)
        if a[start:end] != b[start:end]:
            return next(i for i in range(start, end) if a[i] != b[i])
    return n
