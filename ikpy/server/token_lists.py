"""Log probabilities as lists over the tokens of a text, the form of OpenAI's /v1/completions."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ikpy.server.probabilities import logprob, token_text
from ikpy.server.tasks import TokenProbability

if TYPE_CHECKING:
    from ikpy.vocab import Vocab


def prompt_pieces(vocab: Vocab, tokens: Sequence[int]) -> list[bytes]:
    """Bytes that every token of a prompt adds to its text: none for a BOS token at its beginning, where the vocabulary
    adds one, and without the space that the tokenizer puts before a text."""
    pieces = [vocab.token_to_piece(token, special=True) for token in tokens]
    if vocab.add_bos and pieces and tokens[0] == vocab.bos:
        pieces[0] = b""
    if vocab.kind == "spm" and vocab.add_space_prefix:
        for i, piece in enumerate(pieces):
            if i == 0 or not vocab.token_to_piece(tokens[i - 1]):  # behind a control token
                pieces[i] = piece.removeprefix(b" ")
    return pieces


class TokenLists:
    """Lists ``tokens``, ``token_logprobs``, ``top_logprobs`` and ``text_offset`` of an answer, made part by part.

    ``n_top`` most probable tokens and the one that is there are shown for every place. ``special``: control tokens have
    text in answers.
    """

    def __init__(self, vocab: Vocab, n_top: int, *, special: bool) -> None:
        self._vocab = vocab
        self._n_top = n_top
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._n_characters = 0

    def add(self, found: Sequence[TokenProbability]) -> dict[str, list[Any]]:
        """Lists of the next tokens of an answer."""
        eog = self._vocab.eog
        pieces = [b"" if i.token in eog else self._vocab.token_to_piece(i.token, self._special) for i in found]
        return {
            "tokens": [token_text(self._vocab, item.token) for item in found],
            "token_logprobs": [logprob(item.probability) for item in found],
            "top_logprobs": [self._top(item) for item in found],
            "text_offset": [self._offset(piece) for piece in pieces],
        }

    def add_prompt(
        self, tokens: Sequence[int], pieces: Sequence[bytes], found: Sequence[TokenProbability]
    ) -> dict[str, list[Any]]:
        """Lists of a prompt, whose first token depends on nothing and has no probability."""
        return {
            "tokens": [token_text(self._vocab, token) for token in tokens],
            "token_logprobs": [None, *(logprob(item.probability) for item in found)],
            "top_logprobs": [None, *(self._top(item) for item in found)],
            "text_offset": [self._offset(piece) for piece in pieces],
        }

    def _top(self, item: TokenProbability) -> dict[str, float]:
        """Log probabilities by text. Of tokens with the same text the most probable one counts."""
        shown: dict[str, float] = {}
        for token, p in (*item.top[: self._n_top], (item.token, item.probability)):
            shown.setdefault(token_text(self._vocab, token), logprob(p))
        return shown

    def _offset(self, piece: bytes) -> int:
        """Characters before a token; one that goes on with a character begins where that does."""
        start = self._n_characters
        self._n_characters += len(self._decoder.decode(piece))
        return start
