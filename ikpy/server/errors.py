"""Errors as clients see them."""

from __future__ import annotations

from typing import Any

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
}


SHUTTING_DOWN = "the server is shutting down"


class ApiError(Exception):
    """An error with its HTTP status; ``headers`` are added to the response, ``fields`` to the error in its body."""

    def __init__(
        self, code: int, message: str, headers: dict[str, str] | None = None, fields: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.headers = headers or {}
        self.fields = fields or {}

    def body(self) -> dict[str, Any]:
        """The JSON object clients get."""
        body = error_body(self.code, self.message)
        body["error"].update(self.fields)
        return body


def error_body(code: int, message: str) -> dict[str, Any]:
    """JSON object of an error."""
    return {"error": {"code": code, "message": message, "type": TYPES.get(code, "server_error")}}


def bad_request(message: str) -> ApiError:
    """An error the client caused."""
    return ApiError(400, message)


def prompt_too_long(message: str, n_prompt: int, n_ctx: int) -> ApiError:
    """A prompt that does not fit a context, with type and fields of llama-server: how much must be left out."""
    fields = {"type": "exceed_context_size_error", "n_prompt_tokens": n_prompt, "n_ctx": n_ctx}
    return ApiError(400, message, fields=fields)


def queue_full(n_waiting: int) -> ApiError:
    """The queue is at its limit: the client should come back later."""
    return ApiError(503, f"{n_waiting} requests are waiting already, try again later", {"Retry-After": "1"})


def engine_ended(reason: str) -> ApiError:
    """The engine cannot go on."""
    return ApiError(503, f"the engine has ended, the server must be started again: {reason}")


def shutting_down() -> ApiError:
    """The server takes no more requests."""
    return ApiError(503, SHUTTING_DOWN, {"Retry-After": "5"})
