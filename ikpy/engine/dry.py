"""DRY: penalises tokens that would continue a repetition of earlier text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

LONGEST_BREAKER_BYTES = 40
LONGEST_BREAKER_TOKENS = 20
NEAR = 256
"""Tokens at the end that are searched for a breaker first."""
LONG = 16
"""Tokens compared per token of a history, from which on `common_with_end` is faster."""

DryBreakers = Mapping[int, Sequence[tuple[int, ...]]]
"""First token of a breaker -> the token sequences that must follow it (empty: the token alone breaks)."""


def dry_breakers(
    breakers: Sequence[str], token_bytes: Sequence[bytes], tokenize: Callable[[str], list[int]]
) -> dict[int, list[tuple[int, ...]]]:
    """Token sequences that contain a breaker string.

    ``token_bytes[id]`` is the text of a token; ``tokenize`` gives the ids of a text without added tokens.
    Tokens whose text contains the breaker break alone; tokens that end with its beginning break with the rest
    behind them.
    """
    found: dict[int, list[tuple[int, ...]]] = {}
    by_last: dict[int, list[tuple[int, bytes]]] = {}
    for token, text in enumerate(token_bytes):
        if text:
            by_last.setdefault(text[-1], []).append((token, text))
    for breaker in breakers:
        wanted = breaker.encode("utf-8")[:LONGEST_BREAKER_BYTES]
        if not wanted:
            continue
        tails = {
            cut: tuple(tokenize(wanted[cut:].decode("utf-8", "ignore"))[:LONGEST_BREAKER_TOKENS])
            for cut in range(1, len(wanted))
        }
        whole = {token for token, text in enumerate(token_bytes) if wanted in text}
        for token in whole:
            found.setdefault(token, []).append(())
        for cut, tail in tails.items():
            for token, text in by_last.get(wanted[cut - 1], ()) if tail else ():
                if token not in whole and text.endswith(wanted[:cut]):
                    found.setdefault(token, []).append(tail)
    return {token: sorted(set(sequences)) for token, sequences in found.items()}


def tokens_since_breaker(history: NDArray[np.int64], breakers: DryBreakers) -> int:
    """Tokens at the end of ``history`` behind the last breaker."""
    n = len(history)
    heads = np.fromiter(breakers, dtype=np.int64)
    end, size = n, NEAR
    while end > 0:  # most often one of the last few tokens breaks
        start = max(0, end - size)
        for at in start + np.flatnonzero(np.isin(history[start:end], heads))[::-1]:
            longest = -1
            for tail in breakers.get(int(history[at]), ()):
                if len(tail) <= n - 1 - at and tuple(history[at + 1 : at + 1 + len(tail)]) == tail:
                    longest = max(longest, len(tail))
            if longest >= 0:
                return int(n - 1 - at - longest)
        end, size = start, 2 * size
    return n


def common_with_end(history: NDArray[np.int64]) -> NDArray[np.int64]:
    """For every place: how many tokens up to it are those at the end (the Z-function from behind), in linear time."""
    text = history[::-1].tolist()
    n = len(text)
    found = [n] + [0] * (n - 1)
    begin = end = 0
    for i in range(1, n):
        length = min(end - i, found[i - begin]) if i < end else 0
        while i + length < n and text[length] == text[i + length]:
            length += 1
        found[i] = length
        if i + length > end:
            begin, end = i, i + length
    return np.array(found[::-1], np.int64)


def repetition_lengths(history: NDArray[np.int64], most: int) -> dict[int, int]:
    """For every token that followed an earlier copy of the end of ``history``: the longest copied length.

    Lengths are limited to ``most``.
    """
    n = len(history)
    if n < 2 or most < 1:
        return {}
    at = np.flatnonzero(history[:-1] == history[-1])  # ends of earlier copies
    lengths = np.ones(len(at), np.int64)
    going_on, n_steps = np.arange(len(at)), 0
    for length in range(1, most):
        going_on = going_on[at[going_on] >= length]
        going_on = going_on[history[at[going_on] - length] == history[n - 1 - length]]
        if not len(going_on):
            break
        lengths[going_on] = length + 1
        n_steps += NEAR + len(going_on)
        if n_steps > LONG * n:  # many copies, or long ones
            lengths = np.minimum(common_with_end(history)[at], most)
            break
    tokens, which = np.unique(history[at + 1], return_inverse=True)
    longest = np.zeros(len(tokens), np.int64)
    np.maximum.at(longest, which, lengths)
    return dict(zip(tokens.tolist(), longest.tolist(), strict=True))


def dry_penalties(
    history: NDArray[np.int64], breakers: DryBreakers, multiplier: float, base: float, allowed_length: int
) -> dict[int, float]:
    """Amount to subtract from the logit of each token that would extend a repetition; one that breaks alone ends it."""
    limit = tokens_since_breaker(history, breakers)
    if limit < allowed_length:
        return {}
    exponent = 88.72 / math.log(base) if base > 1.000001 else math.inf
    useful = limit if math.isinf(exponent) else min(limit, allowed_length + math.ceil(exponent))
    return {
        token: multiplier * base ** min(length - allowed_length, exponent)
        for token, length in repetition_lengths(history, useful).items()
        if length >= allowed_length and () not in breakers.get(token, ())
    }
