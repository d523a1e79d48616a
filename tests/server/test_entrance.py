"""Clients that come while the model is loaded."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ikpy.server.serve import Reception
from tests.server.harness import MODELS
from tests.server.live import PATIENCE, wait_for

LOADING = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}


async def echo(request: Request) -> Response:
    return JSONResponse({"path": request.url.path, "body": (await request.body()).decode()})


def reception(listener: socket.socket, prefix: str = "") -> Reception:
    more: dict[str, Any] = {"timeout": PATIENCE, "ssl_key_file": None, "ssl_cert_file": None}
    return Reception([listener], prefix=prefix, drain_seconds=5.0, **more)


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_health_says_that_the_model_is_loaded_and_others_wait(prefix: str) -> None:
    app = Starlette(routes=[Route("/{path:path}", echo, methods=["GET", "POST"])])
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}{prefix}"
        with reception(listener, prefix) as http:
            waiting = pool.submit(httpx.post, f"{address}/completion", content="hello", timeout=PATIENCE)
            for path in ("/health", "/v1/health"):
                answer = httpx.get(address + path, timeout=PATIENCE)
                assert (answer.status_code, answer.json()) == (503, LOADING), path
            assert not waiting.done()
            stop = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM))
            stop.start()
            http.run(app, lambda: None, lambda: None)
            assert waiting.result(PATIENCE).json() == {"path": f"{prefix}/completion", "body": "hello"}


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/completion", LOADING),
        ("/api/chat", {"error": "Loading model"}),
        ("/v1/messages", {"type": "error", "error": LOADING["error"] | {"type": "overloaded_error"}}),
    ],
)
def test_clients_are_told_when_the_model_cannot_be_loaded(path: str, told: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/llm"
        started = time.monotonic()
        with pytest.raises(ValueError, match="damaged"), reception(listener, "/llm"):
            waiting = pool.submit(httpx.post, address + path, timeout=PATIENCE)
            assert httpx.get(f"{address}/health", timeout=PATIENCE).status_code == 503
            time.sleep(0.2)  # the other request arrives
            raise ValueError("damaged")
        assert (waiting.result(PATIENCE).status_code, waiting.result().json()) == (503, told)
        assert time.monotonic() - started < PATIENCE


def test_early_clients_of_the_command() -> None:
    """From the first connection on every answer is that of a server, before and after the model is there."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    line = [sys.executable, "-m", "ikpy", "server", "-m", MODELS["PUPPET"], "-t", "1", "-c", "512", "--port", str(port)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    server = subprocess.Popen(line, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert wait_for(lambda: accepts(port))
        address = f"http://127.0.0.1:{port}"
        assert httpx.get(f"{address}/health", timeout=PATIENCE).status_code == 503
        server.send_signal(signal.SIGHUP)  # as for a server with its model: keys are read again
        answer = httpx.post(f"{address}/completion", json={"prompt": "x", "n_predict": 2}, timeout=PATIENCE)
        assert answer.json()["tokens_predicted"] == 2
        assert httpx.get(f"{address}/health", timeout=PATIENCE).json()["status"] == "ok"
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE) == 0
    finally:
        server.kill()
        server.wait()


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE).close()
    except ConnectionRefusedError:
        return False
    return True
