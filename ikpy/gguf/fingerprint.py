"""Tells files with tensors of the same shapes and types apart."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ikpy.gguf.reader import GGUFFile

SAMPLED_TENSORS = 64
SAMPLED_BYTES = 256


def weights_fingerprint(gguf: GGUFFile, most: int | None = SAMPLED_TENSORS) -> int:
    """CRC-32 of the first bytes of tensors from all over the file; most: of so many at most, None: of all."""
    tensors = list(gguf.tensors.values())
    checksum = 0
    for info in tensors[:: max(1, -(-len(tensors) // (most or len(tensors) or 1)))]:
        checksum = zlib.crc32(gguf.data(info)[:SAMPLED_BYTES].tobytes(), checksum)
    return checksum
