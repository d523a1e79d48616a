"""Prompts of models with an encoder and a decoder, where those of others may have pictures and sounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ikpy.engine.encoded_texts import EncodedTexts
from ikpy.tools.media_tokens import MediaReader

if TYPE_CHECKING:
    from ikpy.tools.media import Media
    from ikpy.vocab import Vocab


class PromptReader(MediaReader):
    """Stands where other models have what reads pictures: ids of the encoder's text need no rows."""

    def __init__(self, n_vocab: int, vocab: Vocab) -> None:
        self.texts = EncodedTexts(n_vocab)
        super().__init__(None, self.texts, vocab)

    def refresh(self, media: Sequence[Media], tokens: Sequence[int] | None = None) -> None:
        return

    def fitting(self, media: Sequence[Media], tokens: Sequence[int], taken: int) -> tuple[int, int]:
        return len(tokens), 0

    def text(self, tokens: Sequence[int]) -> str:
        return self._vocab.detokenize(self.texts.plain(tokens))

    def shown(self, tokens: Sequence[int]) -> list[int]:
        return self.texts.plain([token for token in tokens if self.store.is_media(token)])
