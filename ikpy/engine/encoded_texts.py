"""Texts of models with an encoder and a decoder, as lists of ids like any other.

Ids from n_vocab on are tokens that the encoder reads (id - n_vocab), those below are the decoder's. A sequence begins
with the first kind; the encoder reads all of it at once, and its keys and values for the decoder stay in these tokens'
cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ikpy.engine.batch import Batch
from ikpy.engine.media import MediaStore
from ikpy.errors import UsageError

if TYPE_CHECKING:
    from ikpy.engine.context import Context
    from ikpy.engine.model import Model
    from ikpy.engine.params import ContextParams


class EncodedTexts(MediaStore):
    """Stands where ids of pictures have their rows: here they need none."""

    def __init__(self, n_vocab: int) -> None:
        super().__init__(n_vocab, 0)
        self.end = 2 * n_vocab

    @property
    def holds_texts(self) -> bool:
        return True

    def has_media(self, tokens: Sequence[int]) -> bool:
        return max(tokens, default=0) >= self.n_vocab

    def prompt(self, tokens: Sequence[int], start: int) -> list[int]:
        """The ids of a text that the encoder reads, and the token that the decoder starts with."""
        return [*(token + self.n_vocab for token in tokens), start]

    def plain(self, tokens: Sequence[int]) -> list[int]:
        """Tokens of the vocabulary, of both kinds."""
        return [token % self.n_vocab for token in tokens]

    def turn(self, tokens: Sequence[int]) -> int:
        """Length of the encoder's text among these."""
        return sum(token >= self.n_vocab for token in tokens)

    def cut(self, tokens: Sequence[int], n: int) -> int:
        """The encoder's text that the tokens begin with, or else at most n of them."""
        return self.turn(tokens) if len(tokens) and self.is_media(tokens[0]) else min(n, len(tokens))

    def kept(self, ours: Sequence[int], theirs: Sequence[int], n: int) -> int:
        """All of n equal tokens if they have both encoder's texts, or none."""
        return n if n >= max(self.turn(ours), self.turn(theirs)) else 0


def with_texts(model: Model, params: ContextParams) -> ContextParams:
    """The parameters of a context, with the ids of texts if the model has an encoder for these."""
    if model.arch.decoder_start is None or isinstance(params.media, EncodedTexts):
        return params
    if params.media is not None:
        raise UsageError(f"{model.hparams.arch} models read tokens only, no pictures and sounds")
    return replace(params, media=EncodedTexts(model.hparams.n_vocab))


def needs_texts(model: Model) -> UsageError:
    """What tools say that give a model tokens without a text for its encoder."""
    return UsageError(
        f"a model of architecture '{model.hparams.arch}' writes behind a text that its encoder has read: use ikpy cli, "
        "ikpy server or ikpy.LLM"
    )


def prompt_of(context: Context, tokens: Sequence[int]) -> list[int]:
    """The ids of a text to go on from, as the model wants them."""
    start, texts = context.model.arch.decoder_start, context.params.media
    if start is None or not isinstance(texts, EncodedTexts):
        return list(tokens)
    return texts.prompt(tokens, start)


def texts_of(context: Context, tokens: Sequence[int]) -> list[int]:
    """The ids of a text whose states are wanted, of the encoder where there is one."""
    ids = prompt_of(context, tokens)
    return ids if context.model.arch.decoder_start is None else ids[:-1]


class TextBatch:
    """A batch whose tokens are those of encoders' texts (is_text, bool [n]) or of decoders, whose texts have `lengths`
    (int64 [n]). Raises UsageError for a text without its beginning, and for a decoder's token without a text.
    """

    def __init__(self, batch: Batch, n_vocab: int) -> None:
        self._batch, self.n_vocab = batch, n_vocab
        self.is_text = batch.tokens >= n_vocab
        self.lengths = self._lengths()
        self._starts = np.flatnonzero(self.is_text & (batch.pos == 0))
        self._check()

    def _lengths(self) -> NDArray[np.int64]:
        """Of the texts before the tokens: what the batch says, and what it has of the sequence itself."""
        lengths = self._batch.turns.copy()
        for mask in np.unique(self._batch.masks[self.is_text]).tolist():
            own = self._batch.masks == mask
            lengths[own & ~self.is_text] += int((own & self.is_text).sum())
        return lengths

    def _check(self) -> None:
        pos, masks, is_text = self._batch.pos, self._batch.masks, self.is_text
        follows = np.zeros(len(pos), bool)
        follows[1:] = is_text[:-1] & (masks[1:] == masks[:-1]) & (pos[1:] == pos[:-1] + 1)
        if (is_text & (pos > 0) & ~follows).any():
            raise UsageError("the encoder reads a text as a whole: its tokens must be in one batch, in order")
        if (~is_text & (self.lengths <= 0)).any():
            raise UsageError(
                "this model writes behind a text that its encoder has read: there is none before a token of the batch"
            )

    @property
    def texts(self) -> list[tuple[int, ...]]:
        """Sequences of every text that the batch has."""
        return [self._batch.seq_ids[start] for start in self._starts.tolist()]

    def bounds(self, n: int) -> list[int]:
        """Ends of micro-batches of at most n tokens, of one kind each, that cut no text apart. UsageError for a text
        with more tokens.
        """
        n_tokens, found, start = len(self.is_text), list[int](), 0
        while start < n_tokens:
            end = start + self._same_kind(start, min(start + n, n_tokens))
            if self.is_text[start] and end < n_tokens and self.is_text[end] and self._batch.pos[end]:
                end = int(self._starts[self._starts <= end][-1])
                if end == start:
                    raise UsageError(
                        f"the {self._length(start)} tokens of the encoder's text see each other and must fit one "
                        f"micro-batch of {n}: raise n_ubatch (-ub)"
                    )
            found.append(end)
            start = end
        return found

    def _length(self, start: int) -> int:
        """Tokens of the text that begins there."""
        following = self._starts[self._starts > start]
        return self._same_kind(start, int(following[0]) if len(following) else len(self.is_text))

    def _same_kind(self, start: int, end: int) -> int:
        """Tokens from start on, up to end, that are of one kind."""
        others = np.flatnonzero(self.is_text[start:end] != self.is_text[start])
        return int(others[0]) if len(others) else end - start
