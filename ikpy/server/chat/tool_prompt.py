"""Tools in the system message, for templates that write calls but do not show the tools to the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ikpy.server.chat.tool_reading import ToolFormat

Message = dict[str, Any]

CALLING = """To call a tool, write exactly
{example}
with the name of the tool for NAME and a JSON object with its parameters for ARGUMENTS. Several calls may follow one \
another between the outer markers."""


def shows_tools(template: str) -> bool:
    """Whether a template mentions the variable with the tools at all."""
    return "tools" in template


def with_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], format_: ToolFormat) -> list[Message]:
    """The conversation with the tools, and how to call them, at the end of its system message."""
    text = tools_text(tools, format_)
    if messages and messages[0]["role"] == "system":
        return [messages[0] | {"content": _followed(messages[0].get("content"), text)}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def tools_text(tools: Sequence[Mapping[str, Any]], format_: ToolFormat) -> str:
    """A section per tool, then the form of a call."""
    sections = ["## Tools\nYou can use these tools:"]
    for tool in tools:
        function = tool["function"]
        parameters = json.dumps(function.get("parameters") or {}, ensure_ascii=False)
        description = function.get("description") or ""
        sections.append(f"### {function['name']}\nDescription: {description}\n\nParameters: {parameters}")
    return "\n\n".join([*sections, CALLING.format(example=format_.example)])


def _followed(content: Any, text: str) -> Any:
    if isinstance(content, list):
        return [*content, {"type": "text", "text": f"\n{text}"}]
    return f"{content}\n\n{text}" if content else text
