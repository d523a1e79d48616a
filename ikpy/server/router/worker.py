"""A process that serves one model."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import secrets
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, Any

import httpx
import psutil

from ikpy.server.errors import ApiError, engine_ended, shutting_down
from ikpy.server.router import NO_MEMORY

if TYPE_CHECKING:
    from ikpy.server.log import ServerLog
    from ikpy.server.router.catalog import ModelFile

LISTENING = re.compile(r'HTTP server listening.*?port"?[=:] ?"(\d+)"')
LONGEST_PAUSE = 30.0
"""Most seconds between two restarts."""
CALM_SECONDS = 60.0
"""Seconds without a crash after which the next restart is immediate again."""
LONGEST_LINE = 1 << 20
"""Bytes of a line of a process's log."""
REMEMBERED = ("/props", "/v1/props", "/models", "/v1/models", "/api/tags", "/api/version")
"""Routes that are answered while a model sleeps."""
LOST_SECONDS = 5.0
"""Most seconds between a broken connection and the end of the process that broke it."""
ENGINE_ENDED = engine_ended("").message
"""What a process says about its health when its engine has ended, without the reason."""


class NoRoomError(ApiError):
    """A model cannot be loaded while others take the memory."""


class State(Enum):
    """What a model's process is doing."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    SLEEPING = "sleeping"
    FAILED = "failed"


class Worker:
    """The process of one model. All methods belong to the event loop."""

    def __init__(
        self, model: ModelFile, arguments: Sequence[str], environment: Mapping[str, str], log: ServerLog, timeout: float
    ) -> None:
        self.model = model
        self.state = State.UNLOADED
        self.n_running = 0
        self.n_crashes = 0
        self.last_used = time.monotonic()
        self.client: httpx.AsyncClient | None = None
        self.remembered: dict[str, dict[str, Any]] = {}
        self._arguments = [sys.executable, "-m", "ikpy", "server", *arguments]
        self._secret = secrets.token_urlsafe(24)
        self._environment = {**environment, "IKPY_WORKER": "1", "LLAMA_API_KEY": self._secret}
        self._log = log
        self._timeout = timeout
        self._process: asyncio.subprocess.Process | None = None
        self._loading: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._replacing: asyncio.Task[None] | None = None
        self._wanted = False
        self._closed = False
        self._pause = 0.0
        self._started = 0.0
        self._last_lines: deque[str] = deque(maxlen=5)

    @property
    def headers(self) -> dict[str, str]:
        """Headers that the process accepts requests with."""
        return {"authorization": f"Bearer {self._secret}"}

    @property
    def own_entry(self) -> dict[str, Any]:
        """What the process said of its model in its list of models; empty before it was loaded once."""
        listed = self.remembered.get("/v1/models", {}).get("data") or [{}]
        entry: dict[str, Any] = listed[0]
        return entry

    @property
    def memory(self) -> int:
        """Resident bytes of the process."""
        if self._process is None or self._process.returncode is not None:
            return 0
        try:
            return int(psutil.Process(self._process.pid).memory_info().rss)
        except psutil.Error:
            return 0

    @property
    def pid(self) -> int | None:
        """Process id while there is a process."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    @property
    def exit_code(self) -> int | None:
        """Status with which the last process ended; None before, and if none could be started."""
        return None if self._process is None else self._process.returncode

    @property
    def stopping(self) -> asyncio.Task[None] | None:
        """The end of the process that was asked for and is not there yet."""
        return None if self._stopping is None or self._stopping.done() else self._stopping

    @property
    def is_active(self) -> bool:
        """Whether there is a process, or will be one soon."""
        ending = self._ending if self._wanted else None  # the restart begins when the end is complete
        tasks = (self._loading, self._restarting, self._stopping, ending)
        return self.pid is not None or any(task is not None and not task.done() for task in tasks)

    @property
    def takes_place(self) -> bool:
        """Whether the model counts as loaded: it is, or requests wait for it."""
        return self.is_active or self.n_running > 0

    @property
    def needed(self) -> int:
        """Bytes of memory, as far as they are known: a model that is not loaded yet needs those of its files."""
        return self.memory if self.state is State.LOADED else max(self.memory, self.model.size)

    async def load(self) -> None:
        """Starts the process if it is not running and waits until it answers; one that ends does so first.

        Raises ApiError 500 if that fails (NoRoomError for lack of memory), 503 if the model is unloaded meanwhile.
        """
        while (end := self._awaited_end) is not None:
            await asyncio.wait({end})
        if self._closed:
            raise shutting_down()
        if self._is_loaded:
            return
        if self._loading is None or self._loading.done():
            self._wanted = True
            self._loading = asyncio.ensure_future(self._start())
            self._loading.add_done_callback(self._start_ended)
        # A client that goes away gives up waiting, not the start that others may wait for.
        await asyncio.shield(self._loading)

    @property
    def _is_loaded(self) -> bool:
        return self.state is State.LOADED and self.pid is not None

    @property
    def _awaited_end(self) -> asyncio.Task[None] | None:
        """What has to be over before the process is started or used."""
        return self.stopping or (None if self._is_loaded else self._ending)

    def failed_with(self, error: Exception) -> bool:
        """Whether this error ended the last start."""
        loading = self._loading
        return loading is not None and loading.done() and not loading.cancelled() and loading.exception() is error

    async def lost(self) -> bool:
        """After a broken connection: whether the process has ended. Its end becomes known a moment later."""
        if self._ending is None:
            return True
        await asyncio.wait({self._ending}, timeout=LOST_SECONDS)
        return self.pid is None

    async def has_failed(self) -> bool:
        """Whether the engine of the process has ended; the process is then ended as well, and started again."""
        client, process = self.client, self._process
        assert client is not None and process is not None
        try:
            answer = await client.get("/health")
        except httpx.HTTPError:  # the end of the process is noticed elsewhere
            return False
        if ENGINE_ENDED not in answer.text:
            return False
        if process is self._process and self._is_loaded and self.stopping is None:
            self.state = State.FAILED
            self._log.failure("router", "the engine has ended", model=self.model.name)
            self._replacing = asyncio.ensure_future(self._terminate(process))  # the loop itself does not keep it
        return True

    async def _start(self) -> None:
        self.state = State.LOADING
        self._last_lines.clear()
        self._log.event("router", "loading model", model=self.model.name)
        self._process = None  # of which an exit code would be told if no other can be made
        self._process = await self._create()
        if not self._wanted:  # stopped while it was created
            self._process.kill()
        self._started = time.monotonic()
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        readers = [
            asyncio.ensure_future(self._read_log(self._process.stdout, port)),
            asyncio.ensure_future(self._read_log(self._process.stderr, None)),
        ]
        ended = asyncio.ensure_future(self._process.wait())
        await asyncio.wait({port, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not port.done() or not self._wanted:  # one that is stopped may have found its port just now
            raise await self._early_end(await ended, readers)
        await self._connect(port.result(), ended)
        self.state, self.last_used = State.LOADED, time.monotonic()
        self._ending = asyncio.ensure_future(self._end(ended, readers))
        self._log.event("router", "model loaded", model=self.model.name, pid=self._process.pid)

    def _start_ended(self, start: asyncio.Task[None]) -> None:
        """Takes note of an error for which nobody may be waiting any more; after one that is no ApiError, and is not
        logged yet, a process may be left, which nobody uses."""
        error = None if start.cancelled() else start.exception()
        if isinstance(error, Exception) and not isinstance(error, ApiError):
            self.state = State.FAILED
            self._log.caught("router", "model not loaded", error, model=self.model.name)
            if self._process is not None and self._process.returncode is None:
                self._process.kill()

    async def _create(self) -> asyncio.subprocess.Process:
        """A new process. Raises ApiError 500 if the system does not start one, NoRoomError for lack of memory."""
        pipe = asyncio.subprocess.PIPE
        try:
            return await asyncio.create_subprocess_exec(
                *self._arguments,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                env=self._environment,
                start_new_session=True,
                limit=LONGEST_LINE,
            )
        except OSError as error:
            message = f"its process cannot be started: {error.strerror}"
            raise self._failure(message, no_memory=error.errno == errno.ENOMEM) from None
        except ValueError as error:  # a NUL in an option of a preset
            raise self._failure(f"its process cannot be started: {error}", no_memory=False) from None

    async def _early_end(self, status: int, readers: Sequence[asyncio.Future[None]]) -> ApiError:
        """The error for those who wait for a process that ended before it listened."""
        if not self._wanted:
            message = f"the model {self.model.name} was unloaded before it could answer"
            return shutting_down() if self._closed else ApiError(503, message, {"Retry-After": "1"})
        await asyncio.gather(*readers)
        reason = next((line for line in reversed(self._last_lines) if line.startswith("error: ")), "")
        return self._failure(reason or f"its process ended with status {status}", no_memory=status == NO_MEMORY)

    def _failure(self, message: str, *, no_memory: bool) -> ApiError:
        """Notes and logs that the model could not be loaded; the error for those who wait for it."""
        self.state = State.FAILED
        self._log.failure("router", "model not loaded", model=self.model.name, error=message)
        kind = NoRoomError if no_memory else ApiError
        return kind(500, f"the model {self.model.name} cannot be loaded: {message}")

    async def _read_log(self, stream: asyncio.StreamReader | None, port: asyncio.Future[int] | None) -> None:
        """Passes log lines on and finds the port in them."""
        assert stream is not None
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # longer than the limit: a part of it is lost, the process must not wait for a reader
                continue
            if not line:
                return
            text = line.decode("utf-8", "replace").rstrip("\n")
            self._last_lines.append(text)
            found = LISTENING.search(text) if port is not None and not port.done() else None
            if found and port is not None:
                port.set_result(int(found[1]))
            self._log.forward(text, error=port is None)

    async def _connect(self, port: int, ended: asyncio.Future[int]) -> None:
        """Makes the client and waits until the process answers it or ends."""
        timeout = httpx.Timeout(self._timeout, connect=10.0)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=16)
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=timeout, limits=limits)
        try:
            await self._answering(ended)
            await self._remember()
        except BaseException:
            await self.client.aclose()
            raise

    async def _answering(self, ended: asyncio.Future[int]) -> None:
        """Waits until the process accepts connections or ends: its port is known a moment before."""
        assert self.client is not None
        while not ended.done():
            try:
                await self.client.get("/health")
                return
            except httpx.TransportError:
                await asyncio.sleep(0.02)

    async def _remember(self) -> None:
        """Keeps what the model says about itself, for the time when it sleeps."""
        assert self.client is not None
        with suppress(httpx.HTTPError, ValueError):  # its end is noticed elsewhere
            for path in REMEMBERED:
                self.remembered[path] = (await self.client.get(path, headers=self.headers)).json()

    async def _end(self, ended: asyncio.Future[int], readers: Sequence[asyncio.Future[None]]) -> None:
        """Waits for the end of the process; an unexpected one leads to a restart, each a little later."""
        status = await ended
        await asyncio.gather(*readers)
        if self.client is not None:
            await self.client.aclose()
        self._ending = None
        if not self._wanted:
            return
        self.state = State.FAILED
        self.n_crashes += 1
        if time.monotonic() - self._started > CALM_SECONDS:
            self._pause = 0.0
        self._log.failure("router", "model process ended", model=self.model.name, status=status, restart=self._pause)
        self._restarting = asyncio.ensure_future(self._restart(self._pause))
        self._pause = min(LONGEST_PAUSE, max(1.0, 2 * self._pause))

    async def _restart(self, pause: float) -> None:
        await asyncio.sleep(pause)
        with suppress(ApiError):  # logged; the next request tries again
            await self.load()

    def stop(self, *, asleep: bool = False) -> asyncio.Task[None]:
        """Begins to end the process, created or not, unless that is under way; what is waited for.

        Running requests may end, as long as the model allows. The process has a session of its own, so that an
        interrupt from the keyboard reaches it through here only.
        """
        if (stopping := self.stopping) is not None:
            return stopping
        self._wanted = False
        was_loaded = self.state not in (State.UNLOADED, State.SLEEPING)
        if asleep:  # from here on: who asks for its state meanwhile does not wake it up
            self.state = State.SLEEPING
        self._stopping = asyncio.ensure_future(self._stop(was_loaded=was_loaded, asleep=asleep))
        return self._stopping

    def close(self) -> asyncio.Task[None]:
        """As `stop`; the process is never started again."""
        self._closed = True
        return self.stop()

    async def _stop(self, *, was_loaded: bool, asleep: bool) -> None:
        if self._restarting is not None:
            self._restarting.cancel()
        await self._end_process()
        if was_loaded:
            self._log.event("router", "model sleeps" if asleep else "model unloaded", model=self.model.name)
        self.state = State.SLEEPING if asleep else State.UNLOADED

    async def _end_process(self) -> None:
        if self._process is not None and self._process.returncode is None:
            await self._terminate(self._process)
        if self._loading is not None:  # it ends a process that was being created, and must not change the state later
            await asyncio.wait({self._loading})

    async def _terminate(self, process: asyncio.subprocess.Process) -> None:
        """Lets running requests end, as long as the model allows, and ends a process."""
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), self.model.stop_seconds)
        except asyncio.TimeoutError:
            with suppress(ProcessLookupError):  # it ended just now
                process.kill()
            await process.wait()


def worker_environment(removed: set[str]) -> dict[str, str]:
    """The environment without variables that the router sets itself."""
    return {name: value for name, value in os.environ.items() if name not in removed}
