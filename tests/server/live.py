"""A server behind a real socket."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Iterator

import httpx
import psutil
import uvicorn

from ikpy.server.build import Server
from ikpy.server.protocol import http_protocol
from tests.server.harness import start_server

PATIENCE = 120.0
"""Seconds after which something that should happen counts as failed; machines that run tests may be busy."""


@contextlib.contextmanager
def listening(
    command: str | Server, *, queue_limit: int = 512, patience: float = PATIENCE, tls: tuple[str, str] | None = None
) -> Iterator[tuple[httpx.Client, Server]]:
    """Client and server (of a command line, or one that was started) on a free port of the loopback interface; ``tls``:
    files of key and certificate."""
    server = start_server(command) if isinstance(command, str) else command
    server.front.settings.queue_limit = queue_limit
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(server.app, http=http_protocol(patience), log_level="error")
    if tls is not None:
        config.ssl_keyfile, config.ssl_certfile = tls
        config.timeout_keep_alive = 2 * int(PATIENCE)  # behind which TLS ends idle connections, whatever is unread
    http = uvicorn.Server(config)
    thread = threading.Thread(target=http.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    assert wait_for(lambda: http.started)
    try:
        url = f"http{'s' if tls else ''}://127.0.0.1:{listener.getsockname()[1]}"
        with httpx.Client(base_url=url, timeout=PATIENCE, verify=False) as client:
            yield client, server
    finally:
        http.should_exit = True
        thread.join(PATIENCE)
        server.engine.stop(10)


def address_of(process: subprocess.Popen[str]) -> str:
    """Address of a server that was started with `--port 0`, once it answers."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(psutil.Error, httpx.TransportError):
            for connection in psutil.Process(process.pid).net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    address = f"http://127.0.0.1:{connection.laddr.port}"
                    if httpx.get(f"{address}/health", timeout=PATIENCE).status_code != 503:
                        return address
        time.sleep(0.02)
    raise AssertionError(f"the server does not answer; its status is {process.poll()}")


def wait_for(condition: object, seconds: float = PATIENCE) -> bool:
    """Whether a condition (a function without arguments) becomes true in time."""
    assert callable(condition)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return False
