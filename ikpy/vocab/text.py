"""Text as the tokenizers see it: byte strings, structural UTF-8 decoding and the GPT-2 byte map."""

from __future__ import annotations

import functools

import regex

SPACE_SYMBOL = "\u2581"
REPLACEMENT = "\ufffd"

# Bytes that are not valid UTF-8 travel through the pipeline as lone surrogates U+DC80..U+DCFF.
_ESCAPED_BYTE = regex.compile("[\udc80-\udcff]")


def to_internal(text: str | bytes) -> str:
    """Text as str in which every byte that is not valid UTF-8 is one lone surrogate U+DC80..U+DCFF."""
    if isinstance(text, bytes):
        return text.decode("utf-8", "surrogateescape")
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return regex.sub("[\ud800-\udc7f\udd00-\udfff]", REPLACEMENT, text)
    return text


def to_bytes(text: str) -> bytes:
    """Inverse of :func:`to_internal`."""
    return text.encode("utf-8", "surrogateescape")


def has_invalid_bytes(text: str) -> bool:
    """True when ``text`` carries escaped bytes that are not valid UTF-8."""
    return not text.isascii() and _ESCAPED_BYTE.search(text) is not None


def _structural_char(data: bytes, pos: int) -> tuple[str, int]:
    """Character at ``pos`` judged by lead and continuation bits alone, and its length in bytes."""
    lead = data[pos]
    if lead < 0x80:
        return chr(lead), 1
    length = 2 if lead >> 5 == 0b110 else 3 if lead >> 4 == 0b1110 else 4 if lead >> 3 == 0b11110 else 0
    tail = data[pos + 1 : pos + length]
    if length == 0 or len(tail) != length - 1 or any(byte >> 6 != 0b10 for byte in tail):
        return REPLACEMENT, 1
    code = lead & (0x7F >> length)
    for byte in tail:
        code = code << 6 | byte & 0x3F
    if 0xD800 <= code <= 0xDFFF or code > 0x10FFFF:
        return REPLACEMENT, 1
    return chr(code), length


def decode_structural(text: str) -> str:
    """Resolve escaped bytes: each bad byte becomes U+FFFD.

    Overlong forms are structurally sound and decode to the character they spell, as in the reference;
    surrogates and values past U+10FFFF, on which the reference aborts, count as bad bytes.
    """
    if not has_invalid_bytes(text):
        return text
    data = to_bytes(text)
    out: list[str] = []
    pos = 0
    while pos < len(data):
        char, length = _structural_char(data, pos)
        out.append(char)
        pos += length
    return "".join(out)


def split_by_lead_byte(text: str) -> list[str]:
    """Symbols of SPM: as many bytes as the lead byte's top four bits announce, truncated at the end."""
    if not has_invalid_bytes(text):
        return list(text)
    data = to_bytes(text)
    out: list[str] = []
    pos = 0
    while pos < len(data):
        high = data[pos] >> 4
        length = 1 if high < 0xC else 2 if high < 0xE else 3 if high < 0xF else 4
        out.append(data[pos : pos + length].decode("utf-8", "surrogateescape"))
        pos += length
    return out


@functools.cache
def byte_to_char() -> tuple[str, ...]:
    """GPT-2 byte map: the printable character that stands for each of the 256 bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table: list[str] = []
    shifted = 0x100
    for byte in range(256):
        if byte in printable:
            table.append(chr(byte))
        else:
            table.append(chr(shifted))
            shifted += 1
    return tuple(table)


@functools.cache
def char_to_byte() -> dict[str, int]:
    """Inverse GPT-2 byte map."""
    return {char: byte for byte, char in enumerate(byte_to_char())}


@functools.cache
def latin1_to_mapped() -> dict[int, str]:
    """Translation table: byte values read as Latin-1 to the GPT-2 byte map's characters."""
    return dict(enumerate(byte_to_char()))


def byte_encode(word: str) -> str:
    """UTF-8 bytes of ``word`` written with the GPT-2 byte map."""
    return word.encode("utf-8").decode("latin-1").translate(latin1_to_mapped())
