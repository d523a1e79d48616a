"""tokenizer.jsonl of PLaMo 2 and 3: a list of text, score and kind per line, in the order of ids."""

from __future__ import annotations

import json
from pathlib import Path

from ikpy.errors import FileFormatError
from ikpy.vocab.table import TokenType

_KINDS = {"BYTE": TokenType.BYTE, "CONTROL": TokenType.CONTROL, "UNKNOWN": TokenType.UNKNOWN}


def read_scored_tokens(path: Path) -> list[tuple[str, TokenType, float]]:
    """Text, type and score of every token. FileFormatError unless texts differ and every byte has one."""
    tokens: dict[str, tuple[str, TokenType, float]] = {}
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                text, score, kind = json.loads(line)[:3]
                if not isinstance(text, str) or text in tokens:
                    raise ValueError("its text is no string or that of an earlier one")
                tokens[text] = text, _KINDS.get(str(kind), TokenType.NORMAL), float(score)
            except (ValueError, TypeError, RecursionError) as error:
                raise FileFormatError(f"{path}: line {number} is no token: {error}") from None
    for byte in range(256):
        if tokens.keys().isdisjoint((f"<0x{byte:02X}>", f"<0x{byte:02x}>")):
            raise FileFormatError(f"{path}: <0x{byte:02X}> is missing; every byte needs a token")
    return list(tokens.values())
