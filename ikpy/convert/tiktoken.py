"""Reads tiktoken.model: one token per line, its bytes in base64 and its rank; merges follow from the ranks."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

from ikpy.errors import FileFormatError
from ikpy.vocab.text import byte_to_char

_LONGEST = 4096  # bytes of a line that is looked at


def read_ranks(path: Path) -> dict[bytes, int]:
    """Tokens and ranks (the ids) of a file; FileFormatError if it is none."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise FileFormatError(f"{path}: line {number} is not a token in base64 and its rank") from None
    return ranks


def is_ranks(path: Path) -> bool:
    """Whether a file begins with a token in base64 and its rank."""
    with path.open("rb") as file:
        words = file.readline(_LONGEST).split()
    return len(words) == 2 and words[1].isdigit()


def merges(ranks: dict[bytes, int]) -> list[str]:
    """The merge that makes each token of several bytes, in order of rank, written with the GPT-2 byte map."""
    out = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            parts = _last_two_parts(token, rank, ranks)
            if len(parts) == 2:  # tokens that no merge can reach exist
                out.append(f"{mapped(parts[0])} {mapped(parts[1])}")
    return out


def mapped(token: bytes) -> str:
    """Bytes as characters of the GPT-2 byte map."""
    table = byte_to_char()
    return "".join(table[byte] for byte in token)


def _last_two_parts(token: bytes, rank: int, ranks: dict[bytes, int]) -> list[bytes]:
    """The parts of a token after all merges of lower rank."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        found = [ranks.get(parts[i] + parts[i + 1], rank) for i in range(len(parts) - 1)]
        lowest = min(found)
        if lowest >= rank:
            break
        at = found.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts
