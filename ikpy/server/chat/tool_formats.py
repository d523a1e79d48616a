"""The known formats of tool calls: found in templates, forced by grammars."""

from __future__ import annotations

import json
import re
from typing import Any

from ikpy.engine.gbnf import GrammarError
from ikpy.engine.json_schema import literal, schema_to_gbnf
from ikpy.server.chat.tool_blocks import DEEPSEEK, GLM, KIMI, LLAMA
from ikpy.server.chat.tool_reading import ListedCalls, TaggedCall, ToolFormat
from ikpy.server.errors import ApiError, bad_request

HERMES = ToolFormat(
    "hermes",
    "<tool_call>",
    lambda: TaggedCall("<tool_call>", "</tool_call>"),
    r'"<tool_call>\n" call "\n</tool_call>"',
    ("<tool_call>", "</tool_call>"),
)
MISTRAL = ToolFormat(
    "mistral",
    "[TOOL_CALLS]",
    lambda: ListedCalls("[TOOL_CALLS]"),
    r'"[TOOL_CALLS] [" call "]"',
    ("[TOOL_CALLS]",),
)


def tool_format(template: str) -> ToolFormat | None:
    """How a template lets the model write calls; None when it knows no tools or an unsupported way."""
    if "tools" not in template:
        return None
    if "<arg_key>" in template and GLM.opening in template:
        return GLM
    for known in (DEEPSEEK, KIMI, HERMES, MISTRAL):
        if known.opening in template:
            return known
    return LLAMA if "<|python_tag|>" in template or '{"name": function name' in template else None


GRAMMAR_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|[A-Za-z][A-Za-z0-9-]*')


def call_grammar(format_: ToolFormat, tools: list[dict[str, Any]], *, several: bool) -> str:
    """GBNF that allows exactly a call of one of the tools (several: one after another)."""
    if format_.root is None:
        raise ApiError(501, f"This server cannot force tool calls of the {format_.name} format; use tool_choice auto")
    rules, alternatives = [], []
    for i, tool in enumerate(tools):
        prefix = f"tool{i}-"
        try:
            rules.append(prefixed(schema_to_gbnf(tool.get("parameters") or {"type": "object"}), prefix))
        except GrammarError as error:
            raise bad_request(f"parameters of tool {tool['name']}: {error}") from None
        head = literal(f'{{"name": {json.dumps(tool["name"], ensure_ascii=False)}, "{format_.arguments}": ')
        alternatives.append(f'{head} {prefix}root "}}"')
    repeated = f'({format_.root} "\\n"?)+' if several else format_.root
    return f"root ::= {repeated}\ncall ::= {' | '.join(alternatives)}\n" + "".join(rules)


def prefixed(rules: str, prefix: str) -> str:
    """GBNF text with a prefix before every rule name."""
    names = set(re.findall(r"^([A-Za-z][A-Za-z0-9-]*) ::=", rules, re.MULTILINE))
    return GRAMMAR_WORD.sub(lambda match: prefix + match[0] if match[0] in names else match[0], rules)
