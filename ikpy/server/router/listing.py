"""What clients see of a router's models: the list, their states as events, and the router itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from ikpy.server.http import data_event
from ikpy.server.router.worker import State
from ikpy.server.settings import BUILD

if TYPE_CHECKING:
    from ikpy.server.router.pool import Pool

Object = dict[str, Any]
LOOK_SECONDS = 0.1
"""Between two looks at the states of models."""
TEXT_ALONE = {"input_modalities": ["text"], "output_modalities": ["text"]}
"""What goes into a model that was not loaded yet, and what comes out, as far as is known."""


def status_of(pool: Pool, name: str) -> Object:
    """State of a model in llama.cpp's words: one that could not be loaded, or whose process ended, is unloaded."""
    state, worker = pool.state_of(name), pool.workers.get(name)
    if state is not State.FAILED or worker is None:
        return {"value": state.value}
    code = worker.exit_code
    return {"value": State.UNLOADED.value, "failed": True} | ({} if code is None else {"exit_code": code})


async def entries(pool: Pool) -> list[Object]:
    """What clients of the OpenAI API see of the models."""
    data = []
    catalog = await pool.catalog.all()
    lengths = await asyncio.to_thread(lambda: {name: pool.request_tokens(model) for name, model in catalog.items()})
    for name, model in catalog.items():
        worker = pool.workers.get(name)
        status = status_of(pool, name)
        if worker is not None:
            status |= {"memory": worker.memory, "crashes": worker.n_crashes, "running": worker.n_running}
        entry: Object = {"id": name, "aliases": [], "tags": [], "object": "model", "created": model.changed}
        entry |= {"owned_by": "llamacpp"} | ({} if model.path is None else {"path": str(model.path)})
        told = {} if worker is None or worker.model != model else worker.own_entry
        length = told.get("max_model_len") or lengths[name]
        entry |= {"architecture": told.get("architecture") or TEXT_ALONE}
        entry |= {"meta": told.get("meta") or {"size": model.size}, "status": status}
        data.append(entry | ({} if length is None else {"max_model_len": length}))
    return data


def router_props(pool: Pool) -> Object:
    """GET /props of the router itself, by which clients of llama-server know one."""
    return {
        "role": "router",
        "max_instances": pool.limits.n_models,
        "models_autoload": pool.limits.autoload,
        "model_alias": "",
        "model_path": "",
        "default_generation_settings": {"params": {}, "n_ctx": 0},
        "build_info": BUILD,
    }


async def status_events(pool: Pool) -> AsyncIterator[str]:
    """Events of a stream that says how the states of models change from now on, until it or the router is closed."""
    known = _states(pool)
    while not pool.is_closed:
        await asyncio.sleep(LOOK_SECONDS)
        found = _states(pool)
        for name, status in found.items():
            if status != known.get(name):
                told = {"status": status["value"]} | {key: value for key, value in status.items() if key != "value"}
                yield data_event({"model": name, "event": "model_status", "data": told})
        known = found


def _states(pool: Pool) -> dict[str, Object]:
    return {name: status_of(pool, name) for name in pool.workers}
