"""How prompts and answers fit a slot's context: what is left out of a long prompt, and dropped when it is full."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ikpy.engine.media import MediaStore
    from ikpy.server.params import GenerationParams

TOO_LONG = "the request exceeds the available context size, try increasing it"


class RequestError(Exception):
    """The request of a slot cannot go on; the message is for the client."""


class ContextShift(NamedTuple):
    """Old tokens were dropped: ``n_discard`` of the ``n_left`` behind the first ``n_keep``."""

    n_keep: int
    n_left: int
    n_discard: int


def truncate_prompt(tokens: list[int], n_ctx: int, n_keep: int) -> list[int]:
    """A prompt that is too long: its beginning and its end, blocks of half the rest left out."""
    n_block = max(1, (n_ctx - n_keep) // 2)
    erased = (len(tokens) - n_keep - n_block) // n_block
    return tokens[:n_keep] + tokens[n_keep + erased * n_block :]


def shortened(tokens: list[int], n_ctx: int, n_keep: int) -> list[int]:
    """A prompt of which `truncate_prompt` makes the same, without blocks that it would leave out anyway."""
    n_block = max(1, (n_ctx - n_keep) // 2)
    spare = max(0, (len(tokens) - n_keep - n_block) // n_block - 2)
    return tokens[:n_keep] + tokens[n_keep + spare * n_block :]


@dataclass(frozen=True)
class ContextFit:
    """A slot's room for ``n_ctx`` tokens. ``may_shift``: old tokens may be dropped; ``add_bos``: texts begin with a BOS
    token, which is kept beside those of ``n_keep``."""

    n_ctx: int
    may_shift: bool
    add_bos: bool

    def fitted(self, prompt: list[int], params: GenerationParams, *, whole: bool = False) -> list[int]:
        """A prompt with blocks left out if it is too long. Raises RequestError if it must stay ``whole``."""
        if self._fits(prompt, params, whole=whole):
            return prompt
        return truncate_prompt(prompt, self.n_ctx, self._n_keep(prompt, params))

    def shortened(self, prompt: list[int], params: GenerationParams, *, whole: bool = False) -> list[int]:
        """A prompt of which `fitted` makes the same. Raises RequestError as that does."""
        if self._fits(prompt, params, whole=whole):
            return prompt
        return shortened(prompt, self.n_ctx, self._n_keep(prompt, params))

    def shift(
        self, tokens: list[int], prompt: list[int], params: GenerationParams, media: MediaStore | None = None
    ) -> ContextShift:
        """What is dropped of the tokens of a full context, which begin with a prompt: pictures of a store as a whole.

        A picture in which the tokens that are kept end is kept too, where it leaves room for others.
        """
        n_past = len(tokens)
        keep = min(self._n_keep(prompt, params), n_past)
        if media is not None:
            keep = media.kept_whole(tokens, keep, self._most_kept)
        wanted = params.n_discard
        end = keep + max(1, min(wanted if wanted > 0 else (n_past - keep) // 2, n_past - keep))
        if media is not None:
            keep, end = media.whole(tokens, keep, end)
        return ContextShift(keep, n_past - keep, end - keep)

    def _fits(self, prompt: list[int], params: GenerationParams, *, whole: bool) -> bool:
        if len(prompt) < self.n_ctx:
            return True
        if whole or not self.may_shift or params.prompt_probs is not None:
            raise RequestError(TOO_LONG)
        return False

    def _n_keep(self, prompt: list[int], params: GenerationParams) -> int:
        """Tokens at the beginning that a context shift spares."""
        wanted = len(prompt) if params.n_keep < 0 else params.n_keep + int(self.add_bos)
        return min(wanted, self._most_kept)

    @property
    def _most_kept(self) -> int:
        """Tokens that may be kept at most."""
        return self.n_ctx - 4
