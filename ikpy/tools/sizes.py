"""Sizes in bytes as people write and read them."""

from __future__ import annotations

import math
import re

from ikpy.errors import UsageError

_SIZE_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_size(text: str) -> int:
    """Bytes of a size such as `500M` or `2G` (powers of 1000); UsageError if it is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip().upper())
    size = float(match[1]) * _SIZE_UNITS[match[2]] if match else 0
    if not 1 <= size < math.inf:
        raise UsageError(f"size '{text}' is not a number of bytes such as 500M or 2G")
    return int(size)


def format_size(nbytes: int) -> str:
    """Bytes as text with a decimal unit, as `parse_size` reads it."""
    value, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{nbytes} B" if unit == "B" else f"{value:.2f} {unit}"
