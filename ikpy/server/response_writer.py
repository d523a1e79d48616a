"""Answers of the OpenAI responses API: the object of an answer, and the events of a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ikpy.server import probabilities
from ikpy.server.chat.deltas import Delta
from ikpy.server.chat.request import ChatRequest
from ikpy.server.errors import error_body
from ikpy.server.front import Front, random_id
from ikpy.server.generation import Generation
from ikpy.server.http import apart, named_event
from ikpy.server.tasks import Failed, Finished, Piece, TokenProbability
from ikpy.vocab.stream import StreamDecoder

Object = dict[str, Any]
EVENTS_WITH_SETTINGS = 3
"""Events of a stream that have the whole object of the answer."""
PREFIXES = {"content": "msg_", "reasoning": "rs_", "tool": "fc_"}


@dataclass
class Item:
    """An output item: a message ("content"), reasoning, or a function call ("tool")."""

    kind: str
    index: int
    """Number of a call."""
    id: str
    name: str = ""
    text: str = ""
    """Text, or JSON text of a call's arguments."""
    logprobs: list[Object] = field(default_factory=list)

    def part(self) -> Object:
        """The content of a message or of reasoning."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "annotations": [], "logprobs": self.logprobs, "text": self.text}

    def json(self, status: str) -> Object:
        """The item; one that is in progress has no content yet."""
        if self.kind == "tool":
            call = {"type": "function_call", "status": status, "arguments": self.text}
            return call | {"call_id": self.id, "name": self.name, "id": self.id}
        content = [] if status == "in_progress" else [self.part()]
        if self.kind == "content":
            return {"type": "message", "status": status, "id": self.id, "content": content, "role": "assistant"}
        return {
            "id": self.id,
            "summary": [],
            "type": "reasoning",
            "content": content,
            "encrypted_content": "",
            "status": status,
        }


class ResponseWriter:
    """The objects of one answer to the request ``body``; identifiers stay the same from event to event."""

    def __init__(self, front: Front, chat: ChatRequest, body: Mapping[str, Any]) -> None:
        self._front = front
        self._chat = chat
        self._settings = settings(chat, body)
        self._id = random_id("resp_")
        self._created = int(time.time())
        self._reader = chat.output.reader()
        self._items: list[Item] = []
        self._unsent: list[TokenProbability] = []
        """Of tokens whose text the reader holds back."""
        self._n_events = 0

    # objects

    def _response(self, status: str, **more: Any) -> Object:
        """The answer as an object."""
        return {
            "id": self._id,
            "object": "response",
            "status": status,
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "model": self._chat.model,
            "output": [],
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": None,
            **self._settings,
            **more,
        }

    def _usage(self, event: Finished) -> Object:
        """Object ``usage``."""
        return {
            "input_tokens": event.n_prompt,
            "output_tokens": event.n_decoded,
            "total_tokens": event.n_prompt + event.n_decoded,
            "input_tokens_details": {
                "cached_tokens": event.n_cached,
                "cache_write_tokens": event.n_prompt - event.n_cached,
            },
            "output_tokens_details": {"reasoning_tokens": self._n_reasoning_tokens(event)},
        }

    def _decoder(self) -> StreamDecoder:
        """Gives the texts of the answer's tokens."""
        vocab, visible = self._front.vocab, self._chat.params.preserved_tokens
        return StreamDecoder(lambda token: vocab.token_to_piece(token, token in visible))

    def _n_reasoning_tokens(self, event: Finished) -> int:
        """Tokens up to the end of the reasoning."""
        last = next((item.text for item in reversed(self._items) if item.kind == "reasoning"), "")
        end, decoder = event.text.rfind(last) + len(last) if last else 0, self._decoder()
        n, length = 0, 0
        for token in event.tokens:
            if length >= end:
                break
            n, length = n + 1, length + len(decoder.feed(token))
        return n

    def _finished(self, event: Finished) -> Object:
        """The whole answer. A limit leaves the last item unfinished."""
        status = ended_status(event)
        output = [item.json("completed") for item in self._items[:-1]]
        output += [item.json(status) for item in self._items[-1:]]
        return self._response(status, output=output, usage=self._usage(event))

    def answer(self, event: Finished) -> Object:
        """The answer to a request without ``stream``."""
        for text, found in self._pieces(event):
            self._keep(found)
            for delta in self._reader.feed(text):
                self._add(delta)
        for delta in self._reader.end(event):
            self._add(delta)
        self._add_rest()
        if not self._items:
            self._items.append(Item("content", 0, random_id("msg_")))
        return self._finished(event)

    def n_values(self, event: Piece | Finished) -> int:
        """About how many values the tokens of an event have in an answer."""
        n_top = self._chat.n_top
        return 0 if n_top is None else len(event.probabilities) * (1 + n_top) * probabilities.N_ENTRY

    def _pieces(self, event: Finished) -> Iterator[tuple[str, tuple[TokenProbability, ...]]]:
        """The text with its log probabilities: in one piece without them, by tokens otherwise."""
        if self._chat.n_top is None:
            yield event.text, ()
            return
        decoder, rest = self._decoder(), event.text
        for token, probability in zip(event.tokens, event.probabilities, strict=False):
            text = decoder.feed(token)[: len(rest)]  # a stop string ends the text before the tokens end
            yield text, (probability,)
            rest = rest[len(text) :]
        yield rest, ()

    # items

    def _is_open(self, delta: Delta) -> bool:
        """Whether new output goes on with the last item."""
        return bool(self._items) and (self._items[-1].kind, self._items[-1].index) == (delta.kind, delta.index)

    def _add(self, delta: Delta) -> list[Object]:
        """Adds new output to the last item, or to a new one; the log probabilities that belong to it."""
        if not self._is_open(delta):
            if self._items:
                del self._unsent[:-1]  # of the marker between the items
            prefix = PREFIXES[delta.kind]
            item_id = f"{prefix}{delta.call_id}" if delta.kind == "tool" else random_id(prefix)
            self._items.append(Item(delta.kind, delta.index, item_id, delta.name or ""))
        item, logprobs = self._items[-1], self._logprobs() if delta.kind == "content" else []
        item.text += delta.text
        item.logprobs += logprobs
        self._unsent.clear()
        return logprobs

    def _keep(self, found: Sequence[TokenProbability]) -> None:
        """Keeps log probabilities until there is output that they belong to; without the token that ends the answer,
        as in OpenAI's API."""
        self._unsent += [item for item in found if item.token not in self._front.vocab.eog]

    def _add_rest(self) -> list[Object]:
        """Adds the log probabilities of tokens behind the text, such as those of a stop string, to a message at the end
        of the answer, and returns them."""
        last = self._items[-1] if self._items else None
        return self._add(Delta(last.kind, "", last.index)) if last is not None and last.kind == "content" else []

    def _logprobs(self) -> list[Object]:
        """Log probabilities of the tokens since the last output."""
        if self._chat.n_top is None:
            return []
        found: Sequence[TokenProbability] = self._unsent
        shown = probabilities.openai(self._front.vocab, found, post_sampling=False, n_top=self._chat.n_top)
        content: list[Object] = shown["content"]
        return content

    # stream

    def _event(self, name: str, /, **values: Any) -> str:
        number, self._n_events = self._n_events, self._n_events + 1
        return named_event(name, {"type": name, **values, "sequence_number": number})

    async def stream(self, generation: Generation) -> AsyncIterator[str]:
        """Events of a stream."""
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress"))
        async for event in generation.events():
            if isinstance(event, Failed):
                yield named_event("error", error_body(event.code, event.message))
            elif isinstance(event, Piece):
                self._keep(event.probabilities)
                for text in await apart(self.n_values(event), self._deltas, self._reader.feed(event.text)):
                    yield text
            elif isinstance(event, Finished):
                for text in [*self._deltas(self._reader.end(event)), *self._rest()]:
                    yield text
                for text in await apart(self.n_values(event), self._end, event):
                    yield text

    def _deltas(self, deltas: list[Delta]) -> list[str]:
        """Events of new output: the end of an item, the beginning of the next, and the text."""
        out = []
        for delta in deltas:
            begins = not self._is_open(delta)
            if begins and self._items:
                out += self._close("completed")
            logprobs = self._add(delta)
            if begins:
                out += self._open()
            more = {"logprobs": logprobs} if delta.kind == "content" else {}
            out.append(self._text_event("delta", delta=delta.text, **more))
        return out

    def _rest(self) -> list[str]:
        """Event of the log probabilities behind the text, if there are any."""
        logprobs = self._add_rest()
        return [self._text_event("delta", delta="", logprobs=logprobs)] if logprobs else []

    def _open(self) -> list[str]:
        """Events at the beginning of the last item."""
        item, at = self._items[-1], len(self._items) - 1
        empty = Item(item.kind, item.index, item.id, item.name)
        out = [self._event("response.output_item.added", item=empty.json("in_progress"), output_index=at)]
        if item.kind != "tool":
            where = {"output_index": at, "content_index": 0}
            out.append(self._event("response.content_part.added", item_id=item.id, part=empty.part(), **where))
        return out

    def _text_event(self, ending: str, /, **values: Any) -> str:
        """Event of the last item's text."""
        item, where = self._items[-1], {"output_index": len(self._items) - 1}
        if item.kind != "tool":
            where["content_index"] = 0
        name = {"content": "output_text", "reasoning": "reasoning_text", "tool": "function_call_arguments"}[item.kind]
        return self._event(f"response.{name}.{ending}", item_id=item.id, **values, **where)

    def _close(self, status: str) -> list[str]:
        """Events at the end of the last item."""
        item, at = self._items[-1], len(self._items) - 1
        if item.kind == "tool":
            out = [self._text_event("done", name=item.name, arguments=item.text)]
        else:
            more = {"logprobs": item.logprobs} if item.kind == "content" else {}
            where = {"output_index": at, "content_index": 0}
            out = [
                self._text_event("done", text=item.text, **more),
                self._event("response.content_part.done", item_id=item.id, part=item.part(), **where),
            ]
        return [*out, self._event("response.output_item.done", item=item.json(status), output_index=at)]

    def _end(self, event: Finished) -> list[str]:
        """Events that close the last item, and the whole answer."""
        status = ended_status(event)
        out = self._close(status) if self._items else []
        return [*out, self._event(f"response.{status}", response=self._finished(event), timings=event.timings.json())]


def ended_status(event: Finished) -> str:
    """Status of a finished answer."""
    return "incomplete" if event.stopped_limit else "completed"


def settings(chat: ChatRequest, body: Mapping[str, Any]) -> Object:
    """What an answer repeats of its request, with the values that hold where the request has none."""
    sampling, reasoning = chat.params.sampling, body.get("reasoning")
    return {
        "background": False,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": None,
        "reasoning": reasoning if isinstance(reasoning, dict) else {"effort": None, "summary": None},
        "store": False,
        "temperature": float(sampling.temperature),
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": float(sampling.top_p),
        "truncation": "disabled",
    }
