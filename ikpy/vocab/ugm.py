"""Unigram (arXiv:1804.10959): normalisation by a precompiled character map, then the best path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tokenizers import models

from ikpy.errors import FileFormatError
from ikpy.vocab import keys
from ikpy.vocab.table import TokenTable, TokenType
from ikpy.vocab.text import REPLACEMENT, SPACE_SYMBOL, has_invalid_bytes, to_bytes

_IS_LEAF, _HAS_LEAF, _IS_FAR = 1 << 31, 1 << 8, 1 << 9
"""Bits of a node of a character map: its other bits are a value; a value follows it; its offset has 8 bits more."""


class CharsMap:
    """``precompiled_charsmap``: longest-prefix lookup in an XOR-compressed double array of u32 nodes.

    Layout: u32 byte size of the array, the array (little endian), NUL-terminated replacement strings.
    """

    def __init__(self, data: bytes):
        size = int.from_bytes(data[:4], "little") if len(data) >= 4 else -1
        if size < 4 or size % 4 or 4 + size > len(data):
            raise FileFormatError("tokenizer.ggml.precompiled_charsmap: array size does not fit the data")
        self._nodes: list[int] = np.frombuffer(data, "<u4", size // 4, offset=4).tolist()
        self._replacements = data[4 + size :]

    def longest_prefix(self, data: bytes, start: int) -> tuple[int, str] | None:
        """Length in bytes of the longest mapped prefix of ``data[start:]``, and its replacement."""
        best = None
        index = self._base(self._node(0))
        for pos in range(start, len(data)):
            byte = data[pos]
            if byte == 0:
                break
            index ^= byte
            node = self._node(index)
            if node & (_IS_LEAF | 0xFF) != byte:
                break
            index ^= self._base(node)
            if node & _HAS_LEAF:
                best = pos + 1 - start, self._node(index) & 0x7FFFFFFF
        return None if best is None else (best[0], self._replacement(best[1]))

    def check(self) -> None:
        """FileFormatError unless every byte string is looked up inside the array, and every replacement is UTF-8.

        For readers that end in other ways than `longest_prefix` does where a map is damaged.
        """
        nodes = np.array(self._nodes, np.int64)
        labels = np.arange(1, 256)
        is_seen = np.zeros(len(nodes), bool)
        reached = np.zeros(1, np.int64)
        while len(reached):
            is_seen[reached] = True
            of = nodes[reached]
            offsets = reached ^ np.where(of & _IS_FAR, of >> 10 << 8, of >> 10)
            self._check_values(nodes, offsets[of & _HAS_LEAF > 0])
            nexts = offsets[:, None] ^ labels
            self._check_inside(nexts.max())
            nexts = np.unique(nexts[nodes[nexts] & (_IS_LEAF | 0xFF) == labels])
            reached = nexts[~is_seen[nexts]]
        try:
            self._replacements.decode()
        except UnicodeDecodeError:
            raise FileFormatError("tokenizer.ggml.precompiled_charsmap: the replacements are not UTF-8") from None

    def _check_values(self, nodes: np.ndarray, places: np.ndarray) -> None:
        """places: of the values of some nodes."""
        self._check_inside(places.max(initial=0))
        for offset in np.unique(nodes[places] & (_IS_LEAF - 1)).tolist():
            if offset >= len(self._replacements) or self._replacements[offset] & 0xC0 == 0x80:
                raise FileFormatError(f"tokenizer.ggml.precompiled_charsmap: no replacement begins at {offset}")
            self._replacement(offset)

    def _check_inside(self, index: int) -> None:
        if index >= len(self._nodes):
            raise FileFormatError(f"tokenizer.ggml.precompiled_charsmap: node {index} is outside the array")

    @staticmethod
    def _base(node: int) -> int:
        return node >> 10 << 8 if node & _IS_FAR else node >> 10

    def _node(self, index: int) -> int:
        self._check_inside(index)
        return self._nodes[index]

    def _replacement(self, offset: int) -> str:
        end = self._replacements.find(b"\0", offset)
        if end < 0:
            raise FileFormatError(f"tokenizer.ggml.precompiled_charsmap: replacement at {offset} is outside the data")
        return self._replacements[offset:end].decode("utf-8", "replace")


class UgmModel:
    """Tokenizer of fragments; the best path is found by the ``tokenizers`` package in float64."""

    def __init__(self, table: TokenTable, metadata: Mapping[str, Any], unknown: int | None, add_space_prefix: bool):
        if table.scores is None:
            raise FileFormatError("tokenizer.ggml.scores is missing; a 't5' tokenizer needs a score per token")
        self._unknown = unknown
        self._add_space_prefix = add_space_prefix
        self._merge_spaces = keys.flag(metadata, "tokenizer.ggml.remove_extra_whitespaces", False)
        charsmap = keys.numbers(metadata, "tokenizer.ggml.precompiled_charsmap")
        self._charsmap = (
            None if charsmap is None or not len(charsmap) else CharsMap(charsmap.astype(np.uint8).tobytes())
        )
        self._user_prefixes = {
            text[:end]
            for text, kind in zip(table.texts, table.types, strict=True)
            if kind == TokenType.USER_DEFINED
            for end in range(1, len(text) + 1)
        }
        self._build_model(table, table.scores.astype(float).tolist())

    def _build_model(self, table: TokenTable, scores: list[float]) -> None:
        normal = [score for score, kind in zip(scores, table.types, strict=True) if kind == TokenType.NORMAL]
        lowest = min(normal, default=0.0)
        # Entry 0 stands for the unknown token, with a text that cannot occur (two noncharacters); the package
        # scores unknown characters 10 below the worst entry, as the reference does.
        pieces: list[tuple[str, float]] = [("\U0010fffe\U0010ffff", lowest)]
        self._token_of_entry: list[int | None] = [self._unknown]
        matched = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
        for index, (text, kind) in enumerate(zip(table.texts, table.types, strict=True)):
            if kind in matched and not has_invalid_bytes(text):  # normalised text has none
                score = 0.0 if kind == TokenType.USER_DEFINED else max(scores[index], lowest)
                pieces.append((text, score))
                self._token_of_entry.append(index)
        self._model = models.Unigram(pieces, unk_id=0)

    def encode(self, fragment: str) -> list[int]:
        """Ids of a fragment without special tokens."""
        text = self.normalise(fragment)
        if not text:
            return []
        ids = (self._token_of_entry[token.id] for token in self._model.tokenize(text))
        return [index for index in ids if index is not None]

    def normalise(self, fragment: str) -> str:
        """Text the best path is searched in: mapped characters, spaces as U+2581."""
        out: list[str] = []
        in_word = prefixed = False
        for char in self._mapped(fragment):
            if char == " ":
                in_word = False
                if not self._merge_spaces:
                    out.append(SPACE_SYMBOL)
                continue
            if not in_word:
                in_word = True
                if self._merge_spaces or (self._add_space_prefix and not prefixed):
                    out.append(SPACE_SYMBOL)
                    prefixed = True
            out.append(char)
        return "".join(out)

    def _mapped(self, fragment: str) -> str:
        out: list[str] = []
        data = to_bytes(fragment)
        pos = offset = 0
        while pos < len(fragment):
            length = self._user_defined_path(fragment, pos)
            found = None
            if length == 0 and self._charsmap is not None:
                found = self._charsmap.longest_prefix(data, offset)
            if found is None:
                taken = fragment[pos : pos + max(length, 1)]
                out += [REPLACEMENT if "\udc80" <= char <= "\udcff" else char for char in taken]
            else:
                taken = data[offset : offset + found[0]].decode("utf-8", "surrogateescape")
                out.append(found[1])
            pos += len(taken)
            offset += len(to_bytes(taken))
        return "".join(out)

    def _user_defined_path(self, fragment: str, pos: int) -> int:
        """Characters from ``pos`` that begin some user-defined token; they are copied unmapped."""
        end = pos
        while end < len(fragment) and fragment[pos : end + 1] in self._user_prefixes:
            end += 1
        return end - pos
