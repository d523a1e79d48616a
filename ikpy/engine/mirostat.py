"""Mirostat (arXiv:2007.14966): leaves as many candidates as keep the surprise of a text near a target."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ikpy.engine import candidates as shape
from ikpy.engine.candidates import Candidates, FloatArray
from ikpy.engine.feedback import Feedback
from ikpy.engine.sampling_params import SamplingParams


class Mirostat(Feedback[float]):
    """Its state is the limit of surprise in bits, which moves by what the accepted tokens surprised."""

    def __init__(self, params: SamplingParams, n_vocab: int) -> None:
        super().__init__(2.0 * params.mirostat_tau)
        self._params = params
        self._n_vocab = n_vocab
        self._whole: FloatArray = np.empty(0)

    def limited(self, c: Candidates) -> Candidates:
        """The candidates at the temperature within the limit, the likeliest first."""
        c = shape.temperature(c, self._params.temperature).sort()
        self._whole = p = c.probabilities()
        if self._params.mirostat == 1:
            return shape.top_k(c, shape.mirostat_k(p, self.state, self._n_vocab), 1)
        with np.errstate(divide="ignore"):
            kept = max(1, int((-np.log2(p) <= self.state).sum()))
        return c.select(slice(0, kept), True)

    def note_drawn(self, token: int, ids: NDArray[np.int32], probabilities: FloatArray) -> None:
        """A token was drawn from these candidates. 1 steers the surprise of the whole distribution, 2 that of these."""
        judged = self._whole[: len(ids)] if self._params.mirostat == 1 else probabilities
        self.drawn = token, -math.log2(float(judged[ids == token][0]))

    def learned(self, value: float) -> float:
        return self.state - self._params.mirostat_eta * (value - self._params.mirostat_tau)
