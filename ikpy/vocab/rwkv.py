"""RWKV World: the longest token at every place of a text, which is taken as bytes."""

from __future__ import annotations

import re

from ikpy.errors import FileFormatError
from ikpy.vocab.table import TokenTable, TokenType
from ikpy.vocab.text import to_bytes

_ESCAPE = re.compile(rb"\\(?:x([0-9A-Fa-f]{2})|(.))", re.DOTALL)
_CONTROLS = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}
_BEGINNING = 2
"""Bytes by which tokens are told apart first; few lengths are left to try then."""


def unescaped(text: str) -> bytes:
    """Bytes of a token, whose text is written as Python writes bytes."""

    def byte(match: re.Match[bytes]) -> bytes:
        return bytes([int(match[1], 16)]) if match[1] else _CONTROLS.get(match[2], match[2])

    return _ESCAPE.sub(byte, to_bytes(text))


class RwkvModel:
    """Tokenizer of fragments. Control tokens and unused ones stand for no text."""

    def __init__(self, table: TokenTable):
        self._ids: dict[bytes, int] = {}
        lengths: dict[bytes, set[int]] = {}
        for index, (text, kind) in enumerate(zip(table.texts, table.types, strict=True)):
            token = unescaped(text)
            if token and kind in (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.BYTE):
                self._ids[token] = index
                lengths.setdefault(token[:_BEGINNING], set()).add(len(token))
        self._lengths = {beginning: sorted(found, reverse=True) for beginning, found in lengths.items()}
        missing = [byte for byte in range(256) if bytes([byte]) not in self._ids]
        if missing:
            raise FileFormatError(
                f"a 'rwkv' tokenizer needs a token for every byte; {256 - len(missing)} are there, "
                f"0x{missing[0]:02x} has none"
            )

    def encode(self, fragment: str) -> list[int]:
        """Ids of a fragment."""
        text, out, at = to_bytes(fragment), [], 0
        while at < len(text):
            for length in self._lengths.get(text[at : at + _BEGINNING], ()):
                if (index := self._ids.get(text[at : at + length])) is not None:
                    break
            else:
                length, index = 1, self._ids[text[at : at + 1]]
            out.append(index)
            at += length
        return out
