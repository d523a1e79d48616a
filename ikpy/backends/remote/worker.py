"""One client of a host, in a process of its own: what it sends can harm nothing but this process.

Started by `host.py` as `python -m ikpy.backends.remote.worker FD JSON`.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import numpy as np

import ikpy
from ikpy import _native
from ikpy._native import core
from ikpy.backends.remote.protocol import (
    ANSWER,
    ANSWER_MAGIC,
    FAILED,
    GREETING,
    HEAD,
    MAGIC,
    MAX_GREETING,
    MAX_PAYLOAD,
    OK,
    SHA256_BYTES,
    VERSION,
    Head,
    Message,
    ProtocolError,
    keep_alive,
    one_line,
    ops_digest,
    parsed_json,
    read_exactly,
    received,
)
from ikpy.backends.remote.store import Store
from ikpy.backends.remote.tensor_cache import TensorCache
from ikpy.errors import IkpyError
from ikpy.quants import registry

GREETING_SECONDS = 10.0
# Within a message nothing may stay away for longer; between two of them a client may think as long as it likes.
MESSAGE_SECONDS = 60.0
MAX_ROWS = 1 << 31
LAST_SECONDS, LAST_BYTES = 2.0, 1 << 30
# Messages whose payload may be large, the others have a few bytes.
LARGE = (Message.UPLOAD, Message.PROGRAM)
SMALL_PAYLOAD = 64


class Session:
    """Answers the messages of a connection. Raises ProtocolError for what makes no sense."""

    def __init__(self, connection: socket.socket, store: Store, cache: TensorCache | None) -> None:
        self._connection, self._store, self._cache = connection, store, cache
        self._handlers: dict[Message, Callable[[Head], None]] = {
            Message.MEMORY: self._memory,
            Message.ALLOC: self._alloc,
            Message.FREE: lambda head: store.release(head.a),
            Message.UPLOAD: self._upload,
            Message.DOWNLOAD: self._download,
            Message.COPY: lambda head: store.copy(head.a, head.b, head.c),
            Message.FILL: lambda head: store.fill(head.a, head.b, head.c),
            Message.PROGRAM: lambda head: store.compile(head.a, head.b, self._payload(head)),
            Message.RUN: lambda head: store.run(head.a),
            Message.DROP: lambda head: store.drop(head.a),
            Message.SYNC: lambda head: self._answer(b""),
            Message.HAS: self._has,
            Message.KEEP: self._keep,
            Message.FORMAT: self._format,
            Message.PREPARED: self._prepared,
        }

    def greet(self, n_threads: int) -> None:
        """Checks that the client speaks the same, and says what this host is."""
        magic, version, nbytes = GREETING.unpack(received(self._connection, GREETING.size))
        if magic != MAGIC:
            raise ProtocolError("this host serves `ikpy --rpc` only")
        said = parsed_json(received(self._connection, nbytes)) if nbytes <= MAX_GREETING else {}
        if version != VERSION or said.get("ops") != ops_digest():
            other = str(said.get("ikpy", "?"))[:40]
            raise ProtocolError(
                f"the host is ikpy {ikpy.__version__} (protocol {VERSION}), this program ikpy {other} (protocol "
                f"{version}): install the same version on both machines"
            )
        answer = {"isa": _native.tier, "threads": n_threads, "cache": self._cache is not None}
        self._answer(json.dumps(answer).encode())

    def serve(self) -> None:
        """Answers until the client goes."""
        head = bytearray(HEAD.size)
        while True:
            self._connection.settimeout(None)
            if not self._connection.recv_into(memoryview(head)[:1]):
                return
            self._connection.settimeout(MESSAGE_SECONDS)
            read_exactly(self._connection, memoryview(head)[1:])
            self._handle(head)

    def _handle(self, data: bytes | bytearray) -> None:
        number, *rest = HEAD.unpack(data)
        try:
            message = Message(number)
        except ValueError:
            raise ProtocolError(f"message {number} is unknown") from None
        head = Head(message, *rest)
        if head.payload > (MAX_PAYLOAD if message in LARGE else SMALL_PAYLOAD):
            raise ProtocolError(f"{message.name}: a payload of {head.payload} bytes")
        if head.payload and message not in (*LARGE, Message.HAS, Message.KEEP, Message.PREPARED):
            raise ProtocolError(f"{message.name} has no payload")
        self._handlers[message](head)

    def _payload(self, head: Head) -> bytes:
        return received(self._connection, head.payload)

    def _answer(self, data: bytes | memoryview) -> None:
        self._connection.sendall(ANSWER.pack(ANSWER_MAGIC, OK, len(data)) + (data if len(data) < 1 << 16 else b""))
        if len(data) >= 1 << 16:
            self._connection.sendall(data)

    # messages

    def _memory(self, head: Head) -> None:
        self._answer(np.array([self._store.free, self._store.limit], "<u8").tobytes())

    def _alloc(self, head: Head) -> None:
        done = self._store.alloc(head.a, head.b)
        self._answer(bytes([done]) + np.array([self._store.free], "<u8").tobytes())

    def _upload(self, head: Head) -> None:
        read_exactly(self._connection, self._store.span(head.a, head.payload))

    def _download(self, head: Head) -> None:
        self._answer(self._store.span(head.a, head.b))

    def _digest(self, head: Head) -> bytes:
        if head.payload != SHA256_BYTES or self._cache is None:
            raise ProtocolError("no SHA-256, or no cache")
        return self._payload(head)

    def _has(self, head: Head) -> None:
        target, digest = self._store.span(head.a, head.b), self._digest(head)
        assert self._cache is not None
        self._answer(bytes([self._cache.read(digest, target)]))

    def _keep(self, head: Head) -> None:
        data, digest = self._store.span(head.a, head.b), self._digest(head)
        assert self._cache is not None
        self._cache.keep(digest, data)

    def _format(self, head: Head) -> None:
        registry.by_id(min(head.a, MAX_ROWS))
        fmt = core.activation_format(head.a, min(head.b, MAX_ROWS), bool(head.c))
        self._answer(np.array([fmt], "<i4").tobytes())

    def _prepared(self, head: Head) -> None:
        sizes = np.frombuffer(self._payload(head), "<i8").tolist() if head.payload == 32 else []
        if len(sizes) != 4 or not all(0 <= n < MAX_ROWS for n in sizes) or sizes[1] * sizes[2] * sizes[3] >= 1 << 48:
            raise ProtocolError("sizes of activations that there are not")
        self._answer(np.array([core.activation_nbytes(*sizes)], "<u8").tobytes())


def refuse(connection: socket.socket, reason: str) -> None:
    """Says why the connection ends, in a way that lets the client read it."""
    with suppress(OSError):
        text = reason.encode()
        connection.settimeout(LAST_SECONDS)
        connection.sendall(ANSWER.pack(ANSWER_MAGIC, FAILED, len(text)) + text)
        connection.shutdown(socket.SHUT_WR)
        # What is not read when a connection is closed takes the last words with it.
        end, left = time.monotonic() + LAST_SECONDS, LAST_BYTES
        while time.monotonic() < end and left > 0 and (n := len(connection.recv(1 << 20))):
            left -= n
    connection.close()


def run(connection: socket.socket, limit: int, n_threads: int, cache: str | None) -> str:
    """Serves a client to its end; why it ended, "" if it left."""
    keep_alive(connection)
    try:
        connection.settimeout(GREETING_SECONDS)
        session = Session(connection, Store(limit, n_threads), TensorCache(Path(cache)) if cache else None)
        session.greet(n_threads)
        session.serve()
    except TimeoutError:
        reason = "nothing came in time"
    except ConnectionError:
        return "the connection was lost"
    except (IkpyError, MemoryError, OSError, ValueError, OverflowError) as error:
        reason = one_line(str(error) or "not enough memory")
    else:
        return ""
    refuse(connection, reason)
    return reason


def end_with_parent() -> None:
    """Ends this process when the one that started it has ended."""
    parent = os.getppid()

    def watch() -> NoReturn:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(arguments: list[str]) -> int:
    """Exit status 0 when the client left, 1 when it was sent away; the reason is a line on standard error."""
    settings = json.loads(arguments[1])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # what a client sent would stay on the disk
    end_with_parent()
    reason = run(socket.socket(fileno=int(arguments[0])), settings["limit"], settings["threads"], settings["cache"])
    if reason:
        print(f"rpc-server: {settings['client']}: {reason}", file=sys.stderr, flush=True)
    return int(bool(reason))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
