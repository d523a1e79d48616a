"""References within JSON schemas (``$ref``)."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote


def resolve(root: Any, target: str) -> Any:
    """What a reference (``#/...``) means within a schema; None if it points nowhere."""
    node = root
    if not re.match("#(/|$)", target):
        return None
    for part in unquote(target[1:]).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and key in node:
            node = node[key]
        elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        else:
            return None
    return node
