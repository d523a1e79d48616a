"""Anthropic routes: messages and count_tokens (server.md#routes)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ikpy.server.chat.deltas import Delta
from ikpy.server.chat.output import ChatMessage
from ikpy.server.chat.request import ChatRequest, chat_request
from ikpy.server.chat.tool_reading import parse_value
from ikpy.server.errors import bad_request, error_body
from ikpy.server.front import Front, random_id
from ikpy.server.generation import Generation
from ikpy.server.http import EventStream, json_response, named_event, read_body, with_anthropic_words
from ikpy.server.read_params import mapping, wrong_type
from ikpy.server.routes_status import front_of
from ikpy.server.tasks import Failed, Finished, Piece

Object = dict[str, Any]
READ_BLOCKS = ("text", "image", "document")
HOSTED_TOOLS = ("web_search_", "web_fetch_", "code_execution_")
OWN_FIELDS = ("system", "messages", "tools", "tool_choice", "thinking", "n", "output_config", "output_format")
"""Fields that chat requests have not, or in another form."""
ANY_ARGUMENTS = {"type": "object"}
"""Schema of tools whose arguments Anthropic defines (bash, text_editor): requests give none."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def to_chat(body: Mapping[str, Any]) -> Object:
    """The request in the OpenAI form."""
    if "messages" not in body:
        raise bad_request("'messages' is required")
    if not isinstance(body["messages"], list):
        raise bad_request("Expected 'messages' to be an array")
    out = {k: v for k, v in body.items() if k not in OWN_FIELDS}
    if not isinstance(body.get("system"), (str, list, type(None))):
        raise wrong_type("system", "string or array", body["system"])
    system = _content(body.get("system"))
    messages: list[Object] = [{"role": "system", "content": system}] if system else []
    for message in body["messages"]:
        messages += _messages(message)
    out["messages"] = messages
    if "stop_sequences" in body:
        out["stop"] = out.pop("stop_sequences")
    if body.get("tools") is not None:
        out["tools"] = _tools(body["tools"])
    if body.get("tool_choice") is not None:
        out |= _choice(mapping(body, "tool_choice"))
    out |= _output(body)
    thinking = mapping(body, "thinking")
    if thinking.get("type") == "disabled":
        out["chat_template_kwargs"] = {**mapping(body, "chat_template_kwargs"), "enable_thinking": False}
    if thinking.get("type") == "enabled" and "budget_tokens" in thinking:
        out["thinking_budget_tokens"] = thinking["budget_tokens"]
    return out


def _output(body: Mapping[str, Any]) -> Object:
    """Form and effort of the answer: ``output_config``, or ``output_format`` of older clients."""
    config = mapping(body, "output_config")
    out: Object = {"reasoning_effort": config["effort"]} if isinstance(config.get("effort"), str) else {}
    form = config.get("format") or body.get("output_format")
    if isinstance(form, dict):
        out["response_format"] = {"type": form.get("type"), "json_schema": {"schema": form.get("schema", {})}}
    return out


