"""Generations that request handlers wait for, and how their events come from the engine thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request

from ikpy.server.errors import ApiError
from ikpy.server.http import disconnected
from ikpy.server.tasks import Embedded, Event, Failed, Finished, Task, next_request

if TYPE_CHECKING:
    from ikpy.server.scheduler import Engine

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed the connection; nobody reads an answer."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of work; ClientGoneError as soon as the client has gone. The request body must have been read."""
    gone = asyncio.ensure_future(disconnected(request.receive))
    working = asyncio.ensure_future(work)
    try:
        await asyncio.wait({gone, working}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        gone.cancel()
        working.cancel()


class Inbox:
    """Events for one reader, in the event loop's thread; `asyncio.Queue`, made for several, takes longer."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._arrival: asyncio.Future[None] | None = None

    def put(self, event: Event) -> None:
        """Adds an event and wakes the reader if it waits."""
        self._events.append(event)
        if self._arrival is not None:
            if not self._arrival.done():
                self._arrival.set_result(None)
            self._arrival = None

    async def first(self) -> Event:
        """The next event, which stays."""
        while not self._events:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        return self._events[0]

    async def get(self) -> Event:
        """The next event."""
        if not self._events:
            await self.first()
        return self._events.popleft()


class Mail:
    """Events on their way from the engine thread to an event loop, which is woken once for those of a batch."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: deque[tuple[Inbox, Event]] = deque()

    def put(self, inbox: Inbox, event: Event) -> None:
        """Takes an event, from any thread; `send` brings it to its inbox."""
        self._waiting.append((inbox, event))

    def send(self) -> None:
        """Wakes the loop if there are events."""
        if self._waiting:
            with contextlib.suppress(RuntimeError):  # a closed loop has no readers any more
                self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        while self._waiting:
            inbox, event = self._waiting.popleft()
            inbox.put(event)


class Generation:
    """Tasks of one request, given to the engine, and their events in the order they happen."""

    def __init__(self, engine: Engine, mail: Mail) -> None:
        self.tasks: list[Task] = []
        self._engine = engine
        self._mail = mail
        self._events = Inbox()

    def sink(self, event: Event) -> None:
        """Takes an event from the engine thread, which sends the mail after every batch."""
        self._mail.put(self._events, event)

    def submit(self, tasks: Sequence[Task]) -> None:
        """Queues the tasks. Raises ApiError 503."""
        self.tasks = list(tasks)
        number = next_request()
        for task in self.tasks:
            task.request = number
            task.wake = self._mail.send
        self._engine.submit(*tasks)

    def cancel(self) -> None:
        """Gives up what is still running."""
        self._engine.cancel(*self.tasks)

    async def events(self) -> AsyncIterator[Event]:
        """Events until every task has ended."""
        running = len(self.tasks)
        while running:
            event = await self._events.get()
            if isinstance(event, (Finished, Failed, Embedded)):
                running -= 1
            yield event

    async def first(self, request: Request) -> None:
        """Waits for the first event, which stays in the queue, but not longer than streams may be silent.

        Raises ApiError if it is an error, ClientGoneError when the client went away; both end all tasks.
        """
        patience = self._engine.settings.ping_interval or None
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                event = await unless_gone(request, asyncio.wait_for(self._events.first(), patience))
                if isinstance(event, Failed):
                    raise ApiError(event.code, event.message)
        except BaseException:
            self.cancel()
            raise

    async def results(self, request: Request) -> list[Any]:
        """Finished or Embedded event of every task, by index.

        Raises ApiError when one failed, ClientGoneError when the client went away; both end the others.
        """
        try:
            return await unless_gone(request, self._collect())
        finally:
            self.cancel()

    async def _collect(self) -> list[Any]:
        found: dict[int, Event] = {}
        async for event in self.events():
            if isinstance(event, Failed):
                raise ApiError(event.code, event.message)
            if isinstance(event, (Finished, Embedded)):
                found[event.index] = event
        return [found[index] for index in sorted(found)]
