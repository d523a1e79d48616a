"""HTTP building blocks: JSON answers, server-sent events, request bodies, disconnects."""

from __future__ import annotations

import asyncio
import json
import json.encoder
import re
import secrets
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ikpy.engine.grammars import strict_json
from ikpy.server import json_turns
from ikpy.server.errors import ApiError, bad_request

if TYPE_CHECKING:
    from ikpy.server.settings import ServerSettings

T = TypeVar("T")
JSON_TYPE = "application/json; charset=utf-8"
LONE = re.compile("[\ud800-\udfff]")
"""Surrogates: those of a pair are one character in texts of Python."""
ANY_HEADER = zlib.MAX_WBITS | 32
"""For zlib: the data begin with the header of gzip or of zlib."""
ANTHROPIC = ("/v1/messages", "/v1/messages/count_tokens")
"""Routes of Anthropic's API."""
ANTHROPIC_TYPES = {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
"""What its clients call errors that OpenAI's call otherwise."""
SHORT_BODY = 2048
"""Bytes of a request that is read in the event loop: tokenizing so much takes up to 0.4 ms, another
thread's turn 0.2."""
LARGE_BODY = 1 << 20
"""Bytes of a body that is parsed in another thread."""
QUICK_VALUES = 200_000
"""Values of a body that json's C code reads at once, which no other thread can interrupt: about 20 ms."""
FEW_VALUES = 2000
"""Values of an answer that is made in the event loop, which takes some milliseconds."""


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def to_json(value: Any) -> str:
    """Compact JSON; characters stay as they are, lone surrogates become U+FFFD."""
    return _clean(_ENCODER.encode(value))


def _clean(text: str) -> str:
    """The text with U+FFFD for lone surrogates."""
    try:
        if not text.isascii():
            text.encode("utf-8")
    except UnicodeEncodeError:
        return LONE.sub("\N{REPLACEMENT CHARACTER}", text)
    return text


def to_json_in_turns(value: Any) -> str:
    """`to_json` of a large value, for a thread of its own: others get their turns meanwhile."""
    return _clean(json_turns.encode(value, _ENCODER))


def encoded_size(values: Iterable[Any]) -> int:
    """Bytes of the JSON of all values together."""
    return sum(len(to_json_in_turns(value).encode()) for value in values)


async def apart(n_values: int, function: Callable[..., T], *args: Any) -> T:
    """The result of a function that handles about so many values, many of them in another thread."""
    return function(*args) if n_values <= FEW_VALUES else await asyncio.to_thread(function, *args)


async def made_json(n_values: int, make: Callable[[], Any]) -> str:
    """Compact JSON of about ``n_values`` values, which are made and encoded in another thread if they are many."""
    encode = to_json if n_values <= FEW_VALUES else to_json_in_turns
    return await apart(n_values, lambda: encode(make()))


async def made_response(n_values: int, make: Callable[[], Any]) -> Response:
    """A JSON answer that is made as by `made_json`."""
    return Response(await made_json(n_values, make), media_type=JSON_TYPE)


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(to_json(value), status, headers, JSON_TYPE)


def error_response(scope: Scope, body: dict[str, Any], status: int, headers: dict[str, str] | None = None) -> Response:
    """The answer to a request with an error; clients of Ollama's routes expect a text where others do an object, those
    of Anthropic's its form."""
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    if path.startswith("/api/"):
        body = {"error": body["error"]["message"]}
    elif path in ANTHROPIC:
        body = {"type": "error", "error": with_anthropic_words(body["error"])}
    return json_response(body, status, headers)


def with_anthropic_words(error: dict[str, Any]) -> dict[str, Any]:
    """An error of Anthropic's routes: Claude Code finds by its words that a conversation has to be shortened."""
    if "n_prompt_tokens" not in error:
        return error | {"type": ANTHROPIC_TYPES.get(error["code"], error["type"])}
    message = f"prompt is too long: {error['n_prompt_tokens']} tokens > {error['n_ctx']} maximum"
    return error | {"type": "invalid_request_error", "message": f"{message}: {error['message']}"}


def data_event(value: Any) -> str:
    """One server-sent event."""
    return f"data: {to_json(value)}\n\n"


async def made_event(n_values: int, make: Callable[[], Any]) -> str:
    """One server-sent event that is made as by `made_json`."""
    return f"data: {await made_json(n_values, make)}\n\n"


_MARK = secrets.token_hex(16)
"""A text that no request contains."""


def data_events(make: Callable[[str], Any]) -> Callable[[str], str]:
    """`data_event` of ``make(text)`` as a function of the text, which must occur once; all else is encoded only once.
    The text must not have lone surrogates."""
    before, after = data_event(make(_MARK)).split(f'"{_MARK}"')
    return lambda text: f"{before}{json.encoder.encode_basestring(text)}{after}"


def named_event(name: str, value: Any) -> str:
    """One server-sent event with a name."""
    return f"event: {name}\ndata: {to_json(value)}\n\n"


DONE = "data: [DONE]\n\n"
PING = b":\n\n"
"""A comment in a stream of events."""


async def read_body(request: Request, settings: ServerSettings) -> dict[str, Any]:
    """The JSON object of a request. Raises ApiError 400, 408 or 413."""
    value = await parsed(await read_bytes(request, settings))
    if not isinstance(value, dict):
        raise bad_request(f"the request body must be a JSON object, not {_kind(value)}")
    return value


async def aside(request: Request, function: Callable[..., T], *args: Any, **more: Any) -> T:
    """The result of a function that reads a request; long requests are read in another thread."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) <= SHORT_BODY and "content-encoding" not in request.headers:
        return function(*args, **more)
    return await asyncio.to_thread(function, *args, **more)


async def read_bytes(request: Request, settings: ServerSettings) -> bytes:
    """The body of a request. Raises ApiError 400, 408, 413 or 415."""
    try:
        data = await asyncio.wait_for(_read(request, settings.max_body), settings.timeout)
    except asyncio.TimeoutError:
        raise ApiError(408, f"the request body did not arrive within {settings.timeout:g} seconds") from None
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding == "identity":
        return data
    if encoding not in ("gzip", "deflate"):
        raise ApiError(415, f"request bodies may be encoded as gzip or deflate, not {encoding}")
    return await asyncio.to_thread(_inflate, data, settings.max_body)


def _inflate(data: bytes, limit: int) -> bytes:
    """A gzip or zlib body. Raises ApiError 400 or 413."""
    unpacker = zlib.decompressobj(ANY_HEADER)
    try:
        found = unpacker.decompress(data, limit + 1)
    except zlib.error:
        raise bad_request("the request body is not what its content-encoding says") from None
    if len(found) > limit:
        raise ApiError(413, f"the request body is larger than {limit} bytes")
    if not unpacker.eof:
        raise bad_request("the encoded request body ends too early")
    return found


async def _read(request: Request, limit: int) -> bytes:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > limit:
            raise ApiError(413, f"the request body is larger than {limit} bytes")
    return bytes(data)


async def parsed(data: bytes) -> Any:
    """`parse_json` in the event loop, of large bodies in another thread. Raises ApiError 400."""
    return parse_json(data) if len(data) <= LARGE_BODY else await asyncio.to_thread(parse_large, data)


def parse_json(data: bytes) -> Any:
    """JSON of a request body. Raises ApiError 400 saying where it is wrong."""
    try:
        return strict_json.loads(data.decode("utf-8-sig"))  # some Windows programs write a BOM
    except UnicodeDecodeError as error:
        raise bad_request(f"the request body is not valid UTF-8: byte {error.start}") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise bad_request(f"the request body is not valid JSON: {error.msg} at {where}") from None
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the request body is not valid JSON: {error}") from None


def parse_large(data: bytes) -> Any:
    """`parse_json` for a thread of its own: others get their turns meanwhile. Raises ApiError 400."""
    if sum(data.count(mark) for mark in b",[{") <= QUICK_VALUES:
        return parse_json(data)
    try:
        return strict_json.loads(data.decode("utf-8-sig"), json_turns.PatientDecoder)
    except json_turns.TooManyError as error:
        raise bad_request(f"the request body has {error}") from None
    except (ValueError, RecursionError):
        return parse_json(data)  # which says where it is wrong


def _kind(value: Any) -> str:
    names = {list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone. The request body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends text pieces as they come; stops at once when the client goes away.

    ``close`` is called in any case, so that what produces the pieces can be given up. When no piece has come for
    ``ping`` seconds (0: never), a comment is sent: clients and proxies give up connections that are silent while a
    long prompt is evaluated.
    """

    def __init__(
        self,
        pieces: AsyncIterator[str],
        close: Callable[[], None],
        *,
        ping: float = 0.0,
        media_type: str = "text/event-stream",
    ) -> None:
        super().__init__(media_type=media_type, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._pieces = pieces
        self._close = close
        self._ping = ping
        self._turn = asyncio.Lock()
        """Held by what is being sent."""
        self._last_sent = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream."""
        gone = asyncio.ensure_future(disconnected(receive))
        sending = asyncio.ensure_future(self._send_all(send))
        pinging = asyncio.ensure_future(self._send_pings(send))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            for task in (gone, sending, pinging):
                task.cancel()
            self._close()

    async def _send_all(self, send: Send) -> None:
        async with self._turn:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for piece in self._pieces:
            await self._send_part(send, piece.encode("utf-8"))
        await self._turn.acquire()  # for good: nothing may come behind the end
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_part(self, send: Send, body: bytes) -> None:
        async with self._turn:
            await send({"type": "http.response.body", "body": body, "more_body": True})
            self._last_sent = time.monotonic()

    async def _send_pings(self, send: Send) -> None:
        """Comments, but not while something is on its way to a client that takes it slowly."""
        while self._ping > 0:
            await asyncio.sleep(max(0.0, self._last_sent + self._ping - time.monotonic()))
            if self._turn.locked():
                self._last_sent = time.monotonic()
            elif time.monotonic() - self._last_sent >= self._ping:
                await self._send_part(send, PING)
