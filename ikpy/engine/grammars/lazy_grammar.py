"""Grammars that hold only after a marker was generated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ikpy.engine.grammars.grammar import TextGrammar, TokenTexts


@dataclass(frozen=True)
class Trigger:
    """When a grammar begins to hold: behind ``marker``.

    ``skipped``: opening and closing tag of a part at the beginning in which the marker means nothing; ``inside``: the
    prompt has opened that part already; ``again``: there may be such parts anywhere.
    """

    marker: str
    skipped: tuple[str, str] | None = None
    inside: bool = False
    again: bool = False


class LazyGrammar:
    """Allows everything until the marker comes, then what ``grammar`` allows behind it.

    ``piece`` gives the text of a token, control tokens included. A token that holds the marker and text behind it which
    the grammar does not allow leaves the rest of the answer free: it cannot be taken back.
    """

    def __init__(
        self, grammar: TextGrammar, trigger: Trigger, texts: TokenTexts, piece: Callable[[int], bytes]
    ) -> None:
        self._grammar = grammar
        self._trigger = trigger
        self._texts = texts
        self._piece = piece
        self.reset()

    def reset(self) -> None:
        """Returns to the start."""
        self._grammar.reset()
        self._text = b""
        self._active = False
        self._searching = True

    @property
    def active(self) -> bool:
        """Whether the grammar holds."""
        return self._active

    def allows(self, token: int) -> bool:
        """Whether ``token`` may come next."""
        return not self._active or self._grammar.allows(token)

    @property
    def ready(self) -> bool:
        """Whether no mask is being computed in another thread."""
        return self._grammar.ready

    def when_ready(self, call: Callable[[], object]) -> None:
        """Calls a function once ``ready`` is true."""
        self._grammar.when_ready(call)

    def begin_mask(self) -> None:
        """Has `mask` computed in another thread, if it is not known."""
        if self._active:
            self._grammar.begin_mask()

    def mask(self) -> NDArray[np.bool_]:
        """True for every token that may come next, [n_vocab]."""
        return self._grammar.mask() if self._active else np.ones(self._texts.n_vocab, np.bool_)

    def accept(self, token: int) -> None:
        """Advances by ``token``."""
        if self._active:
            self._grammar.accept(token)
        elif self._searching:
            self._text += self._piece(token)
            self._search()

    def _search(self) -> None:
        start = self._start()
        marker = self._trigger.marker.encode()
        at = -1 if start is None else self._text.find(marker, start)
        if at < 0:
            return
        self._searching = False
        tokens = self._texts.tokens_of(self._text[at + len(marker) :])
        if tokens is None:
            return
        for token in tokens:
            if not self._grammar.allows(token):
                return
            self._grammar.accept(token)
        self._active = True

    def _start(self) -> int | None:
        """Where the marker counts: behind the skipped part; None while that goes on."""
        if self._trigger.skipped is None:
            return 0
        opening, closing = (tag.encode() for tag in self._trigger.skipped)
        if self._trigger.again:
            return self._behind_last(opening, closing)
        text = self._text.lstrip()
        if not self._trigger.inside and not text.startswith(opening):
            return None if opening.startswith(text) else 0
        end = self._text.find(closing)
        return None if end < 0 else end + len(closing)

    def _behind_last(self, opening: bytes, closing: bytes) -> int | None:
        """Where the last skipped part ends; None while it goes on."""
        at = self._text.rfind(opening)
        if at < 0 and not self._trigger.inside:
            return 0
        end = self._text.find(closing, max(at, 0))
        return None if end < 0 else end + len(closing)
