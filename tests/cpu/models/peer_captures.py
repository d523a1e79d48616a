"""Log-probabilities that other engines computed, in tests/data/peer_logits (`benchmarks.peer_logits`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parents[2] / "data" / "peer_logits"


def check_against_peer(name: str, tokens: np.ndarray, logits: np.ndarray, tolerance: float) -> None:
    """Holds logits [T, n_vocab] to the capture of that name: the largest difference of log-probabilities.

    The model of the capture is written by the test, from its seed: `tokens` must be those of the capture.
    """
    with np.load(FOLDER / f"{name}.npz") as capture:
        assert np.array_equal(capture["tokens"], tokens), f"{name}: the capture is of other tokens"
        expected, peer = capture["logprobs"].astype(np.float64), str(capture["peer"])
    z = logits.astype(np.float64)
    z -= z.max(-1, keepdims=True)
    differences = np.abs(z - np.log(np.exp(z).sum(-1, keepdims=True)) - expected)
    token, word = np.unravel_index(differences.argmax(), differences.shape)
    worst = differences[token, word]
    assert worst <= tolerance, f"{name}: token {token}, logit {word} {worst:.2e} off {peer}, {tolerance:.0e} allowed"
