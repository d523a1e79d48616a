"""The router's application: its own routes, and requests passed on to the process of a model."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING
from urllib.parse import quote

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

import ikpy
from ikpy.server.app import Gate, error_handlers, page_files
from ikpy.server.entrance import LOADING
from ikpy.server.errors import ApiError, error_body
from ikpy.server.form import is_form, read_form
from ikpy.server.http import (
    EventStream,
    data_event,
    disconnected,
    error_response,
    json_response,
    parsed,
    read_bytes,
    to_json,
)
from ikpy.server.model_entries import model_list, shown_entry
from ikpy.server.router.catalog import no_model
from ikpy.server.router.listing import Object, entries, router_props, status_events
from ikpy.server.router.ollama import entries_of, unloaded, unloads
from ikpy.server.router.worker import REMEMBERED, State
from ikpy.server.routes_anthropic import stream_error

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
OWN_REQUEST_HEADERS = HOP_HEADERS | {"content-encoding"}
"""Headers of requests that are not passed on: their bodies are unpacked here."""
STATUS_PATHS = frozenset((*REMEMBERED, "/api/ps", "/metrics", "/slots"))
"""GET routes that neither wake a model up nor keep it awake."""


def pool_of(request: Request) -> Pool:
    """The models."""
    return request.app.state.pool


def path_of(request: Request) -> str:
    """Path of a request without the prefix of the server."""
    # Not of the URL, which some versions of starlette make of the Host header: keys are checked for this path.
    path: str = request.scope["path"]
    return path.removeprefix(request.scope.get("root_path", ""))


async def health(request: Request) -> Response:
    """GET /health: of a single model, whether it has been loaded once."""
    pool = pool_of(request)
    if pool.is_single and not any(worker.remembered for worker in pool.workers.values()):
        raise ApiError(503, LOADING)
    return json_response({"status": "ok", "models_loaded": len(pool.loaded())})


async def models(request: Request) -> Response:
    """GET /v1/models: all models of the folder with their state."""
    return json_response(model_list(await shown_entries(request), request.headers))


async def shown_entries(request: Request) -> list[Object]:
    """Entries of all models; where they lie is told with a key only, if the server has keys."""
    found = await entries(pool_of(request))
    if not request.scope["known_client"]:
        found = [{key: value for key, value in entry.items() if key != "path"} for entry in found]
    return found


async def model(request: Request) -> Response:
    """GET /v1/models/NAME."""
    name = request.path_params["id"]
    found = [entry for entry in await shown_entries(request) if entry["id"] == name]
    if not found:
        raise no_model(name)
    return json_response(shown_entry(found[0], request.headers))


async def named_model(request: Request) -> str:
    """Field ``model`` of a request about a model."""
    body = await parsed(await read_bytes(request, request.app.state.settings))
    name = body.get("model") if isinstance(body, dict) else None
    if not isinstance(name, str):
        raise ApiError(400, '"model" is required')
    return await pool_of(request).pick(name)


async def load(request: Request) -> Response:
    """POST /models/load."""
    async with pool_of(request).use(await named_model(request)):
        return json_response({"success": True})


async def unload(request: Request) -> Response:
    """POST /models/unload."""
    if not await pool_of(request).unload(await named_model(request)):
        raise ApiError(400, "model is not running")
    return json_response({"success": True})


async def events(request: Request) -> Response:
    """GET /models/sse: states of models as they change."""
    settings: ServerSettings = request.app.state.settings
    return EventStream(status_events(pool_of(request)), lambda: None, ping=settings.ping_interval)


async def props(request: Request) -> Response:
    """GET /props: of the model in ``?model=`` or of the one that is meant without, else of the router."""
    try:
        return await forward(request)
    except ApiError as error:
        if error.code != 400 or request.query_params.get("model") is not None:
            raise
        return json_response(router_props(pool_of(request)))


async def no_downloads(request: Request) -> Response:
    """POST and DELETE /models."""
    raise ApiError(501, "models are neither downloaded nor deleted here: use --hf-repo, ikpy.download or the folder")


async def tags(request: Request) -> Response:
    """GET /api/tags."""
    return json_response({"models": await entries_of(pool_of(request), are_running=False)})


async def running(request: Request) -> Response:
    """GET /api/ps."""
    return json_response({"models": await entries_of(pool_of(request), are_running=True)})


async def version(request: Request) -> Response:
    """GET /api/version."""
    return json_response({"version": ikpy.__version__})


async def forward(request: Request) -> Response:
    """Any other request: to the model it names in its body or in ``?model=``, which ``?autoload=`` loads or not."""
    body = await read_bytes(request, request.app.state.settings)
    name = request.query_params.get("model")
    if body and name is None:
        kind = request.headers.get("content-type", "")
        value = await form_model(kind, body) if is_form(kind) else await parsed(body)
        name = value.get("model") if isinstance(value, dict) and isinstance(value.get("model"), str) else None
        if unloads(path_of(request), value):
            return json_response(await unloaded(pool_of(request), name or None, path_of(request)))
    pool = pool_of(request)
    name = await pool.pick(name or None)
    counts = request.method not in ("GET", "HEAD") or path_of(request) not in STATUS_PATHS
    worker = pool.workers.get(name)
    if not counts and worker is not None and worker.state is State.SLEEPING:
        return asleep(worker, path_of(request))
    autoload = request.query_params.get("autoload")
    if not (pool.limits.autoload if autoload is None else autoload.lower() in ("true", "1", "on")):
        pool.check_loaded(name)
    return Forwarded(pool, name, request, body, counts=counts)


async def form_model(content_type: str, body: bytes) -> dict[str, str]:
    """Field ``model`` of a form."""
    fields = await asyncio.to_thread(read_form, content_type, body)
    return {"model": fields.get("model", b"").decode("utf-8", "replace")}


def asleep(worker: Worker, path: str) -> Response:
    """What a status route answers for a model that sleeps and should go on sleeping."""
    if path == "/api/ps":
        return json_response({"models": []})
    known = worker.remembered.get(path)
    if known is None:
        raise ApiError(503, f"the model {worker.model.name} sleeps; a request for an answer wakes it up")
    return json_response(known | {"is_sleeping": True} if path.endswith("/props") else known)


class Forwarded(Response):
    """The answer of a model's process, passed on as it comes; given up when the client goes away."""

    def __init__(self, pool: Pool, name: str, request: Request, body: bytes, *, counts: bool) -> None:
        super().__init__()
        self._counts = counts
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
        """Sends the answer except for its end; False if none may follow: an error was sent, or only a part."""
        async with AsyncExitStack() as stack:
            try:
                worker = await stack.enter_async_context(self._pool.use(self._name, counts=self._counts))
                answer = await self._open(worker, stack)
            except ApiError as error:
                await stack.aclose()
                await error_response(scope, error.body(), error.code, error.headers)(scope, receive, send)
                return False
            kept = [(k.lower(), v) for k, v in answer.headers.raw if k.decode("latin-1").lower() not in HOP_HEADERS]
            await send({"type": "http.response.start", "status": answer.status_code, "headers": kept})
            try:
                async for piece in answer.aiter_raw():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            except httpx.HTTPError:
                await worker.lost()
                kind = answer.headers.get("content-type", "")
                last = last_line(kind, path_of(self._request), ended(self._name))
                if not last:
                    return False
                await send({"type": "http.response.body", "body": last.encode(), "more_body": True})
        return True

    async def _open(self, worker: Worker, stack: AsyncExitStack) -> httpx.Response:
        """The beginning of the answer. A process that ended before it was asked, or cannot go on, is started again.

        Raises ApiError.
        """
        try:
            answer = await self._ask(worker, stack)
            # Who comes too early or too late is told when to try again; who finds the engine ended is not.
            if answer.status_code == 503 and "retry-after" not in answer.headers and await worker.has_failed():
                raise ApiError(503, ended(self._name), {"Retry-After": "1"})
            return answer
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
        headers = [(k, v) for k, v in request.headers.raw if k.decode("latin-1").lower() not in OWN_REQUEST_HEADERS]
        headers += [(k.encode(), v.encode()) for k, v in worker.headers.items()]
        query = httpx.QueryParams(
            [(k, v) for k, v in request.query_params.multi_items() if k not in ("model", "autoload")]
        )
        # Not joined with the address: //host/path would name another host.
        url = worker.client.base_url.copy_with(raw_path=f"{quote(path_of(request))}?{query}".rstrip("?").encode())
        # An answer may begin hours after its request; whoever waits for it closes the connection when that is too long.
        limits = worker.client.timeout
        patient = httpx.Timeout(connect=limits.connect, read=None, write=limits.write, pool=limits.pool)
        stream = worker.client.stream(request.method, url, headers=headers, content=self._body, timeout=patient)
        return await stack.enter_async_context(stream)


