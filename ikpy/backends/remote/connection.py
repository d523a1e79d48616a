"""The client's end of a connection to a host."""

from __future__ import annotations

import socket
import threading
from collections import deque
from typing import Any, NoReturn

import numpy as np

from ikpy.backends.cuda.api import DeviceError
from ikpy.backends.remote.protocol import (
    ANSWER,
    ANSWER_MAGIC,
    HEAD,
    MAX_TEXT,
    OK,
    Message,
    ProtocolError,
    greeting,
    keep_alive,
    one_line,
    parsed_json,
    read_exactly,
    received,
)

CONNECT_SECONDS = 10.0
# A host that takes longer for one batch counts as lost.
ANSWER_SECONDS = 600.0
# Bytes that are sent behind a request before its answer is read: they fit any socket's buffers, so that neither end
# waits for the other to read.
BEHIND_REQUEST = 32 << 10
# Bytes of small messages that are put together, and of payloads that are sent without a copy.
GATHERED, LARGE = 256 << 10, 64 << 10

AGAIN = "; load the model again when the host runs"


class Connection:
    """Messages to a host in order, and its answers. Raises DeviceError, naming the host, once it fails in any way."""

    def __init__(self, host: str, port: int, name: str) -> None:
        self.name = name
        self._lock = threading.RLock()
        self._busy = False
        self._queue: list[bytes | memoryview] = []
        self._queued = 0
        self._behind = 0
        self._waiting: deque[memoryview] = deque()
        self.requested = self.answered = 0
        self._dead = ""
        try:
            self._socket = socket.create_connection((host, port), CONNECT_SECONDS)
        except OSError as error:
            raise DeviceError(
                f"{name}: no connection: {error.strerror or error}; is `ikpy rpc-server` running?"
            ) from None
        keep_alive(self._socket)
        try:
            self._socket.sendall(greeting())
            self.host: dict[str, Any] = parsed_json(self._read_answer(MAX_TEXT))
        except (OSError, ProtocolError) as error:
            self._fail(error)
        self._socket.settimeout(ANSWER_SECONDS)

    @property
    def is_dead(self) -> bool:
        """Whether the connection failed or was closed."""
        return bool(self._dead)

    def close(self) -> None:
        """Ends the connection."""
        self._dead = self._dead or "the connection was closed"
        self._socket.close()

    def _fail(self, error: BaseException) -> NoReturn:
        reason = str(error)
        if isinstance(error, TimeoutError):
            reason = f"no answer came in time{AGAIN}"
        elif isinstance(error, OSError):
            reason = f"the connection was lost ({error.strerror or error}){AGAIN}"
        elif not isinstance(error, ProtocolError):
            reason = "a transfer was interrupted"
        self._dead = self._dead or f"{self.name}: {reason}"
        self._socket.close()
        if isinstance(error, Exception):
            raise DeviceError(self._dead) from None
        raise error

    # sending

    def post(self, message: Message, a: int = 0, b: int = 0, c: int = 0, payload: memoryview | bytes = b"") -> None:
        """Queues a message without an answer; a payload may change when this returns."""
        with self._lock:
            if self._dead:
                raise DeviceError(self._dead)
            nbytes = HEAD.size + len(payload)
            if self._waiting and self._behind + nbytes > BEHIND_REQUEST and not self._busy:
                self.settle()
            self._queue.append(HEAD.pack(message, len(payload), a, b, c))
            is_large = len(payload) >= LARGE
            if len(payload):
                self._queue.append(payload if is_large else bytes(payload))
            self._queued += nbytes
            self._behind += nbytes
            if (is_large or self._queued > GATHERED) and not self._busy:
                self.flush()

    def post_later(self, message: Message, a: int) -> None:
        """Queues a message, whatever this thread is doing, if the host is still there; for finalizers."""
        if not self._dead:
            self._queue.append(HEAD.pack(message, 0, a, 0, 0))

    def flush(self) -> None:
        """Sends what is queued."""
        with self._lock:
            if self._busy:
                return
            self._busy = True
            try:
                self._send()
            finally:
                self._busy = False

    def _send(self) -> None:
        parts, self._queue, self._queued = self._queue, [], 0
        try:
            pending = b""
            for part in parts:
                if len(part) < LARGE:
                    pending += part
                    continue
                self._socket.sendall(pending)
                self._socket.sendall(part)
                pending = b""
            if pending:
                self._socket.sendall(pending)
        except (BrokenPipeError, ConnectionResetError) as error:
            self._fail(self._last_words() or error)
        except BaseException as error:
            self._fail(error)

    def _last_words(self) -> ProtocolError | None:
        """What the host said before it closed the connection."""
        try:
            self._socket.settimeout(1.0)
            for target in self._waiting:
                self._fill(target)
            self._read_answer(0)
        except ProtocolError as error:
            return error
        except OSError:
            return None
        return None

    # answers

    def request(
        self, target: memoryview, message: Message, a: int = 0, b: int = 0, c: int = 0, payload: bytes = b""
    ) -> None:
        """Queues a message whose answer fills memory when somebody waits for it."""
        with self._lock:
            self.post(message, a, b, c, payload)
            self._waiting.append(target)
            self.requested += 1
            self._behind = 0

    def ask(
        self, nbytes: int, message: Message, a: int = 0, b: int = 0, c: int = 0, payload: bytes = b""
    ) -> np.ndarray:
        """The answer to a message, uint8 [nbytes]."""
        answer = np.empty(nbytes, np.uint8)
        with self._lock:
            self.request(answer.data, message, a, b, c, payload)
            self.settle()
        return answer

    def synchronize(self) -> None:
        """Waits until the host has done everything that was said so far.

        Finalizers may ask for that in the midst of a transfer of the same thread. They have nothing to wait for: what
        they say comes behind it.
        """
        with self._lock:
            if not self._busy:
                self.ask(0, Message.SYNC)

    def settle(self, serial: int | None = None) -> None:
        """Reads the answers that were asked for, if the one with this number has not come."""
        with self._lock:
            if self._busy or (serial is not None and self.answered >= serial):
                return
            if self._dead:
                raise DeviceError(self._dead)
            self._busy = True
            try:
                self._send()
                while self._waiting:
                    self._fill(self._waiting[0])
                    self._waiting.popleft()
                    self.answered += 1
            except DeviceError:
                raise
            except BaseException as error:
                self._fail(error)
            finally:
                self._busy = False

    def _fill(self, target: memoryview) -> None:
        if self._read_head() != len(target):
            raise ProtocolError("an answer has the wrong size")
        read_exactly(self._socket, target)

    def _read_answer(self, most: int) -> bytes:
        nbytes = self._read_head()
        if nbytes > most:
            raise ProtocolError("an answer has the wrong size")
        return received(self._socket, nbytes)

    def _read_head(self) -> int:
        """Bytes of the next answer. ProtocolError for what the host complains of."""
        magic, status, nbytes = ANSWER.unpack(received(self._socket, ANSWER.size))
        if magic != ANSWER_MAGIC:
            raise ProtocolError("what answers there is no `ikpy rpc-server`")
        if status != OK:
            raise ProtocolError(one_line(received(self._socket, min(nbytes, MAX_TEXT)).decode(errors="replace")))
        return nbytes
