"""Running the HTTP side until a signal."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

if TYPE_CHECKING:
    from ikpy.server.build import Server

INTERRUPTED = 130
KEEP_ALIVE_SECONDS = 5


class HttpServer(uvicorn.Server):
    """Ends in order at the first SIGINT or SIGTERM, and at once at the second."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles the signals while the server runs."""
        previous = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: stop accepting and let requests end; second: give up."""
        if self.should_exit:
            print("received a second interrupt, terminating immediately.", file=sys.stderr, flush=True)
            os._exit(INTERRUPTED)
        self.should_exit = True


def serve(
    server: Server,
    listener: socket.socket,
    *,
    drain_seconds: float,
    ssl_key_file: str | None = None,
    ssl_cert_file: str | None = None,
) -> None:
    """Answers requests on a bound socket until a signal; running requests get ``drain_seconds`` to end."""
    config = uvicorn.Config(
        server.app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(drain_seconds),
        ssl_keyfile=ssl_key_file,
        ssl_certfile=ssl_cert_file,
    )
    server.engine.start()
    try:
        HttpServer(config).run(sockets=[listener])
    finally:
        server.engine.stop(drain_seconds)
        listener.close()
