"""Unigram vocabularies: tokens with scores, and the table of characters that texts are normalised by."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ikpy.convert.checkpoint import check_fetched
from ikpy.convert.sentencepiece import read_model
from ikpy.errors import FileFormatError, UnsupportedError
from ikpy.vocab.table import TokenType
from ikpy.vocab.ugm import CharsMap

UNIGRAM = "t5"
"""Model name of these vocabularies."""
N_GAPS = 100
"""Tokens `<extra_id_N>` behind the pieces of T5."""

Token = tuple[int, str, TokenType, float]
"""Id, text, kind and score."""


def tokens_of_json(model: Mapping[str, Any]) -> Iterator[Token]:
    """Those of the `model` of tokenizer.json."""
    for index, (text, score) in enumerate(model["vocab"]):
        yield index, text, TokenType.UNKNOWN if index == model.get("unk_id") else TokenType.NORMAL, float(score)


def check_maps(normalizers: list[dict[str, Any]]) -> None:
    """FileFormatError where the table of a `Precompiled` normalizer is damaged.

    The `tokenizers` package, which would read it next, prints a panic there.
    """
    for step in normalizers:
        try:
            table = base64.b64decode(step.get("precompiled_charsmap", ""), validate=True)
        except (TypeError, ValueError):
            raise FileFormatError("precompiled_charsmap of the normalizer is not a text in base64") from None
        CharsMap(table).check()


def keys_of_json(normalizers: list[dict[str, Any]]) -> dict[str, Any]:
    """Keys for its `Precompiled` normalizers, of which there is one at most."""
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": UNIGRAM,
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.remove_extra_whitespaces": True,
    }
    maps = [step["precompiled_charsmap"] for step in normalizers]
    if maps:
        keys["tokenizer.ggml.precompiled_charsmap"] = np.frombuffer(base64.b64decode(maps[0]), np.uint8)
    return keys


def read_pieces(path: Path, *, n_most: int, gaps: bool) -> tuple[list[Token], dict[str, Any]]:
    """Tokens and keys of a sentencepiece model alone. gaps: with those of T5 for gaps behind its pieces, as far as ids
    are below n_most. UnsupportedError for a BPE model.
    """
    check_fetched(path)
    source = read_model(path)
    if source.is_bpe:
        raise UnsupportedError(f"{path}: a BPE model; in this file a Unigram model is expected")
    n = len(source.texts)
    tokens: list[Token] = [
        (index, text, TokenType(source.types[index]), source.scores[index]) for index, text in enumerate(source.texts)
    ]
    for i in range(min(N_GAPS, n_most - n) if gaps else 0):
        tokens.append((n + i, f"<extra_id_{N_GAPS - 1 - i}>", TokenType.CONTROL, 0.0))
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": UNIGRAM,
        "tokenizer.ggml.add_space_prefix": source.add_space_prefix,
        "tokenizer.ggml.remove_extra_whitespaces": source.removes_spaces,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": True,
    }
    if source.character_map:
        keys["tokenizer.ggml.precompiled_charsmap"] = np.frombuffer(source.character_map, np.uint8)
    return tokens, keys
