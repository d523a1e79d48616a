"""Calls of Gemma 4: ``call:NAME{key:value,...}`` with texts between tokens of their own instead of JSON's quotes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from ikpy.engine.grammars import strict_json
from ikpy.engine.grammars.gbnf import MOST_REPETITIONS, GrammarError, literal, upper_limit
from ikpy.engine.grammars.json_schema import NoValueError
from ikpy.engine.grammars.schema_counts import Items, Pairs
from ikpy.engine.grammars.schema_keywords import malformed
from ikpy.engine.grammars.schema_merge import allows_nothing
from ikpy.engine.grammars.schema_references import resolve
from ikpy.server.chat.scanning import DEEPEST, behind_blanks, behind_comma
from ikpy.server.chat.tagged_values import if_possible, listed, parameters_of, takes_text, text_without, value_types
from ikpy.server.chat.tool_blocks import BlockCalls, Call, QuotedTexts
from ikpy.server.chat.tool_reading import Rules, ToolFormat, value_or_text

QUOTE = '<|"|>'
HEAD = re.compile(r"\s*call:\s*([^\s{]+)\s*(?=\{)")
KEY = re.compile(rf"\s*(?:{re.escape(QUOTE)}(.*?){re.escape(QUOTE)}|([^\s:,{{}}\[\]][^:,{{}}\[\]]*?))\s*:", re.DOTALL)
BARE = re.compile(r"[^,\]}]+")
PYTHON_WORDS = {"None": None, "True": True, "False": False}
"""What templates write for values of Python, and models after them."""
DEEPEST_RULE = 5
"""Values within values that are held to their schemas; deeper ones, and those of recursive schemas, may be any."""
ANY_DEPTH = 4
ANY_KEY = r'[^<>"{}:,\x5B\x5D\x00-\x20]{1,100}'
"""GBNF of a key that no schema names."""
PLAIN = '"true" | "false" | "null" | "-"? [0-9]{1,16} ("." [0-9]{1,16})? ([eE] [-+]? [0-9]{1,2})?'
NOTHING = '""'
COMMA = ' "," '
ALTERNATIVES = ("anyOf", "oneOf")

# reading


def gemma_calls(block: str) -> tuple[list[Call], str]:
    """The call of a block."""
    head = HEAD.match(block)
    try:
        value, end = _value(block, head.end(), 0) if head else (None, 0)
    except ValueError:
        return [], block
    if head is None or block[end:].strip():
        return [], block
    return [(head[1], json.dumps(value, ensure_ascii=False), None)], ""


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """The value at a place and the place behind it. Raises ValueError."""
    if depth > DEEPEST:
        raise ValueError("nested too deep")
    at = behind_blanks(text, at)
    if text.startswith(QUOTE, at):
        end = text.index(QUOTE, at + len(QUOTE))
        return text[at + len(QUOTE) : end], end + len(QUOTE)
    if text.startswith('"', at):
        return strict_json.DECODER.raw_decode(text, at)
    if text.startswith("{", at):
        return _object(text, at + 1, depth)
    if text.startswith("[", at):
        return _list(text, at + 1, depth)
    bare = BARE.match(text, at)
    if bare is None:
        raise ValueError("no value")
    return _bare_value(bare[0].strip()), bare.end()


def _bare_value(text: str) -> Any:
    """A number, a literal, or a text for which the model wrote no quotes."""
    if text in PYTHON_WORDS:
        return PYTHON_WORDS[text]
    return value_or_text(text)


def _object(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    at = behind_blanks(text, at)
    while not text.startswith("}", at):
        key = KEY.match(text, at)
        if key is None:
            raise ValueError("no key")
        name = key[2] if key[1] is None else key[1]
        found[name.strip('"')], at = _value(text, key.end(), depth + 1)
        at = behind_comma(text, at, "}")
    return found, at + 1


def _list(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    found = []
    at = behind_blanks(text, at)
    while not text.startswith("]", at):
        value, at = _value(text, at, depth + 1)
        found.append(value)
        at = behind_comma(text, at, "]")
    return found, at + 1


# grammars


def gemma_call(name: str, schema: Any, rules: Rules) -> str:
    """GBNF of a call."""
    return f"{literal(f'call:{name}')} {_object_rule(schema, schema, rules, DEEPEST_RULE)}"


def _value_rule(schema: Any, root: Any, rules: Rules, depth: int) -> str:
    """GBNF of a value; ``root``: the whole schema."""
    rules.spend()
    choices = listed(schema)
    if choices:
        return f"({' | '.join(map(written, choices))})"
    if allows_nothing(schema) or (isinstance(schema, dict) and ("enum" in schema or "const" in schema)):
        return rules.schema(schema, root)  # which raises NoValueError
    if not isinstance(schema, dict) or depth == 0:
        return _any_value(rules, ANY_DEPTH)
    if malformed(schema):
        return rules.schema(schema, root)  # which raises GrammarError
    if isinstance(schema.get("$ref"), str):
        found = resolve(root, schema["$ref"])
        return rules.schema(schema, root) if found is None else _value_rule(found, root, rules, depth - 1)
    for key in ALTERNATIVES:
        if isinstance(schema.get(key), list):
            options = [if_possible(partial(_value_rule, item, root, rules, depth - 1)) for item in schema[key]]
            return _any_of([option for option in options if option is not None])
    types = value_types(schema) or ({"object"} if "properties" in schema else {"array"} if "items" in schema else set())
    if not types:
        return _text(rules) if "allOf" not in schema and takes_text(schema) else _any_value(rules, ANY_DEPTH)
    options = [if_possible(partial(_typed, kind, schema, root, rules, depth)) for kind in sorted(types)]
    return _any_of([option for option in options if option is not None])


def _any_of(options: list[str]) -> str:
    if not options:
        raise NoValueError("no alternative has a value")
    return f"({' | '.join(options)})"


def _typed(kind: str, schema: Mapping[str, Any], root: Any, rules: Rules, depth: int) -> str:
    if kind == "string":
        return _text(rules)
    if kind == "object":
        return _object_rule(schema, root, rules, depth)
    if kind == "array":
        low, high = int(schema.get("minItems", 0)), upper_limit(schema.get("maxItems"))
        if low > MOST_REPETITIONS:
            raise GrammarError(f"an array of more than {MOST_REPETITIONS} items")
        if high is not None and low > high:
            raise NoValueError("no array has so many items")
        item = if_possible(partial(_value_rule, schema.get("items"), root, rules, depth - 1))
        if item is None and low > 0:
            raise NoValueError("an array needs items of which there are none")
        more = None if item is None else rules.rule(item)
        body = Items([], more, 0, NOTHING).counted(low, high)
        return f'"[" {body} "]"'
    return rules.schema({**schema, "type": kind}, root)


def _object_rule(schema: Any, root: Any, rules: Rules, depth: int) -> str:
    """Properties in the order of their names, in which the template has the model see them."""
    found = parameters_of(schema, root)
    named = []
    for key, value in sorted(found.properties.items(), key=lambda item: item[0].lower()):
        needed = key in found.required
        rule = if_possible(partial(_value_rule, value, root, rules, depth - 1), needed=needed)
        if rule is not None:
            named.append((f"{literal(f'{key}:')} {rule}", needed))
    more = None
    if found.more is not None:
        rule = if_possible(partial(_value_rule, found.more, root, rules, depth - 1))
        more = None if rule is None else rules.rule(f'{ANY_KEY} ":" {rule}')
    return f'"{{" {Pairs(named, more, NOTHING).chained(rules.rule)} "}}"'


def _text(rules: Rules) -> str:
    return rules.rule(f"@{{{QUOTE}}} {text_without(QUOTE)} @{{{QUOTE}}}")


def _any_value(rules: Rules, depth: int) -> str:
    """GBNF of a value of any type, of bounded depth."""
    plain = f"{_text(rules)} | {PLAIN}"
    if depth == 0:
        return rules.rule(plain)
    inner = _any_value(rules, depth - 1)
    pair = f'{ANY_KEY} ":" {inner}'
    return rules.rule(f'{plain} | "[" ({inner} ("," {inner})*)? "]" | "{{" ({pair} ("," {pair})*)? "}}"')


def written(value: Any) -> str:
    """GBNF of a value as the model writes it."""
    if isinstance(value, str):
        return f"@{{{QUOTE}}} {literal(value)} @{{{QUOTE}}}" if value else f"@{{{QUOTE}}} @{{{QUOTE}}}"
    if isinstance(value, list):
        return f'"[" {COMMA.join(map(written, value))} "]"'
    if isinstance(value, dict):
        pairs = (f"{literal(f'{key}:')} {written(item)}" for key, item in sorted(value.items()))
        return f'"{{" {COMMA.join(pairs)} "}}"'
    return literal(json.dumps(value))


GEMMA = ToolFormat(
    "gemma",
    "<|tool_call>",
    lambda: BlockCalls("<|tool_call>", "<tool_call|>", gemma_calls, QuotedTexts(QUOTE)),
    "call @{<tool_call|>}",
    gemma_call,
    r'"\n"?',
    ("<|tool_call>", "<tool_call|>", QUOTE),
)
