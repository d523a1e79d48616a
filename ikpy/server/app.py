"""The application: routes, keys, CORS, errors."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Match, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ikpy.errors import IkpyError
from ikpy.server import (
    routes_adapters,
    routes_anthropic,
    routes_completions,
    routes_embeddings,
    routes_infill,
    routes_native,
    routes_ollama,
    routes_openai,
    routes_rerank,
    routes_responses,
    routes_slots,
    routes_status,
    routes_transcription,
    routes_unsupported,
)
from ikpy.server.errors import ApiError, error_body
from ikpy.server.front import Front
from ikpy.server.generation import ClientGoneError
from ikpy.server.http import error_response, json_response
from ikpy.server.keys import KeyRing
from ikpy.server.openapi import document

if TYPE_CHECKING:
    from ikpy.server.log import ServerLog

Handler = Callable[[Request], Awaitable[Response]]
PAGE_FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/markdown.js": ("markdown.js", "text/javascript"),
    "/clipboard.js": ("clipboard.js", "text/javascript"),
    "/files.js": ("files.js", "text/javascript"),
    "/media.js": ("media.js", "text/javascript"),
    "/pictures.js": ("pictures.js", "text/javascript"),
    "/sounds.js": ("sounds.js", "text/javascript"),
}
OPEN_PATHS = frozenset({*PAGE_FILES, "/health", "/v1/health", "/models", "/v1/models", "/api/tags", "/api/version"})
"""Paths that need no API key."""

CLIENT_GONE = 499
LONGEST_REASON = 200
"""Characters of an error in the log."""


def routes() -> list[Route]:
    """Every route with its methods."""
    table: list[tuple[str, Handler, str]] = [
        ("GET", routes_status.health, "/health /v1/health"),
        ("GET", routes_status.props, "/props"),
        ("POST", routes_status.change_props, "/props"),
        ("GET", routes_status.v1_props, "/v1/props"),
        ("GET", routes_status.models, "/v1/models /models"),
        ("GET", routes_status.model, "/v1/models/{id:path}"),
        ("GET", routes_status.slots, "/slots"),
        ("GET", routes_status.slots_list, "/slots/list"),
        ("GET", routes_status.metrics, "/metrics"),
        ("GET", routes_status.version, "/version"),
        ("GET", openapi, "/openapi.json"),
        ("POST", routes_native.completion, "/completion /completions"),
        ("POST", routes_completions.completions, "/v1/completions"),
        ("POST", routes_openai.chat_completions, "/v1/chat/completions /chat/completions"),
        ("POST", routes_openai.input_tokens, "/v1/chat/completions/input_tokens /chat/completions/input_tokens"),
        ("POST", routes_openai.apply_template, "/apply-template"),
        ("POST", routes_anthropic.messages, "/v1/messages"),
        ("POST", routes_anthropic.count_tokens, "/v1/messages/count_tokens"),
        ("POST", routes_responses.responses, "/v1/responses /responses"),
        ("POST", routes_responses.input_tokens, "/v1/responses/input_tokens"),
        ("POST", routes_transcription.transcriptions, "/v1/audio/transcriptions /audio/transcriptions"),
        ("POST", routes_embeddings.embedding, "/embedding /embeddings"),
        ("POST", routes_embeddings.v1_embeddings, "/v1/embeddings"),
        ("POST", routes_infill.infill, "/infill"),
        ("POST", routes_slots.slot_action, "/slots/{id}"),
        ("GET", routes_slots.list_files, "/list"),
        ("POST", routes_slots.rename_prompt, "/rename_prompt"),
        ("POST", routes_slots.delete_prompt, "/delete_prompt"),
        ("GET", routes_adapters.lora_list, "/lora-adapters"),
        ("POST", routes_adapters.lora_apply, "/lora-adapters"),
        ("GET", routes_adapters.control_vectors, "/control-vectors"),
        ("POST", routes_adapters.control_vector_load, "/control-vectors/load"),
        ("POST", routes_adapters.control_vector_unload, "/control-vectors/unload"),
        ("POST", routes_adapters.control_vector_apply, "/control-vectors/apply"),
        ("POST", routes_rerank.rerank, "/rerank /reranking /v1/rerank /v1/reranking"),
        ("POST", routes_ollama.chat, "/api/chat"),
        ("POST", routes_ollama.generate, "/api/generate"),
        ("POST", routes_ollama.embed_texts, "/api/embed"),
        ("POST", routes_ollama.embed_prompt, "/api/embeddings"),
        ("POST", routes_ollama.show, "/api/show"),
        ("GET", routes_ollama.tags, "/api/tags"),
        ("GET", routes_ollama.running, "/api/ps"),
        ("GET", routes_ollama.version, "/api/version"),
        ("POST", routes_native.tokenize, "/tokenize"),
        ("POST", routes_native.detokenize, "/detokenize"),
        ("GET", routes_native.tokenizer_info, "/tokenizer_info"),
    ]
    table += [
        ("POST", routes_unsupported.unsupported(what), paths) for paths, what in routes_unsupported.UNSUPPORTED.items()
    ]
    return [Route(path, handler, methods=[method]) for method, handler, paths in table for path in paths.split()]


async def openapi(request: Request) -> Response:
    """GET /openapi.json: the routes and the fields of their requests."""
    return json_response(document(routes()))


def make_app(front: Front, log: ServerLog) -> ASGIApp:
    """The ASGI application of a server."""
    api = routes()
    app = Starlette(routes=[*api, *page_routes(front)], exception_handlers=error_handlers())
    app.state.front = front
    app.state.log = log
    if front.settings.static_path:
        app.mount("/", StaticFiles(directory=front.settings.static_path, html=True))
    beside_files = api if front.settings.static_path else None
    return Gate(app, front.keys, log, front.settings.cors, front.settings.api_prefix, beside_files)


def page_routes(front: Front) -> list[Route]:
    """The built-in page, unless it is off or replaced by a directory."""
    return [] if not front.settings.webui or front.settings.static_path else page_files()


def page_files() -> list[Route]:
    """The built-in page and the files it needs. Nothing on it comes from elsewhere, whatever a model writes."""
    headers = {
        "Cross-Origin-Embedder-Policy": "require-corp",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; media-src data:",
        "Cache-Control": "no-cache",
    }

    def route(path: str, file: Path, kind: str) -> Route:
        async def answer(request: Request) -> Response:
            return FileResponse(file, media_type=kind, headers=headers)

        return Route(path, answer)

    folder = Path(__file__).parent / "web"
    return [route(path, folder / name, f"{kind}; charset=utf-8") for path, (name, kind) in PAGE_FILES.items()]


def error_handlers() -> Any:
    """What answers errors."""
    return {
        ApiError: _api_error,
        HTTPException: _http_error,
        IkpyError: _user_error,
        ClientGoneError: _client_gone,
        ClientDisconnect: _client_gone,
        Exception: _internal_error,
    }


class Gate:
    """In front of the application: API keys, CORS headers, preflight requests, request log.

    ``cors``: origins whose pages may use the server (see `is_allowed`); None: all while there are no keys, else none.
    ``prefix`` is the beginning of all paths (`/llm`). ``beside_files``: the routes beside which all other paths lead to
    files of a page, which need no key, as browsers send none for scripts; None where there are no files.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyRing,
        log: ServerLog,
        cors: Collection[str] | None = None,
        prefix: str = "",
        beside_files: Sequence[Route] | None = None,
    ) -> None:
        self.app = app
        self.keys = keys
        self.log = log
        self.cors = cors
        self.prefix = prefix
        self.beside_files = beside_files

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        key = self.keys.name_of(headers) if self.keys else None
        status, problem = 0, ""

        async def send_marked(message: Message) -> None:
            nonlocal status, problem
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"server", b"ikpy"), *self._cors(headers)]
            elif status >= 400:
                problem = problem or error_text(message.get("body", b""))
            await send(message)

        try:
            inner = self._without_prefix(scope["path"])
            known = not self.keys or key is not None
            if scope["method"] == "OPTIONS":
                await _preflight(headers.get("access-control-request-headers", "*"))(scope, receive, send_marked)
            elif inner is None:
                await self._answer_outside(scope["path"])(scope, receive, send_marked)
            elif known or inner in OPEN_PATHS or self._is_file(scope):
                await self.app({**scope, "root_path": self.prefix, "known_client": known}, receive, send_marked)
            else:
                body = {"error": {"message": "Invalid API Key", "type": "authentication_error", "code": 401}}
                refused = error_response({**scope, "root_path": self.prefix}, body, 401)
                await refused(scope, receive, send_marked)
        finally:
            self._log(scope, status, key, problem)

    def _is_file(self, scope: Scope) -> bool:
        """Whether a request can get nothing but a file of the page: no route has its path, with whatever method."""
        if self.beside_files is None or scope["method"] not in ("GET", "HEAD"):
            return False
        inner = {**scope, "root_path": self.prefix}
        return all(route.matches(inner)[0] is Match.NONE for route in self.beside_files)

    def _without_prefix(self, path: str) -> str | None:
        """The path as the table of routes has it; None if it does not begin with the prefix."""
        return path[len(self.prefix) :] if path.startswith(f"{self.prefix}/") else None

    def _answer_outside(self, path: str) -> Response:
        """What answers a path without the prefix. The page's own paths are relative: it needs the slash behind it."""
        if self.prefix and path == self.prefix:
            return RedirectResponse(f"{path}/")
        return json_response(error_body(404, "File Not Found"), 404)

    def _cors(self, headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
        """Headers that let the page of the request's origin read the answer, if it may."""
        origin, open_ = headers.get("origin", ""), not self.keys
        allowed = open_ if self.cors is None else is_allowed(origin, self.cors)
        found = [(b"access-control-allow-origin", origin.encode("latin-1"))] if allowed else []
        return found if open_ and self.cors is None else [*found, (b"vary", b"Origin")]

    def _log(self, scope: Scope, status: int, key: str | None, problem: str) -> None:
        if self._without_prefix(scope["path"]) in ("/v1/health", "/v1/completions"):
            return
        host, port = scope.get("client") or ("", 0)
        more = {name: value for name, value in (("key", key), ("error", problem)) if value}
        params = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True))
        params = {name: "****" if self.keys.name_of({"x-api-key": text}) else text for name, text in params.items()}
        self.log.event(
            "log_server_request", "request", remote_addr=host, remote_port=port, status=status,
            method=scope["method"], path=scope["path"], params=params, **more,
        )  # fmt: skip


