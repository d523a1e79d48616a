"""OpenAI chat completions; apply-template."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ikpy.server import probabilities
from ikpy.server.chat.deltas import Delta
from ikpy.server.chat.output import ChatMessage
from ikpy.server.chat.rendering import render
from ikpy.server.chat.request import (
    ChatRequest,
    chat_request,
    read_messages,
    read_tool_choice,
    read_tools,
)
from ikpy.server.errors import error_body
from ikpy.server.front import Front, random_id
from ikpy.server.generation import Generation
from ikpy.server.http import (
    DONE,
    EventStream,
    apart,
    aside,
    data_event,
    data_events,
    json_response,
    made_response,
    read_body,
)
from ikpy.server.routes_status import front_of
from ikpy.server.settings import BUILD
from ikpy.server.tasks import Failed, Finished, Piece, Progress, TokenProbability


def usage(events: Sequence[Finished], n: int) -> dict[str, Any]:
    """Object ``usage`` of the answers to one or several prompts, ``n`` answers to each."""
    completion = sum(event.n_decoded for event in events)
    prompt = sum(event.n_prompt for event in events[::n])
    return {
        "completion_tokens": completion,
        "prompt_tokens": prompt,
        "total_tokens": completion + prompt,
        "prompt_tokens_details": {"cached_tokens": sum(event.n_cached for event in events[::n])},
    }


def stop_reason(event: Finished) -> str:
    """finish_reason without tool calls."""
    return "length" if event.stopped_limit else "stop"


def truncation(events: Iterable[Finished]) -> dict[str, Any]:
    """The field of answers to which text was lost: of the prompt, or dropped from the full context."""
    return {"truncated": True} if any(event.truncated for event in events) else {}


class ChatAnswer:
    """Answers to one chat request."""

    def __init__(self, front: Front, chat: ChatRequest) -> None:
        self.front = front
        self.chat = chat
        self.id = random_id("chatcmpl-")
        self.created = int(time.time())
        self._plain: dict[tuple[int, str], Callable[[str], str]] = {}
        """Chunks with nothing but text, by answer and kind of text."""
        self._unsent: defaultdict[int, list[TokenProbability]] = defaultdict(list)
        """By answer, of tokens whose text the reader holds back."""

    def logprobs(self, found: Sequence[TokenProbability]) -> dict[str, Any]:
        """Field ``logprobs`` of a choice, or nothing."""
        if self.chat.n_top is None or not found:
            return {}
        post = self.chat.params.post_sampling_probs
        shown = probabilities.openai(self.front.vocab, found, post_sampling=post, n_top=self.chat.n_top)
        return {"logprobs": shown}

    def n_values(self, event: Piece | Finished) -> int:
        """About how many values the tokens of an event have in an answer."""
        return (
            0 if self.chat.n_top is None else len(event.probabilities) * (1 + self.chat.n_top) * probabilities.N_ENTRY
        )

    def message(self, event: Finished) -> ChatMessage:
        """Reasoning, content and calls of a whole answer."""
        reader, message = self.chat.output.reader(), ChatMessage()
        for delta in [*reader.feed(event.text), *reader.end(event)]:
            message.add(delta)
        return message

    def choice(self, event: Finished) -> dict[str, Any]:
        """One element of ``choices``."""
        message = self.message(event)
        reason = finish_reason(event, bool(message.calls))
        head = {"finish_reason": reason, "index": event.index, "message": message.openai()}
        return head | self.logprobs(event.probabilities)

    def answer(self, events: Sequence[Finished]) -> dict[str, Any]:
        """The whole answer."""
        return {
            "choices": [self.choice(event) for event in events],
            "created": self.created,
            "model": self.chat.model,
            "system_fingerprint": BUILD,
            "object": "chat.completion",
            "usage": usage(events, len(events)),
            "id": self.id,
            "timings": events[-1].timings.json(),
        } | truncation(events)

    def chunk_object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """What is in every event of a stream."""
        head = {"choices": choices, "created": self.created, "id": self.id, "model": self.chat.model}
        return head | {"system_fingerprint": BUILD, "object": "chat.completion.chunk"}

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> str:
        """One event of a stream."""
        return data_event(self.chunk_object(choices) | more)

    async def stream(self, generation: Generation) -> AsyncIterator[str]:
        """Events of a stream."""
        readers = [self.chat.output.reader() for _ in generation.tasks]
        called = [False] * len(readers)
        finished: list[Finished] = []
        for i in range(len(readers)):
            yield self.chunk([{"finish_reason": None, "index": i, "delta": {"role": "assistant", "content": None}}])
        async for event in generation.events():
            if isinstance(event, Failed):
                yield data_event(error_body(event.code, event.message))
            elif isinstance(event, Progress):
                choices: list[dict[str, Any]] = [{"finish_reason": None, "index": event.index, "delta": {}}]
                yield self.chunk(choices, prompt_progress=event.json())
            elif isinstance(event, (Piece, Finished)):
                reader = readers[event.index]
                deltas = reader.end(event) if isinstance(event, Finished) else reader.feed(event.text)
                called[event.index] |= any(delta.kind == "tool" for delta in deltas)
                for text in await apart(self.n_values(event), self._delta_chunks, event, deltas):
                    yield text
                if isinstance(event, Finished):
                    finished.append(event)
                    yield self._last_chunk(event, called[event.index])
        if self.chat.include_usage and finished:
            yield self.chunk([], usage=usage(finished, len(finished)), timings=finished[-1].timings.json())
        yield DONE

    def _delta_chunks(self, event: Piece | Finished, deltas: list[Delta]) -> list[str]:
        """Chunks of new output; log probabilities of all tokens since the last chunk go with the first."""
        more = {}
        if isinstance(event, Piece):
            more = {} if event.timings is None else {"timings": event.timings.json()}
            self._unsent[event.index] += event.probabilities
        extra = self.logprobs(self._unsent.pop(event.index, ())) if deltas else {}
        chunks = []
        for i, delta in enumerate(deltas):
            if not more and not extra and delta.kind != "tool":
                chunks.append(self._text_chunk(event.index, delta))
                continue
            choice = {"finish_reason": None, "index": event.index, "delta": delta_object(delta)}
            chunks.append(self.chunk([choice | (extra if i == 0 else {})], **more))
        return chunks

    def _text_chunk(self, index: int, delta: Delta) -> str:
        """Chunk with nothing but text."""
        key = index, delta.kind

        def make(text: str) -> dict[str, Any]:
            choice = {"finish_reason": None, "index": index, "delta": delta_object(Delta(delta.kind, text))}
            return self.chunk_object([choice])

        if key not in self._plain:
            self._plain[key] = data_events(make)
        return self._plain[key](delta.text)

    def _last_chunk(self, event: Finished, called: bool) -> str:
        """End of an answer, with the log probabilities of tokens behind its text, such as those of a stop string."""
        choice = {"finish_reason": finish_reason(event, called), "index": event.index, "delta": {}}
        choice |= self.logprobs(self._unsent.pop(event.index, ()))
        more = {} if self.chat.include_usage else {"timings": event.timings.json()}
        return self.chunk([choice], **more, **truncation([event]))


def finish_reason(event: Finished, called: bool) -> str:
    """finish_reason of a chat answer."""
    return "tool_calls" if called and not event.stopped_limit else stop_reason(event)


def delta_object(delta: Delta) -> dict[str, Any]:
    """Object ``delta`` of a chunk."""
    if delta.kind == "content":
        return {"content": delta.text}
    if delta.kind == "reasoning":
        return {"reasoning_content": delta.text}
    if delta.name is None:
        return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}
    function = {"name": delta.name, "arguments": delta.text}
    return {"tool_calls": [{"index": delta.index, "id": delta.call_id, "type": "function", "function": function}]}


async def chat_completions(request: Request) -> Response:
    """POST /v1/chat/completions."""
    front = front_of(request)
    body = await read_body(request, front.settings)
    chat = await chat_request(request, body, front)
    generation = await front.start([chat.prompt], chat.params, request)
    answer = ChatAnswer(front, chat)
    if chat.params.stream:
        await generation.first(request)
        return EventStream(answer.stream(generation), generation.cancel, ping=front.settings.ping_interval)
    results = await generation.results(request)
    return await made_response(sum(map(answer.n_values, results)), lambda: answer.answer(results))


async def input_tokens(request: Request) -> Response:
    """POST /v1/chat/completions/input_tokens: the length of a conversation's prompt."""
    front = front_of(request)
    return await count_tokens(request, await read_body(request, front.settings))


async def count_tokens(request: Request, body: dict[str, Any]) -> Response:
    """The number of tokens of a chat request's prompt, in the form of the responses API."""
    chat = await chat_request(request, body, front_of(request), may_exceed=True)
    return json_response({"object": "response.input_tokens", "input_tokens": len(chat.prompt.tokens)})


async def apply_template(request: Request) -> Response:
    """POST /apply-template."""
    front = front_of(request)
    body = await read_body(request, front.settings)
    media = front.chat_media()
    messages, tools = read_messages(body, media), read_tools(body)
    choice = read_tool_choice(body)
    rendered = await aside(request, render, front, front.template_for(tools), body, messages, tools, choice)
    return json_response({"prompt": media.public(rendered.text)})
