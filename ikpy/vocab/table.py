"""Token table read from GGUF keys: texts, types, scores and the text-to-id index."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ikpy.errors import FileFormatError
from ikpy.vocab import keys


class TokenType(enum.IntEnum):
    """``tokenizer.ggml.token_type`` values."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass
class TokenTable:
    """Tokens by id. ``scores`` is f32 ``[n_tokens]`` or None, ``types`` a list of TokenType values."""

    texts: list[str]
    types: list[int]
    scores: np.ndarray | None
    ids: dict[str, int]

    def __len__(self) -> int:
        return len(self.texts)

    @classmethod
    def empty(cls) -> TokenTable:
        """Table of a model without vocabulary."""
        return cls([], [], None, {})

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> TokenTable:
        """Read tokens, scores and types; wrong lengths or repeated texts raise FileFormatError."""
        texts = keys.texts(metadata, "tokenizer.ggml.tokens")
        if texts is None:
            raise FileFormatError("cannot find tokenizer vocab: key tokenizer.ggml.tokens is missing")
        if "" in texts:
            texts = [text or f"[EMPTY_{i}]" for i, text in enumerate(texts)]
        ids = {text: i for i, text in enumerate(texts)}
        if len(ids) != len(texts):
            raise FileFormatError(_repeated_text_message(texts, ids))
        return cls(texts, _read_types(metadata, len(texts)), _read_scores(metadata, len(texts)), ids)


def _repeated_text_message(texts: Sequence[str], ids: Mapping[str, int]) -> str:
    index = next(i for i, text in enumerate(texts) if ids[text] != i)
    text = texts[index]
    return f"tokenizer.ggml.tokens: token {text!r} appears twice (ids {index} and {ids[text]})"


def _read_types(metadata: Mapping[str, Any], n_tokens: int) -> list[int]:
    values = keys.numbers(metadata, "tokenizer.ggml.token_type")
    if values is None:
        return [int(TokenType.NORMAL)] * n_tokens
    if len(values) < n_tokens:
        raise FileFormatError(f"tokenizer.ggml.token_type: {len(values)} entries for {n_tokens} tokens")
    types = values[:n_tokens]
    known = (types >= TokenType.NORMAL) & (types <= TokenType.BYTE)
    return np.where(known, types, int(TokenType.UNDEFINED)).tolist()


def _read_scores(metadata: Mapping[str, Any], n_tokens: int) -> np.ndarray | None:
    values = keys.numbers(metadata, "tokenizer.ggml.scores")
    if values is None:
        return None
    if len(values) < n_tokens:
        raise FileFormatError(f"tokenizer.ggml.scores: {len(values)} entries for {n_tokens} tokens")
    return values.astype(np.float32)[:n_tokens]
