"""Properties whose schema follows from a pattern of their name (``patternProperties``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ikpy.engine.grammars.pattern_search import Search, apart, search_gbnf


def with_patterns(named: Mapping[str, Any], patterns: Mapping[str, Any]) -> dict[str, Any]:
    """The named properties with what the patterns found in their names ask for."""
    found = dict(named)
    for pattern, schema in patterns.items():
        search = Search(pattern)
        for name in named:
            if search.found(name):
                found[name] = _both(found[name], schema)
    return found


def _both(own: Any, schema: Any) -> Any:
    if own is False or schema is False:
        return False
    return schema if own is True else own if schema is True else {"allOf": [own, schema]}


def usable(patterns: Mapping[str, Any], named: Iterable[str]) -> dict[str, str]:
    """GBNF of names, between the quotes, by pattern: of patterns of which no name has to fit two or is a named one.

    A pattern that is not understood, or that may be found in the same name as another one with another schema, is left
    out: objects without such properties fit the schema too.
    """
    names = list(named)
    found = {}
    for pattern, schema in patterns.items():
        others = [other for other in patterns if other != pattern and patterns[other] != schema]
        if schema is False or not all(apart(pattern, other) for other in others):
            continue
        search = Search(pattern)
        if all(search.found(name) is False for name in names):
            try:
                found[pattern] = search_gbnf(pattern)
            except ValueError:
                continue
    return found
