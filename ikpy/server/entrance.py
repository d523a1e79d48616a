"""What clients meet while the model is loaded."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ikpy.server.errors import error_body
from ikpy.server.http import error_response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

HEALTH = ("/health", "/v1/health")
LOADING = "Loading model"
LOOK_SECONDS = 0.02


class Entrance:
    """The application of a server from its start on: `/health` is answered with 503, and all other requests wait, until
    it is opened. Its methods may be called in any thread.

    ``prefix`` is the beginning of all paths (`/llm`).
    """

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._health = frozenset(prefix + path for path in HEALTH)
        self._app: ASGIApp | None = None
        self._closed = False

    def open(self, app: ASGIApp) -> None:
        """Hands all requests to an application from now on."""
        self._app = app

    def close(self) -> None:
        """Answers those who wait with 503: there will be no application."""
        self._closed = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        while self._app is None and not self._closed and scope["path"] not in self._health:
            await asyncio.sleep(LOOK_SECONDS)
        if self._app is not None:
            await self._app(scope, receive, send)
        else:
            refused = error_response({**scope, "root_path": self._prefix}, error_body(503, LOADING), 503)
            await refused(scope, receive, send)
