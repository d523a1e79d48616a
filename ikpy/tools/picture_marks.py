"""Where pictures are in texts: markers of users, and marks while a template puts a prompt together."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from ikpy.errors import UsageError
from ikpy.tools.pictures import Picture, picture_from
from ikpy.vocab.templates import flat_content

T = TypeVar("T")
MARKER = "<__media__>"
"""Stands for a picture in texts of users."""
_SECRET = secrets.token_hex(16)
"""A text that nobody writes."""
_MARK = f"<__media_{_SECRET}_"


class Marks(Generic[T]):
    """Texts that stand for pictures, whatever a picture is, while a template puts a prompt together."""

    def __init__(self) -> None:
        self.items: list[T] = []

    def add(self, item: T) -> str:
        """What stands for a picture."""
        self.items.append(item)
        return f"{_MARK}{len(self.items) - 1}__>"

    def joined(self, parts: Iterable[str | T]) -> str:
        """A message of texts and pictures as one text: newlines are between texts, not beside pictures."""
        text, beside_text = "", False
        for part in parts:
            is_text = isinstance(part, str)
            text += ("\n" if is_text and beside_text else "") + (part if isinstance(part, str) else self.add(part))
            beside_text = is_text
        return text

    def parts(self, text: str) -> list[str | T]:
        """Texts and pictures of a text in turn. A template may leave out pictures, or repeat them."""
        first, *others = text.split(_MARK)
        found: list[str | T] = [first]
        for other in others:
            number, _, behind = other.partition("__>")
            found += [self.items[int(number)], behind]
        return found


def with_markers(text: str, n: int) -> str:
    """A text with n pictures in front, if it does not say where they are. Raises UsageError if it does for others."""
    if MARKER not in text:
        return MARKER * n + text
    check_markers(text, n)
    return text


def check_markers(text: str, n: int) -> None:
    """Raises UsageError if a text has not as many markers as there are pictures."""
    if (found := text.count(MARKER)) != n:
        raise UsageError(
            f"Failed to tokenize prompt: number of markers {MARKER} ({found}) and of pictures ({n}) differ"
        )


def divided(text: str, items: Sequence[T]) -> list[str | T]:
    """A text with as many markers as there are items, as texts and items in turn. Raises UsageError."""
    check_markers(text, len(items))
    first, *others = text.split(MARKER)
    parts: list[str | T] = [first]
    for item, behind in zip(items, others, strict=True):
        parts += [item, behind]
    return parts


def with_marks(message: Mapping[str, Any], marks: Marks[Picture]) -> Mapping[str, Any]:
    """A message with marks in place of its pictures: content parts of type image, or image_url with data in it."""
    content = message.get("content")
    if isinstance(content, str) or not isinstance(content, Sequence):
        return message
    parts = [picture_of(part) for part in content]
    if not any(isinstance(part, Picture) for part in parts):
        return message
    return {
        **message,
        "content": marks.joined(part if isinstance(part, Picture) else flat_content([part]) for part in parts),
    }


def picture_of(part: Any) -> Any:
    """The picture of a content part; another part as it is."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "image":
        return picture_from(next((part[name] for name in ("image", "url", "path") if name in part), None))
    if kind == "image_url":
        given = part.get("image_url")
        return picture_from(given.get("url") if isinstance(given, Mapping) else given)
    return part
