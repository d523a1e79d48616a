"""How connections speak HTTP: uvicorn, with bounds on clients that do not finish the head of a request."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD = 65536
"""Bytes of request line and headers."""


def http_protocol(timeout: float) -> type[asyncio.Protocol]:
    """The protocol class of a server whose clients have ``timeout`` seconds for the head of a request."""

    class BoundedHead(HttpToolsProtocol):
        """Closes connections whose request head is too long or takes too long."""

        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self._n_head = 0
            """Bytes of the head that is being received."""
            self._in_head = True
            self._deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._deadline = self.loop.call_later(timeout, self._give_up)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_clock()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._in_head and self._deadline is None:
                self._deadline = self.loop.call_later(timeout, self._give_up)
            self._n_head += len(data)
            super().data_received(data)
            if self._in_head and self._n_head > MOST_HEAD and not self.transport.is_closing():
                self.send_400_response("The head of the request is too long.")

        def on_headers_complete(self) -> None:
            self._in_head = False
            self._stop_clock()
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self._in_head, self._n_head = True, 0

        def _stop_clock(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _give_up(self) -> None:
            self._deadline = None
            if self._in_head and (self.cycle is None or self.cycle.response_complete):
                self.transport.close()

    return BoundedHead
