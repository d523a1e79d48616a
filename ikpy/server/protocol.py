"""How connections speak HTTP: uvicorn, with bounds on what clients send before they are answered, and on how long they
may leave an answer unread."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import sys
import termios
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from ikpy.server.errors import shutting_down
from ikpy.server.http import error_response

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

MOST_HEAD = 65536
"""Bytes of request line and headers."""
MOST_BEHIND = 65536
"""Bytes of the requests behind the one that is answered."""
EMPTY_LINE = b"\n\r\n"
"""With the end of the line before."""
UPGRADE = b"upgrade:"
MOST_UNSENT = 65536
"""Bytes that may wait for the client before more is written."""
LAST_PATIENCE = 1.0
"""Seconds without a byte taken that the end of the server leaves a client."""
BYTES_ACKED = slice(120, 128)
"""Where `tcpi_bytes_acked` is in Linux's struct tcp_info."""


def http_protocol(timeout: float) -> type[asyncio.Protocol]:
    """The protocol class of a server whose clients have ``timeout`` seconds for the head of a request, and to read more
    of an answer."""

    class Connection(BoundedConnection):
        patience = timeout

    return Connection


class BoundedConnection(HttpToolsProtocol):
    """Answers requests one after the other, and closes connections whose request head is too long or takes too long.
    One whose client reads nothing of an answer for as long is cut off: what waits to be sent would keep it open.

    What comes behind a request waits until that is answered, and reading goes on, as a client that leaves is seen only
    then; the connection ends behind the answer if more comes than is kept. Offers to go on with another protocol, which
    Java's client makes with every request (h2c), are passed over: the parser would take the body for that protocol.
    """

    patience = 0.0

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._n_head = 0
        """Bytes of the head that is being received."""
        self._n_body = 0
        """Bytes of the body that have not come; 0 also if only its end tells how long it is."""
        self._tail = b""
        """The last bytes of a body of the second kind."""
        self._in_head = True
        """Whether the next byte is none of a body."""
        self._offer: bytes | None = b""
        """The beginning of a line of the head as long as it may be such an offer, None behind other beginnings."""
        self._behind = bytearray()
        self._deadline: asyncio.TimerHandle | None = None
        self._next_look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(MOST_UNSENT)  # those of TLS transports would take half a MiB
        self._deadline = self.loop.call_later(self.patience, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        self._stop_looking()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look_later(n_taken(self.transport))

    def resume_writing(self) -> None:
        self._stop_looking()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        at = 0
        while at < len(data) and not self.transport.is_closing():
            if self._in_head and self._is_answering:
                self._keep(data[at:])
                return
            end = self._part_end(data, at)
            self._receive_part(data[at:end])
            at = end

    def on_headers_complete(self) -> None:
        self._in_head, self._tail = False, b""
        self._n_body = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
        self._stop_clock()
        super().on_headers_complete()
        if self.cycle is not None:
            send = send_unchunked(self.cycle) if self.parser.get_http_version() < "1.1" else self.cycle.send
            self.cycle.send = send_in_parts(send)  # type: ignore[method-assign, assignment]

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head, self._n_head, self._n_body = True, 0, 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        behind, self._behind = bytes(self._behind), bytearray()
        self.data_received(behind)

    def give_up(self) -> None:
        """Closes the connection of a client that does not read its answer, soon also of one that stops to, and refuses
        a request whose body has not come."""
        self.patience = LAST_PATIENCE
        if self.flow.write_paused:
            self.transport.abort()
        if self._in_head or not self._is_answering or self.transport.is_closing():
            return
        if not self.cycle.response_started:
            error = shutting_down()
            response = error_response(
                dict(self.scope), error.body(), error.code, error.headers | {"Connection": "close"}
            )
            head = b"".join(b"%s: %s\r\n" % pair for pair in response.raw_headers)
            self.transport.write(STATUS_LINE[error.code] + head + b"\r\n" + bytes(response.body))
        self.transport.close()

    @property
    def _is_answering(self) -> bool:
        """Whether the last request whose head has come is not answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _part_end(self, data: bytes, at: int) -> int:
        """How far the parser may read from ``at``, so that it never gets to the next request: to the end of a body, or
        of a line of the head; bodies in chunks end with an empty line."""
        if self._n_body:
            return min(len(data), at + self._n_body)
        if self._in_head:
            return data.find(b"\n", at) + 1 or len(data)
        if not at and (start := (self._tail + data[:2]).find(EMPTY_LINE)) >= 0:
            return start + len(EMPTY_LINE) - len(self._tail)
        start = data.find(EMPTY_LINE, at)
        return start + len(EMPTY_LINE) if start >= 0 else len(data)

    def _receive_part(self, part: bytes) -> None:
        """Hands the parser a part of one request."""
        if self._in_head and self._deadline is None:
            self._deadline = self.loop.call_later(self.patience, self._head_is_late)
        if self._in_head:
            self._n_head += len(part)
        elif not self._n_body:
            self._tail = (self._tail + part[-2:])[-2:]
        self._n_body = max(0, self._n_body - len(part))
        super().data_received(self._without_offer(part) if self._in_head else part)
        if self._in_head and self._n_head > MOST_HEAD and not self.transport.is_closing():
            self.send_400_response("The head of the request is too long.")

    def _without_offer(self, part: bytes) -> bytes:
        """What the parser may see of the next part of a line; nothing as long as it may be such an offer."""
        line, is_whole = (self._offer or b"") + part, part.endswith(b"\n")
        may_offer = self._offer is not None and UPGRADE.startswith(line[: len(UPGRADE)].lower())
        is_hidden = may_offer and b"websocket" not in line.lower()
        self._offer = b"" if is_whole else line if is_hidden else None
        return b"" if is_hidden else line

    def _keep(self, data: bytes) -> None:
        """Keeps the beginning of the requests behind the one that is answered."""
        self._behind += data
        if len(self._behind) > MOST_BEHIND:
            self._behind.clear()
            self.cycle.keep_alive = False

    def _look_later(self, n_before: int) -> None:
        """Looks after a while whether the client has taken more than so many bytes."""
        self._stop_looking()
        self._next_look = self.loop.call_later(self.patience, self._look, n_before)

    def _look(self, n_before: int) -> None:
        n_now = n_taken(self.transport)
        if n_now > n_before:
            self._look_later(n_now)
        else:
            self.transport.abort()

    def _stop_looking(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _head_is_late(self) -> None:
        self._deadline = None
        if self._in_head and not self._is_answering:
            self.transport.close()


def n_taken(transport: Any) -> int:
    """Bytes that the client has taken, as far as the system tells; of sockets that are not counted, less than 0: minus
    what waits for it, in the system too, which takes more in lumps of some 100 KB.

    What waits in a TLS transport cannot be seen.
    """
    connection = transport.get_extra_info("socket")
    with contextlib.suppress(OSError, AttributeError):  # no TCP, or not Linux
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_ACKED.stop)
        return int.from_bytes(info[BYTES_ACKED], sys.byteorder)
    kept = bytes(4)
    with contextlib.suppress(OSError):
        kept = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, kept)
    return -int(transport.get_write_buffer_size()) - int.from_bytes(kept, sys.byteorder)


Sending = Callable[[Any], Awaitable[None]]


def send_in_parts(send: Sending) -> Sending:
    """Sends long bodies part by part: between two of them a client that does not read is waited for. A TLS transport
    takes a whole body without a word, and leaves a client that reads slowly half a minute for it."""

    async def send_parts(message: Any) -> None:
        body = message.get("body", b"")
        last = max(0, len(body) - 1) // MOST_UNSENT * MOST_UNSENT
        for at in range(0, last, MOST_UNSENT):
            await send(message | {"body": body[at : at + MOST_UNSENT], "more_body": True})
        await send(message | {"body": body[last:]} if last else message)

    return send_parts


def send_unchunked(cycle: RequestResponseCycle) -> Sending:
    """Sends an answer to a client of HTTP/1.0, which knows no chunks: the body without a length ends with the
    connection."""
    send, sized = cycle.send, False

    async def send_plain(message: Any) -> None:
        nonlocal sized
        if message["type"] == "http.response.start":
            sized = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = None if sized else False
            cycle.keep_alive = False
        elif not sized:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_plain
