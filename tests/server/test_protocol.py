"""Connections as bytes: request heads without end, requests behind others, bodies that do not come, HTTP/1.0."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from typing import Any

import httpx
import psutil
import pytest

from ikpy.server.protocol import BoundedConnection
from tests.server.live import PATIENCE, listening, wait_for
from tests.server.test_command import process

SERVER = "llama-server -m PUPPET -t 1 -c 512 -np 1"
REQUEST = b"GET /health HTTP/1.1\r\nHost: x\r\n"
ENDLESS = {"prompt": "The", "n_predict": 2**31 - 1, "ignore_eos": True, "temperature": 0, "logit_bias": [[449, 100]]}
LONG = {"prompt": "x", "n_predict": 200, "temperature": 0, "logit_bias": [[449, 100]]}


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


@pytest.mark.parametrize("n_bytes", [1, 7, 10_000])
def test_an_offer_of_another_protocol_is_passed_over(n_bytes: int) -> None:
    body = json.dumps({"content": "upgrade: h2c\r\n"}).encode()
    head = b"POST /tokenize HTTP/1.1\r\nUnder: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUPGRADE: h2c\r\n"
    sized = head + b"HTTP2-Settings: AAEAAEAA\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    data = sized + chunked + b"GET /health HTTP/1.1\r\nUpgrade: h2c\r\nConnection: close, Upgrade\r\n\r\n"
    with listening(SERVER) as (client, server), connect(client) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(data), n_bytes):
            connection.sendall(data[at : at + n_bytes])
            time.sleep(0.001)
        answers = read_all(connection)
    tokens = server.front.vocab.tokenize("upgrade: h2c\r\n", add_special=False)
    assert answers.count(b"HTTP/1.1 200") == 3
    assert answers.count(json.dumps({"tokens": tokens}).replace(" ", "").encode()) == 2


def test_a_head_that_does_not_come_is_given_up() -> None:
    with listening(SERVER, patience=0.5) as (client, _):
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
    with listening(SERVER, patience=0.2) as (client, _):
        body = {"prompt": "x", "n_predict": 64, "stream": True, "logit_bias": [[449, 100]]}
        with client.stream("POST", "/completion", json=body) as response:
            lines = response.iter_lines()
            first = next(lines)
            time.sleep(0.6)
            assert '"tokens_predicted":64' in [first, *(line for line in lines if line)][-1]


def post(path: str, body: object, *headers: str, version: str = "1.1") -> bytes:
    """A request."""
    content = json.dumps(body).encode()
    head = [f"POST {path} HTTP/{version}", "Host: x", f"Content-Length: {len(content)}", *headers, "", ""]
    return "\r\n".join(head).encode() + content


def chunked(path: str, body: object) -> bytes:
    """A request whose body has no length, and a trailer."""
    content = json.dumps(body, indent=1).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return head + b"%x\r\n%s\r\n0\r\nX-Trailer: 1\r\n\r\n" % (len(content), content)


def split_answers(data: bytes) -> list[bytes]:
    """Answers that followed each other on a connection."""
    return [b"HTTP/1.1" + rest for rest in data.split(b"HTTP/1.1")[1:]]


PIPELINED = [
    post("/tokenize", {"content": "a"}),
    REQUEST + b"\r\n",
    chunked("/tokenize", {"content": "b"}),
    post("/completion", LONG | {"stream": True}),
    REQUEST + b"\r\n",
    post("/tokenize", {"content": "c" * 5000}, "Connection: close"),
]


@pytest.mark.parametrize("n", [1, 2, 3, 1000])
def test_bodies_in_chunks_are_read_up_to_their_end_and_not_line_by_line(n: int) -> None:
    connection = BoundedConnection.__new__(BoundedConnection)
    connection._in_head, connection._n_body, connection._tail = False, 0, b""
    body = b"3e8\r\n" + b"\n" * 1000 + b"\r\n0\r\n\r\n"
    data, parts, at = body + b"GET / HTTP/1.1\r\n\r\n", [], 0
    for begin in range(0, len(body), n):
        piece, at = data[begin : begin + n], 0
        while at < len(piece) and sum(map(len, parts)) < len(body):
            end = connection._part_end(piece, at)
            connection._tail = (connection._tail + piece[at:end])[-2:]
            parts.append(piece[at:end])
            at = end
    assert b"".join(parts) == body
    assert len(parts) <= -(-len(body) // n) + 2, f"{len(parts)} parts of {n} bytes"


@pytest.mark.parametrize("n", [1, 7, 100, 10**6], ids=lambda n: f"{n} bytes at once")
def test_requests_behind_each_other_are_answered_in_order(n: int) -> None:
    with listening(SERVER) as (client, _), connect(client) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data = b"".join(PIPELINED)
        for at in range(0, len(data), n):
            connection.sendall(data[at : at + n])
        answers = split_answers(read_all(connection))
    assert len(answers) == len(PIPELINED)
    assert all(answer.startswith(b"HTTP/1.1 200") for answer in answers)
    assert [b"slots_idle" in answer for answer in answers] == [False, True, False, False, True, False]
    assert b'"tokens_predicted":200' in answers[3] and answers[3].endswith(b"0\r\n\r\n")
    assert answers[5].count(b",") > 1000 > answers[2].count(b",")


@pytest.mark.parametrize(
    "behind", [REQUEST + b"\r\n", REQUEST, b"\r\n", b"x" * 200_000], ids=["whole", "begun", "blank", "long"]
)
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_seen_behind_another_request(behind: bytes, together: bool, stream: bool) -> None:
    with listening(SERVER) as (client, server):
        with connect(client) as connection:
            request = post("/completion", ENDLESS | {"stream": stream})
            connection.sendall(request + behind if together else request)
            assert wait_for(lambda: server.engine.n_idle == 0)
            if not together:
                connection.sendall(behind)
        assert wait_for(lambda: server.engine.n_idle == 1, 20)


def test_too_much_behind_a_request_ends_the_connection_with_its_answer() -> None:
    with listening(SERVER) as (client, server), connect(client) as connection:
        connection.sendall(post("/completion", LONG | {"stream": True, "n_predict": 400}))
        assert wait_for(lambda: server.engine.n_idle == 0)
        for _ in range(100):
            connection.sendall((REQUEST + b"\r\n") * 100)
        answers = split_answers(read_all(connection))
        assert len(answers) == 1
        assert b'"tokens_predicted":400' in answers[0] and answers[0].endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("path", ["/completion", "/api/chat"])
def test_a_body_that_does_not_come_does_not_hold_up_the_end(path: str) -> None:
    with process("-c", "512", "--drain-seconds", "0") as (server, address):
        url = httpx.URL(address)
        with socket.create_connection((url.host, url.port), PATIENCE) as connection:
            connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
            httpx.get(f"{address}/health", timeout=PATIENCE)  # the head has come before
            server.send_signal(signal.SIGTERM)
            head, _, body = read_all(connection).partition(b"\r\n\r\n")
        out, err = server.communicate(timeout=PATIENCE)
    assert head.startswith(b"HTTP/1.1 503") and b"connection: close" in head and b"retry-after" in head
    error = json.loads(body)["error"]
    assert "shutting down" in (error if path == "/api/chat" else error["message"])
    assert server.returncode == 0 and "Traceback" not in out + err and "Cancel" not in out + err


def test_a_client_that_does_not_read_does_not_hold_up_the_end() -> None:
    with process("-c", "512", "--drain-seconds", "0") as (server, address):
        url = httpx.URL(address)
        with socket.create_connection((url.host, url.port), PATIENCE) as connection:
            # Some 10 MB, more than the buffers of the system take.
            body = {"prompt": "The", "n_predict": 450, "ignore_eos": True, "stream": True, "n_probs": 500}
            connection.sendall(post("/completion", body))
            slots = f"{address}/slots"
            assert wait_for(lambda: httpx.get(slots, timeout=PATIENCE).json()[0]["next_token"]["n_decoded"] == 450)
            server.send_signal(signal.SIGTERM)
            out, err = server.communicate(timeout=PATIENCE)
    assert server.returncode == 0 and "Traceback" not in out + err and "Cancel" not in out + err


UNREAD = {
    "stream": post("/completion", ENDLESS | {"stream": True, "n_probs": 50}),
    "whole": post("/tokenize", {"content": "a b " * 150_000, "with_pieces": True}),
}
"""Requests for more than the buffers of the system take: without an end, and of 13 MB."""


def connect_narrow(client: httpx.Client) -> socket.socket:
    """A connection for which the client's system keeps little that is not read."""
    connection = socket.socket()
    connection.settimeout(PATIENCE)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((client.base_url.host, client.base_url.port))
    return connection


