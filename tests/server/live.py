"""A server behind a real socket."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import uvicorn

from ikpy.server.build import Server
from tests.server.harness import start_server


@contextlib.contextmanager
def listening(command: str, *, queue_limit: int = 512) -> Iterator[tuple[httpx.Client, Server]]:
    """Client and server on a free port of the loopback interface."""
    server = start_server(command)
    server.front.settings.queue_limit = queue_limit
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    http = uvicorn.Server(uvicorn.Config(server.app, log_level="error"))
    thread = threading.Thread(target=http.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not http.started:
        time.sleep(0.01)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=60) as client:
            yield client, server
    finally:
        http.should_exit = True
        thread.join(10)
        server.engine.stop(10)


def wait_for(condition: object, seconds: float = 5.0) -> bool:
    """Whether a condition (a function without arguments) becomes true in time."""
    assert callable(condition)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return False
