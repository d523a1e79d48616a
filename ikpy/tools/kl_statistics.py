"""Statistics of two models' next-token distributions as printed (perplexity.md#comparing-with-a-base-model)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ikpy.tools.logprobs import exponential

FloatArray = NDArray[np.float64]


@dataclass
class ChunkStatistics:
    """Per-token values, arrays [n]: losses of both models, divergence, probability difference, top match."""

    nll: FloatArray
    nll_base: FloatArray
    kld: FloatArray
    p_diff: FloatArray
    same_top: NDArray[np.bool_]

    @classmethod
    def empty(cls, n: int) -> ChunkStatistics:
        """Uninitialised arrays for n tokens."""
        return cls(np.empty(n), np.empty(n), np.empty(n), np.empty(n), np.empty(n, dtype=np.bool_))

    @classmethod
    def join(cls, parts: Sequence[ChunkStatistics]) -> ChunkStatistics:
        """Concatenation."""
        names = ("nll", "nll_base", "kld", "p_diff", "same_top")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


@dataclass(frozen=True)
class Estimate:
    """A value with its standard uncertainty."""

    value: float
    error: float


@dataclass
class Moments:
    """Number, sum and sum of squares of values that come in pieces."""

    n: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, values: FloatArray) -> None:
        """Adds values [n]."""
        self.n += len(values)
        self.total += float(values.sum())
        self.squares += float(np.square(values).sum())

    @property
    def estimate(self) -> Estimate:
        """Mean and its standard error; the error is 0 for 10 values or fewer, or without positive variance."""
        mean = self.total / self.n
        variance = self.squares / self.n - mean * mean
        return Estimate(mean, math.sqrt(variance / (self.n - 1)) if self.n > 10 and variance > 0 else 0.0)


def covariance(a: Moments, b: Moments, products: float) -> float:
    """Covariance of two means from the sum of the products of the values; 0 for fewer than 10 values."""
    n = a.n
    if n < 10:
        return 0.0
    return (products / n - a.total / n * (b.total / n)) / (n - 1)


def percentile(ordered: FloatArray, fraction: float) -> float:
    """Value at ``fraction`` of ascending values, linearly interpolated at position ``fraction * (n - 1)``."""
    position = fraction * (len(ordered) - 1)
    below = int(position)
    if below + 1 >= len(ordered):
        return float(ordered[-1])
    weight = position - below
    return float((1 - weight) * ordered[below] + weight * ordered[below + 1])


class KLStatistics:
    """All tokens seen so far; every derived quantity is computed over them."""

    heading = (
        "chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence"
        "              Δp RMS            Same top p"
    )

    def __init__(self) -> None:
        self._parts: list[ChunkStatistics] = []
        self._nll, self._nll_base, self._kld = Moments(), Moments(), Moments()
        self._p_diff, self._p_diff_squares = Moments(), Moments()
        self._loss_products = 0.0
        self._n_same_top = 0

    def add(self, chunk: ChunkStatistics) -> None:
        """Adds one chunk; takes time and memory of that chunk only."""
        self._parts.append(chunk)
        self._nll.add(chunk.nll)
        self._nll_base.add(chunk.nll_base)
        self._kld.add(chunk.kld)
        self._p_diff.add(chunk.p_diff)
        self._p_diff_squares.add(np.square(chunk.p_diff))
        self._loss_products += float((chunk.nll * chunk.nll_base).sum())
        self._n_same_top += int(chunk.same_top.sum())

    @property
    def all(self) -> ChunkStatistics:
        """The values of all tokens, joined anew at every use."""
        return ChunkStatistics.join([ChunkStatistics.empty(0), *self._parts])

    @property
    def n_tokens(self) -> int:
        """Tokens seen."""
        return self._nll.n

    @property
    def loss(self) -> Estimate:
        """Mean loss of the evaluated model."""
        return self._nll.estimate

    @property
    def base_loss(self) -> Estimate:
        """Mean loss of the base model."""
        return self._nll_base.estimate

    @property
    def _loss_covariance(self) -> float:
        return covariance(self._nll, self._nll_base, self._loss_products)

    @property
    def log_ratio(self) -> Estimate:
        """``ln(PPL(Q)/PPL(base))``, the losses being correlated."""
        loss, base = self.loss, self.base_loss
        variance = loss.error**2 + base.error**2 - 2 * self._loss_covariance
        return Estimate(loss.value - base.value, math.sqrt(max(0.0, variance)))

    @property
    def ppl(self) -> Estimate:
        """Perplexity of the evaluated model."""
        return _exponential(self.loss)

    @property
    def base_ppl(self) -> Estimate:
        """Perplexity of the base model, from the file."""
        return _exponential(self.base_loss)

    @property
    def kld(self) -> Estimate:
        """Mean Kullback-Leibler divergence of the base distribution from the model's, in nats."""
        return self._kld.estimate

    @property
    def rms_p_diff(self) -> Estimate:
        """Root mean square of the probability differences."""
        square = self._p_diff_squares.estimate
        rms = math.sqrt(square.value)
        return Estimate(rms, 0.5 * square.error / rms if rms > 0 else 0.0)

    @property
    def same_top(self) -> Estimate:
        """Share of tokens where both models have the same most likely token."""
        n = self.n_tokens
        share = self._n_same_top / n
        return Estimate(share, math.sqrt(share * (1 - share) / (n - 1)) if n > 1 else 0.0)

    def chunk_line(self) -> str:
        """The table row after the latest chunk."""
        ppl, ratio, kld, rms, top = self.ppl, self.log_ratio, self.kld, self.rms_p_diff, self.same_top
        return (
            f"{len(self._parts):4d}"
            f"    {ppl.value:9.4f} ± {ppl.error:9.4f}"
            f"    {ratio.value:10.5f} ± {ratio.error:10.5f}"
            f"    {kld.value:10.5f} ± {kld.error:10.5f}"
            f"    {100 * rms.value:6.3f} ± {100 * rms.error:6.3f} %"
            f"    {100 * top.value:6.3f} ± {100 * top.error:6.3f} %"
        )

    def report(self) -> list[str]:
        """Lines of the final blocks; empty for fewer than 100 tokens."""
        if self.n_tokens < 100:
            return []
        return [*self._perplexity_lines(), "", *self._divergence_lines(), "", *self._probability_lines()]

    def _perplexity_lines(self) -> list[str]:
        loss, base, ppl, base_ppl, ratio = self.loss, self.base_loss, self.ppl, self.base_ppl, self.log_ratio
        joint = self._loss_covariance
        errors = loss.error * base.error
        correlation = 100 * joint / errors if errors > 0 else 0.0
        exp_ratio = exponential(ratio.value)
        variance = ppl.error**2 + base_ppl.error**2 - 2 * joint * ppl.value * base_ppl.value
        difference = Estimate(ppl.value - base_ppl.value, math.sqrt(max(0.0, variance)))
        return [
            "====== Perplexity statistics ======",
            f"Mean PPL(Q)                   : {ppl.value:10.6f} ± {ppl.error:10.6f}",
            f"Mean PPL(base)                : {base_ppl.value:10.6f} ± {base_ppl.error:10.6f}",
            f"Cor(ln(PPL(Q)), ln(PPL(base))): {correlation:6.2f}%",
            f"Mean ln(PPL(Q)/PPL(base))     : {ratio.value:10.6f} ± {ratio.error:10.6f}",
            f"Mean PPL(Q)/PPL(base)         : {exp_ratio:10.6f} ± {exp_ratio * ratio.error:10.6f}",
            f"Mean PPL(Q)-PPL(base)         : {difference.value:10.6f} ± {difference.error:10.6f}",
        ]

    def _divergence_lines(self) -> list[str]:
        kld, ordered = self.kld, np.sort(self.all.kld)
        return [
            "====== KL divergence statistics ======",
            f"Mean    KLD: {kld.value:10.6f} ± {kld.error:10.6f}",
            f"Maximum KLD: {ordered[-1]:10.6f}",
            *(f"{100 * f:4.1f}%   KLD: {percentile(ordered, f):10.6f}" for f in (0.999, 0.99, 0.95, 0.90)),
            f"Median  KLD: {percentile(ordered, 0.5):10.6f}",
            *(f"{100 * f:4.1f}%   KLD: {percentile(ordered, f):10.6f}" for f in (0.10, 0.05, 0.01, 0.001)),
            f"Minimum KLD: {ordered[0]:10.6f}",
        ]

    def _probability_lines(self) -> list[str]:
        ordered = 100 * np.sort(self.all.p_diff)
        mean, rms, top = self._p_diff.estimate, self.rms_p_diff, self.same_top
        return [
            "====== Token probability statistics ======",
            f"Mean    Δp: {100 * mean.value:6.3f} ± {100 * mean.error:5.3f} %",
            f"Maximum Δp: {ordered[-1]:6.3f}%",
            *(f"{100 * f:4.1f}%   Δp: {percentile(ordered, f):6.3f}%" for f in (0.999, 0.99, 0.95, 0.90, 0.75)),
            f"Median  Δp: {percentile(ordered, 0.5):6.3f}%",
            *(f"{100 * f:4.1f}%   Δp: {percentile(ordered, f):6.3f}%" for f in (0.25, 0.10, 0.05, 0.01, 0.001)),
            f"Minimum Δp: {ordered[0]:6.3f}%",
            f"RMS Δp    : {100 * rms.value:6.3f} ± {100 * rms.error:5.3f} %",
            f"Same top p: {100 * top.value:6.3f} ± {100 * top.error:5.3f} %",
        ]


def _exponential(loss: Estimate) -> Estimate:
    ppl = exponential(loss.value)
    return Estimate(ppl, ppl * loss.error)