def is_open(connection: socket.socket) -> bool:
    """Whether the server, which runs in this process, still has its side of a connection."""
    sides = psutil.Process().net_connections(kind="tcp")
    return any(side.raddr == connection.getsockname() for side in sides)


def test_a_client_that_stops_reading_at_the_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for which nothing has to wait yet when connections are given up."""
    made: list[BoundedConnection] = []
    connection_made = BoundedConnection.connection_made

    def noted(self: BoundedConnection, transport: Any) -> None:
        made.append(self)
        connection_made(self, transport)

    monkeypatch.setattr(BoundedConnection, "connection_made", noted)
    with listening(SERVER, patience=1e4) as (client, server), connect_narrow(client) as connection:
        go_on = threading.Event()
        server.engine.call(lambda: go_on.wait(PATIENCE))
        connection.sendall(UNREAD["stream"])
        assert wait_for(lambda: bool(made) and made[0]._is_answering)
        made[0].loop.call_soon_threadsafe(made[0].give_up)
        go_on.set()
        assert wait_for(lambda: not is_open(connection))


@pytest.mark.parametrize("kind", UNREAD)
def test_a_client_that_does_not_read_is_cut_off(kind: str) -> None:
    with listening(SERVER, patience=0.5) as (client, server), connect_narrow(client) as connection:
        connection.sendall(UNREAD[kind])
        assert wait_for(lambda: is_open(connection))
        assert wait_for(lambda: not is_open(connection))
        assert wait_for(lambda: server.engine.n_idle == 1)


@pytest.mark.parametrize("is_tls", [False, True])
def test_a_client_that_reads_slowly_gets_the_whole_answer(is_tls: bool, request: pytest.FixtureRequest) -> None:
    n_read, begin = 0, time.monotonic()
    tls = request.getfixturevalue("tls") if is_tls else None
    with (
        listening(SERVER, patience=0.5, tls=tls) as (client, _),
        wrapped(connect(client)) if is_tls else connect(client) as connection,
    ):
        connection.sendall(UNREAD["whole"])
        # The system lets the server write on only when a good part of what it keeps, some MB, has been read: that
        # it keeps less and less is what shows that the client reads.
        while n_read < 13_000_000 and (data := connection.recv(65536)):
            n_read += len(data)
            time.sleep(0.03 * len(data) / 65536)  # a record of TLS is 16 KiB long
    assert n_read >= 13_000_000
    assert time.monotonic() - begin > 4.0, "more than the time without reading"


@pytest.fixture(name="tls", scope="module")
def make_certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Files of a key and its certificate."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl that makes a certificate")
    folder = tmp_path_factory.mktemp("tls")
    files = str(folder / "key.pem"), str(folder / "certificate.pem")
    line = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*line, "-keyout", files[0], "-out", files[1]], capture_output=True, check=True)
    return files


def wrapped(connection: socket.socket) -> ssl.SSLSocket:
    """TLS over a connection, with any certificate."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(connection)


