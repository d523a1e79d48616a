"""Bounds of numbers in schemas, compared with exact arithmetic."""

from __future__ import annotations

import itertools
import random
from decimal import Decimal
from typing import Any

import pytest

from ikpy.engine.grammars.gbnf import GrammarError
from ikpy.engine.grammars.grammar import json_schema_grammar
from tests.cpu.vocab.test_grammar import TEXTS, accepts

WRITTEN = [
    sign + whole + point
    for sign, whole, point in itertools.product(
        ("", "-"), ("0", "1", "2", "9", "10", "11", "19", "20", "100"), ("", ".0", ".00", ".05", ".1", ".10", ".49",
        ".5", ".50", ".500", ".501", ".51", ".9", ".99", ".999"),
    )
]  # fmt: skip
EDGES = (0, 1, -1, 2, 10, -10, 19.5, 20, 0.5, -0.5, 0.1, 0.05, 1.5, 9.99, -9.99, 1e-3, 1e2, 10.5, -0.0)


def fits(text: str, schema: dict[str, Any]) -> bool:
    value = Decimal(text)
    found = [
        value >= Decimal(str(schema["minimum"])) if "minimum" in schema else True,
        value > Decimal(str(schema["exclusiveMinimum"])) if "exclusiveMinimum" in schema else True,
        value <= Decimal(str(schema["maximum"])) if "maximum" in schema else True,
        value < Decimal(str(schema["exclusiveMaximum"])) if "exclusiveMaximum" in schema else True,
    ]
    return all(found)


def cases() -> list[dict[str, Any]]:
    chance = random.Random(3)
    found = []
    for _ in range(60):
        names = chance.sample(["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"], chance.randint(1, 3))
        found.append({"type": "number", **{name: chance.choice(EDGES) for name in names}})
    return found


@pytest.mark.parametrize("schema", cases(), ids=str)
def test_numbers_between_bounds(schema: dict[str, Any]) -> None:
    wanted = {text for text in WRITTEN if fits(text, schema)}
    # What is written "-0" equals 0; it is left out.
    wanted -= {text for text in WRITTEN if text.startswith("-") and Decimal(text) == 0}
    try:
        grammar = json_schema_grammar(schema, TEXTS)
    except GrammarError as error:
        assert "no number lies between the bounds" in str(error) and not wanted
        return
    wrong = [text for text in WRITTEN if accepts(grammar, text) != (text in wanted)]
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"minimum": 0, "maximum": 1}, ["0", "0.0", "1", "1.000", "0.12345"], ["1.001", "-0.1", "2", "01", "1.", ".5"]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, ["0.0001", "0.999999"], ["0", "0.0", "1", "0."]),
        ({"minimum": 0.25}, ["0.25", "0.250", "0.3", "7", "123456.5"], ["0.249999", "0", "-1"]),
        ({"minimum": -1e300, "maximum": 1e300}, ["-1", "0", "123456.5"], ["1e3"]),
        ({"minimum": 1e17}, ["100000000000000000"], ["1", "0", "99999999999999999"]),
        ({"minimum": 1e-300, "maximum": 1}, ["0.5", "1"], ["0", "0.0"]),
        ({"minimum": 3, "maximum": 3}, ["3", "3.0"], ["3.1", "2.9"]),
        ({"minimum": -2.5, "maximum": 2.5}, ["-2.5", "-0.1", "0", "2.5"], ["-2.51", "2.6", "-3"]),
    ],
)  # fmt: skip
def test_single_ranges(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    grammar = json_schema_grammar({"type": "number", **schema}, TEXTS)
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    "schema",
    [
        {"minimum": 2, "maximum": 1},
        {"exclusiveMinimum": 1, "maximum": 1},
        {"minimum": 1e-50, "maximum": 2e-50},
        {"exclusiveMinimum": 0, "exclusiveMaximum": 0},
    ],
)
def test_empty_ranges_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError, match="no number lies between the bounds"):
        json_schema_grammar({"type": "number", **schema}, TEXTS)


def test_bounds_of_hundreds_of_digits_are_refused() -> None:
    with pytest.raises(GrammarError, match="nested too deeply"):
        json_schema_grammar({"type": "number", "minimum": 1e300}, TEXTS)


def test_bounds_that_must_hold_together() -> None:
    schema = {"allOf": [{"type": "number", "minimum": 0.5}, {"maximum": 1.5}, {"exclusiveMaximum": 1.25}]}
    grammar = json_schema_grammar(schema, TEXTS)
    assert [text for text in ("0.5", "1.2", "0.4", "1.25", "1.5") if accepts(grammar, text)] == ["0.5", "1.2"]


def test_bounds_without_a_type_are_those_of_a_number() -> None:
    grammar = json_schema_grammar({"minimum": 3, "exclusiveMaximum": 5}, TEXTS)
    assert accepts(grammar, "3") and accepts(grammar, "4.5")
    assert not accepts(grammar, "2") and not accepts(grammar, "5") and not accepts(grammar, '"a"')


def test_numbers_without_bounds_are_those_of_64_bits() -> None:
    grammar = json_schema_grammar({"type": "number"}, TEXTS)
    for text in ("1e5", "-1.5E-07", "9e289", "9999999999999999e199"):
        assert accepts(grammar, text)
    for text in ("1e290", "1e999", "1e-1234", "1e"):
        assert not accepts(grammar, text)
