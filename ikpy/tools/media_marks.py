"""Where pictures and sounds are in texts: markers of users, and marks while a template puts a prompt together."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from ikpy.errors import UsageError
from ikpy.tools.media import Media, from_base64
from ikpy.tools.pictures import picture_from
from ikpy.tools.sounds import sound_from
from ikpy.vocab.templates import flat_content

T = TypeVar("T")
MARKER = "<__media__>"
"""Stands for a picture or a sound in texts of users."""
_SECRET = secrets.token_hex(16)
"""A text that nobody writes."""
_MARK = f"<__media_{_SECRET}_"


class Marks(Generic[T]):
    """Texts that stand for media, whatever these are, while a template puts a prompt together."""

    def __init__(self) -> None:
        self.items: list[T] = []

    def add(self, item: T) -> str:
        """What stands for one of the media."""
        self.items.append(item)
        return f"{_MARK}{len(self.items) - 1}__>"

    def joined(self, parts: Iterable[str | T]) -> str:
        """A message of texts and media as one text: newlines are between texts, not beside media."""
        text, beside_text = "", False
        for part in parts:
            is_text = isinstance(part, str)
            text += ("\n" if is_text and beside_text else "") + (part if isinstance(part, str) else self.add(part))
            beside_text = is_text
        return text

    def parts(self, text: str) -> list[str | T]:
        """Texts and media of a text in turn. A template may leave some out, or repeat them."""
        first, *others = text.split(_MARK)
        found: list[str | T] = [first]
        for other in others:
            number, _, behind = other.partition("__>")
            found += [self.items[int(number)], behind]
        return found


def with_markers(text: str, n: int) -> str:
    """A text with n media in front, if it does not say where they are. Raises UsageError if it does for others."""
    if MARKER not in text:
        return MARKER * n + text
    check_markers(text, n)
    return text


def check_markers(text: str, n: int) -> None:
    """Raises UsageError if a text has not as many markers as there are media."""
    if (found := text.count(MARKER)) != n:
        raise UsageError(
            f"Failed to tokenize prompt: number of markers {MARKER} ({found}) and of pictures or sounds ({n}) differ"
        )


def divided(text: str, items: Sequence[T]) -> list[str | T]:
    """A text with as many markers as there are items, as texts and items in turn. Raises UsageError."""
    check_markers(text, len(items))
    first, *others = text.split(MARKER)
    parts: list[str | T] = [first]
    for item, behind in zip(items, others, strict=True):
        parts += [item, behind]
    return parts


def with_marks(message: Mapping[str, Any], marks: Marks[Media]) -> Mapping[str, Any]:
    """A message with marks in place of its pictures and sounds, content parts as `media_of` knows them."""
    content = message.get("content")
    if isinstance(content, str) or not isinstance(content, Sequence):
        return message
    parts = [media_of(part) for part in content]
    if not any(isinstance(part, Media) for part in parts):
        return message
    return {
        **message,
        "content": marks.joined(part if isinstance(part, Media) else flat_content([part]) for part in parts),
    }


def media_of(part: Any) -> Any:
    """The picture or the sound of a content part of type image, audio, or image_url or input_audio with data in it;
    another part as it is."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("image", "audio"):
        given = next((part[name] for name in (kind, "url", "path") if name in part), None)
        return picture_from(given) if kind == "image" else sound_from(given)
    if kind == "image_url":
        given = part.get("image_url")
        return picture_from(given.get("url") if isinstance(given, Mapping) else given)
    if kind == "input_audio":
        given = part.get("input_audio")
        data = given.get("data") if isinstance(given, Mapping) else None
        return sound_from(from_base64(data) if isinstance(data, str) else data)
    return part
