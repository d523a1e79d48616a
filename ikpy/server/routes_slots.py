"""Slot state files: save, restore, erase, list, rename, delete (server.md#slots-queue-and-cache)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ikpy.errors import IkpyError
from ikpy.server.errors import ApiError, bad_request
from ikpy.server.front import Front
from ikpy.server.generation import unless_gone
from ikpy.server.http import json_response, parse_json, read_body
from ikpy.server.read_params import from_digits
from ikpy.server.routes_status import front_of
from ikpy.server.slot_files import MEDIA_TOKEN, draft_file, read_slot, write_slot, written_draft_files
from ikpy.server.slot_reports import SlotState
from ikpy.server.slots import Slot
from ikpy.tools.media_marks import MARKER

CANNOT_RESTORE = "Unable to restore slot, no available space in KV cache or invalid slot save file"
BUSY_WAIT = 0.02
"""Seconds between two looks at a busy slot."""


def save_folder(front: Front) -> Path:
    """Where state files live. Raises ApiError 501 without --slot-save-path."""
    if front.settings.slot_save_path is None:
        raise ApiError(501, "This server does not support slot files. Start it with `--slot-save-path`")
    return Path(front.settings.slot_save_path)


def is_file_name(value: Any) -> bool:
    """Whether a value names a file in a folder and leads nowhere else."""
    bad = '/\\:*?"<>|\0'
    if not isinstance(value, str) or not value or value.startswith(".") or ".." in value or set(value) & set(bad):
        return False
    try:
        return len(value.encode()) <= 200
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def file_name(value: Any) -> str:
    """The checked name of a slot file. Raises ApiError 400."""
    if not is_file_name(value) or value.endswith(".tokens.json"):
        raise bad_request("Invalid filename")
    return str(value)


async def slot_action(request: Request) -> Response:
    """POST /slots/{id}?action=save, restore or erase."""
    front = front_of(request)
    folder = save_folder(front)
    number = from_digits(request.path_params["id"])
    if number is None or number >= len(front.engine.slots):
        raise bad_request("Invalid slot ID")
    slot = front.engine.slots[number]
    action = request.query_params.get("action")
    if action not in ("save", "restore", "erase"):
        raise bad_request("Invalid action")
    if action == "erase":
        return json_response(await unless_gone(request, when_idle(front, slot, lambda: erase(slot))))
    body = await read_body(request, front.settings)
    if "filename" not in body:
        raise bad_request('"filename" is required')
    name = file_name(body["filename"])
    work = save if action == "save" else restore
    return json_response(await unless_gone(request, when_idle(front, slot, lambda: work(front, slot, folder, name))))


async def when_idle(front: Front, slot: Slot, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Runs work in the engine thread as soon as the slot is idle."""

    def attempt() -> dict[str, Any] | None:
        return work() if slot.state is SlotState.IDLE else None

    while True:
        result = await asyncio.wrap_future(front.engine.call(attempt))
        if result is not None:
            return result
        await asyncio.sleep(BUSY_WAIT)


def erase(slot: Slot) -> dict[str, Any]:
    """Empties the cache of a slot."""
    n = len(slot.tokens)
    slot.truncate(0)
    return {"id_slot": slot.id, "n_erased": n}


def save(front: Front, slot: Slot, folder: Path, name: str) -> dict[str, Any]:
    """Writes the state and the tokens of a slot."""
    began = time.perf_counter()
    try:
        size = write_slot(folder, name, front.engine, slot)
    except OSError as error:
        raise ApiError(500, f"cannot save the slot: {error.strerror}") from None
    times = {"save_ms": 1e3 * (time.perf_counter() - began)}
    return {"id_slot": slot.id, "filename": name, "n_saved": len(slot.tokens), "n_written": size, "timings": times}


def restore(front: Front, slot: Slot, folder: Path, name: str) -> dict[str, Any]:
    """Reads the state of a slot."""
    began = time.perf_counter()
    try:
        size = read_slot(folder, name, front.engine, slot)
    except (OSError, IkpyError) as error:
        front.engine.log.failure("restore", "slot not restored", id_slot=slot.id, filename=name, error=str(error))
        raise bad_request(CANNOT_RESTORE) from None
    times = {"restore_ms": 1e3 * (time.perf_counter() - began)}
    return {"id_slot": slot.id, "filename": name, "n_restored": len(slot.tokens), "n_read": size, "timings": times}


async def list_files(request: Request) -> Response:
    """GET /list."""
    front = front_of(request)
    folder = save_folder(front)
    return json_response(await asyncio.to_thread(describe_files, front, folder))


def describe_files(front: Front, folder: Path) -> list[dict[str, Any]]:
    """State files of the folder with the text they hold."""
    out = []
    for listed in sorted(folder.glob("*.tokens.json")):
        path = folder / listed.name.removesuffix(".tokens.json")
        try:
            tokens = parse_json(listed.read_bytes())["tokens"]
            stat = path.stat()
            text = shown_text(front, tokens)
        except (OSError, KeyError, TypeError, ApiError, IkpyError):
            continue
        changed = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stat.st_mtime))
        out.append(
            {
                "filename": path.name,
                "filesize": stat.st_size,
                "mtime": changed,
                "token_count": len(tokens),
                "prompt": text,
            }
        )
    return out


def shown_text(front: Front, tokens: list[int]) -> str:
    """Text of a listed file's tokens, with a marker for a picture or a sound."""
    groups = groupby(tokens, lambda token: token == MEDIA_TOKEN)
    return "".join(MARKER if is_media else front.vocab.detokenize(list(part)) for is_media, part in groups)


async def rename_prompt(request: Request) -> Response:
    """POST /rename_prompt."""
    front = front_of(request)
    folder = save_folder(front)
    body = await read_body(request, front.settings)
    old, new = file_name(body.get("old_filename")), file_name(body.get("new_filename"))
    existing_file(folder, old)
    if (folder / new).exists():
        raise bad_request(f"{new} exists already")
    listed = folder / f"{old}.tokens.json"
    try:
        (folder / old).rename(folder / new)
        if listed.exists():
            listed.rename(folder / f"{new}.tokens.json")
        for path in written_draft_files(folder, old):
            number = path.name.removeprefix(draft_file(folder, old).name)
            path.rename(folder / f"{draft_file(folder, new).name}{number}")
    except OSError as error:
        raise ApiError(500, f"cannot rename {old}: {error.strerror}") from None
    return json_response({"status": "renamed", "old_filename": old, "new_filename": new})


async def delete_prompt(request: Request) -> Response:
    """POST /delete_prompt."""
    front = front_of(request)
    folder = save_folder(front)
    body = await read_body(request, front.settings)
    name = file_name(body.get("filename"))
    path = existing_file(folder, name)
    try:
        path.unlink()
        (folder / f"{name}.tokens.json").unlink(missing_ok=True)
        for draft in written_draft_files(folder, name):
            draft.unlink()
    except OSError as error:
        raise ApiError(500, f"cannot delete {name}: {error.strerror}") from None
    return json_response({"status": "deleted", "filename": name})


def existing_file(folder: Path, name: str) -> Path:
    """A file of the folder. Raises ApiError 404."""
    path = folder / name
    if not path.is_file():
        raise ApiError(404, f"{name}: no such file")
    return path
