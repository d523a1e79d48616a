"""OpenAI Responses route (tools specification 10.12)."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ikpy.server.chat.deltas import Delta
from ikpy.server.chat.output import ChatMessage
from ikpy.server.chat.request import ChatRequest, read_chat
from ikpy.server.errors import bad_request, error_body
from ikpy.server.front import Generation, random_id
from ikpy.server.http import EventStream, aside, json_response, named_event, read_body
from ikpy.server.routes_openai import count_tokens
from ikpy.server.routes_status import front_of
from ikpy.server.tasks import Failed, Finished, Piece

Object = dict[str, Any]


def to_chat(body: Mapping[str, Any]) -> Object:
    """The request in the chat form."""
    if "input" not in body:
        raise bad_request("'input' is required")
    if body.get("previous_response_id"):
        raise bad_request("ikpy does not support 'previous_response_id'.")
    dropped = ("reasoning", "input", "instructions", "tools", "max_output_tokens", "previous_response_id", "text", "n")
    out = {k: v for k, v in body.items() if k not in dropped}
    instructions = body.get("instructions")
    messages: list[Object] = []
    if isinstance(instructions, str) and instructions:
        messages.append({"role": "system", "content": instructions})
    given = body["input"]
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list):
        for item in given:
            messages += _item(item, messages)
    else:
        raise bad_request("'input' must be a string or an array")
    out["messages"] = messages
    if body.get("max_output_tokens") is not None:
        out["max_tokens"] = body["max_output_tokens"]
    if body.get("tools") is not None:
        out["tools"] = _tools(body["tools"])
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        out["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    reasoning = body.get("reasoning")
    if isinstance(reasoning, dict) and isinstance(reasoning.get("effort"), str):
        out["reasoning_effort"] = reasoning["effort"]
    wanted = body.get("text")
    if isinstance(wanted, dict) and isinstance(wanted.get("format"), dict):
        form = wanted["format"]
        out["response_format"] = {"type": form.get("type"), "json_schema": {"schema": form.get("schema", {})}}
    return out


def _item(item: Any, before: list[Object]) -> list[Object]:
    """Messages of one input item; a call joins the assistant message before it."""
    if not isinstance(item, dict):
        raise bad_request("'input' items must be objects")
    kind = item.get("type", "message")
    if kind == "reasoning":
        return []
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


class ResponseWriter:
    """The objects of one answer; identifiers stay the same from event to event."""

    def __init__(self, chat: ChatRequest) -> None:
        self.chat = chat
        self.id = random_id("resp_")
        self.message_id = random_id("msg_")
        self.reasoning_id = random_id("rs_")
        self.created = int(time.time())
        self.message = ChatMessage()
        self.reader = chat.output.reader()
        self._opened: list[tuple[str, int]] = []
        """Kinds and numbers of a stream's output items, in their order."""
        self._n_events = 0

    # --- items ------------------------------------------------------------------------------------------------

    def text_part(self) -> Object:
        """The text of the message."""
        return {"type": "output_text", "annotations": [], "logprobs": [], "text": self.message.content}

    def reasoning_item(self) -> Object:
        """The reasoning as an output item."""
        return {
            "id": self.reasoning_id,
            "summary": [],
            "type": "reasoning",
            "content": [{"text": self.message.reasoning, "type": "reasoning_text"}],
            "encrypted_content": "",
        }

    def call_item(self, call: Mapping[str, str]) -> Object:
        """A function call as an output item."""
        return {
            "type": "function_call",
            "status": "completed",
            "arguments": call["arguments"],
            "call_id": f"fc_{call['id']}",
            "name": call["name"],
            "id": f"fc_{call['id']}",
        }

    def usage(self, event: Finished) -> Object:
        """Object ``usage``."""
        return {
            "input_tokens": event.n_prompt,
            "output_tokens": event.n_decoded,
            "total_tokens": event.n_prompt + event.n_decoded,
            "input_tokens_details": {"cached_tokens": event.n_cached},
        }

    @staticmethod
    def outcome(event: Finished) -> Object:
        """Status of an answer; of one that a limit ended also the reason."""
        if not event.stopped_limit:
            return {"status": "completed"}
        return {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}

    def answer(self, event: Finished) -> Object:
        """The whole answer. A limit leaves the last item unfinished."""
        for delta in [*self.reader.feed(event.text), *self.reader.finish()]:
            self.message.add(delta)
        output: list[Object] = []
        if self.message.reasoning:
            output.append(self.reasoning_item() | {"status": "completed"})
        if self.message.content or not self.message.calls:
            output.append(
                {
                    "content": [self.text_part()],
                    "id": self.message_id,
                    "role": "assistant",
                    "status": "completed",
                    "type": "message",
                }
            )
        output += [self.call_item(call) for call in self.message.calls]
        outcome = self.outcome(event)
        output[-1]["status"] = outcome["status"]
        return {
            "completed_at": None if event.stopped_limit else int(time.time()),
            "created_at": self.created,
            "id": self.id,
            "model": self.chat.model,
            "object": "response",
            "output": output,
            **outcome,
            "usage": self.usage(event),
        }

    # --- stream -----------------------------------------------------------------------------------------------

    def _event(self, name: str, **values: Any) -> str:
        number, self._n_events = self._n_events, self._n_events + 1
        return named_event(name, {"type": name, **values, "sequence_number": number})

    async def stream(self, generation: Generation) -> AsyncIterator[str]:
        """Events of a stream."""
        head = {
            "id": self.id,
            "object": "response",
            "status": "in_progress",
            "created_at": self.created,
            "model": self.chat.model,
            "output": [],
        }
        yield self._event("response.created", response=head)
        yield self._event("response.in_progress", response=head)
        async for event in generation.events():
            if isinstance(event, Failed):
                yield named_event("error", error_body(event.code, event.message))
            elif isinstance(event, Piece):
                for text in self._deltas(self.reader.feed(event.text)):
                    yield text
            elif isinstance(event, Finished):
                for text in [*self._deltas(self.reader.finish()), *self._end(event)]:
                    yield text

    def _deltas(self, deltas: list[Delta]) -> list[str]:
        out = []
        for delta in deltas:
            self.message.add(delta)
            key = delta.kind, delta.index
            if key not in self._opened:
                self._opened.append(key)
                out += self._open(delta)
            at = self._opened.index(key)
            if delta.kind == "content":
                name, where = "response.output_text.delta", self._text_place(at)
                out.append(self._event(name, item_id=self.message_id, delta=delta.text, **where))
            elif delta.kind == "reasoning":
                name, where = "response.reasoning_text.delta", {"output_index": at, "content_index": 0}
                out.append(self._event(name, delta=delta.text, item_id=self.reasoning_id, **where))
            else:
                item_id = f"fc_{self.message.calls[delta.index]['id']}"
                name = "response.function_call_arguments.delta"
                out.append(self._event(name, delta=delta.text, item_id=item_id, output_index=at))
        return out

    @staticmethod
    def _text_place(output_index: int) -> Object:
        """Fields of events of the text, which has no log probabilities here."""
        return {"output_index": output_index, "content_index": 0, "logprobs": []}

    def _open(self, delta: Delta) -> list[str]:
        """Events at the beginning of the last output item."""
        at = len(self._opened) - 1
        if delta.kind == "content":
            return self._open_message(at)
        if delta.kind == "reasoning":
            item = self.reasoning_item() | {"content": [], "status": "in_progress"}
        else:
            item = {
                "arguments": "",
                "call_id": f"fc_{delta.call_id}",
                "name": delta.name,
                "type": "function_call",
                "status": "in_progress",
                "id": f"fc_{delta.call_id}",
            }
        return [self._event("response.output_item.added", item=item, output_index=at)]

    def _open_message(self, at: int) -> list[str]:
        item = {
            "content": [],
            "id": self.message_id,
            "role": "assistant",
            "status": "in_progress",
            "type": "message",
        }
        part = {"type": "output_text", "text": ""}
        where = {"output_index": at, "content_index": 0}
        return [
            self._event("response.output_item.added", item=item, output_index=at),
            self._event("response.content_part.added", item_id=self.message_id, part=part, **where),
        ]

    def _end(self, event: Finished) -> list[str]:
        """Events that close the items, and the whole answer."""
        output = [self._ended_item(kind, index) for kind, index in self._opened]
        outcome = self.outcome(event)
        if output and event.stopped_limit:
            output[-1]["status"] = outcome["status"]
        out = []
        for at, item in enumerate(output):
            if item["type"] == "message":
                where = {"output_index": at, "content_index": 0}
                name, text = "response.output_text.done", self.message.content
                out += [
                    self._event(name, item_id=self.message_id, text=text, **self._text_place(at)),
                    self._event("response.content_part.done", item_id=self.message_id, part=self.text_part(), **where),
                ]
            out.append(self._event("response.output_item.done", item=item, output_index=at))
        response = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            **outcome,
            "model": self.chat.model,
            "output": output,
            "usage": self.usage(event),
        }
        return [*out, self._event(f"response.{outcome['status']}", response=response)]

    def _ended_item(self, kind: str, index: int) -> Object:
        """An output item of a stream at its end."""
        if kind == "reasoning":
            return self.reasoning_item()
        if kind != "content":
            return self.call_item(self.message.calls[index])
        return {
            "type": "message",
            "status": "completed",
            "id": self.message_id,
            "content": [self.text_part()],
            "role": "assistant",
        }


async def responses(request: Request) -> Response:
    """POST /v1/responses and /responses."""
    front = front_of(request)
    body = to_chat(await read_body(request, front.settings))
    chat = await aside(request, read_chat, body, front)
    generation = await front.start([chat.prompt], chat.params)
    writer = ResponseWriter(chat)
    if chat.params.stream:
        await generation.first(request)
        return EventStream(writer.stream(generation), generation.cancel, front.settings.timeout)
    return json_response(writer.answer((await generation.results(request))[0]))


async def input_tokens(request: Request) -> Response:
    """POST /v1/responses/input_tokens: the length of the prompt."""
    body = await read_body(request, front_of(request).settings)
    return await count_tokens(request, to_chat(body))
