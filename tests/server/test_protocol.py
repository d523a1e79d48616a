"""Connections whose clients send no proper request head."""

from __future__ import annotations

import socket
import time

import httpx
import pytest

from tests.server.live import PATIENCE, listening

SERVER = "llama-server -m PUPPET -t 1 -c 512 -np 1"
REQUEST = b"GET /health HTTP/1.1\r\nHost: x\r\n"


def connect(client: httpx.Client) -> socket.socket:
    return socket.create_connection((client.base_url.host, client.base_url.port), PATIENCE)


def read_all(connection: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    found = b""
    try:
        while data := connection.recv(65536):
            found += data
    except ConnectionResetError:  # it closed with data unread
        pass
    return found


@pytest.mark.parametrize("head", [b"X-Long: ", b"X-Many: 1\r\n", b""], ids=["one header", "many headers", "path"])
def test_a_head_without_end_is_refused(head: bytes) -> None:
    with listening(SERVER) as (client, _), connect(client) as connection:
        connection.sendall(REQUEST + head if head else b"GET /")
        refused = False
        for _ in range(100):
            try:
                connection.sendall((head if head.endswith(b"\n") else b"x") * 10_000)
            except (BrokenPipeError, ConnectionResetError):
                refused = True
                break
        assert refused or read_all(connection).startswith(b"HTTP/1.1 400")
        assert client.get("/health").status_code == 200


def test_long_heads_that_end_and_long_bodies_are_read() -> None:
    with listening(SERVER) as (client, _):
        assert client.get("/health", headers={"X-Long": "x" * 50_000}).status_code == 200
        body = {"prompt": [1] * 40_000, "n_predict": 1}
        assert client.post("/completion", json=body).status_code == 200


def test_a_head_that_does_not_come_is_given_up() -> None:
    with listening(SERVER, head_timeout=0.5) as (client, _):
        for begun in (b"", REQUEST):
            with connect(client) as connection:
                connection.sendall(begun)
                assert read_all(connection) == b""
        with connect(client) as connection:
            connection.sendall(REQUEST + b"\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
            connection.sendall(REQUEST)
            assert read_all(connection) == b""


def test_a_long_answer_is_not_cut_by_the_time_limit_of_heads() -> None:
    with listening(SERVER, head_timeout=0.2) as (client, _):
        body = {"prompt": "x", "n_predict": 64, "stream": True, "logit_bias": [[449, 100]]}
        with client.stream("POST", "/completion", json=body) as response:
            lines = response.iter_lines()
            first = next(lines)
            time.sleep(0.6)
            assert '"tokens_predicted":64' in [first, *(line for line in lines if line)][-1]
