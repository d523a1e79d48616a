"""Vocabulary keys of RWKV World: a file of lines with an id, a Python literal (text or bytes) and a number of bytes."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np

from ikpy.convert.checkpoint import check_fetched
from ikpy.errors import FileFormatError
from ikpy.vocab.table import TokenType

WORLD = "rwkv_vocab_v20230424.txt"
_END = "<s>"
"""Token 0, which is in no file: the end of a text."""


def world_keys(path: Path, n_vocab: int) -> dict[str, Any]:
    """All `tokenizer.ggml.*` keys, for a model of n_vocab tokens: as llama.cpp has them, a turn ends with two newlines.
    FileFormatError for a file that is none of its kind.
    """
    tokens = _read(path)
    if max(tokens) >= n_vocab:
        raise FileFormatError(f"{path}: token {max(tokens)} is beyond the {n_vocab} of the model")
    texts = {0: _END, **{index: repr(token)[2:-1] for index, token in tokens.items()}}
    types = {0: TokenType.CONTROL, **dict.fromkeys(tokens, TokenType.NORMAL)}
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": "rwkv",
        "tokenizer.ggml.tokens": [texts.get(index, f"[PAD{index}]") for index in range(n_vocab)],
        "tokenizer.ggml.token_type": np.array([types.get(i, TokenType.UNUSED) for i in range(n_vocab)], np.int32),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }
    turn_end = next((index for index, token in tokens.items() if token == b"\n\n"), None)
    return keys if turn_end is None else keys | {"tokenizer.ggml.eot_token_id": turn_end}


def _read(path: Path) -> dict[int, bytes]:
    """Bytes by id, from 1 on. FileFormatError unless they differ and every byte has a token."""
    check_fetched(path)
    tokens: dict[int, bytes] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path}: {error}") from None
    for number, line in enumerate(lines, 1):
        try:
            index, token = _parsed(line)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise FileFormatError(f"{path}: line {number} is no id, literal and length") from None
        if index in tokens or index < 1:
            raise FileFormatError(f"{path}: line {number}: id {index} is below 1 or that of an earlier line")
        tokens[index] = token
    known = set(tokens.values())
    missing = [byte for byte in range(256) if bytes([byte]) not in known]
    if missing or len(known) < len(tokens):
        problem = f"byte 0x{missing[0]:02x} has no token" if missing else "two tokens are equal"
        raise FileFormatError(f"{path}: {problem}")
    return tokens


def _parsed(line: str) -> tuple[int, bytes]:
    """Id and bytes of a line; ValueError or SyntaxError for another one."""
    index, _, rest = line.partition(" ")
    literal, _, length = rest.rpartition(" ")
    value = ast.literal_eval(literal)
    token = value.encode("utf-8") if isinstance(value, str) else value
    if not isinstance(token, bytes) or not token or len(token) != int(length):
        raise ValueError(line)
    return int(index), token
