"""The order of tensors in a file."""

from __future__ import annotations

import re
from collections.abc import Mapping

_STACK = re.compile(r"(enc|dec)\.blk\.(\d{1,9})\.")


def sort_key(name: str, order: Mapping[str, int]) -> tuple[int, int, int, str]:
    """Sort key of a tensor: embedding, layers (of an encoder, then of a decoder) in the order of the family's modules,
    the rest.
    """
    if in_stack := _STACK.match(name):
        return 1 + (in_stack[1] == "dec"), int(in_stack[2]), 0, name
    if not name.startswith("blk."):
        return 0 if name.startswith("token_embd") else 3, 0, 0, name
    _, layer, rest = name.split(".", 2)
    base = rest.removesuffix(".weight").removesuffix(".bias")
    return 1, int(layer), order.get(rest, order.get(base, 0)), rest
