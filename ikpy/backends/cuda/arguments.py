"""Parameter buffer of a kernel launch."""

from __future__ import annotations

from collections.abc import Sequence


def pack(args: Sequence[bytes]) -> bytes:
    """Arguments as a kernel reads them: each one at a multiple of its alignment.

    Scalars have 1, 2, 4 or 8 bytes and are aligned to their size; structs are aligned to 8 bytes.
    """
    buffer = bytearray()
    for value in args:
        alignment = min(8, len(value))
        buffer += bytes(-len(buffer) % alignment)
        buffer += value
    return bytes(buffer)
