"""Candidate tokens of one sampling step and the samplers that shape them (options.md#sampling).

Every sampler takes :class:`Candidates` and returns them, possibly fewer. Probabilities are float64 and
refer to the current candidates only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
MIROSTAT_CANDIDATES = 100
"""Most likely candidates from which mirostat 1 estimates how fast probabilities fall."""
LARGEST32, TINY32 = (float(value) for value in (np.finfo(np.float32).max, np.finfo(np.float32).tiny))


def to_float32(values: FloatArray) -> NDArray[np.float32]:
    """Rounded to 32-bit floats; what is too large for them becomes the largest, infinities stay."""
    return np.where(np.isinf(values), values, np.clip(values, -LARGEST32, LARGEST32)).astype(np.float32)


def factor32(value: float) -> float:
    """A positive factor as a 32-bit float has it, never 0 or infinite."""
    return float(np.float32(min(max(value, TINY32), LARGEST32)))


@dataclass
class Candidates:
    """Token ids int32 [n] with logits float32 [n]; ``ordered`` = logits descend."""

    ids: NDArray[np.int32]
    logits: NDArray[np.float32]
    ordered: bool = False

    def __len__(self) -> int:
        return len(self.ids)

    def select(self, index: slice | NDArray[np.int64] | NDArray[np.bool_], ordered: bool) -> Candidates:
        """The candidates at ``index``."""
        return Candidates(self.ids[index], self.logits[index], ordered)

    def sort(self) -> Candidates:
        """By descending logit; equal logits keep their order."""
        if self.ordered:
            return self
        return self.select(np.argsort(-self.logits, kind="stable"), True)

    def probabilities(self) -> FloatArray:
        """Softmax of the logits."""
        return softmax(self.logits)


def softmax(logits: NDArray[np.float32]) -> FloatArray:
    """Probabilities float64 [n]; logits of -infinity give 0, unless all are, and those of infinity share all."""
    x = logits.astype(np.float64)
    top = x.max()
    if np.isnan(top):
        return np.full(len(x), 1.0 / len(x))
    e = np.exp(x - top) if np.isfinite(top) else (x == top).astype(np.float64)
    return e / e.sum()


def _keep_prefix(c: Candidates, reached: NDArray[np.bool_], min_keep: int) -> Candidates:
    """Candidates up to and including the first where ``reached`` holds and at least ``min_keep`` are kept."""
    reached = reached.copy()
    reached[: max(0, min_keep - 1)] = False
    index = int(reached.argmax()) if reached.any() else len(c) - 1
    return c.select(slice(0, index + 1), c.ordered)


def top_k(c: Candidates, k: int, min_keep: int = 0) -> Candidates:
    """The ``max(k, min_keep)`` largest logits; all for ``k <= 0``."""
    if k <= 0 or max(k, min_keep) >= len(c):
        return c.sort()
    k = max(k, min_keep)
    if c.ordered:
        return c.select(slice(0, k), True)
    limit = np.partition(c.logits, len(c) - k)[len(c) - k]
    near = c.select(np.flatnonzero(c.logits >= limit), False)
    return near.sort().select(slice(0, k), True)


def top_p(c: Candidates, p: float, min_keep: int = 0) -> Candidates:
    """The shortest prefix of descending probabilities whose sum reaches ``p`` (nucleus sampling)."""
    if p >= 1:
        return c
    c = c.sort()
    return _keep_prefix(c, np.cumsum(c.probabilities()) >= p, min_keep)


def min_p(c: Candidates, p: float, min_keep: int = 0) -> Candidates:
    """Candidates at least ``p`` times as probable as the most probable one."""
    if p <= 0 or not len(c):
        return c
    limit = float(c.logits.max()) + np.log(p)
    kept = c.logits >= limit
    if int(kept.sum()) >= max(1, min_keep):
        return c.select(kept, c.ordered)
    return c.sort().select(slice(0, max(1, min_keep)), True)


def tail_free(c: Candidates, z: float, min_keep: int = 0) -> Candidates:
    """Cuts the tail where the normalised curvature of descending probabilities adds up to more than ``z``."""
    if z >= 1 or len(c) <= 2:
        return c
    c = c.sort()
    curvature = np.abs(np.diff(c.probabilities(), n=2))
    total = curvature.sum()
    weights = curvature / total if total > 1e-6 else np.full(len(curvature), 1.0 / len(curvature))
    passed = np.cumsum(weights) > z
    passed[: max(min_keep, 1)] = False
    if not passed.any():
        return c
    return c.select(slice(0, int(passed.argmax())), True)


def typical(c: Candidates, p: float, min_keep: int = 0) -> Candidates:
    """Locally typical sampling: candidates of surprise closest to the entropy, up to probability ``p``."""
    if p >= 1:
        return c
    probability = c.probabilities()
    with np.errstate(divide="ignore", invalid="ignore"):
        surprise = -np.log(probability)
        entropy = float(np.where(probability > 0, probability * surprise, 0.0).sum())
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    passed = np.cumsum(probability[order]) > p
    passed[: max(0, min_keep - 1)] = False
    count = int(passed.argmax()) + 1 if passed.any() else len(c)
    return c.select(order[:count], False)


def temperature(c: Candidates, t: float, spread: float = 0.0, exponent: float = 1.0) -> Candidates:
    """Logits divided by ``t``, or by a value in ``t ± spread`` that grows with the normalised entropy."""
    if spread > 0:
        if len(c) <= 1:
            return c
        low, high = max(0.0, t - spread), t + spread
        p = c.probabilities()
        positive = p[p > 0]
        entropy = float(-(positive * np.log(positive)).sum()) / np.log(len(c))
        t = low + (high - low) * entropy**exponent
    if t <= 0:
        return c.sort().select(slice(0, 1), True)
    if t == 1:
        return c
    return Candidates(c.ids, to_float32(c.logits.astype(np.float64) / factor32(t)), c.ordered)


def xtc(c: Candidates, threshold: float, min_keep: int = 0) -> Candidates:
    """Removes all candidates with probability >= ``threshold`` but the least likely of them."""
    if threshold > 0.5 or len(c) < 2:
        return c
    c = c.sort()
    above = int((c.probabilities() >= threshold).sum())
    if above < 2 or len(c) - (above - 1) < min_keep:
        return c
    return c.select(slice(above - 1, len(c)), True)


def top_n_sigma(c: Candidates, n: float) -> Candidates:
    """Candidates within ``n`` standard deviations of the largest logit; needs at least 4 finite logits."""
    if n <= 0:
        return c
    finite = c.logits[np.isfinite(c.logits)].astype(np.float64)
    if len(finite) < 4:
        return c
    return c.select(c.logits >= finite.max() - n * finite.std(), c.ordered)


def adaptive_logits(probability: FloatArray, target: float) -> NDArray[np.float32]:
    """Logits that prefer probabilities near ``target``; impossible candidates stay impossible."""
    distance = np.abs(probability - target) / 0.3
    logits = 5.0 - 10.0 * distance**2 / (1.0 + distance)
    return np.where(probability > 0, logits, -np.inf).astype(np.float32)


def mirostat_k(probability: FloatArray, mu: float, n_vocab: int) -> int:
    """Number of candidates mirostat 1 keeps, from descending probabilities and the surprise limit ``mu``."""
    top = probability[:MIROSTAT_CANDIDATES]
    top = top[top > 0]
    if len(top) < 2:
        return 1
    i = np.arange(len(top) - 1)
    t = np.log((i + 2) / (i + 1))
    b = np.log(top[:-1] / top[1:])
    s = float((t * b).sum() / (t * t).sum())
    epsilon = s - 1
    if abs(epsilon) < 1e-9 or s <= 0:
        return len(probability)
    # As a logarithm: mu grows while the text surprises little, and k itself would overflow.
    log_k = (math.log(epsilon / (1 - float(n_vocab) ** -epsilon)) + mu * math.log(2)) / s
    return len(probability) if log_k >= math.log(len(probability)) else int(max(1.0, math.exp(log_k)))


def penalize(
    logits: NDArray[np.float32], history: NDArray[np.int64], repeat: float, frequency: float, presence: float
) -> None:
    """Applies repeat, frequency and presence penalties for ``history`` to ``logits`` in place."""
    tokens, counts = np.unique(history, return_counts=True)
    seen = logits[tokens].astype(np.float64)
    factor = factor32(repeat)
    seen = to_float32(np.where(seen <= 0, seen * factor, seen / factor)).astype(np.float64)
    penalties = to_float32(np.asarray(counts * frequency + presence, np.float64))
    logits[tokens] = to_float32(seen - penalties.astype(np.float64))
