"""Scales of LoRA adapters, and control vectors (server.md#routes)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from ikpy.errors import IkpyError, UsageError
from ikpy.server.errors import bad_request
from ikpy.server.front import Front
from ikpy.server.http import json_response, parsed, read_body, read_bytes
from ikpy.server.read_params import bounded, integer, number, read_scales
from ikpy.server.routes_slots import is_file_name
from ikpy.server.routes_status import front_of

T = TypeVar("T")


async def in_engine(front: Front, function: Callable[[], T]) -> T:
    """Runs a function between two batches. UsageError becomes an answer 400."""
    try:
        return await asyncio.wrap_future(front.engine.call(function))
    except UsageError as error:
        raise bad_request(str(error)) from None


async def lora_list(request: Request) -> Response:
    """GET /lora-adapters."""
    front = front_of(request)
    return json_response(await in_engine(front, front.engine.adapters.lora_json))


async def lora_apply(request: Request) -> Response:
    """POST /lora-adapters: the scales of requests from now on."""
    front = front_of(request)
    scales = read_scales(await parsed(await read_bytes(request, front.settings)))
    if scales is None:
        raise bad_request("expected an array of adapters")
    await in_engine(front, lambda: front.engine.set_lora(scales))
    return json_response({"success": True})


async def control_vectors(request: Request) -> Response:
    """GET /control-vectors."""
    front = front_of(request)
    return json_response(await in_engine(front, lambda: shown(front)))


def shown(front: Front) -> list[dict[str, Any]]:
    """The control vectors in use."""
    return [vector.json() for vector in front.engine.adapters.vectors]


async def control_vector_load(request: Request) -> Response:
    """POST /control-vectors/load."""
    front = front_of(request)
    body = await read_body(request, front.settings)
    path = body.get("path")
    if not isinstance(path, str) or not path:
        raise bad_request('"path" must be a string')
    scale = bounded(number(body, "scale", 1.0))
    layers = integer(body, "layer_start", -1), integer(body, "layer_end", -1)
    failed = f"Failed to load control vector from {path}"
    file = vector_file(front, path)
    if file is None:
        hint = "only files in --slot-save-path and those of --control-vector can be loaded"
        return json_response({"success": False, "error": f"{failed}: {hint}"}, 400)
    try:
        await asyncio.wrap_future(
            front.engine.call(lambda: front.engine.change_vectors(lambda a: a.load_vector(file, path, scale, *layers)))
        )
    except IkpyError:
        return json_response({"success": False, "error": failed}, 400)
    return json_response({"success": True, "control_vectors": await in_engine(front, lambda: shown(front))})


def vector_file(front: Front, path: str) -> str | None:
    """The file a request may mean: one of the command line, or one by its name in the folder of slot files."""
    settings = front.settings
    if path in settings.control_vectors:
        return path
    folder = settings.slot_save_path
    return str(Path(folder) / path) if folder is not None and is_file_name(path) else None


async def control_vector_unload(request: Request) -> Response:
    """POST /control-vectors/unload."""
    front = front_of(request)
    index = integer(await read_body(request, front.settings), "id", -1)
    await in_engine(front, lambda: front.engine.change_vectors(lambda a: a.unload_vector(index)))
    return json_response({"success": True})


async def control_vector_apply(request: Request) -> Response:
    """POST /control-vectors/apply: new scales."""
    front = front_of(request)
    scales = read_scales(await parsed(await read_bytes(request, front.settings)))
    if scales is None:
        raise bad_request("expected an array of control vectors")
    await in_engine(front, lambda: front.engine.change_vectors(lambda a: a.scale_vectors(scales)))
    return json_response({"success": True})
