"""GBNF for the names of an object's further properties: all but those that have a schema of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from ikpy.engine.grammars.gbnf import literal

MOST_PREFIXES = 1000
"""Beginnings of names that are told apart; each is a rule or two."""
LONGEST_PREFIXES = (32, 16, 8, 4, 2, 1)
_ESCAPES = '"\\bfnrt'

_Trie = dict[str | None, Any]
"""What may follow: JSON text of the next character -> trie; None: a name ends here (False) or is longer (True)."""


def other_names(names: Iterable[str], add: Callable[[str], str]) -> str:
    """Body between the quotes of a JSON string that is none of ``names``; uses the rule ``char``.

    ``add`` makes a rule. Left out as well: strings that begin as a name does and go on with an escape of four digits,
    which may be the same character, and those that begin with the same 32 characters as a longer name (fewer, if there
    are many names).
    """
    root = _trie(names)
    found = f"{_leaving(root, add)} char*"
    inside = _inside(root, add)
    return f"{found} | {inside}" if inside else found


def _trie(names: Iterable[str]) -> _Trie:
    texts = [tuple(json.dumps(char, ensure_ascii=False)[1:-1] for char in name) for name in names]
    for longest in LONGEST_PREFIXES:
        if len({text[:n] for text in texts for n in range(1, min(len(text), longest) + 1)}) <= MOST_PREFIXES:
            break
    root: _Trie = {}
    for text in texts:
        node: _Trie = root
        for char in text[:longest]:
            node = node.setdefault(char, {})
        node[None] = node.get(None, False) or len(text) > longest
    return root


def _leaving(node: _Trie, add: Callable[[str], str]) -> str:
    """Rule of the texts behind a beginning of names up to the first character with which they are no names."""
    following = [char for char in node if char is not None]
    single = "".join(_class_char(char) for char in following if len(char) == 1)
    escapes = "".join(f"\\{e}" if e in '"\\' else e for e in _ESCAPES if f"\\{e}" not in following)
    options = [f'[^"\\\\\\x7F\\x00-\\x1F{single}]', *([f"[\\\\] [{escapes}]"] if escapes else [])]
    for char in following:
        if not node[char].get(None):
            options.append(f"{literal(char)} {_leaving(node[char], add)}")
    return add(" | ".join(options))


def _inside(node: _Trie, add: Callable[[str], str]) -> str:
    """Rule of the texts behind a beginning of names that end inside of names; empty if there are none."""
    options = [] if None in node else ['""']
    for char, child in node.items():
        if char is not None and (rest := _inside(child, add)):
            options.append(f"{literal(char)} {rest}")
    return add(" | ".join(options)) if options else ""


def _class_char(char: str) -> str:
    return f"\\{char}" if char in "[]" else f"\\x{ord(char):02X}" if char in "^-" else char
