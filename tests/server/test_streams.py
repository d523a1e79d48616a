"""Streams of events: delivery to the event loop, clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from ikpy.engine.sampling import SamplingParams
from ikpy.server.chat.output import OutputFormat
from ikpy.server.chat.request import ChatRequest
from ikpy.server.generation import Inbox, Mail
from ikpy.server.http import EventStream, data_event, data_events
from ikpy.server.params import GenerationParams
from ikpy.server.prompts import Prompt
from ikpy.server.routes_openai import ChatAnswer
from ikpy.server.tasks import Event, Finished, Piece, Timings, TokenProbability
from tests.server.harness import MODELS, loaded, read_events


class Connection:
    """Takes what a response sends; leaves when ``leave`` is set."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.leave = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)


class Pieces:
    """An iterator over pieces that then waits for ever, or ends; notes that it was closed."""

    def __init__(self, *pieces: str, ends: bool = True) -> None:
        self.closed = 0
        self._pieces = pieces
        self._ends = ends

    async def __aiter__(self) -> AsyncIterator[str]:
        for piece in self._pieces:
            yield piece
        if not self._ends:
            await asyncio.Event().wait()

    def close(self) -> None:
        self.closed += 1


async def run(connection: Connection, pieces: Pieces) -> None:
    stream = EventStream(aiter(pieces), pieces.close)  # type: ignore[arg-type]
    await asyncio.wait_for(stream({}, connection.receive, connection.send), 30)
    assert pieces.closed == 1


def test_pieces_are_sent_in_order_and_the_stream_ends() -> None:
    async def play() -> None:
        connection = Connection()
        await run(connection, Pieces("a", "\u00e9"))
        assert [m.get("body") for m in connection.sent] == [None, b"a", "\u00e9".encode(), b""]
        assert [m.get("more_body") for m in connection.sent[1:]] == [True, True, False]

    asyncio.run(play())


def test_a_stream_stops_when_its_client_leaves() -> None:
    async def play() -> None:
        connection = Connection()
        asyncio.get_running_loop().call_later(0.05, connection.leave.set)
        await run(connection, Pieces("a", ends=False))
        assert connection.sent[-1]["body"] == b"a"

    asyncio.run(play())


def test_a_slow_producer_is_waited_for() -> None:
    async def play() -> None:
        async def slow() -> AsyncIterator[str]:
            await asyncio.sleep(0.5)
            yield "late"

        connection = Connection()
        await EventStream(slow(), lambda: None)({}, connection.receive, connection.send)
        assert connection.sent[1]["body"] == b"late"

    asyncio.run(play())


def test_errors_of_the_producer_come_out() -> None:
    async def play() -> None:
        async def broken() -> AsyncIterator[str]:
            yield "a"
            raise ValueError("broken")

        connection = Connection()
        with pytest.raises(ValueError, match="broken"):
            await EventStream(broken(), lambda: None)({}, connection.receive, connection.send)

    asyncio.run(play())


class Loop:
    """Counts how often it is woken."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def call_soon_threadsafe(self, call: Any) -> None:
        self.calls.append(call)


def test_the_loop_is_woken_once_for_the_events_of_a_batch() -> None:
    loop = Loop()
    mail: Any = Mail(loop)  # type: ignore[arg-type]
    first, second = Inbox(), Inbox()
    mail.send()
    assert not loop.calls
    for n in range(3):
        mail.put(first, n)
        mail.put(second, 10 + n)
    mail.send()
    assert len(loop.calls) == 1
    loop.calls[0]()

    async def read(inbox: Inbox) -> list[Any]:
        return [await inbox.first(), *[await inbox.get() for _ in range(3)]]

    assert asyncio.run(read(first)) == [0, 0, 1, 2]
    assert asyncio.run(read(second)) == [10, 10, 11, 12]
    mail.send()
    assert len(loop.calls) == 1


def test_a_reader_that_was_given_up_loses_no_event() -> None:
    async def play() -> None:
        inbox: Any = Inbox()
        waiting = asyncio.ensure_future(inbox.get())
        await asyncio.sleep(0)
        waiting.cancel()
        inbox.put(1)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        later = asyncio.ensure_future(inbox.get())
        assert await later == 1
        later = asyncio.ensure_future(inbox.get())
        await asyncio.sleep(0)
        inbox.put(2)
        inbox.put(3)
        assert [await later, await inbox.get()] == [2, 3]

    asyncio.run(play())


@pytest.mark.parametrize("text", ["a", 'quotes " and \\ and \n', "\u00e9 \U0001f600 \u2028", "\x00\x7f"])
def test_events_around_a_text_are_those_of_the_whole_object(text: str) -> None:
    def make(text: str) -> dict[str, Any]:
        return {"id": 'x"y', "choices": [{"delta": {"content": text}, "end": None}]}

    assert data_events(make)(text) == data_event(make(text))


def test_events_for_a_closed_loop_are_dropped() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    mail = Mail(loop)
    mail.put(Inbox(), None)  # type: ignore[arg-type]
    mail.send()


class Played:
    """A generation of one answer whose events are known."""

    tasks = (None,)

    def __init__(self, *pieces: str) -> None:
        timings = Timings(1, 0.0, len(pieces), 0.0, 64, 1)
        found = [TokenProbability(token, 0.5, ()) for token in range(300, 300 + len(pieces))]
        self._events: list[Event] = [
            Piece(0, 0, text, (item,), None, 1, 0, 1, ()) for text, item in zip(pieces, found, strict=True)
        ]
        self._events.append(
            Finished(
                0, 0, "".join(pieces), (), 1, 0, len(pieces), 1, False, False, False, True, "", tuple(found), timings
            )
        )  # fmt: skip

    async def events(self) -> AsyncIterator[Event]:
        for event in self._events:
            yield event


def play_chat(*pieces: str) -> tuple[list[int], list[str]]:
    """Tokens with log probabilities in a streamed chat, and its texts."""
    front = SimpleNamespace(vocab=loaded(MODELS["MODEL"]).vocab)
    output = OutputFormat(("<think>", "</think>"))
    chat = ChatRequest(Prompt([1], ""), GenerationParams(SamplingParams()), output, "m", 1, False)

    async def play() -> str:
        generation: Any = Played(*pieces)
        return "".join([text async for text in ChatAnswer(front, chat).stream(generation)])  # type: ignore[arg-type]

    choices = [e["data"]["choices"][0] for e in read_events(asyncio.run(play())) if e["data"] != "[DONE]"]
    shown = [entry["id"] for choice in choices for entry in choice.get("logprobs", {}).get("content", [])]
    texts = [choice["delta"].get("content") or choice["delta"].get("reasoning_content") for choice in choices]
    return shown, [text for text in texts if text]


def test_log_probabilities_of_text_that_is_held_back_come_with_it() -> None:
    """The reader waits for what may be a tag; no token may go without its entry meanwhile."""
    shown, texts = play_chat(" ", "<th", "ink>", "so", "</th", "ing", "</think>", "\n", "yes", "<")
    assert shown == list(range(300, 310))
    assert texts == ["so", "</thing", "yes", "<"]


@pytest.mark.parametrize("text", [[], ["yes"], ["<think>", "so", "</think>"]])
@pytest.mark.parametrize("n_behind", [1, 3])
def test_log_probabilities_behind_the_text_come_at_the_end(text: list[str], n_behind: int) -> None:
    """Tokens of a stop string and the one that ends an answer have no text, but entries in plain answers."""
    shown, _ = play_chat(*text, *[""] * n_behind)
    assert shown == list(range(300, 300 + len(text) + n_behind))
