"""What the router itself answers of the Ollama API: which models there are, and requests that unload one."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ikpy.server.model_entries import FOREVER, digest, stamp

if TYPE_CHECKING:
    from ikpy.server.router.pool import Pool

NO_TIME = re.compile(r"[+-]?(0+(\.0*)?|\.0+)((ns|us|µs|ms|s|m|h)(0+(ns|us|µs|ms|s|m|h))*)?")
"""Durations of zero: `0`, `0s`, `0h0m`."""
QUESTIONS = {"/api/generate": "prompt", "/api/chat": "messages"}
"""Where the routes that unload models have what is to be answered."""


async def entries_of(pool: Pool, *, are_running: bool) -> list[dict[str, Any]]:
    """All models, or those whose processes run and when these end."""
    loaded = {worker.model.name: worker for worker in pool.loaded()}
    found: list[dict[str, Any]] = []
    for name, model in (await pool.catalog.all()).items():
        facts = digest(name, model.size, model.changed, *model.arguments)
        entry = {"name": name, "model": name, "modified_at": stamp(model.changed), "size": model.size, "digest": facts}
        if not are_running:
            found.append(entry)
        elif name in loaded:
            left = loaded[name].last_used + pool.limits.idle_seconds - time.monotonic()
            ends = stamp(time.time() + max(left, 0.0)) if pool.limits.idle_seconds else FOREVER
            found.append(entry | {"expires_at": ends})
    return found


def unloads(path: str, body: object) -> bool:
    """Whether a request has nothing to answer and asks that the model be kept for no time."""
    if path not in QUESTIONS or not isinstance(body, Mapping) or body.get(QUESTIONS[path]):
        return False
    kept = body.get("keep_alive")
    if isinstance(kept, str):
        return NO_TIME.fullmatch(kept) is not None
    return isinstance(kept, (int, float)) and not isinstance(kept, bool) and kept == 0


async def unloaded(pool: Pool, name: str | None, path: str) -> dict[str, Any]:
    """Ends the process of a model, if there is one; the answer. Raises ApiError as `Pool.pick` does."""
    picked = await pool.pick(name)
    await pool.unload(picked)
    nothing = {"message": {"role": "assistant", "content": ""}} if path == "/api/chat" else {"response": ""}
    return {"model": name or picked, "created_at": stamp(), **nothing, "done": True, "done_reason": "unload"}
