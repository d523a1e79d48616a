"""Output forms of the tokenizer tool."""

from __future__ import annotations

from collections.abc import Sequence

from ikpy.vocab import Vocab


def ids_line(ids: Sequence[int]) -> bytes:
    """All ids as a Python list."""
    return f"[{', '.join(map(str, ids))}]\n".encode()


def token_lines(vocab: Vocab, ids: Sequence[int]) -> bytes:
    """One line per token: id and the bytes it stands for, which need not be valid UTF-8."""
    return b"".join(b"%6d -> '%s'\n" % (index, vocab.token_to_piece(index, special=True)) for index in ids)


def count_line(ids: Sequence[int]) -> bytes:
    """Number of tokens."""
    return f"Total number of tokens: {len(ids)}\n".encode()
