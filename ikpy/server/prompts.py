"""Prompts of native requests: text, token ids, mixtures, lists of prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ikpy.errors import UsageError
from ikpy.server.errors import bad_request
from ikpy.server.media import MOST_MEDIA, MediaSource
from ikpy.tools.media import Media
from ikpy.tools.media_marks import divided

if TYPE_CHECKING:
    from ikpy.vocab import Vocab

WRONG_TYPE = (
    '"prompt" elements must be a string, a list of tokens, a JSON object containing a prompt string, '
    "or a list of mixed strings & tokens."
)
EMPTY = '"prompt" must not be empty'


@dataclass(frozen=True)
class Prompt:
    """Tokens of a prompt, what answers show as ``prompt``, and its text if it came as one.

    A prompt with pictures or sounds has ``parts`` and no tokens until these are made of them; then it has ``media``.
    """

    tokens: list[int]
    shown: Any
    text: str | None = None
    parts: tuple[str | MediaSource, ...] = ()
    media: tuple[Media, ...] = ()


def is_token(value: Any) -> bool:
    """Whether a JSON value is an integer."""
    return isinstance(value, int) and not isinstance(value, bool)


def read_prompts(value: Any, vocab: Vocab) -> list[Prompt]:
    """Prompts of a field; several only for a list of prompts. Raises ApiError 400."""
    if isinstance(value, str):
        return [Prompt(_text(value, vocab), value, value)]
    if not isinstance(value, list):
        return [_one(value, vocab)]
    if not value:
        raise bad_request(EMPTY)
    if all(is_token(item) for item in value):
        return [Prompt(check_tokens(value, vocab), value)]
    if any(is_token(item) for item in value):
        return [Prompt(_mixed(value, vocab), None)]
    if len(value) == 1 and isinstance(value[0], str):
        return read_prompts(value[0], vocab)
    return [_one(item, vocab) for item in value]


def is_batch(value: Any) -> bool:
    """Whether a prompt field is a list of several prompts, which is answered with a list."""
    return isinstance(value, list) and len(value) > 1 and not any(is_token(item) for item in value)


def _one(value: Any, vocab: Vocab) -> Prompt:
    """A prompt of a list, which answers do not show."""
    if isinstance(value, str):
        return Prompt(_text(value, vocab), None, value)
    if isinstance(value, dict) and isinstance(text := value.get("prompt_string"), str):
        if value.get("multimodal_data"):
            return Prompt([], None, text, _media_parts(text, value["multimodal_data"]))
        return Prompt(_text(text, vocab), None, text)
    if isinstance(value, list):
        if not value:
            raise bad_request(EMPTY)
        if all(is_token(item) for item in value):
            return Prompt(check_tokens(value, vocab), None)
        return Prompt(_mixed(value, vocab), None)
    raise bad_request(WRONG_TYPE)


def _text(text: str, vocab: Vocab) -> list[int]:
    return _not_empty(vocab.tokenize(text, add_special=True, parse_special=True))


def _media_parts(text: str, data: Any) -> tuple[str | MediaSource, ...]:
    """A text with markers and base64 of the files that these stand for, in turn."""
    files = [data] if isinstance(data, str) else data
    if not isinstance(files, list) or not all(isinstance(item, str) for item in files):
        raise bad_request('"multimodal_data" must be an array of base64 strings')
    if len(files) > MOST_MEDIA:
        raise bad_request(f"too many media files, the maximum is {MOST_MEDIA}")
    try:
        return tuple(divided(text, [MediaSource(file) for file in files]))
    except UsageError as error:
        raise bad_request(str(error)) from None


def _mixed(items: list[Any], vocab: Vocab) -> list[int]:
    """Texts and ids in turn; only the first may get a BOS token."""
    if not all(is_token(item) or isinstance(item, str) for item in items):
        raise bad_request(WRONG_TYPE)
    return _not_empty(join_tokens(items, vocab, add_special=True))


def join_tokens(items: list[Any], vocab: Vocab, *, add_special: bool, parse_special: bool = True) -> list[int]:
    """Ids of texts and ids in turn; ``add_special`` holds for a text at the beginning."""
    tokens: list[int] = []
    for i, item in enumerate(items):
        if isinstance(item, str):
            tokens += vocab.tokenize(item, add_special=add_special and i == 0, parse_special=parse_special)
        else:
            tokens += check_tokens([item], vocab)
    return tokens


def check_tokens(tokens: list[int], vocab: Vocab) -> list[int]:
    """The ids. Raises ApiError 400 for one outside the vocabulary."""
    for token in tokens:
        if not 0 <= token < vocab.n_tokens:
            raise bad_request(f"token id {token} is outside the vocabulary (0 to {vocab.n_tokens - 1})")
    return tokens


def _not_empty(tokens: list[int]) -> list[int]:
    if not tokens:
        raise bad_request(EMPTY)
    return tokens