def last_line(kind: str, path: str, message: str) -> str:
    """How a stream of a content type tells of an error; empty for other answers, which break off."""
    if kind.startswith("application/x-ndjson"):
        return to_json({"error": message}) + "\n"
    if not kind.startswith("text/event-stream"):
        return ""
    return stream_error(503, message) if path == "/v1/messages" else data_event(error_body(503, message))


def list_routes() -> list[Route]:
    """Routes about the list of models."""
    return [
        *(Route(path, models) for path in ("/v1/models", "/models")),
        Route("/models", no_downloads, methods=["POST", "DELETE"]),
        Route("/models/sse", events),
        Route("/props", props),
        Route("/v1/models/{id:path}", model),
        Route("/models/load", load, methods=["POST"]),
        Route("/models/unload", unload, methods=["POST"]),
        Route("/api/tags", tags),
        Route("/api/ps", running),
        Route("/api/version", version),
    ]


def ended(name: str) -> str:
    """What a client is told whose model's process ended."""
    return f"the process of the model {name} ended unexpectedly; it is started again"


def make_router(
    pool: Pool, settings: ServerSettings, keys: KeyRing, log: ServerLog, at_start: Collection[str] = ()
) -> ASGIApp:
    """The ASGI application of a router, which loads the models ``at_start`` when it starts."""

    async def load_first() -> None:
        for name in at_start:
            try:
                async with pool.use(name):
                    pass
            except ApiError as error:  # logged; a request tries again
                if pool.is_single and not pool.is_closed:
                    pool.problem = error.message
                    signal.raise_signal(signal.SIGTERM)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        working = [asyncio.ensure_future(work) for work in (pool.watch(), load_first())]
        yield
        for work in working:
            work.cancel()
        await pool.stop()

    routes = [
        *(Route(path, health) for path in ("/health", "/v1/health")),
        *([] if pool.is_single else list_routes()),
        *(page_files() if settings.webui else []),
        Route("/{path:path}", forward, methods=["GET", "POST"]),
    ]
    app = Starlette(routes=routes, exception_handlers=error_handlers(), lifespan=lifespan)
    app.state.pool, app.state.settings, app.state.log = pool, settings, log
    return Gate(app, keys, log, settings.cors, settings.api_prefix)
