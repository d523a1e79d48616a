"""Token probabilities: of a drawn token, and as the native and the OpenAI API show them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ikpy.server.tasks import TokenProbability

if TYPE_CHECKING:
    from ikpy.server.tasks import CompletionTask
    from ikpy.vocab import Vocab

LEAST_LOGPROB = -9999.0
"""Shown for a token without any probability, as JSON knows no infinity."""
N_ENTRY = 6
"""Values of a token in `openai`: id, text, bytes, log probability."""


def of_token(task: CompletionTask, token: int, logits: NDArray[np.float32]) -> TokenProbability | None:
    """Probabilities of the drawn token and the most likely ones, before or after the samplers; None if not wanted."""
    n = task.params.n_probs
    if n <= 0:
        return None
    if task.params.post_sampling_probs:
        ids, p = task.sampler.last_ids.astype(np.int64), task.sampler.last_probabilities
    else:
        ids, p = np.arange(len(logits), dtype=np.int64), softmax(logits, task)
    order = largest(p, n)
    at = np.flatnonzero(ids == token)
    own = float(p[at[0]]) if len(at) else 0.0
    return TokenProbability(token, own, tuple((int(ids[i]), float(p[i])) for i in order))


def largest(p: NDArray[Any], n: int) -> NDArray[np.intp]:
    """Places of the n largest values, in descending order, of equal ones the first; without sorting all."""
    first = max(0, len(p) - n)
    at = np.flatnonzero(p >= np.partition(p, first)[first])
    return at[np.argsort(-p[at], kind="stable")[:n]]


def softmax(logits: NDArray[np.float32], task: CompletionTask) -> NDArray[np.float64]:
    """Softmax of the logits with the biases of the request and without ignored ends, [n_vocab]."""
    x = task.sampler.biased(logits).astype(np.float64)
    p = np.exp(x - x.max())
    return p / p.sum()


def token_text(vocab: Vocab, token: int) -> str:
    """Text of a token; a single byte of a longer character is named."""
    piece = vocab.token_to_piece(token, special=True)
    if len(piece) == 1 and piece[0] & 0x80:
        return f"byte: \\x{piece[0]:02x}"
    return piece.decode("utf-8", "replace")


def native(vocab: Vocab, found: Sequence[TokenProbability], *, post_sampling: bool) -> list[dict[str, Any]]:
    """Array ``completion_probabilities``: the names of ik_llama.cpp and those of llama.cpp."""
    return [
        {
            "content": token_text(vocab, item.token),
            "probs": [{"tok_str": token_text(vocab, token), "prob": p} for token, p in item.top],
            **shown,
        }
        for item, shown in zip(found, openai(vocab, found, post_sampling=post_sampling)["content"], strict=True)
    ]


def openai(
    vocab: Vocab, found: Sequence[TokenProbability], *, post_sampling: bool, n_top: int | None = None
) -> dict[str, Any]:
    """Object ``logprobs``, with at most ``n_top`` of the most probable tokens."""
    key, top_key = ("prob", "top_probs") if post_sampling else ("logprob", "top_logprobs")

    def entry(token: int, p: float) -> dict[str, Any]:
        piece = vocab.token_to_piece(token, special=True)
        value = p if post_sampling else logprob(p)
        return {"id": token, "token": token_text(vocab, token), "bytes": list(piece), key: value}

    content = [
        entry(item.token, item.probability) | {top_key: [entry(token, p) for token, p in item.top[:n_top]]}
        for item in found
    ]
    return {"content": content}


def logprob(p: float) -> float:
    """Natural logarithm of a probability."""
    return math.log(p) if p > 0 else LEAST_LOGPROB
