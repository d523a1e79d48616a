"""Routes that other servers have and this one does not: they say so."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from ikpy.server.errors import ApiError

UNSUPPORTED = {
    "/load /save /rename /all /delete": "stored chat histories",
    "/v1/chat/completions/control": "changes of an answer that is being written; close its connection to end it",
    "/v1/streams/lookup": "streams that go on over another connection",
    "/tools": "tools that run in the server",
    "/v1/systemone": "decision models",
}
"""POST routes that exist elsewhere, and what is missing here."""


def unsupported(what: str) -> Callable[[Request], Awaitable[Response]]:
    """A handler that answers 501 and says what is not supported."""

    async def handler(request: Request) -> Response:
        raise ApiError(501, f"This server does not support {what}")

    return handler
