"""How much work a JSON schema may be."""

from __future__ import annotations

from ikpy.engine.grammars.gbnf import GrammarError

MOST_PARTS = 50_000
"""Schemas that are converted: a short text can name the same ones again and again."""


class Budget:
    """Counts the schemas that are converted for one grammar."""

    def __init__(self) -> None:
        self._n_parts = 0

    def spend(self, n: int = 1) -> None:
        """Counts a schema that is looked at, or work that takes as long as n; raises GrammarError at the limit."""
        self._n_parts += n
        if self._n_parts > MOST_PARTS:
            raise GrammarError(f"JSON schema conversion failed: more than {MOST_PARTS} schemas, references followed")
