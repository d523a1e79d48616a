"""Pictures and sounds of requests: where they come from, and what of a conversation they are."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ikpy.errors import IkpyError
from ikpy.server.errors import bad_request
from ikpy.sound.samples import MAX_SECONDS, SAMPLE_RATE
from ikpy.tools.media import Media, from_base64
from ikpy.tools.media_files import media_of_file
from ikpy.tools.media_marks import MARKER, Marks
from ikpy.tools.media_tokens import NO_MEDIA
from ikpy.tools.pictures import Picture

NO_PROJECTOR = "Multimodal data provided, but model does not support multimodal requests."
NOT_LOADED = "Failed to load image or audio file"
NO_KINDS = {"image": False, "audio": False}
"""Which kinds of media are taken without a projector."""
FIELDS = {"image_url": ("image", "url"), "input_audio": ("audio", "data")}
"""Types of content parts: what they hold, and where."""
ALSO_TAKEN = {"input_audio": "url"}
MOST_MEDIA = 256
"""Of a request."""
MOST_BYTES = 64 << 20
MOST_PIXELS = 256 << 20
"""Of all pictures of a request."""
MOST_SECONDS = MAX_SECONDS
"""Of all sounds of a request."""
KEPT_BYTES = 96 << 20
"""Of decoded media of a request while it waits to be encoded."""
DATA_HEADS = "data:image/", "data:audio/", "data:video/"
"""Beginnings of addresses with data in them; what the data is tells its beginning."""
DOWNLOAD_SECONDS = 10.0
DOWNLOAD_BYTES = 10 << 20
LONGEST_SHOWN = 100
"""Characters of an address in an error."""


@dataclass(frozen=True)
class MediaSource:
    """A picture or a sound as a request has it: an address (``data:``, ``http:``, ``https:``, ``file:``) or base64."""

    text: str


@dataclass(frozen=True)
class MediaRules:
    """Where media may come from: ``folder`` is the one of ``file:`` addresses, None if they are not allowed;
    ``downloads``: whether others may be asked."""

    folder: str | None = None
    downloads: bool = True


class ChatMedia:
    """The pictures and sounds of a conversation. ``marks`` stand for them in the texts that templates see. ``takes``:
    whether there is a projector for each kind."""

    def __init__(self, takes: Mapping[str, bool]) -> None:
        self.marks: Marks[MediaSource] = Marks()
        self._takes = takes

    def _source(self, part: Mapping[str, Any]) -> MediaSource:
        """The picture or the sound of a content part. Raises ApiError 400."""
        kind = part["type"]
        what, name = FIELDS[kind]
        if not self._takes[what]:
            raise bad_request(NO_MEDIA.format(what))
        given = part.get(kind)
        found = given
        if isinstance(given, dict):
            found = given.get(name) or given.get(ALSO_TAKEN.get(kind, name))
        if not isinstance(found, str) or not found:
            raise bad_request(f"'{kind}' must be an object with a string '{name}'")
        return MediaSource(found)

    def content(self, parts: Sequence[Mapping[str, Any]]) -> str | None:
        """Content with media as one text, None for parts without any. Raises ApiError 400."""
        if all(part["type"] == "text" for part in parts):
            return None
        found = [str(part["text"]) if part["type"] == "text" else self._source(part) for part in parts]
        joined = self.marks.joined(found)
        if len(self.marks.items) > MOST_MEDIA:
            raise bad_request(f"too many media files, the maximum is {MOST_MEDIA}")
        return joined

    def public(self, prompt: str) -> str:
        """A rendered prompt with the markers of native requests."""
        return "".join(MARKER if isinstance(part, MediaSource) else part for part in self.marks.parts(prompt))


def fetched(parts: Sequence[str | MediaSource], rules: MediaRules) -> list[str | bytes]:
    """The parts with the files of their media. It may wait for other hosts. Raises ApiError 400."""
    known: dict[MediaSource, bytes] = {}
    n_bytes = 0
    for part in parts:
        if isinstance(part, MediaSource) and part not in known:
            known[part] = content_of(part.text, rules)
            n_bytes += len(known[part])
            if n_bytes > MOST_BYTES:
                raise bad_request(f"the pictures and sounds have more than {MOST_BYTES >> 20} MiB together")
    return [part if isinstance(part, str) else known[part] for part in parts]


def decoded(parts: Sequence[str | bytes], takes: Mapping[str, bool]) -> list[str | Media]:
    """The parts with their media, whose files can be read and for which there is a projector. Little of what is decoded
    is kept: the rest is decoded again when it is encoded. Raises ApiError 400."""
    known: dict[bytes, Media] = {}
    n_kept = n_pixels = n_samples = 0
    for part in parts:
        if isinstance(part, str) or part in known:
            continue
        try:
            media = known[part] = media_of_file(part)
        except (IkpyError, MemoryError) as error:
            raise bad_request(f"{NOT_LOADED}: {str(error) or 'too little memory'}") from None
        if not takes[media.what]:
            raise bad_request(NO_MEDIA.format(media.what))
        n_kept += media.n_bytes
        if isinstance(media, Picture):
            n_pixels += media.n_bytes // 3
        else:
            n_samples += media.n_bytes // 4
        if n_pixels > MOST_PIXELS:
            raise bad_request(f"the pictures have more than {MOST_PIXELS >> 20} megapixels together")
        if n_samples > MOST_SECONDS * SAMPLE_RATE:
            raise bad_request(f"the sounds are longer than {MOST_SECONDS} seconds together")
        if n_kept > KEPT_BYTES:
            media.drop()
    return [part if isinstance(part, str) else known[part] for part in parts]


def content_of(address: str, rules: MediaRules) -> bytes:
    """Bytes of the file that an address means. Raises ApiError 400."""
    if address.startswith(("http://", "https://")):
        return downloaded(address, rules)
    if address.startswith("file://"):
        return read_file(address.removeprefix("file://"), rules)
    if address.startswith("data:"):
        head, comma, text = address.partition(",")
        if not comma:
            raise bad_request("Invalid uri-encoded base64 value")
        if not head.startswith(DATA_HEADS):
            raise bad_request(f"Invalid uri format: {head[:LONGEST_SHOWN]}")
        if not head.endswith(";base64"):
            raise bad_request("uri must be base64 encoded")
        return from_text(text)
    return from_text(address)


def from_text(text: str) -> bytes:
    """Bytes of base64 text. Raises ApiError 400."""
    data = from_base64(text)
    if not data:
        raise bad_request("Invalid base64 value")
    return data


def read_file(name: str, rules: MediaRules) -> bytes:
    """A file of the folder for them. Raises ApiError 400 for one outside of it."""
    shown = name[:LONGEST_SHOWN]
    if rules.folder is None:
        raise bad_request("file:// URLs are not allowed unless --media-path is specified")
    try:
        folder = Path(rules.folder).resolve()
        path = (folder / name.lstrip("/")).resolve()
        if not path.is_relative_to(folder):
            raise bad_request(f"file path is not allowed: {shown}")
        if not path.is_file():  # reading from a pipe might wait for ever
            raise FileNotFoundError(name)
        return path.read_bytes()
    except (OSError, ValueError, RuntimeError):  # names with a zero byte, loops of links
        raise bad_request(f"file does not exist or cannot be opened: {shown}") from None


def downloaded(url: str, rules: MediaRules) -> bytes:
    """What another host sends. Raises ApiError 400."""
    import httpx

    if not rules.downloads:
        raise bad_request("Failed to download image: --offline forbids it")
    data, deadline = bytearray(), time.monotonic() + DOWNLOAD_SECONDS
    try:
        with httpx.stream("GET", url, timeout=DOWNLOAD_SECONDS, follow_redirects=True) as response:
            response.raise_for_status()
            for chunk in response.iter_bytes():
                data += chunk
                if len(data) > DOWNLOAD_BYTES:
                    raise bad_request(f"Failed to download image: more than {DOWNLOAD_BYTES >> 20} MiB")
                if time.monotonic() > deadline:
                    raise bad_request(f"Failed to download image: more than {DOWNLOAD_SECONDS:g} seconds")
    except httpx.HTTPStatusError as error:
        raise bad_request(f"Failed to download image: the host answered {error.response.status_code}") from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise bad_request(f"Failed to download image: {reason.splitlines()[0][:LONGEST_SHOWN]}") from None
    return bytes(data)
