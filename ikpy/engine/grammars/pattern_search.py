"""Which texts a regular expression of a schema is found in: as GBNF, and for single texts.

Texts are tried with the grammar, not by an engine that goes back: no pattern takes more than linear time.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from ikpy.engine.grammars.gbnf import GrammarError
from ikpy.engine.grammars.schema_pattern import pattern_to_gbnf

if TYPE_CHECKING:
    from ikpy.engine.grammars.grammar import TextGrammar

ANY = r'([^"\\\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))*'
"""GBNF of any text between the quotes of a JSON string."""
PREFIX = re.compile(r"\^((?:[\w\s:/@-](?![*?{+]))*)")


def search_gbnf(pattern: str) -> str:
    """Body between the quotes of JSON strings in which ``pattern`` is found; ValueError for one not understood."""
    begins, end = pattern.startswith("^"), re.search(r"(\\*)\$$", pattern)
    ends = end is not None and len(end[1]) % 2 == 0
    inner = pattern[begins : len(pattern) - ends]
    if (begins or ends) and "|" in re.sub(r"\\.|\[(?:\\.|[^\]])*\]|\((?:\\.|[^()])*\)", "", inner):
        raise ValueError("alternatives of which one is at an end of the text")
    body = pattern_to_gbnf(f"^{inner}$")
    return f"{'' if begins else ANY} ({body}) {'' if ends else ANY}"


class Search:
    """Says of texts whether a pattern is found in them."""

    def __init__(self, pattern: str) -> None:
        from ikpy.engine.grammars.grammar import TokenTexts, gbnf_grammar

        texts = TokenTexts([bytes([i]) for i in range(256)], special=(), eog=(0,))
        self._grammar: TextGrammar | None
        try:
            self._grammar = gbnf_grammar(f"root ::= {search_gbnf(pattern)}", texts)
        except (ValueError, RecursionError, GrammarError):
            self._grammar = None

    def found(self, text: str) -> bool | None:
        """Whether the pattern is found; None for a pattern that is not understood."""
        if self._grammar is None:
            return None
        self._grammar.reset()
        for byte in json.dumps(text, ensure_ascii=False)[1:-1].encode("utf-8", "replace"):
            if not self._grammar.allows(byte):
                return False
            self._grammar.accept(byte)
        return self._grammar.complete


def apart(a: str, b: str) -> bool:
    """Whether two patterns cannot be found in the same text, because texts of both begin differently."""
    first, second = (PREFIX.match(pattern) for pattern in (a, b))
    if first is None or second is None or "|" in a + b:
        return False
    return not (first[1].startswith(second[1]) or second[1].startswith(first[1]))
