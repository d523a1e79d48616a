"""Tool calls that give every argument in tags of its own: GLM 4.5, Qwen3-Coder and Seed-OSS.

Strings stand there without quotes, so the schema decides whether a value is text or JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from ikpy.engine.grammars.gbnf import literal
from ikpy.engine.grammars.json_schema import NoValueError
from ikpy.engine.grammars.schema_merge import allows_nothing
from ikpy.engine.grammars.schema_references import resolve
from ikpy.engine.grammars.schema_values import allowed_values
from ikpy.server.chat.tool_blocks import BlockCalls, Call
from ikpy.server.chat.tool_reading import Rules, ToolFormat, value_or_text

Schemas = Mapping[str, Mapping[str, Any]]
"""Schema of every parameter by function and name."""

SHAPES = ("type", "anyOf", "oneOf", "allOf", "enum", "const", "$ref", "properties", "items")
GLM_NAME = re.compile(r"\s*([^\s<{]+)\s*")
GLM_ARGUMENT = re.compile(r"<arg_key>((?:(?!</arg_key>).)*)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)
CODER_NAME = re.compile(r"\s*<function=([^>\s]+)>\s*")
CODER_ARGUMENT = re.compile(r"<parameter=([^>]+)>\n?(.*?)</parameter>\s*", re.DOTALL)
CODER_END = "</function>"
ANY_NAME = r'[^<>"\x00-\x20]{1,100}'
"""GBNF of the name of a parameter that no schema names."""
MOST_PARTS = 100
"""References and parts of allOf that are followed at the top of a schema."""


# schemas


def value_types(schema: Any) -> set[str]:
    """JSON types that a schema names, alternatives included; empty if it may be any or they are said elsewhere."""
    if not isinstance(schema, dict):
        return set()
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(alternatives, list):
        found = [value_types(item) for item in alternatives]
        return set().union(*found) if all(found) else set()
    named = schema.get("type")
    return {named} if isinstance(named, str) else {str(t) for t in named} if isinstance(named, list) else set()


@dataclass(frozen=True)
class Parameters:
    """What a schema says of a call's parameters; ``more``: the schema of further ones, None if there may be none."""

    properties: Mapping[str, Any]
    required: Collection[str]
    more: Any


def parameters_of(schema: Any, root: Any = None) -> Parameters:
    """The parameters of a call, references and parts of ``allOf`` at the top followed; ``root``: the whole schema."""
    properties: dict[str, Any] = {}
    required: list[Any] = []
    more, parts = None, [schema]
    closed = n_read = 0
    while n_read < min(len(parts), MOST_PARTS):
        part = parts[n_read] if isinstance(parts[n_read], dict) else {}
        n_read += 1
        if isinstance(part.get("properties"), dict):
            properties |= part["properties"]
            closed += "additionalProperties" not in part
        required += part["required"] if isinstance(part.get("required"), list) else []
        more = part.get("additionalProperties", more)
        parts += part["allOf"] if isinstance(part.get("allOf"), list) else []
        if isinstance(part.get("$ref"), str):
            parts.append(resolve(schema if root is None else root, part["$ref"]))
    if more is None and not closed:
        more = True
    return Parameters(properties, [str(name) for name in required], None if more is False else more)


def takes_text(schema: Any) -> bool:
    """Whether a value of the schema may be any text."""
    if not isinstance(schema, dict) or "enum" in schema or "const" in schema or allows_nothing(schema):
        return schema is True
    return "string" in value_types(schema) or not any(key in schema for key in SHAPES)


def listed(schema: Any) -> list[Any]:
    """The values that ``enum`` or ``const`` of a schema allow; empty if it lists none. Patterns beside them, which take
    long to make, are not looked at."""
    if not isinstance(schema, dict):
        return []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    beside = {key: value for key, value in schema.items() if key != "pattern"}
    return allowed_values(values, beside) if isinstance(values, list) else []


def typed_value(text: str, schema: Any) -> Any:
    """The value of an argument: JSON of a type that the schema has, else the text itself."""
    value = value_or_text(text)
    if isinstance(value, str):
        return text if schema is None or takes_text(schema) or text in listed(schema) else value
    types = value_types(schema)
    return value if not types or types & set(_json_types(value)) else text


def _json_types(value: Any) -> tuple[str, ...]:
    if value is None or isinstance(value, bool):
        return ("null",) if value is None else ("boolean",)
    if isinstance(value, int):
        return "integer", "number"
    return ("number",) if isinstance(value, float) else ("object",) if isinstance(value, dict) else ("array",)


# grammars


@lru_cache(maxsize=16)
def text_without(marker: str) -> str:
    """GBNF of the texts in which a marker does not occur; its first character must not come again in it.

    A beginning of the marker may stand there if another beginning or a character that does not go on with it follows.
    """
    head = marker[0]
    cut = " | ".join(literal(marker[:n]) for n in range(1, len(marker)))
    broken = " | ".join(f"{literal(marker[:n])} [^{head}{marker[n]}]" for n in range(1, len(marker)))
    return f"([^{head}] | ({cut})* ({broken}))* ({cut})*"


