"""OpenAI Responses route (server.md#routes)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ikpy.server.chat.request import chat_request
from ikpy.server.errors import bad_request
from ikpy.server.front import check_repeated
from ikpy.server.http import EventStream, aside, encoded_size, made_response, read_body
from ikpy.server.read_params import mapping, string
from ikpy.server.response_writer import EVENTS_WITH_SETTINGS, Object, ResponseWriter, settings
from ikpy.server.routes_openai import count_tokens
from ikpy.server.routes_status import front_of

LOGPROBS = "message.output_text.logprobs"
"""What ``include`` names for log probabilities."""


def to_chat(body: Mapping[str, Any]) -> Object:
    """The request in the chat form."""
    if "input" not in body:
        raise bad_request("'input' is required")
    if body.get("previous_response_id"):
        raise bad_request("ikpy does not support 'previous_response_id'.")
    dropped = ("reasoning", "input", "instructions", "tools", "max_output_tokens", "previous_response_id", "text", "n")
    out = {k: v for k, v in body.items() if k not in dropped}
    instructions = string(body, "instructions")
    messages: list[Object] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    given = body["input"]
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list):
        messages += _conversation(given)
    else:
        raise bad_request("'input' must be a string or an array")
    out["messages"] = messages
    if body.get("max_output_tokens") is not None:
        out["max_tokens"] = body["max_output_tokens"]
    if body.get("tools") is not None:
        out["tools"] = _tools(body["tools"])
    out |= _choice(body.get("tool_choice"))
    out |= _logprobs(body)
    reasoning = mapping(body, "reasoning")
    if isinstance(reasoning.get("effort"), str):
        out["reasoning_effort"] = reasoning["effort"]
    form = mapping(mapping(body, "text"), "format")
    if form:
        out["response_format"] = {"type": form.get("type"), "json_schema": {"schema": form.get("schema", {})}}
    return out


def _choice(choice: Any) -> Object:
    """Field ``tool_choice`` in the chat form, where it differs."""
    if not isinstance(choice, dict):
        return {}
    if choice.get("type") == "function" and "name" in choice:
        return {"tool_choice": {"type": "function", "function": {"name": choice["name"]}}}
    if choice.get("type") != "allowed_tools" or not isinstance(choice.get("tools"), list):
        return {}
    tools = [{"type": "function", "function": tool} for tool in choice["tools"]]
    inner = {"mode": choice.get("mode", "auto"), "tools": tools}
    return {"tool_choice": {"type": "allowed_tools", "allowed_tools": inner}}


def _logprobs(body: Mapping[str, Any]) -> Object:
    """Fields ``include`` and ``top_logprobs`` in the chat form; either asks for log probabilities."""
    include, n_top = body.get("include"), body.get("top_logprobs")
    if not n_top and not (isinstance(include, list) and LOGPROBS in include):
        return {}
    return {"logprobs": True, "top_logprobs": n_top or 0}


def _conversation(items: list[Any]) -> list[Object]:
    """Messages of the input; reasoning belongs to the assistant message or call behind it."""
    messages: list[Object] = []
    thoughts: list[str] = []
    for item in items:
        if isinstance(item, dict) and item.get("type") == "reasoning":
            thoughts.append(_reasoning(item))
            continue
        messages += _item(item, messages)
        if any(thoughts) and messages[-1]["role"] == "assistant":
            earlier = messages[-1].get("reasoning_content")
            messages[-1]["reasoning_content"] = "\n".join(text for text in (earlier, *thoughts) if text)
        thoughts = []
    return messages


def _reasoning(item: Object) -> str:
    """Text of a reasoning item, or else its summary."""
    for parts in (item.get("content"), item.get("summary")):
        texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        if found := "\n".join(text for text in texts if isinstance(text, str)):
            return found
    return ""


def _item(item: Any, before: list[Object]) -> list[Object]:
    """Messages of one input item; a call joins the assistant message before it."""
    if not isinstance(item, dict):
        raise bad_request("'input' items must be objects")
    kind = item.get("type", "message")
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
        call = {"id": item.get("call_id", ""), "type": "function", "function": function}
        if before and before[-1]["role"] == "assistant":
            before[-1].setdefault("tool_calls", []).append(call)
            return []
        return [{"role": "assistant", "content": None, "tool_calls": [call]}]
    if kind == "function_call_output":
        output = item.get("output", "")
        content = _content(output) if isinstance(output, list) else str(output)
        return [{"role": "tool", "tool_call_id": item.get("call_id", ""), "content": content}]
    if kind != "message":
        raise bad_request(f"unsupported input item type: {kind}")
    out = {"role": item.get("role"), "content": _content(item.get("content"))}
    return [out]


def _content(content: Any) -> Any:
    """Content parts under their chat names."""
    if not isinstance(content, list):
        return content
    names = {"input_text": "text", "output_text": "text", "input_image": "image_url"}
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "input_file":
            raise bad_request("'input_file' is not supported")
        if kind == "input_image" and not isinstance(part.get("image_url"), str):
            raise bad_request("'image_url' is required")
    return [
        part | {"type": names.get(str(part.get("type")), part.get("type"))} if isinstance(part, dict) else part
        for part in content
    ]


def _tools(tools: Any) -> list[Object]:
    """The functions; what OpenAI's own servers carry out (web_search, ...) and free-form tools are left out."""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise bad_request("Expected 'tools' to be an array of objects")
    return [
        tool if "function" in tool else {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        for tool in tools
        if tool.get("type", "function") == "function"
    ]


async def responses(request: Request) -> Response:
    """POST /v1/responses and /responses."""
    front = front_of(request)
    body = await read_body(request, front.settings)
    chat = await chat_request(request, to_chat(body), front)
    if chat.params.stream:
        check_repeated(EVENTS_WITH_SETTINGS * await aside(request, encoded_size, [settings(chat, body)]))
    generation = await front.start([chat.prompt], chat.params, request)
    writer = ResponseWriter(front, chat, body)
    if chat.params.stream:
        await generation.first(request)
        return EventStream(writer.stream(generation), generation.cancel, ping=front.settings.ping_interval)
    result = (await generation.results(request))[0]
    return await made_response(writer.n_values(result), lambda: writer.answer(result))


async def input_tokens(request: Request) -> Response:
    """POST /v1/responses/input_tokens: the length of the prompt."""
    body = await read_body(request, front_of(request).settings)
    return await count_tokens(request, to_chat(body))
