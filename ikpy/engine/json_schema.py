"""JSON schema to GBNF (tools specification 9.6): the grammar of the JSON texts a schema allows."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from ikpy.engine.gbnf import MOST_REPETITIONS, GrammarError
from ikpy.engine.named_patterns import usable, with_patterns
from ikpy.engine.pattern_search import search_gbnf
from ikpy.engine.schema_bounds import integer_gbnf, number_gbnf
from ikpy.engine.schema_counts import Pairs
from ikpy.engine.schema_merge import CONSTRAINTS, JOINING, Conjunction, allows_nothing, components
from ikpy.engine.schema_names import other_names
from ikpy.engine.schema_pattern import is_whole, pattern_to_gbnf
from ikpy.engine.schema_values import allowed_values

Schema = dict[str, Any] | bool

PRIMITIVES = {
    "space": r'| " " | "\n"{1,2} [ \t]{0,20}',
    "char": r'[^"\\\x7F\x00-\x1F] | [\\] (["\\bfnrt] | "u" [0-9a-fA-F]{4})',
    "string": r'"\"" char* "\"" space',
    "boolean": '("true" | "false") space',
    "null": '"null" space',
    "integral": "[0] | [1-9] [0-9]{0,15}",
    "integer": '("-"? integral) space',
    "number": '("-"? integral) ("." [0-9]{1,16})? ([eE] [-+]? exponent)? space',
    "exponent": '[0-9]{1,2} | "1" [0-9]{2} | "2" [0-8] [0-9]',
    "value": "object | array | string | number | boolean | null",
    "object": r'"{" space (string ":" space value ("," space string ":" space value)*)? "}" space',
    "array": '"[" space (value ("," space value)*)? "]" space',
    "date": '[0-9]{4} "-" ("0" [1-9] | "1" [0-2]) "-" ("0" [1-9] | [1-2] [0-9] | "3" [0-1])',
    "time": '([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9] ":" [0-5] [0-9] ("." [0-9]{3})? '
    '("Z" | ("+" | "-") ([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9])',
    "date-time": 'date "T" time',
    "uuid": "[0-9a-fA-F]{8}" + ' "-" [0-9a-fA-F]{4}' * 3 + ' "-" [0-9a-fA-F]{12}',
}
USES = {
    "string": ("char", "space"),
    "boolean": ("space",),
    "null": ("space",),
    "integer": ("integral", "space"),
    "number": ("integral", "exponent", "space"),
    "value": ("object", "array", "string", "number", "boolean", "null"),
    "object": ("string", "value", "space"),
    "array": ("value", "space"),
    "date-time": ("date", "time"),
}
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
LISTED_FORMATS = ("date", "time", "date-time")
MOST_PARTS = 50_000
"""Schemas that are converted: a short text can name the same ones again and again."""
SEARCH_PARTS = 20
"""Schemas that are converted in the time that a pattern needs to be made a grammar of its own (1.5 ms)."""
UNREAD = ("not", "if", "contains", "propertyNames", "dependentSchemas", "$dynamicRef")
"""Keywords that are not read: an error where a schema says nothing else."""
COUNTS = ("minProperties", "maxProperties")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
OF_OBJECTS = ("properties", "patternProperties", "required", "additionalProperties", *COUNTS)
LARGEST = sys.float_info.max
"""Of bounds."""
LONGEST_PLACE = 100
"""Characters of the place of a schema, of which rules and errors get their names."""


def schema_to_gbnf(schema: Schema) -> str:
    """GBNF text for ``schema``; raises GrammarError listing everything that cannot be converted."""
    return _Converter(schema).convert()


def literal(text: str) -> str:
    """GBNF literal of ``text``."""
    escaped = []
    for char in text:
        if char in '"\\':
            escaped.append("\\" + char)
        elif ord(char) < 0x20 or ord(char) == 0x7F:
            escaped.append(f"\\x{ord(char):02X}")
        else:
            escaped.append(char)
    return f'"{"".join(escaped)}"'


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


def _inside(where: str, name: Any) -> str:
    """The place of a part of the schema at ``where``."""
    return f"{where}-{name}"[-LONGEST_PLACE:]


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_number(value: Any) -> bool:
    # Integers of JSON may be larger than floats.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


KEYWORD_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("oneOf", "anyOf", "allOf", "enum", "prefixItems"), (_is_list, "a list")),
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength", *COUNTS), (_is_count, "a whole number from 0")),
    **dict.fromkeys(BOUNDS, (_is_number, "a number")),
    **dict.fromkeys(("properties", "patternProperties"), (lambda value: isinstance(value, dict), "an object")),
    "required": (_is_names, "a list of names"),
    "pattern": (lambda value: isinstance(value, str), "a string"),
}


class _Converter:
    def __init__(self, schema: Schema) -> None:
        self.root = schema
        self.rules: dict[str, str] = {}
        self.counts: Counter[str] = Counter()
        self.references: dict[str, str] = {}
        self.errors: list[str] = []
        self.n_parts = 0

    def convert(self) -> str:
        try:
            text = self.expression(self.root, "root")
        except RecursionError:
            raise GrammarError("JSON schema conversion failed: schemas are nested too deeply") from None
        self.rules = {"root": text, **{k: v for k, v in self.rules.items() if k != "root"}}
        if self.errors:
            raise GrammarError("JSON schema conversion failed: " + "; ".join(self.errors))
        return "\n".join(f"{name} ::= {body}" for name, body in self.rules.items()) + "\n"

    def use(self, name: str) -> str:
        """A primitive rule's name, the rule and what it needs being added."""
        if name not in self.rules:
            self.rules[name] = PRIMITIVES[name]
            for other in USES.get(name, ()):
                self.use(other)
        return name

    def add(self, hint: str, body: str) -> str:
        """Name of a new rule."""
        base = re.sub(r"[^A-Za-z0-9]+", "-", hint[-LONGEST_PLACE:]).strip("-") or "rule"
        name = base
        while name in self.rules or name in PRIMITIVES or name == "root":
            self.counts[base] += 1
            name = f"{base}-{self.counts[base] + 1}"
        self.rules[name] = body
        return name

    def part(self, schema: Any, where: str) -> str:
        """Name of a new rule for a schema."""
        return self.add(where, self.expression(schema, where))

    def fail(self, message: str) -> str:
        self.errors.append(message)
        return '""'

    def count_part(self, n: int = 1) -> None:
        """Counts a schema that is looked at, or work that takes as long as n; raises GrammarError at the limit."""
        self.n_parts += n
        if self.n_parts > MOST_PARTS:
            raise GrammarError(f"JSON schema conversion failed: more than {MOST_PARTS} schemas, references followed")

    def expression(self, schema: Any, where: str) -> str:
        """Right-hand side for one schema; ends with the white space that may follow."""
        self.count_part()
        if schema is True or schema == {}:
            return self.use("value")
        if not isinstance(schema, dict):
            return self.fail(f"{where}: unsupported schema {json.dumps(schema)[:60]}")
        if error := self.malformed(schema):
            return self.fail(f"{where}: {error}")
        if any(key in schema for key in JOINING):
            return self.joined(schema, where)
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return self.constants(self.allowed(values, schema), where)
        unread = next((key for key in UNREAD if key in schema), None)
        if unread and not any(key in schema for key in CONSTRAINTS):
            return self.fail(f"{where}: {unread} is not supported")
        kind = schema.get("type")
        if isinstance(kind, list):
            return self.alternatives([{**schema, "type": item} for item in kind], where)
        return self.typed(schema, kind or self.implied_type(schema), where)

    @staticmethod
    def malformed(schema: dict[str, Any]) -> str:
        """What is wrong with the value of a keyword that is read; empty if nothing is."""
        for key, (is_fine, kind) in KEYWORD_KINDS.items():
            if key in schema and not is_fine(schema[key]):
                return f"{key} must be {kind}"
        return ""

    @staticmethod
    def implied_type(schema: dict[str, Any]) -> str | None:
        if any(key in schema for key in OF_OBJECTS):
            return "object"
        if any(key in schema for key in ("items", "prefixItems", "minItems", "maxItems")):
            return "array"
        if any(key in schema for key in ("pattern", "format", "minLength", "maxLength")):
            return "string"
        if any(key in schema for key in BOUNDS):
            return "number"
        return None

    def typed(self, schema: dict[str, Any], kind: Any, where: str) -> str:
        if kind == "object":
            return self.object(schema, where)
        if kind == "array":
            return self.array(schema, where)
        if kind == "string":
            return self.string(schema, where)
        if kind in ("integer", "number"):
            return self.bounded(kind, schema, where)
        if kind in TYPES:
            return self.use(kind)
        if kind is None:
            return self.use("value")
        return self.fail(f"{where}: unknown type {json.dumps(kind)}")

    def allowed(self, values: Sequence[Any], schema: dict[str, Any]) -> list[Any]:
        """The values that what stands beside them allows."""
        self.count_part(SEARCH_PARTS if "pattern" in schema else 1)
        return allowed_values(values, schema)

    def constants(self, values: Sequence[Any], where: str) -> str:
        if not values:
            return self.fail(f"{where}: no value is allowed")
        texts = [literal(json.dumps(value, ensure_ascii=False, separators=(",", ":"))) for value in values]
        return f"({' | '.join(texts)}) {self.use('space')}"

    def alternatives(self, schemas: Sequence[Any], where: str) -> str:
        kept = [(i, schema) for i, schema in enumerate(schemas) if not allows_nothing(schema)]
        names = [self.part(schema, _inside(where, i)) for i, schema in kept]
        return " | ".join(names) if names else self.fail(f"{where}: no alternatives")

    def reference(self, target: Any, where: str) -> str:
        if not isinstance(target, str) or not target.startswith("#"):
            return self.fail(f"{where}: cannot resolve $ref {json.dumps(target)}; only #/... is supported")
        if target in self.references:
            return self.references[target]
        schema = resolve(self.root, target)
        if schema is None:
            return self.fail(f"{where}: $ref {target} points nowhere")
        name = self.add(target.rsplit("/", 1)[-1] if "/" in target else "document", "")
        self.references[target] = name
        self.rules[name] = self.expression(schema, name)
        return name

    def joined(self, schema: dict[str, Any], where: str) -> str:
        """$ref, anyOf, oneOf and allOf, and what stands beside them: all of it must hold."""
        parts = components(schema)
        if not parts:
            return self.use("value")
        if len(parts) == 1 and isinstance(parts[0], dict):
            part = parts[0]
            if "$ref" in part and len(part) == 1:
                return self.reference(part["$ref"], where)
            for key in ("anyOf", "oneOf"):
                if key in part and len(part) == 1:
                    return self.alternatives(part[key], where)
            return self.expression(part, where)
        try:
            options = Conjunction(self.resolved, lambda part: self.look_at(part, where)).of(parts)
        except ValueError as error:
            return self.fail(f"{where}: {error}")
        options = [o for o in options if "enum" not in o or self.allowed(o["enum"], o)]
        if not options:
            return self.fail(f"{where}: no value is allowed")
        return self.expression(options[0], where) if len(options) == 1 else self.alternatives(options, where)

    def resolved(self, target: Any) -> Any:
        """The schema of a reference; ValueError if there is none."""
        schema = resolve(self.root, target) if isinstance(target, str) else None
        if schema is None:
            raise ValueError(f"$ref {json.dumps(target)} points nowhere")
        return schema

    def look_at(self, schema: Any, where: str) -> None:
        """Counts a schema; ValueError for one that no keywords can be read from."""
        self.count_part()
        if not isinstance(schema, dict | bool):
            raise ValueError(f"unsupported schema {json.dumps(schema)[:60]}")
        if isinstance(schema, dict) and (error := self.malformed(schema)):
            raise ValueError(error)

    def object(self, schema: dict[str, Any], where: str) -> str:
        properties: dict[str, Any] = schema.get("properties", {})
        additional = schema.get("additionalProperties", None if properties else True)
        limited = any(key in schema for key in COUNTS)
        patterns = schema.get("patternProperties", {})
        if additional is True:  # any name with any value is allowed already
            patterns = {pattern: value for pattern, value in patterns.items() if value is not True and value != {}}
        if not (properties or patterns or schema.get("required") or limited) and additional is True:
            return self.use("object")
        space = self.use("space")
        required = set(schema.get("required", ()))
        unnamed = sorted(required - set(properties))
        properties = properties | dict.fromkeys(unnamed, True)
        if patterns:
            self.count_part(2 * SEARCH_PARTS * len(patterns))
            properties = with_patterns(properties, patterns)
        if isinstance(additional, dict):
            properties |= {name: additional for name in unnamed if properties[name] is True}
        pairs = []
        for name, value in properties.items():
            if allows_nothing(value) and name not in required:
                continue
            rule = self.part(value, _inside(where, name))
            pairs.append((f'{literal(json.dumps(name, ensure_ascii=False))} {space} ":" {space} {rule}', name))
        extra = None
        if patterns:
            extra = self.pattern_pair(patterns, properties, where)
        elif additional not in (None, False):
            extra = self.additional_pair(additional, properties, where)
        if limited:
            pairs_of = Pairs([(pair, name in required) for pair, name in pairs], extra, space)
            return self.counted(pairs_of, schema, where)
        rest = f'("," {space} {extra})*' if extra else '""'
        start = f"({extra} {rest})?" if extra else '""'
        for pair, name in reversed(pairs):
            after = self.add(_inside(where, "rest"), rest)
            optional = name not in required
            start = f"{pair} {after} | {start}" if optional else f"{pair} {after}"
            start = self.add(_inside(where, "from"), start)
            rest = f'("," {space} {pair}){"?" if optional else ""} {after}'
        return f'"{{" {space} {start} "}}" {space}'

    def counted(self, pairs: Pairs, schema: dict[str, Any], where: str) -> str:
        """An object with so many properties."""
        low, high = int(schema.get("minProperties", 0)), schema.get("maxProperties")
        if max(low, int(high or 0)) > MOST_REPETITIONS:
            return self.fail(f"{where}: more than {MOST_REPETITIONS} properties")
        place = _inside(where, "from")
        try:
            body = pairs.counted(low, None if high is None else int(high), lambda text: self.add(place, text))
        except ValueError as error:
            return self.fail(f"{where}: {error}")
        if body is None:
            return self.fail(f"{where}: no object has so many properties")
        space = self.use("space")
        return f'"{{" {space} ({body}) "}}" {space}'

    def pattern_pair(self, patterns: Mapping[str, Any], named: Mapping[str, Any], where: str) -> str | None:
        """A property whose name fits a pattern; None if only the named ones can be offered."""
        names = usable(patterns, named)
        if not names and not named:
            return self.fail(f"{where}: patternProperties {json.dumps([*patterns])[:80]} cannot be held to")
        space, place = self.use("space"), _inside(where, "pattern")
        pairs = [
            rf'"\"" ({body}) "\"" {space} ":" {space} {self.part(patterns[pattern], place)}'
            for pattern, body in names.items()
        ]
        return f"({' | '.join(pairs)})" if pairs else None

    def additional_pair(self, schema: Any, named: Mapping[str, Any], where: str) -> str:
        """A property that is none of those that are named."""
        rule, space, name = self.part(schema, _inside(where, "additional")), self.use("space"), self.use("string")
        if named:
            self.use("char")
            place = _inside(where, "other")
            name = rf'"\"" ({other_names(named, literal, lambda body: self.add(place, body))}) "\"" {space}'
        return f'{name} ":" {space} {rule}'

    def array(self, schema: dict[str, Any], where: str) -> str:
        space = self.use("space")
        first, more = schema.get("prefixItems", ()), schema.get("items", "prefixItems" not in schema)
        if isinstance(more, list):  # the older way to write prefixItems
            first, more = more, schema.get("additionalItems", False)
        low, high = int(schema.get("minItems", 0)), schema.get("maxItems")
        if allows_nothing(more) or (more is True and first):
            high = len(first) if high is None else min(int(high), len(first))
        if max(low, int(high or 0)) > MOST_REPETITIONS:
            return self.fail(f"{where}: more than {MOST_REPETITIONS} items")
        if high is not None and low > high:
            return self.fail(f"{where}: no array has {low} or more and {int(high)} or fewer items")
        if high == 0:
            return f'"[" {space} "]" {space}'
        items = [self.part(item, _inside(where, i)) for i, item in enumerate(first[: high and int(high)])]
        n, rest = len(items), ""
        if high is None or high > n:
            item = self.part(more, _inside(where, "item"))
            top = "" if high is None else str(int(high) - max(n, 1))
            rest = f'("," {space} {item}){{{max(0, low - max(n, 1))},{top}}}'
            if not items:
                rest = f"({item} {rest})" + ("?" if low == 0 else "")
        # All items of a list are wanted, unless the schema says how many may be missing.
        needed = min(low, n) if "minItems" in schema else n
        for i, item in reversed(list(enumerate(items))):
            rest = f'"," {space} {item} {rest}' if i else f"{item} {rest}"
            rest = f"({rest})?" if i >= needed else rest
        return f'"[" {space} {rest} "]" {space}'

    def string(self, schema: dict[str, Any], where: str) -> str:
        if "pattern" in schema:
            try:
                pattern = schema["pattern"]
                body = pattern_to_gbnf(pattern) if is_whole(pattern) else search_gbnf(pattern)
            except ValueError as error:
                return self.fail(f"{where}: pattern {schema['pattern']!r}: {error}")
            return rf'"\"" ({body}) "\"" {self.use("space")}'
        kind = schema.get("format")
        if kind in LISTED_FORMATS or (isinstance(kind, str) and re.fullmatch("uuid[1-5]?", kind)):
            name = self.use("uuid" if kind.startswith("uuid") else kind)
            return rf'"\"" {name} "\"" {self.use("space")}'
        if "minLength" in schema or "maxLength" in schema:
            low, high = int(schema.get("minLength", 0)), schema.get("maxLength")
            if max(low, int(high or 0)) > MOST_REPETITIONS:
                return self.fail(f"{where}: string lengths above {MOST_REPETITIONS} are not supported")
            count = f"{{{low},{'' if high is None else int(high)}}}"
            return rf'"\"" {self.use("char")}{count} "\"" {self.use("space")}'
        return self.use("string")

    def bounded(self, kind: str, schema: dict[str, Any], where: str) -> str:
        """A number or an integer."""
        try:
            body = integer_gbnf(schema) if kind == "integer" else number_gbnf(schema)
        except ValueError as error:
            return self.fail(f"{where}: {error}")
        return self.use(kind) if body is None else f"({body}) {self.use('space')}"