def value_rule(schema: Any, root: Any, closing: str, rules: Rules) -> str:
    """GBNF of a value in front of its closing tag; ``root``: the whole schema."""
    choices = listed(schema)
    if choices:
        texts = (item if isinstance(item, str) else json.dumps(item, ensure_ascii=False) for item in choices)
        return "(" + " | ".join(map(literal, texts)) + ")"
    if takes_text(schema):
        return rules.rule(text_without(closing))
    return rules.schema(schema, root)


def if_possible(make: Callable[[], str], *, needed: bool = False) -> str | None:
    """GBNF of a value; None where none fits the schema and it may be missing. Raises NoValueError where it may not."""
    try:
        return make()
    except NoValueError:
        if needed:
            raise
        return None


Pair = Callable[[str, str, Any], str]
"""GBNF of a parameter from that of its name and its value, and the schema."""


def tagged_call(head: str, pair: Pair, closing: str, schema: Any, rules: Rules) -> str:
    """GBNF of a call: ``head``, then every parameter."""
    root, found = schema if isinstance(schema, dict) else {}, parameters_of(schema)
    parts = [head]
    for key, value in found.properties.items():
        needed = key in found.required
        rule = if_possible(partial(value_rule, value, root, closing, rules), needed=needed)
        if rule is not None:
            written = pair(literal(key), rule, value)
            parts.append(written if needed else f"({written})?")
    if found.more is not None:
        rule = if_possible(partial(value_rule, found.more, root, closing, rules))
        parts += [] if rule is None else [f"({pair(ANY_NAME, rule, found.more)})*"]
    return " ".join(parts)


def glm_call(name: str, schema: Any, rules: Rules) -> str:
    """GLM 4.5: keys and values in tags."""

    def pair(key: str, value: str, _: Any) -> str:
        return f'@{{<arg_key>}} {key} @{{</arg_key>}} "\\n"? @{{<arg_value>}} {value} @{{</arg_value>}} "\\n"?'

    return tagged_call(f'{literal(name)} "\\n"?', pair, "</arg_value>", schema, rules)


def coder_call(name: str, schema: Any, rules: Rules, gap: str = r'"\n"') -> str:
    """Qwen3-Coder: a function element with an element per parameter, whose value is on lines of its own."""

    def pair(key: str, value: str, _: Any) -> str:
        return f'"<parameter=" {key} ">" {gap} {value} "\\n"? "</parameter>\\n"'

    call = tagged_call(f'{literal(f"<function={name}>")} "\\n"', pair, "</parameter>", schema, rules)
    return f"{call} {literal(CODER_END)}"


def seed_call(name: str, schema: Any, rules: Rules) -> str:
    """Seed-OSS: the same elements, with values on their lines."""
    return coder_call(name, schema, rules, gap="")


# reading


def schemas_of(functions: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Schemas of all parameters."""
    found: dict[str, Mapping[str, Any]] = {}
    for function in functions:
        found[function["name"]] = parameters_of(function.get("parameters")).properties
    return found


def glm_calls(schemas: Schemas, block: str) -> tuple[list[Call], str]:
    """A name, then keys and values."""
    return _calls(GLM_NAME.match(block), GLM_ARGUMENT, block, "", schemas, lambda text: text)


def coder_calls(schemas: Schemas, block: str) -> tuple[list[Call], str]:
    """A function with its parameters; the newline in front of a closing tag belongs to the tag."""
    return _calls(
        CODER_NAME.match(block), CODER_ARGUMENT, block, CODER_END, schemas, lambda text: text.removesuffix("\n")
    )


def _calls(
    name: re.Match[str] | None,
    argument: re.Pattern[str],
    block: str,
    end: str,
    schemas: Schemas,
    trimmed: Callable[[str], str],
) -> tuple[list[Call], str]:
    if name is None:
        return [], block
    types = schemas.get(name[1], {})
    arguments, at = {}, name.end()
    while found := argument.match(block, at):
        key = found[1].strip()
        arguments[key] = typed_value(trimmed(found[2]), types.get(key))
        at = found.end()
    complete = block[at:].strip() == end
    return ([(name[1], json.dumps(arguments, ensure_ascii=False), None)], "") if complete else ([], block)


def tagged_format(
    name: str,
    read: Callable[[Schemas, str], tuple[list[Call], str]],
    behind: str,
    call: Callable[[str, Any, Rules], str],
    markers: tuple[str, ...],
    tag: str = "tool_call",
) -> ToolFormat:
    """A format whose calls stand in an element ``tag``."""
    opening, closing = f"<{tag}>", f"</{tag}>"

    def reader(functions: Sequence[Mapping[str, Any]]) -> BlockCalls:
        return BlockCalls(opening, closing, partial(read, schemas_of(functions)), needs_end=read is glm_calls)

    return ToolFormat(
        name, opening, lambda: reader(()), behind, call, r'"\n"?', (opening, closing, *markers), reader_of=reader
    )


GLM = tagged_format(
    "glm",
    glm_calls,
    "call @{</tool_call>}",
    glm_call,
    ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
CODER = tagged_format("qwen-coder", coder_calls, r'"\n"? call "\n"? @{</tool_call>}', coder_call, ())
SEED = tagged_format("seed", coder_calls, r'"\n"? call "\n"? @{</seed:tool_call>}', seed_call, (), "seed:tool_call")
