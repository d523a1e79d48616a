"""Infill, and routes that are not supported."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ikpy.server.errors import ApiError, bad_request
from ikpy.server.front import Front
from ikpy.server.http import aside, read_body
from ikpy.server.prompts import Prompt
from ikpy.server.routes_native import answer_prompts
from ikpy.server.routes_status import front_of

UNSUPPORTED = {
    "/load /save /rename /all /delete": "stored chat histories",
}
"""POST routes that exist elsewhere, and what is missing here."""


def unsupported(what: str) -> Callable[[Request], Awaitable[Response]]:
    """A handler that answers 501 and says what is not supported."""

    async def handler(request: Request) -> Response:
        raise ApiError(501, f"This server does not support {what}")

    return handler


async def infill(request: Request) -> Response:
    """POST /infill: text between a prefix and a suffix."""
    front = front_of(request)
    body = await read_body(request, front.settings)
    prompt = await aside(request, infill_prompt, front, body)
    params = await aside(request, front.read_params, body)
    return await answer_prompts(request, front, [prompt], params, several=False)


def infill_prompt(front: Front, body: dict[str, Any]) -> Prompt:
    """Fill-in-the-middle tokens around prefix and suffix, and behind them the ``prompt``, the text that the answer
    goes on with (editors send the line up to the cursor). Raises ApiError 501 for a model without them."""
    vocab = front.vocab
    if vocab.fim_pre is None or vocab.fim_suf is None or vocab.fim_mid is None:
        raise ApiError(501, "This model does not support infill: its vocabulary has no fill-in-the-middle tokens")
    texts = {}
    for name in ("input_prefix", "input_suffix", "prompt"):
        texts[name] = body.get(name, "")
        if not isinstance(texts[name], str):
            raise bad_request(f'"{name}" must be a string')
    tokens: list[int] = [vocab.bos] if vocab.add_bos and vocab.bos is not None else []
    for item in extra_files(body):
        if vocab.fim_sep is not None:
            tokens.append(vocab.fim_sep)
        tokens += vocab.tokenize(f"{item[0]}\n{item[1]}\n", add_special=False)
    prefix = [vocab.fim_pre, *vocab.tokenize(texts["input_prefix"], add_special=False)]
    suffix = [vocab.fim_suf, *vocab.tokenize(texts["input_suffix"], add_special=False)]
    tokens += suffix + prefix if front.settings.spm_infill else prefix + suffix
    tokens += [vocab.fim_mid, *vocab.tokenize(texts["prompt"], add_special=False)]
    return Prompt(tokens, texts["input_prefix"])


def extra_files(body: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and texts of ``input_extra``."""
    extra = body.get("input_extra", [])
    if not isinstance(extra, list) or not all(isinstance(item, dict) for item in extra):
        raise bad_request('"input_extra" must be an array of objects with filename and text')
    return [(str(item.get("filename", "tmp")), str(item.get("text", ""))) for item in extra]
