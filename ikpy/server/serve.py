"""Running the HTTP side until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from ikpy.errors import UsageError
from ikpy.server.entrance import Entrance
from ikpy.server.protocol import BoundedConnection, http_protocol
from ikpy.server.slot_files import restore_slots, save_slots

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from ikpy.server.build import Server

INTERRUPTED = 130
KEEP_ALIVE_SECONDS = 75
"""How long a connection without a request stays open: longer than clients and proxies keep theirs (httpx 5 seconds,
aiohttp 15, nginx 60), or one may send a request while it is being closed."""
GIVE_UP_SECONDS = 30.0
"""Seconds that requests which are given up may take to end: one may be in the middle of a large batch."""
JOIN_SECONDS = 1.0
"""A signal ends a wait for a thread in some versions of Python only."""


class HttpServer(uvicorn.Server):
    """Ends in order at the first SIGINT or SIGTERM, and at once at the second. SIGHUP makes the loop call ``reload``.

    Running requests have ``drain_seconds`` to end. Then those whose bodies have not come are refused, and connections
    are closed whose clients do not read. ``give_up`` is called then, or after ``give_up_seconds``, and ends all others
    with an error.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        reload: Callable[[], None],
        drain_seconds: float,
        give_up: Callable[[], object],
        give_up_seconds: float | None = None,
    ) -> None:
        super().__init__(config)
        self.reload = reload
        self.give_up = give_up
        self._drain_seconds = drain_seconds
        self._give_up_seconds = drain_seconds if give_up_seconds is None else give_up_seconds
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles the signals while the server runs. In another thread than the main one, which gets them, nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        if hasattr(signal, "SIGHUP"):
            previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, self.handle_hangup)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to serve."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_hangup(self, *_: object) -> None:
        """Has `reload` called soon: not from here, which may be in the middle of a line of the log, or of a reload."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self.reload)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes the listeners and waits for running requests, of which it tells."""
        running = len(self.server_state.tasks)
        if running and self._drain_seconds:
            line = f"main: running requests: {running}; they have {self._drain_seconds:g} s to end"
            print(f"{line}, a second interrupt ends the server at once", file=sys.stderr, flush=True)
        loop = asyncio.get_running_loop()
        steps = [
            loop.call_later(self._give_up_seconds, self.give_up),
            loop.call_later(self._drain_seconds, self._end_connections),
        ]
        try:
            await super().shutdown(sockets)
        finally:
            for step in steps:
                step.cancel()

    def _end_connections(self) -> None:
        for connection in list(self.server_state.connections):
            if isinstance(connection, BoundedConnection):
                connection.give_up()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: stop accepting and let requests end; second: give up."""
        if self.should_exit:
            with contextlib.suppress(OSError):  # not print: it may be what was interrupted
                os.write(2, b"received a second interrupt, terminating immediately.\n")
            os._exit(INTERRUPTED)
        self.should_exit = True


def http_config(
    app: ASGIApp,
    *,
    timeout: float,
    drain_seconds: float,
    ssl_key_file: str | None,
    ssl_cert_file: str | None,
    lifespan: bool = True,
) -> Any:
    """How the HTTP side runs; clients have ``timeout`` seconds for the head of a request, and to read
    more of an answer. ``lifespan``: the application
    is told of start and end. uvicorn takes uvloop's event loop where it is installed.

    Raises UsageError for a certificate that cannot be used.
    """
    config = uvicorn.Config(
        app,
        http=http_protocol(timeout),
        lifespan="auto" if lifespan else "off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(drain_seconds + GIVE_UP_SECONDS),
        ssl_keyfile=ssl_key_file,
        ssl_certfile=ssl_cert_file,
    )
    try:
        config.load()
    except OSError as error:
        given = f"--ssl-key-file {ssl_key_file}, --ssl-cert-file {ssl_cert_file}"
        reason = f"no key in PEM form with its certificate ({error})"
        if not isinstance(error, ssl.SSLError):  # where nobody is there to type it
            reason = "the key needs a passphrase, which was not given: `openssl pkey` writes one without"
        raise UsageError(f"{given}: {reason}") from None
    return config


class Reception:
    """The HTTP side of a server, in a thread of its own from before the model is loaded; the end of its block ends it.

    Arguments are those of `http_config`; ``prefix`` is the beginning of all paths.
    """

    def __init__(self, listeners: Sequence[socket.socket], *, prefix: str, drain_seconds: float, **config: Any) -> None:
        self._entrance = Entrance(prefix)
        settings = http_config(self._entrance, drain_seconds=drain_seconds, lifespan=False, **config)
        self._http = HttpServer(settings, lambda: None, drain_seconds, self._entrance.close)
        self._thread = threading.Thread(target=self._http.run, args=(list(listeners),), name="http", daemon=True)

    def __enter__(self) -> Reception:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._entrance.close()
        self._http.should_exit = True
        self._thread.join()

    def run(self, app: ASGIApp, reload: Callable[[], None], give_up: Callable[[], object]) -> None:
        """Lets an application answer until a signal, which only the main thread gets."""
        self._http.reload, self._http.give_up = reload, give_up
        with self._http.capture_signals():
            self._entrance.open(app)
            while self._thread.is_alive():
                self._thread.join(JOIN_SECONDS)


def serve(server: Server, reception: Reception, *, drain_seconds: float, reload: Callable[[], None]) -> None:
    """Answers requests until a signal; running requests get ``drain_seconds`` to end."""
    restore_slots(server)
    server.engine.start()
    try:
        reception.run(server.app, reload, server.engine.give_up)
    finally:
        server.engine.stop(drain_seconds)
        save_slots(server)


def end_with_parent() -> None:
    """Ends this process as by SIGTERM when its standard input closes, which happens when its parent ends."""

    def watch() -> None:
        # Not sys.stdin: its lock would be held while the interpreter ends.
        while os.read(0, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent", daemon=True).start()