def _content(value: Any) -> str | list[Object]:
    """Content of a string or of blocks: one text, or parts if there are pictures. Raises ApiError 400 for documents
    that are no text."""
    if not isinstance(value, list):
        return value if isinstance(value, str) else ""
    parts = [_part(block) for block in value if isinstance(block, dict) and block.get("type") in READ_BLOCKS]
    if any(part["type"] == "image_url" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _part(block: Mapping[str, Any]) -> Object:
    """A block as a content part."""
    source = block.get("source")
    if block["type"] == "image":
        return {"type": "image_url", "image_url": {"url": _address(source)}}
    return {"type": "text", "text": _document(source) if block["type"] == "document" else str(block.get("text", ""))}


def _address(source: Any) -> str:
    """The address of a picture: of its data, or of where it is. Raises ApiError 400."""
    given = source if isinstance(source, dict) else {}
    kind, data, media = given.get("type"), given.get("data"), given.get("media_type", "image/png")
    if kind == "base64" and isinstance(data, str):
        return f"data:{media};base64,{data}"
    if kind == "url" and isinstance(given.get("url"), str):
        return str(given["url"])
    raise bad_request("the source of an image must be of type base64 with data, or url with url")


def _tools(tools: Any) -> Any:
    """The tools that a client carries out; those of Anthropic's own servers are left out."""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise bad_request("Expected 'tools' to be an array of objects")
    names = {"name": "name", "description": "description", "input_schema": "parameters"}
    return [
        {
            "type": "function",
            "function": ({} if tool.get("type", "custom") == "custom" else {"parameters": ANY_ARGUMENTS})
            | {new: tool[old] for old, new in names.items() if old in tool},
        }
        for tool in tools
        if not str(tool.get("type", "")).startswith(HOSTED_TOOLS)
    ]


def _choice(choice: Mapping[str, Any]) -> Object:
    kind, alone = choice.get("type"), choice.get("disable_parallel_tool_use")
    out: Object = {"parallel_tool_calls": not alone} if isinstance(alone, bool) else {}
    if kind == "tool":
        return out | {"tool_choice": {"type": "function", "function": {"name": choice.get("name")}}}
    if not isinstance(kind, str) or kind not in CHOICES:
        raise bad_request(f"Invalid tool_choice: {json.dumps(choice)}")
    return out | {"tool_choice": CHOICES[kind]}


def _document(source: Any) -> str:
    """Text of a document. Raises ApiError 400 for one that is no text."""
    given = source if isinstance(source, dict) else {}
    if given.get("type") == "text" and isinstance(given.get("data"), str):
        return str(given["data"])
    if given.get("type") == "content" and isinstance(text := _content(given.get("content")), str):
        return text
    raise bad_request("documents that are no text are not supported")


def _messages(message: Any) -> list[Object]:
    """One message: tool results become messages of their own, before the rest of the text."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return [message]
    role = message.get("role")
    texts: list[Object] = []
    calls: list[Object] = []
    results: list[Object] = []
    reasoning = ""
    for block in message["content"]:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input", {}), ensure_ascii=False)}
            calls.append({"id": block.get("id", ""), "type": "function", "function": function})
        elif kind == "tool_result":
            content = _content(block.get("content"))
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id", ""), "content": content})
        elif kind in ("image", "document"):
            texts.append(_part(block))
        elif kind == "thinking":
            reasoning += str(block.get("thinking", ""))
        elif kind != "redacted_thinking":
            texts.append(block)
    out = list(results)
    if texts or calls or not results:
        own: Object = {"role": role, "content": texts if texts else ("" if not calls else None)}
        out.append(
            own | ({"tool_calls": calls} if calls else {}) | ({"reasoning_content": reasoning} if reasoning else {})
        )
    return out


def content_blocks(message: ChatMessage) -> list[Object]:
    """Array ``content`` of an answer."""
    blocks: list[Object] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    for call in message.calls:
        blocks.append({"type": "tool_use", "id": call["id"], "name": call["name"], "input": arguments(call)})
    return blocks


def arguments(call: Mapping[str, str]) -> Any:
    """Arguments of a call as an object; empty when the model did not finish them."""
    try:
        value = parse_value(call["arguments"])
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def ending(event: Finished, called: bool) -> Object:
    """stop_reason and stop_sequence of an answer."""
    reason = "tool_use" if called else "end_turn"
    if event.stopped_limit:
        reason = "max_tokens"
    elif event.stopped_word and not called:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": event.stopping_word if reason == "stop_sequence" else None}


def input_usage(n_prompt: int, n_cached: int, n_output: int) -> Object:
    """Object ``usage``."""
    return {"cache_read_input_tokens": n_cached, "input_tokens": n_prompt - n_cached, "output_tokens": n_output}


def stream_error(code: int, message: str) -> str:
    """The event that tells of an error in a stream; clients take no notice of one without its name."""
    return named_event("error", {"type": "error", "error": with_anthropic_words(error_body(code, message)["error"])})


class MessageStream:
    """Events of one streamed answer."""

    def __init__(self, front: Front, chat: ChatRequest) -> None:
        self._front = front
        self._reader = chat.output.reader()
        self._blocks: list[tuple[str, int]] = []
        """Kinds and numbers; the last one is open."""
        self._started = False

    async def events(self, generation: Generation) -> AsyncIterator[str]:
        """The events as text."""
        async for event in generation.events():
            if isinstance(event, Failed):
                yield stream_error(event.code, event.message)
            elif isinstance(event, (Piece, Finished)):
                if not self._started:
                    yield self._start(event)
                for delta in self._deltas(event):
                    for text in self._delta(delta):
                        yield text
                if isinstance(event, Finished):
                    for text in self._end(event):
                        yield text

    def _deltas(self, event: Piece | Finished) -> list[Delta]:
        if isinstance(event, Finished):
            return self._reader.end(event)
        return self._reader.feed(event.text)

    def _start(self, event: Piece | Finished) -> str:
        self._started = True
        message: Object = {
            "id": random_id("chatcmpl-"),
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self._front.settings.alias,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": input_usage(event.n_prompt, event.n_cached, 0),
        }
        return self._event("message_start", message=message)

    @staticmethod
    def _event(name: str, **values: Any) -> str:
        return named_event(name, {"type": name, **values})

    def _delta(self, delta: Delta) -> list[str]:
        """Events of new output: the end of the block before and the beginning of its own if it is the first, then the
        text."""
        out = []
        key = (delta.kind, delta.index)
        if self._blocks[-1:] != [key]:
            out += self._close()
            self._blocks.append(key)
            block = {
                "content": {"type": "text", "text": ""},
                "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
                "tool": {"type": "tool_use", "id": delta.call_id, "name": delta.name, "input": {}},
            }[delta.kind]
            out.append(self._event("content_block_start", index=len(self._blocks) - 1, content_block=block))
        value = {
            "content": {"type": "text_delta", "text": delta.text},
            "reasoning": {"type": "thinking_delta", "thinking": delta.text},
            "tool": {"type": "input_json_delta", "partial_json": delta.text},
        }[delta.kind]
        out.append(self._event("content_block_delta", index=len(self._blocks) - 1, delta=value))
        return out

    def _close(self) -> list[str]:
        """Events at the end of the open block."""
        if not self._blocks:
            return []
        at, out = len(self._blocks) - 1, []
        if self._blocks[at][0] == "reasoning":
            signature = {"type": "signature_delta", "signature": ""}
            out.append(self._event("content_block_delta", index=at, delta=signature))
        return [*out, self._event("content_block_stop", index=at)]

    def _end(self, event: Finished) -> list[str]:
        """Events behind the last output."""
        out = self._close()
        delta = ending(event, any(kind == "tool" for kind, _ in self._blocks))
        out.append(self._event("message_delta", delta=delta, usage={"output_tokens": event.n_decoded}))
        out.append(self._event("message_stop"))
        return out


async def messages(request: Request) -> Response:
    """POST /v1/messages."""
    front = front_of(request)
    body = to_chat(await read_body(request, front.settings))
    chat = await chat_request(request, body, front)
    generation = await front.start([chat.prompt], chat.params, request)
    if chat.params.stream:
        await generation.first(request)
        return EventStream(
            MessageStream(front, chat).events(generation), generation.cancel, ping=front.settings.ping_interval
        )
    event = (await generation.results(request))[0]
    reader, message = chat.output.reader(), ChatMessage()
    for delta in [*reader.feed(event.text), *reader.end(event)]:
        message.add(delta)
    return json_response(
        {
            "id": random_id("chatcmpl-"),
            "type": "message",
            "role": "assistant",
            "content": content_blocks(message),
            "model": front.settings.alias,
            **ending(event, bool(message.calls)),
            "usage": input_usage(event.n_prompt, event.n_cached, event.n_decoded),
        }
    )


async def count_tokens(request: Request) -> Response:
    """POST /v1/messages/count_tokens."""
    front = front_of(request)
    body = to_chat(await read_body(request, front.settings))
    chat = await chat_request(request, body, front, may_exceed=True)
    return json_response({"input_tokens": len(chat.prompt.tokens)})
