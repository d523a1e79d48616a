"""The router's application: its own routes, and requests passed on to the process of a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

import ikpy
from ikpy.server.app import Gate, error_handlers, page_files
from ikpy.server.errors import ApiError, error_body
from ikpy.server.http import data_event, disconnected, json_response, parse_json, read_bytes
from ikpy.server.routes_ollama import stamp

if TYPE_CHECKING:
    from ikpy.server.keys import KeyRing
    from ikpy.server.log import ServerLog
    from ikpy.server.router.pool import Pool
    from ikpy.server.router.worker import Worker
    from ikpy.server.settings import ServerSettings

HOP_HEADERS = frozenset(
    "connection keep-alive proxy-authenticate proxy-authorization te trailers transfer-encoding upgrade host "
    "content-length authorization x-api-key accept-encoding date server access-control-allow-origin vary".split()
)
"""Headers of one connection or of the router, which are not passed on."""


def pool_of(request: Request) -> Pool:
    """The models."""
    return request.app.state.pool  # type: ignore[no-any-return]


def path_of(request: Request) -> str:
    """Path of a request without the prefix of the server."""
    return request.url.path.removeprefix(request.scope.get("root_path", ""))


async def health(request: Request) -> Response:
    """GET /health."""
    return json_response({"status": "ok", "models_loaded": len(pool_of(request).loaded())})


async def models(request: Request) -> Response:
    """GET /v1/models: all models of the folder with their state."""
    pool = pool_of(request)
    data = []
    for name, model in pool.catalog().items():
        worker = pool.workers.get(name)
        status: dict[str, Any] = {"value": pool.state_of(name).value}
        if worker is not None:
            status |= {"memory": worker.memory, "crashes": worker.n_crashes, "running": worker.n_running}
        entry = {"id": name, "object": "model", "created": model.changed, "owned_by": "llamacpp"}
        data.append(entry | {"meta": {"size": model.size}, "status": status})
    return json_response({"object": "list", "data": data})


async def named_model(request: Request) -> str:
    """Field ``model`` of a request about a model."""
    body = parse_json(await read_bytes(request, request.app.state.settings))
    name = body.get("model") if isinstance(body, dict) else None
    if not isinstance(name, str):
        raise ApiError(400, '"model" is required')
    return pool_of(request).pick(name)


async def load(request: Request) -> Response:
    """POST /models/load."""
    async with pool_of(request).use(await named_model(request)):
        return json_response({"success": True})


async def unload(request: Request) -> Response:
    """POST /models/unload."""
    return json_response({"success": await pool_of(request).unload(await named_model(request))})


async def tags(request: Request) -> Response:
    """GET /api/tags and /api/ps."""
    pool = pool_of(request)
    loaded = {worker.model.name for worker in pool.loaded()}
    found = [
        {"name": name, "model": name, "modified_at": stamp(model.changed), "size": model.size, "digest": ""}
        for name, model in pool.catalog().items()
        if path_of(request) == "/api/tags" or name in loaded
    ]
    return json_response({"models": found})


async def version(request: Request) -> Response:
    """GET /api/version."""
    return json_response({"version": ikpy.__version__})


async def forward(request: Request) -> Response:
    """Any other request: to the model it names in its body or in ``?model=``."""
    body = await read_bytes(request, request.app.state.settings)
    name = request.query_params.get("model")
    if body and name is None:
        value = parse_json(body)
        name = value.get("model") if isinstance(value, dict) and isinstance(value.get("model"), str) else None
    pool = pool_of(request)
    return Forwarded(pool, pool.pick(name or None), request, body)


class Forwarded(Response):
    """The answer of a model's process, passed on as it comes; given up when the client goes away."""

    def __init__(self, pool: Pool, name: str, request: Request, body: bytes) -> None:
        super().__init__()
        self._pool, self._name, self._request, self._body = pool, name, request, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the answer."""
        sending = asyncio.ensure_future(self._forward(scope, receive, send))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            gone.cancel()
            sending.cancel()
            await asyncio.wait({sending})

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        if await self._pass_on(scope, receive, send):
            # Only now may the client know: its next request must not find this model still in use.
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Sends the answer except for its end; False if all of it was sent, as an error."""
        async with AsyncExitStack() as stack:
            try:
                worker = await stack.enter_async_context(self._pool.use(self._name))
                answer = await self._open(worker, stack)
            except ApiError as error:
                await stack.aclose()
                await json_response(error.body(), error.code, error.headers)(scope, receive, send)
                return False
            kept = [(k.lower(), v) for k, v in answer.headers.raw if k.decode("latin-1").lower() not in HOP_HEADERS]
            await send({"type": "http.response.start", "status": answer.status_code, "headers": kept})
            try:
                async for piece in answer.aiter_raw():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            except httpx.HTTPError:
                await worker.lost()
                if answer.headers.get("content-type", "").startswith("text/event-stream"):
                    event = data_event(error_body(503, ended(self._name))).encode()
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        return True

    async def _open(self, worker: Worker, stack: AsyncExitStack) -> httpx.Response:
        """The beginning of the answer; a process that ended before it was asked is started again. Raises ApiError."""
        try:
            return await self._ask(worker, stack)
        except httpx.ConnectError:
            if not await worker.lost():
                raise ApiError(503, ended(self._name), {"Retry-After": "1"}) from None
        except httpx.HTTPError:
            await worker.lost()
            raise ApiError(503, ended(self._name), {"Retry-After": "1"}) from None
        try:
            await worker.load()
            return await self._ask(worker, stack)
        except httpx.HTTPError:
            raise ApiError(503, ended(self._name), {"Retry-After": "1"}) from None

    async def _ask(self, worker: Worker, stack: AsyncExitStack) -> httpx.Response:
        assert worker.client is not None
        request = self._request
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP_HEADERS} | worker.headers
        query = httpx.QueryParams([(k, v) for k, v in request.query_params.multi_items() if k != "model"])
        stream = worker.client.stream(
            request.method, path_of(request), params=query, headers=headers, content=self._body
        )
        return await stack.enter_async_context(stream)


def ended(name: str) -> str:
    """What a client is told whose model's process ended."""
    return f"the process of the model {name} ended unexpectedly; it is started again"


def make_router(pool: Pool, settings: ServerSettings, keys: KeyRing, log: ServerLog) -> ASGIApp:
    """The ASGI application of a router."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        watching = asyncio.ensure_future(pool.watch())
        yield
        watching.cancel()
        await pool.stop()

    routes = [
        *(Route(path, health) for path in ("/health", "/v1/health")),
        *(Route(path, models) for path in ("/v1/models", "/models")),
        Route("/models/load", load, methods=["POST"]),
        Route("/models/unload", unload, methods=["POST"]),
        *(Route(path, tags) for path in ("/api/tags", "/api/ps")),
        Route("/api/version", version),
        *(page_files() if settings.webui else []),
        Route("/{path:path}", forward, methods=["GET", "POST"]),
    ]
    app = Starlette(routes=routes, exception_handlers=error_handlers(), lifespan=lifespan)
    app.state.pool, app.state.settings, app.state.log = pool, settings, log
    return Gate(app, keys, log, settings.cors, settings.api_prefix)