@pytest.mark.parametrize("kind", UNREAD)
def test_a_client_of_tls_that_does_not_read_is_cut_off(kind: str, tls: tuple[str, str]) -> None:
    with (
        listening(SERVER, patience=0.5, tls=tls) as (client, server),
        wrapped(connect_narrow(client)) as connection,
    ):
        connection.sendall(UNREAD[kind])
        assert wait_for(lambda: is_open(connection))
        assert wait_for(lambda: not is_open(connection))
        assert wait_for(lambda: server.engine.n_idle == 1)


@pytest.mark.parametrize("keep", [(), ("Connection: keep-alive",)])
@pytest.mark.parametrize("version", ["0.9", "1.0"])
def test_old_clients_get_streams_without_chunks(version: str, keep: tuple[str, ...]) -> None:
    with listening(SERVER) as (client, _), connect(client) as connection:
        connection.sendall(post("/completion", LONG | {"stream": True}, *keep, version=version))
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200") and b"connection: close" in head
        assert b"transfer-encoding" not in head and b"content-length" not in head
        events = body.decode().split("\n\n")
        assert events.pop() == "" and all(event.startswith("data: {") for event in events)
        assert json.loads(events[-1].removeprefix("data: "))["tokens_predicted"] == 200


def test_old_clients_get_other_answers_with_their_length() -> None:
    with listening(SERVER) as (client, _), connect(client) as connection:
        connection.sendall(post("/completion", LONG, version="1.0"))
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
        assert f"content-length: {len(body)}".encode() in head
        assert json.loads(body)["tokens_predicted"] == 200