def is_allowed(origin: str, allowed: Collection[str]) -> bool:
    """Whether an origin is one of these; "*" stands for all, "localhost" for pages that this machine serves."""
    if "*" in allowed or origin in allowed:
        return True
    try:
        host = urlsplit(origin).hostname
    except ValueError:  # no address at all
        return False
    return "localhost" in allowed and host in ("localhost", "127.0.0.1", "::1")


def error_text(body: bytes) -> str:
    """The message of an error as clients get it, for the log; empty if the body is no error."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:LONGEST_REASON]
    except (ValueError, KeyError, TypeError):
        return ""


def _preflight(wanted: str) -> Response:
    """What pages may send: the headers that they ask for, as `*` does not cover `Authorization`."""
    headers = {
        "Access-Control-Allow-Credentials": "true",
        "Access-Control-Allow-Methods": "GET, POST",
        "Access-Control-Allow-Headers": wanted,
    }
    return Response(b"", 200, headers, "text/html")


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(request.scope, error.body(), error.code, error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {404: "File Not Found", 405: "Method Not Allowed"}.get(error.status_code, error.detail)
    body = error_body(error.status_code, message)
    return error_response(request.scope, body, error.status_code, dict(error.headers or {}))


async def _user_error(request: Request, error: Exception) -> Response:
    return error_response(request.scope, error_body(400, str(error)), 400)


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(b"", CLIENT_GONE)


async def _internal_error(request: Request, error: Exception) -> Response:
    request.app.state.log.failure("handler", "internal error", path=request.url.path, error=repr(error))
    return error_response(request.scope, error_body(500, f"internal error: {type(error).__name__}: {error}"), 500)
