"""Listed values beside other keywords, and where patterns are found."""

from __future__ import annotations

import itertools
import re
import time
from typing import Any

import pytest

from ikpy.engine.grammars.gbnf import GrammarError
from ikpy.engine.grammars.grammar import json_schema_grammar
from ikpy.engine.grammars.pattern_search import Search, apart
from tests.cpu.vocab.test_grammar import TEXTS, accepts

TRIED = ["".join(letters) for n in range(4) for letters in itertools.product('ab"\n', repeat=n)]


@pytest.mark.parametrize("pattern", ["^a", "b$", "^a.*b$", "ab", "a|b", "^(a|b)$", "^[^a]*$", "", "^$", r"\n", "^a{2}"])
def test_patterns_are_found_where_regular_expressions_find_them(pattern: str) -> None:
    search = Search(pattern)
    ended = re.sub(r"\$$", r"\\Z", pattern)
    wrong = [text for text in TRIED if search.found(text) != bool(re.search(ended, text))]
    assert not wrong, wrong


@pytest.mark.parametrize("pattern", ["(?=a)", "^a|b$", "(a", "a++"])
def test_patterns_that_are_not_understood(pattern: str) -> None:
    assert Search(pattern).found("a") is None


def test_no_pattern_takes_long() -> None:
    began = time.perf_counter()
    assert Search("^(a+)+$").found("a" * 5000 + "!") is False
    assert time.perf_counter() - began < 60, "an engine that goes back would never end"


def test_patterns_of_texts_that_begin_differently() -> None:
    assert apart("^S_", "^I_") and apart("^ab+", "^cd")
    assert not apart("^S", "^S_") and not apart("^ab?", "^ac") and not apart("a", "^b") and not apart("^a|b", "^c")


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"enum": ["ab", "b", 1], "pattern": "^a"}, ['"ab"', "1"], ['"b"']),
        ({"enum": ["ab", "b"], "pattern": "^(?=x)"}, ['"ab"', '"b"'], []),
        ({"enum": ["a", "ab", "abc", [1]], "minLength": 2, "maxLength": 2}, ['"ab"', "[1]"], ['"a"', '"abc"']),
        ({"enum": ["a", 1, None], "type": "string"}, ['"a"'], ["1", "null"]),
        ({"enum": ["a", 1, None, 1.0], "type": ["null", "integer"]}, ["1", "null", "1.0"], ['"a"']),
        ({"const": 1, "type": "number"}, ["1"], []),
        ({"enum": [1, 2.5, True, "3"], "minimum": 2}, ["2.5", "true", '"3"'], ["1"]),
        ({"enum": [1, 2], "exclusiveMaximum": 2}, ["1"], ["2"]),
        ({"enum": [[], [1]], "minItems": 1}, ["[1]"], ["[]"]),
        ({"enum": [{}, {"a": 1}], "maxProperties": 0}, ["{}"], ['{"a":1}']),
        ({"anyOf": [{"const": "a"}, {"const": "b"}], "pattern": "^a$"}, ['"a"'], ['"b"']),
        ({"allOf": [{"enum": ["x1", "y1"]}, {"pattern": "^x"}]}, ['"x1"'], ['"y1"']),
    ],
)
def test_listed_values_fit_what_stands_beside_them(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    grammar = json_schema_grammar(schema, TEXTS)
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


@pytest.mark.parametrize("schema", [{"enum": ["b"], "pattern": "^a"}, {"const": 1, "minimum": 2},
                                    {"anyOf": [{"const": "b"}], "pattern": "^a"}])  # fmt: skip
def test_lists_without_a_value_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError, match="no value is allowed"):
        json_schema_grammar(schema, TEXTS)
