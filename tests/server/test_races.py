"""What meets at the end: the engine's thread and those that stop it, a process that crashed and requests for others."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from ikpy.engine.grammars.grammar import _TokenSource
from ikpy.server import scheduler
from ikpy.server.build import Server
from ikpy.server.errors import SHUTTING_DOWN, ApiError
from ikpy.server.log import ServerLog
from ikpy.server.router.pool import Limits
from ikpy.server.tasks import Failed, Task
from tests.server.engine_requests import ask, ended
from tests.server.harness import start_server
from tests.server.live import PATIENCE, wait_for
from tests.server.test_router_processes import routing, until


@pytest.fixture
def server() -> Iterator[Server]:
    """A server with one slot."""
    found = start_server("llama-server -m MODEL -t 1 -c 512 -np 1")
    yield found
    found.engine.stop(10)


@pytest.fixture
def held(server: Server) -> Iterator[threading.Event]:
    """The engine's thread is at work until this is set."""
    go_on = threading.Event()
    server.engine.call(go_on.wait)
    yield go_on
    go_on.set()


def test_who_waits_takes_no_slot_of_requests_that_are_given_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine may be quick: the slot of the running request is free before its caller does anything else."""
    running, waiting = ask(server, [1, 2, 3], 400), ask(server, [4, 5, 6], 400)
    assert wait_for(lambda: server.engine.n_deferred == 1 and server.engine.n_idle == 0)
    call = server.engine.call

    def and_its_end(function: Callable[[], Any]) -> Future[Any]:
        done = call(function)
        done.result(PATIENCE)
        with contextlib.suppress(ApiError):
            call(lambda: None).result(PATIENCE)
        return done

    monkeypatch.setattr(server.engine, "call", and_its_end)
    server.engine.give_up()
    for events in (running, waiting):
        assert ended(events)
        assert isinstance(events[-1], Failed) and (events[-1].code, events[-1].message) == (503, SHUTTING_DOWN)


def test_a_request_may_end_while_it_is_given_up(
    server: Server, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ending:
        """A slot whose request ends behind the first look at it."""

        looks = 0

        @property
        def task(self) -> Task | None:
            self.looks += 1
            return Task([1], lambda event: None) if self.looks == 1 else None

    monkeypatch.setattr(scheduler, "LAST_BATCH_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(server.engine, "slots", [Ending()])
        server.engine.stop(0.01)
    assert server.engine.is_running


def test_drafters_of_a_batch_that_has_not_ended_are_left_alone(
    server: Server, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Speculator:
        """Its file must not be written while the engine drafts."""

        n_drafted = 0
        saved = 0

        def save(self) -> list[str]:
            self.saved += 1
            return []

    monkeypatch.setattr(scheduler, "LAST_BATCH_SECONDS", 0.0)
    speculator = Speculator()
    server.engine.stop(0.01)
    with monkeypatch.context() as patch:
        patch.setattr(server.engine.slots[0], "speculator", speculator)
        server.engine.finish_drafts()
        assert speculator.saved == 0
        held.set()
        assert wait_for(lambda: not server.engine.is_running)
        server.engine.finish_drafts()
        assert speculator.saved == 1


def test_a_panic_of_an_extension_module_ends_all_requests(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no Exception, and would end the thread without a word to those who wait."""

    class PanicException(BaseException):
        pass

    def panic(task: Task) -> None:
        raise PanicException("index out of range")

    running = ask(server, [1, 2, 3], 400)
    assert wait_for(lambda: server.engine.n_idle == 0)
    with server.engine._wake:  # the thread meets it with both requests
        monkeypatch.setattr(server.engine.reuse, "choose", panic)
        waiting = ask(server, [4, 5, 6], 400)
    server.engine.cancel()
    monkeypatch.setattr(server.engine._steps, "run", lambda: panic(Task([1], print)))
    for events in (running, waiting):
        assert ended(events)
        assert isinstance(events[-1], Failed) and events[-1].code == 503
    assert server.engine.failure == "PanicException: index out of range"


def test_lines_that_neither_fit_the_stream_nor_the_disk_are_lost(tmp_path: Path) -> None:
    class Full(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            raise OSError(28, os.strerror(28))

    stream = io.TextIOWrapper(io.BufferedWriter(Full(), 1), encoding="ascii")
    ServerLog("json", stream).event("request", "é")
    with contextlib.suppress(OSError):
        stream.close()


def test_token_texts_are_whole_for_all_who_ask_at_the_same_time() -> None:
    begun, go_on = threading.Event(), threading.Event()

    class SlowText(bytes):
        """A text whose length the first one who asks waits for, once it is known that there is one."""

        looks = 0

        def __len__(self) -> int:
            SlowText.looks += 1
            if SlowText.looks == 2:
                begun.set()
                go_on.wait(PATIENCE)
            return 1

    source = _TokenSource([SlowText(b"a"), b"b"], [], 2)
    first = threading.Thread(target=source.tokens_of, args=(b"a",))
    first.start()
    assert begun.wait(PATIENCE)
    found = source.tokens_of(b"ab")
    go_on.set()
    first.join(PATIENCE)
    assert found == [0, 1]


def test_a_model_that_crashed_keeps_its_place_until_it_is_started_again(tmp_path: Path) -> None:
    """Between the end of the process and the restart are the last lines of its log and the end of its connections."""

    async def scene() -> None:
        async with routing(tmp_path, Limits(1)) as router:
            crashed = await router.pid("a")
            worker, go_on = router.pool.workers["a"], asyncio.Event()
            client = worker.client
            assert client is not None
            close = client.aclose

            async def slow() -> None:
                await go_on.wait()
                await close()

            client.aclose = slow  # type: ignore[method-assign]
            os.kill(crashed, 9)
            await until(lambda: worker.pid is None)
            assert worker.takes_place, "it is started again in a moment"
            assert await router.pid("b") == router.pool.workers["b"].pid
            go_on.set()
            await until(lambda: client.is_closed)
            await asyncio.sleep(0.1)
            assert [running.model.name for running in router.pool.loaded()] == ["b"]
            assert not worker.is_active, "two models at a time are too many"

    asyncio.run(scene())


def test_a_batch_that_ends_while_a_request_is_cancelled(server: Server) -> None:
    """The engine looks for what is cancelled before the next batch, which a slot without a token would end."""
    looks: list[bool] = []

    class Watched(Task):
        """Looks as a batch would that ends at this moment."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "cancelled" and value:
                looks.append(server.engine._any_cancelled)

    server.engine.cancel(Watched([], lambda event: None))
    assert looks == [True]
