"""Token probabilities as the native and the OpenAI API show them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ikpy.server.tasks import TokenProbability
    from ikpy.vocab import Vocab

LEAST_LOGPROB = -9999.0
"""Shown for a token without any probability, as JSON knows no infinity."""


def token_text(vocab: Vocab, token: int) -> str:
    """Text of a token; a single byte of a longer character is named."""
    piece = vocab.token_to_piece(token, special=True)
    if len(piece) == 1 and piece[0] & 0x80:
        return f"byte: \\x{piece[0]:02x}"
    return piece.decode("utf-8", "replace")


def native(vocab: Vocab, found: Sequence[TokenProbability]) -> list[dict[str, Any]]:
    """Array ``completion_probabilities``."""
    return [
        {
            "content": token_text(vocab, item.token),
            "probs": [{"tok_str": token_text(vocab, token), "prob": p} for token, p in item.top],
        }
        for item in found
    ]


def openai(vocab: Vocab, found: Sequence[TokenProbability], *, post_sampling: bool) -> dict[str, Any]:
    """Object ``logprobs``."""
    key, top_key = ("prob", "top_probs") if post_sampling else ("logprob", "top_logprobs")

    def entry(token: int, p: float) -> dict[str, Any]:
        piece = vocab.token_to_piece(token, special=True)
        value = p if post_sampling else logprob(p)
        return {"id": token, "token": token_text(vocab, token), "bytes": list(piece), key: value}

    content = [
        entry(item.token, item.probability) | {top_key: [entry(token, p) for token, p in item.top]} for item in found
    ]
    return {"content": content}


def logprob(p: float) -> float:
    """Natural logarithm of a probability."""
    return math.log(p) if p > 0 else LEAST_LOGPROB
