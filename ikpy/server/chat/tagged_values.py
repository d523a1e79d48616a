"""Tool calls that give every argument in tags of its own: GLM 4.5, Qwen3-Coder and Seed-OSS.

Strings stand there without quotes, so the schema decides whether a value is text or JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ikpy.engine.json_schema import literal
from ikpy.server.chat.tool_blocks import BlockCalls, Call
from ikpy.server.chat.tool_reading import Rules, ToolFormat, parse_value

Schemas = Mapping[str, Mapping[str, Any]]
"""Schema of every parameter by function and name."""

SHAPES = ("type", "anyOf", "oneOf", "allOf", "enum", "const", "$ref", "properties", "items")
GLM_NAME = re.compile(r"\s*([^\s<{]+)\s*")
GLM_ARGUMENT = re.compile(
    r"<arg_key>((?:(?!</arg_key>).)*)</arg_key>\s*<arg_value>((?:(?!</arg_value>).)*)</arg_value>\s*", re.DOTALL
)
CODER_NAME = re.compile(r"\s*<function=([^>\s]+)>\s*")
CODER_ARGUMENT = re.compile(r"<parameter=([^>]+)>\n?((?:(?!</parameter>).)*)</parameter>\s*", re.DOTALL)
CODER_END = "</function>"


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


def takes_text(schema: Any) -> bool:
    """Whether a value of the schema may be any text."""
    if not isinstance(schema, dict) or "enum" in schema or "const" in schema:
        return schema is True
    return "string" in value_types(schema) or not any(key in schema for key in SHAPES)


def typed_value(text: str, schema: Any) -> Any:
    """The value of an argument: JSON of a type that the schema has, else the text itself."""
    try:
        value = parse_value(text)
    except ValueError:
        return text
    if isinstance(value, str):
        return text
    types = value_types(schema)
    return value if not types or types & set(_json_types(value)) else text


def _json_types(value: Any) -> tuple[str, ...]:
    if value is None or isinstance(value, bool):
        return ("null",) if value is None else ("boolean",)
    if isinstance(value, int):
        return "integer", "number"
    return ("number",) if isinstance(value, float) else ("object",) if isinstance(value, dict) else ("array",)


# grammars


def text_without(marker: str) -> str:
    """GBNF of the texts in which a marker does not occur; its first character must not come again in it.

    A beginning of the marker may stand there if another beginning or a character that does not go on with it follows.
    """
    head = marker[0]
    cut = " | ".join(literal(marker[:n]) for n in range(1, len(marker)))
    broken = " | ".join(f"{literal(marker[:n])} [^{head}{marker[n]}]" for n in range(1, len(marker)))
    return f"([^{head}] | ({cut})* ({broken}))* ({cut})*"


def value_rule(schema: Any, root: Any, closing: str, rules: Rules) -> str:
    """GBNF of a value in front of its closing tag; definitions that it refers to are those of the whole schema."""
    choices = schema.get("enum") if isinstance(schema, dict) else None
    if isinstance(choices, list) and choices and all(isinstance(item, str) for item in choices):
        return "(" + " | ".join(map(literal, choices)) + ")"
    if takes_text(schema):
        return rules.rule(text_without(closing))
    if isinstance(schema, dict):
        schema = schema | {key: root[key] for key in ("$defs", "definitions") if key in root}
    return rules.schema(schema)


def tagged_call(head: str, pair: Callable[[str, str], str], closing: str, schema: Any, rules: Rules) -> str:
    """GBNF of a call: ``head``, then for every parameter ``pair`` of its name and the rule of its value."""
    root = schema if isinstance(schema, dict) else {}
    required = root.get("required", [])
    parts = [head]
    for key, value in root.get("properties", {}).items():
        written = pair(key, value_rule(value, root, closing, rules))
        parts.append(written if key in required else f"({written})?")
    return " ".join(parts)


def glm_call(name: str, schema: Any, rules: Rules) -> str:
    """GLM 4.5: keys and values in tags."""

    def pair(key: str, value: str) -> str:
        return f'@{{<arg_key>}} {literal(key)} @{{</arg_key>}} "\\n"? @{{<arg_value>}} {value} @{{</arg_value>}} "\\n"?'

    return tagged_call(f'{literal(name)} "\\n"?', pair, "</arg_value>", schema, rules)


def coder_call(name: str, schema: Any, rules: Rules, gap: str = r'"\n"') -> str:
    """Qwen3-Coder: a function element with an element per parameter, whose value is on lines of its own."""

    def pair(key: str, value: str) -> str:
        return f'{literal(f"<parameter={key}>")} {gap} {value} "\\n"? "</parameter>\\n"'

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
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        found[function["name"]] = properties if isinstance(properties, dict) else {}
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
        return BlockCalls(opening, closing, partial(read, schemas_of(functions)))

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
