"""What single templates read in other places: tools in the system message (Phi-4-mini) or in a variable of their own
(SmolLM3, Firefunction), calls as text (Phi, SmolLM3, Granite 3, LFM2), results (the first of Gemma 4), plans (Command
R7B), reasoning (GPT-OSS)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ikpy.server.chat.python_calls import is_lfm2, written_calls
from ikpy.server.chat.streamed_lists import FUNCTOOLS, GRANITE, PHI
from ikpy.server.chat.tags import is_harmony
from ikpy.server.chat.tool_ids import with_ids
from ikpy.server.chat.tool_reading import value_or_text
from ikpy.vocab.templates import flat_content

Message = dict[str, Any]


def with_all_fields(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool with the fields that clients may leave out: templates join texts to descriptions and go over parameters
    without asking whether there are any (GPT-OSS, Seed-OSS)."""
    function = {name: value for name, value in tool["function"].items() if value is not None}
    function = _completed(function, description="", parameters={"type": "object", "properties": {}})
    return _completed({**tool, "function": function}, type="function")


def _completed(given: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """Fields behind those that are given: templates write them in this order."""
    return {**given, **{name: value for name, value in defaults.items() if name not in given}}


def with_call_fields(message: Message) -> Message:
    """A message whose calls have what clients may leave out, for the same reason."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    functions = [_completed(call["function"], arguments="{}") for call in calls]
    complete = [{**call, "function": function} for call, function in zip(calls, functions, strict=True)]
    return message | {"tool_calls": [_completed(call, type="function") for call in complete]}


def takes_field(source: str) -> bool:
    """Whether a template takes the tools from a field of the system message."""
    return "message['tools']" in source


def with_field(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The conversation with the tools as JSON text in its system message."""
    shown = {"tools": json.dumps([tool["function"] for tool in tools], ensure_ascii=False)}
    if messages and messages[0]["role"] == "system":
        return [messages[0] | shown, *messages[1:]]
    return [{"role": "system", "content": ""} | shown, *messages]


def own_variable(source: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The variable from which a template takes the tools if that is not ``tools``: SmolLM3, and Firefunction, which
    wants their text also where there are none."""
    if FUNCTOOLS.opening in source and "+ functions" in source:
        return {"functions": json.dumps(tools, indent=2, ensure_ascii=False) if tools else ""}
    return {"xml_tools": [tool["function"] for tool in tools]} if tools and "xml_tools" in source else {}


def with_written_calls(source: str, messages: Sequence[Message]) -> list[Message]:
    """The conversation with its calls as text, for templates that show tools but write no calls."""
    if takes_field(source):
        # The vocabulary has a token for the role of results; that of the role "tool" begins the list of tools.
        named = [m | {"role": "tool_response"} if m["role"] == "tool" else m for m in messages]
        return [_written(m, _in_a_list) for m in named]
    if "tool_calls" not in source:
        if "xml_tools" in source:
            return [_written(m, _one_by_one) for m in messages]
        if GRANITE.opening in source:
            return [_written(m, _behind_a_marker) for m in messages]
        if is_lfm2(source):
            return [_written(m, written_calls, before=True) for m in messages]
    return list(messages)


def _written(message: Message, text_of: Callable[[list[dict[str, Any]]], str], *, before: bool = False) -> Message:
    """A message whose calls stand behind its content, or ``before`` it."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    text = text_of([{"name": c["function"]["name"], "arguments": _arguments(c["function"])} for c in calls])
    content = message.get("content") or ""
    if isinstance(content, list):
        part = {"type": "text", "text": text}
        said: Any = [part, *content] if before else [*content, part]
    else:
        said = text + content if before else content + text
    return {name: value for name, value in message.items() if name != "tool_calls"} | {"content": said}


def _in_a_list(calls: list[dict[str, Any]]) -> str:
    return f"{PHI.markers[0]}{json.dumps(calls, ensure_ascii=False)}{PHI.markers[1]}"


def _behind_a_marker(calls: list[dict[str, Any]]) -> str:
    return f"{GRANITE.opening}{json.dumps(calls, ensure_ascii=False)}"


def _one_by_one(calls: list[dict[str, Any]]) -> str:
    return "\n".join(f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls)


def _arguments(function: Mapping[str, Any]) -> Any:
    """Arguments as an object; those that a limit cut off stay text, clients send "" for none."""
    arguments = function.get("arguments") or {}
    return value_or_text(arguments) if isinstance(arguments, str) else arguments


def with_plans(source: str, messages: Sequence[Message]) -> list[Message]:
    """The messages with what was thought or said before a call in the field that a template reads."""
    if "tool_plan" not in source:
        return list(messages)
    return [m | {"tool_plan": _plan(m)} if m.get("tool_calls") and "tool_plan" not in m else m for m in messages]


def _plan(message: Message) -> str:
    content = message.get("content")
    said = content if isinstance(content, str) else ""
    return str(message.get("reasoning_content") or said)


def with_thinking(source: str, messages: Sequence[Message]) -> list[Message]:
    """The messages with the reasoning before a call in the field ``thinking``, for templates that have channels.

    They refuse a message with content beside it, which is thought, too, where a call follows.
    """
    if not is_harmony(source) or "thinking" not in source:
        return list(messages)
    return [m | _thoughts(m) if m.get("tool_calls") and m.get("reasoning_content") else m for m in messages]


def _thoughts(message: Message) -> Message:
    said = flat_content(message.get("content"))
    thoughts = [str(message["reasoning_content"]), *([said] if said else [])]
    return {"thinking": "\n\n".join(thoughts), "content": ""}


def with_responses(source: str, messages: Sequence[Message]) -> list[Message]:
    """The messages with the results of calls in the field ``tool_responses`` of the message that has the calls, for
    templates that read them there alone (the first ones of Gemma 4).

    Such a template writes the content behind the results: an answer to these follows there, and what was said before
    the calls is a message of its own. The last message stays as it is: it may be the beginning of the answer.
    """
    if "tool_responses" not in source or "!= 'tool'" in source:
        return list(messages)
    out: list[Message] = []
    for i, message in enumerate(with_ids(messages)):
        calling = out[-1] if out and out[-1].get("tool_calls") else {}
        if message["role"] == "tool" and calling:
            calling.setdefault("tool_responses", []).append(_response(message, calling))
        elif message.get("tool_calls"):
            if flat_content(message.get("content")):
                out.append({name: value for name, value in message.items() if name != "tool_calls"})
            out.append(message | {"content": ""})
        elif message["role"] == "assistant" and _is_answered(calling) and i + 1 < len(messages):
            calling["content"] = flat_content(message.get("content"))
        else:
            out.append(message)
    return out


def _is_answered(calling: Message) -> bool:
    """Whether a message has results of its calls, and no answer to them yet."""
    return bool(calling.get("tool_responses")) and not calling["content"]


def _response(result: Message, calling: Message) -> dict[str, Any]:
    """A result with the name of its function: an object if its text is one."""
    calls = [call for call in calling["tool_calls"] if call["id"] == result.get("tool_call_id")]
    names = [call["function"]["name"] for call in calls]
    text = flat_content(result.get("content"))
    value = value_or_text(text)
    return {"name": names[0] if names else result.get("name"), "response": value if isinstance(value, dict) else text}
