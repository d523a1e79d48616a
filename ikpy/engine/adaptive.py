"""The adaptive-p sampler: draws tokens whose probabilities are near a target on average."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ikpy.engine import candidates as shape
from ikpy.engine.candidates import Candidates
from ikpy.engine.feedback import Feedback
from ikpy.engine.sampling_params import SamplingParams

MOST_DECAY = 0.99


class AdaptiveP(Feedback[tuple[float, float]]):
    """Aims where the mean probability of the accepted tokens falls short of the target. Its state is their decaying sum
    and the sum of their weights."""

    def __init__(self, params: SamplingParams, n_vocab: int) -> None:
        self._target = params.adaptive_target
        self._decay = min(params.adaptive_decay, MOST_DECAY)
        self._counts_current = params.adaptive_updt_w_cur
        self._n_vocab = n_vocab
        self._original: NDArray[np.float64] | None = None
        total = 1.0 / (1.0 - self._decay)
        super().__init__((self._target * total, total))

    def begin(self, c: Candidates) -> None:
        """Notes the probabilities before all samplers, if those are what counts."""
        self._original = None if self._counts_current else self._by_token(c.ids, c.probabilities())

    def shaped(self, c: Candidates) -> Candidates:
        """Candidates with the logits of the step."""
        probability = c.probabilities()
        if self._original is None:
            self._original = self._by_token(c.ids, probability)
        wanted = min(max(2.0 * self._target - self.state[0] / self.state[1], 0.0), 1.0)
        return Candidates(c.ids, shape.adaptive_logits(probability, wanted))

    def note_drawn(self, token: int) -> None:
        """A token was drawn."""
        if self._original is not None:
            self.drawn = token, float(self._original[token])

    def learned(self, value: float) -> tuple[float, float]:
        return value + self._decay * self.state[0], 1.0 + self._decay * self.state[1]

    def _by_token(self, ids: NDArray[np.int32], probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
        found = np.zeros(self._n_vocab)
        found[ids] = probabilities
        return found
