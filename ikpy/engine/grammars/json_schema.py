"""JSON schema to GBNF (server.md#constrained-answers): the grammar of the JSON texts a schema allows."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ikpy.engine.grammars.gbnf import MOST_REPETITIONS, GrammarError, literal, upper_limit
from ikpy.engine.grammars.named_patterns import usable, with_patterns
from ikpy.engine.grammars.pattern_search import search_gbnf
from ikpy.engine.grammars.schema_bounds import integer_gbnf, number_gbnf
from ikpy.engine.grammars.schema_budget import Budget
from ikpy.engine.grammars.schema_counts import Items, Pairs
from ikpy.engine.grammars.schema_keywords import COUNTS, implied_type, malformed
from ikpy.engine.grammars.schema_merge import CONSTRAINTS, JOINING, Conjunction, allows_nothing, components
from ikpy.engine.grammars.schema_names import other_names
from ikpy.engine.grammars.schema_pattern import is_whole, pattern_to_gbnf
from ikpy.engine.grammars.schema_primitives import PRIMITIVES, USES
from ikpy.engine.grammars.schema_references import resolve
from ikpy.engine.grammars.schema_values import allowed_values

Schema = dict[str, Any] | bool

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
LISTED_FORMATS = ("date", "time", "date-time")
SEARCH_PARTS = 20
"""Schemas that are converted in the time that a pattern needs to be made a grammar of its own (1.5 ms)."""
UNREAD = ("not", "if", "contains", "propertyNames", "dependentSchemas", "$dynamicRef")
"""Keywords that are not read: an error where a schema says nothing else."""
LONGEST_PLACE = 100
"""Characters of the place of a schema, of which rules and errors get their names."""


def schema_to_gbnf(schema: Schema, root: Schema | None = None, budget: Budget | None = None) -> str:
    """GBNF text for ``schema``; raises GrammarError listing what cannot be converted, NoValueError if no value fits.

    ``root``: the schema that it is part of, in which references are looked up.
    """
    return _Converter(schema, schema if root is None else root, budget or Budget()).convert()


def _inside(where: str, name: Any) -> str:
    """The place of a part of the schema at ``where``."""
    return f"{where}-{name}"[-LONGEST_PLACE:]


class NoValueError(GrammarError):
    """No value fits a schema. Its holder may do without one."""


class _NothingError(Exception):
    """No value fits a schema; the message is for whoever wants one."""


class _KnownBetterError(Exception):
    """Rules were made with one for a schema that no value fits, as has been found out since."""


class _Converter:
    """``impossible``: references to schemas that no value fits, as far as known."""

    def __init__(self, schema: Schema, root: Schema, budget: Budget) -> None:
        self.schema, self.root = schema, root
        self.spend = budget.spend
        self.impossible: dict[str, str] = {}
        self._begin()

    def _begin(self) -> None:
        self.rules: dict[str, str] = {}
        self.counts: Counter[str] = Counter()
        self.references: dict[str, str] = {}
        self.errors: list[str] = []
        self.used: set[str] = set()
        """References whose rules are used."""

    def convert(self) -> str:
        try:
            text = self._text()
        except RecursionError:
            raise GrammarError("JSON schema conversion failed: schemas are nested too deeply") from None
        self.rules = {"root": text, **{k: v for k, v in self.rules.items() if k != "root"}}
        if self.errors:
            raise GrammarError("JSON schema conversion failed: " + "; ".join(self.errors))
        return "\n".join(f"{name} ::= {body}" for name, body in self.rules.items()) + "\n"

    def _text(self) -> str:
        """Body of the rule ``root``."""
        while True:
            try:
                return self.expression(self.schema, "root")
            except _KnownBetterError:
                self._begin()
            except _NothingError as error:
                if self.errors:
                    return self.fail(str(error))
                raise NoValueError(f"JSON schema conversion failed: {error}") from None

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

    def possible(self, schema: Any, where: str) -> str | None:
        """Name of a new rule for a schema; None if no value fits it."""
        try:
            return self.part(schema, where)
        except _NothingError:
            return None

    def fail(self, message: str) -> str:
        self.errors.append(message)
        return '""'

    def expression(self, schema: Any, where: str) -> str:
        """Right-hand side for one schema; ends with the white space that may follow."""
        self.spend()
        if schema is True or schema == {}:
            return self.use("value")
        if allows_nothing(schema):
            raise _NothingError(f"{where}: no value is allowed")
        if not isinstance(schema, dict):
            return self.fail(f"{where}: unsupported schema {json.dumps(schema)[:60]}")
        if error := malformed(schema):
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
        return self.typed(schema, kind or implied_type(schema), where)

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
        self.spend(SEARCH_PARTS if "pattern" in schema else 1)
        return allowed_values(values, schema)

    def constants(self, values: Sequence[Any], where: str) -> str:
        if not values:
            raise _NothingError(f"{where}: no value is allowed")
        texts = [literal(json.dumps(value, ensure_ascii=False, separators=(",", ":"))) for value in values]
        return f"({' | '.join(texts)}) {self.use('space')}"

    def alternatives(self, schemas: Sequence[Any], where: str) -> str:
        found = [self.possible(schema, _inside(where, i)) for i, schema in enumerate(schemas)]
        names = [name for name in found if name is not None]
        if not names:
            raise _NothingError(f"{where}: no alternatives")
        return " | ".join(names)

    def reference(self, target: Any, where: str) -> str:
        if not isinstance(target, str) or not target.startswith("#"):
            return self.fail(f"{where}: cannot resolve $ref {json.dumps(target)}; only #/... is supported")
        if target in self.impossible:
            raise _NothingError(self.impossible[target])
        if target in self.references:
            self.used.add(target)
            return self.references[target]
        schema = resolve(self.root, target)
        if schema is None:
            return self.fail(f"{where}: $ref {target} points nowhere")
        name = self.add(target.rsplit("/", 1)[-1] if "/" in target else "document", "")
        self.references[target] = name
        try:
            self.rules[name] = self.expression(schema, name)
        except _NothingError as error:
            self.impossible[target] = str(error)
            if target in self.used:  # by what is inside it, if that is named elsewhere too
                raise _KnownBetterError from None
            del self.rules[name], self.references[target]
            raise
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
            options = Conjunction(self.resolved, self.look_at).of(parts)
        except ValueError as error:
            return self.fail(f"{where}: {error}")
        options = [o for o in options if "enum" not in o or self.allowed(o["enum"], o)]
        if not options:
            raise _NothingError(f"{where}: no value is allowed")
        return self.expression(options[0], where) if len(options) == 1 else self.alternatives(options, where)

    def resolved(self, target: Any) -> Any:
        """The schema of a reference; ValueError if there is none."""
        schema = resolve(self.root, target) if isinstance(target, str) else None
        if schema is None:
            raise ValueError(f"$ref {json.dumps(target)} points nowhere")
        return schema

    def look_at(self, schema: Any) -> None:
        """Counts a schema; ValueError for one that no keywords can be read from."""
        self.spend()
        if not isinstance(schema, dict | bool):
            raise ValueError(f"unsupported schema {json.dumps(schema)[:60]}")
        if isinstance(schema, dict) and (error := malformed(schema)):
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
            self.spend(2 * SEARCH_PARTS * len(patterns))
            properties = with_patterns(properties, patterns)
        if isinstance(additional, dict):
            properties |= {name: additional for name in unnamed if properties[name] is True}
        pairs = []
        for name, value in properties.items():
            place = _inside(where, name)
            rule = self.part(value, place) if name in required else self.possible(value, place)
            if rule is None:  # it can be left out only
                continue
            pairs.append((f'{literal(json.dumps(name, ensure_ascii=False))} {space} ":" {space} {rule}', name))
        extra = None
        if patterns:
            extra = self.pattern_pair(patterns, properties, where)
        elif additional not in (None, False):
            extra = self.additional_pair(additional, properties, where)
        found = Pairs([(pair, name in required) for pair, name in pairs], extra, space)
        if limited:
            return self.counted(found, schema, where)
        place = _inside(where, "from")
        return f'"{{" {space} {found.chained(lambda text: self.add(place, text))} "}}" {space}'

    def counted(self, pairs: Pairs, schema: dict[str, Any], where: str) -> str:
        """An object with so many properties."""
        low, high = int(schema.get("minProperties", 0)), upper_limit(schema.get("maxProperties"))
        if low > MOST_REPETITIONS:
            return self.fail(f"{where}: more than {MOST_REPETITIONS} properties")
        place = _inside(where, "from")
        try:
            body = pairs.counted(low, high, lambda text: self.add(place, text))
        except ValueError as error:
            return self.fail(f"{where}: {error}")
        if body is None:
            raise _NothingError(f"{where}: no object has so many properties")
        space = self.use("space")
        return f'"{{" {space} ({body}) "}}" {space}'

    def pattern_pair(self, patterns: Mapping[str, Any], named: Mapping[str, Any], where: str) -> str | None:
        """A property whose name fits a pattern; None if only the named ones can be offered."""
        names = usable(patterns, named)
        if not names and not named:
            return self.fail(f"{where}: patternProperties {json.dumps([*patterns])[:80]} cannot be held to")
        space, place = self.use("space"), _inside(where, "pattern")
        rules = [(body, self.possible(patterns[pattern], place)) for pattern, body in names.items()]
        pairs = [rf'"\"" ({body}) "\"" {space} ":" {space} {rule}' for body, rule in rules if rule is not None]
        return f"({' | '.join(pairs)})" if pairs else None

    def additional_pair(self, schema: Any, named: Mapping[str, Any], where: str) -> str | None:
        """A property that is none of those that are named; None if it could have no value."""
        rule, space, name = self.possible(schema, _inside(where, "additional")), self.use("space"), self.use("string")
        if rule is None:
            return None
        if named:
            self.use("char")
            place = _inside(where, "other")
            name = rf'"\"" ({other_names(named, lambda body: self.add(place, body))}) "\"" {space}'
        return f'{name} ":" {space} {rule}'

    def array(self, schema: dict[str, Any], where: str) -> str:
        space = self.use("space")
        first, more = schema.get("prefixItems", ()), schema.get("items", "prefixItems" not in schema)
        if isinstance(more, list):  # the older way to write prefixItems
            first, more = more, schema.get("additionalItems", False)
        low, high = int(schema.get("minItems", 0)), upper_limit(schema.get("maxItems"))
        if more is True and first:
            more = False
        items, more_item = self.items(first, more, high, where)
        if more_item is None:
            high = len(items) if high is None else min(high, len(items))
        if low > MOST_REPETITIONS:
            return self.fail(f"{where}: more than {MOST_REPETITIONS} items")
        if high is not None and low > high:
            raise _NothingError(f"{where}: no array has {low} or more and {high} or fewer items")
        if high == 0:
            return f'"[" {space} "]" {space}'
        # All items of a list are wanted, unless the schema says how many may be missing.
        needed = min(low, len(items)) if "minItems" in schema else len(items)
        body = Items(items, more_item, needed, space).counted(low, high)
        return f'"[" {space} {body} "]" {space}'

    def items(self, first: Sequence[Any], more: Any, high: int | None, where: str) -> tuple[list[str], str | None]:
        """Rules of the items that an array begins with, up to one that no value fits, and of the further ones; None if
        there can be none."""
        names: list[str] = []
        for i, item in enumerate(first[:high]):
            name = self.possible(item, _inside(where, i))
            if name is None:
                return names, None
            names.append(name)
        wanted = high is None or high > len(names)
        return names, self.possible(more, _inside(where, "item")) if wanted else None

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
            low, high = int(schema.get("minLength", 0)), upper_limit(schema.get("maxLength"))
            if low > MOST_REPETITIONS:
                return self.fail(f"{where}: texts of more than {MOST_REPETITIONS} characters cannot be asked for")
            if high is not None and low > high:
                raise _NothingError(f"{where}: no text has {low} or more and {high} or fewer characters")
            count = f"{{{low},{'' if high is None else high}}}"
            return rf'"\"" {self.use("char")}{count} "\"" {self.use("space")}'
        return self.use("string")

    def bounded(self, kind: str, schema: dict[str, Any], where: str) -> str:
        """A number or an integer."""
        try:
            body = integer_gbnf(schema) if kind == "integer" else number_gbnf(schema)
        except ValueError as error:
            raise _NothingError(f"{where}: {error}") from None
        return self.use(kind) if body is None else f"({body}) {self.use('space')}"
