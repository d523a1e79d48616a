"""Streams that are silent for long: comments keep connections open while a prompt waits or is evaluated."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import Message

from ikpy.server.http import EventStream
from tests.server.harness import read_events
from tests.server.live import PATIENCE, listening

COMMAND = "llama-server -m MODEL -t 1 -c 512 -np 1 --sse-ping-interval 1"
HELLO = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/completion": {"prompt": "Hello", "n_predict": 3},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 3},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 3},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 3},
    "/v1/messages": {"messages": HELLO, "max_tokens": 3},
}


@pytest.mark.parametrize("path", BODIES)
def test_comments_come_while_nothing_else_does(path: str) -> None:
    """Before the first event and between later ones."""
    body = BODIES[path] | {"temperature": 0, "stream": True}
    with listening(COMMAND) as (client, server):
        wanted = kinds(client.post(path, json=body).text)
        held, go_on = threading.Event(), threading.Event()
        server.engine.call(lambda: (held.set(), go_on.wait(PATIENCE)))
        assert held.wait(PATIENCE)
        with client.stream("POST", path, json=body) as response:
            assert response.status_code == 200
            lines, found = response.iter_lines(), []
            while found.count(":") < 2:
                found.append(next(lines))
            go_on.set()
            found += lines
    text = "".join(f"{line}\n" for line in found)
    rest, n_comments = re.subn(r"(?m)^:\n\n", "", text)
    assert n_comments == found.count(":") and kinds(rest) == wanted


def kinds(text: str) -> list[tuple[Any, bool]]:
    """Names of events and whether they are JSON."""
    return [(event.get("event"), isinstance(event["data"], dict)) for event in read_events(text)]


def test_lines_of_ollama_have_no_comments() -> None:
    with listening(COMMAND) as (client, server):
        held, go_on = threading.Event(), threading.Event()
        server.engine.call(lambda: (held.set(), go_on.wait(PATIENCE)))
        assert held.wait(PATIENCE)
        threading.Timer(2.5, go_on.set).start()
        answer = client.post("/api/generate", json={"prompt": "x", "options": {"num_predict": 2}})
        assert answer.status_code == 200 and all(line[0] == "{" for line in answer.text.splitlines())


def test_errors_behind_the_head_are_events() -> None:
    with listening(COMMAND) as (client, server):
        held, go_on = threading.Event(), threading.Event()
        server.engine.call(lambda: (held.set(), go_on.wait(PATIENCE)))
        assert held.wait(PATIENCE)
        with client.stream("POST", "/completion", json=BODIES["/completion"] | {"stream": True}) as response:
            lines = response.iter_lines()
            assert next(lines) == ":"
            threading.Thread(target=server.engine.give_up).start()
            go_on.set()
            assert any("shutting down" in line for line in lines)


def test_streams_may_be_silent() -> None:
    with listening(COMMAND.replace("interval 1", "interval 0")) as (client, server):
        held, go_on = threading.Event(), threading.Event()
        server.engine.call(lambda: (held.set(), go_on.wait(PATIENCE)))
        assert held.wait(PATIENCE)
        threading.Timer(2.5, go_on.set).start()
        text = client.post("/completion", json=BODIES["/completion"] | {"stream": True}).text
        assert ":\n\n" not in text.replace("data:", "") and len(read_events(text)) == 4


def test_no_comment_comes_in_the_middle_of_an_event() -> None:
    """Not even behind a comment that a client took so late that an event waited already."""
    took: list[bytes] = []
    event = f"data: {'x' * 200}\n\n"

    async def silent() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def stream() -> None:
        takes = asyncio.Event()

        async def pieces() -> AsyncIterator[str]:
            await asyncio.sleep(0.1)
            asyncio.get_running_loop().call_later(0.1, takes.set)
            yield event

        async def send(message: Message) -> None:
            for byte in message.get("body", b""):
                await takes.wait()
                await asyncio.sleep(0.001)
                took.append(bytes([byte]))

        await EventStream(pieces(), lambda: None, ping=0.02)({"type": "http"}, silent, send)

    asyncio.run(stream())
    assert b"".join(took).decode() == f":\n\n{event}"
