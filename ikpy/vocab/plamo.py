"""PLaMo 2 and 3: the cheapest way to cut a text into tokens, characters without one as bytes."""

from __future__ import annotations

import math
from typing import Any

import regex

from ikpy.errors import FileFormatError
from ikpy.vocab.table import TokenTable, TokenType
from ikpy.vocab.text import to_bytes

_UNIT = 1e4  # scores are compared as whole numbers
_UNKNOWN_COST = 10_000_000
_Node = dict[str, Any]


class PlamoModel:
    """Tokenizer of fragments."""

    def __init__(self, table: TokenTable):
        if table.scores is None:
            raise FileFormatError("tokenizer.ggml.scores is missing; a 'plamo2' tokenizer needs a score per token")
        self._root: _Node = {}
        self._bytes: dict[int, int] = {}
        for index, (text, kind) in enumerate(zip(table.texts, table.types, strict=True)):
            if kind == TokenType.BYTE:
                self._bytes[self._byte_of(text)] = index
            elif text and math.isfinite(table.scores[index]):
                self._add(text, -round(float(table.scores[index]) * _UNIT), index)
        if len(self._bytes) < 256:
            raise FileFormatError(f"a 'plamo2' tokenizer needs a token for every byte; {len(self._bytes)} are there")

    @staticmethod
    def _byte_of(text: str) -> int:
        match = regex.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text)
        if match is None:
            raise FileFormatError(f"token '{text}' of type byte names no byte")
        return int(match[1], 16)

    def _add(self, text: str, cost: int, index: int) -> None:
        node = self._root
        for character in text:
            node = node.setdefault(character, {})
        node[""] = cost, index

    def encode(self, fragment: str) -> list[int]:
        """Ids of a fragment."""
        # Of equal costs the one whose first token is the longest.
        text, n = fragment, len(fragment)
        costs, steps = [0] * (n + 1), [(1, -1)] * n  # length and token of the step from every place
        for i in range(n - 1, -1, -1):
            best, step = costs[i + 1] + _UNKNOWN_COST, (1, -1)
            node, end = self._root, i
            while end < n and (node := node.get(text[end], {})):
                end += 1
                if "" in node and node[""][0] + costs[end] <= best:
                    best, step = node[""][0] + costs[end], (end - i, node[""][1])
            costs[i], steps[i] = best, step
        out, at = [], 0
        while at < n:
            length, index = steps[at]
            out += [index] if index >= 0 else [self._bytes[byte] for byte in to_bytes(text[at])]
            at += length
        return out
