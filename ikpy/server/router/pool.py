"""Which models are loaded: on demand, within limits of number, memory and idle time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ikpy.server.errors import ApiError
from ikpy.server.router.catalog import ModelFile
from ikpy.server.router.worker import NoRoomError, State, Worker

CHECK_SECONDS = 2.0
"""Seconds between two looks at idle times and memory."""
GRACE_SECONDS = 0.5
"""Seconds a request may wait for others to end: a client that has read an answer is a little ahead of the server."""


@dataclass(frozen=True)
class Limits:
    """Most models at a time, seconds a model may be idle, bytes of all models; 0 means no limit. ``autoload``: requests
    load the models they name; ``sleep``: those that were idle for too long count as asleep."""

    n_models: int = 4
    idle_seconds: float = 0.0
    memory: int = 0
    autoload: bool = True
    sleep: bool = False


class Pool:
    """The models that ``catalog`` lists, and their processes. ``is_single``: one, whatever its name."""

    def __init__(
        self,
        catalog: Callable[[], dict[str, ModelFile]],
        limits: Limits,
        make_worker: Callable[[ModelFile], Worker],
        *,
        is_single: bool = False,
    ) -> None:
        self.catalog = catalog
        self.limits = limits
        self.is_single = is_single
        self.problem: str | None = None
        """Why the only model could not be loaded at the start."""
        self.workers: dict[str, Worker] = {}
        self._make_worker = make_worker
        self._lock = asyncio.Lock()

    def loaded(self) -> list[Worker]:
        """Processes that run or start, the one used least recently first."""
        running = [worker for worker in self.workers.values() if worker.pid is not None]
        return sorted(running, key=lambda worker: worker.last_used)

    def state_of(self, name: str) -> State:
        """What the process of a model is doing."""
        worker = self.workers.get(name)
        return State.UNLOADED if worker is None else worker.state

    def pick(self, name: str | None) -> str:
        """The model a request means: the named one, or the only one there is or that is loaded.

        Raises ApiError 404 for an unknown name, 400 when a name is needed.
        """
        models = self.catalog()
        if self.is_single:
            return next(iter(models))
        if name is not None and name in models:
            return name
        running = self.loaded()
        if name is None and (len(models) == 1 or len(running) == 1):
            return next(iter(models)) if len(models) == 1 else running[0].model.name
        shown = ", ".join(sorted(models)) or "none"
        if name is None:
            raise ApiError(400, f'"model" is required; models: {shown}')
        raise ApiError(404, f"there is no model {name}; models: {shown}")

    def check_loaded(self, name: str) -> None:
        """Raises ApiError 400 for a model that a request may not load."""
        worker = self.workers.get(name)
        if worker is None or not (worker.takes_place or worker.state is State.SLEEPING):
            raise ApiError(400, f"the model {name} is not loaded: POST /models/load loads it")

    @asynccontextmanager
    async def use(self, name: str, *, counts: bool = True) -> AsyncIterator[Worker]:
        """The process of a model, which is loaded if needed and stays loaded meanwhile; its idle time begins anew if
        this ``counts``."""
        worker = await self._reserve(name)
        last_used = worker.last_used
        try:
            await self._load(worker)
            yield worker
        finally:
            worker.n_running -= 1
            worker.last_used = time.monotonic() if counts else last_used

    async def _load(self, worker: Worker) -> None:
        """Loads a model; for lack of memory idle ones are unloaded, one after another."""
        while True:
            try:
                return await worker.load()
            except NoRoomError as error:
                if not await self._try_again(worker, error):
                    if any(other.pid is not None for other in self.workers.values() if other is not worker):
                        message = f"{error.message}; the other models are in use, try again later"
                        raise ApiError(503, message, {"Retry-After": "5"}) from None
                    raise

    async def _try_again(self, wanted: Worker, error: NoRoomError) -> bool:
        """Ends the idle process used least recently and starts the wanted one again, unless another request has done
        so meanwhile; False if none is idle."""
        async with self._lock:
            if not wanted.failed_with(error):
                return True
            idle = [worker for worker in self.loaded() if worker is not wanted and not worker.n_running]
            if idle:
                await idle[0].stop()
                wanted.begin()
            return bool(idle)

    async def _reserve(self, name: str) -> Worker:
        async with self._lock:
            model = self.catalog().get(name)
            if model is None:
                raise ApiError(404, f"there is no model {name}")
            worker = self.workers.get(name)
            if worker is None or (worker.model != model and worker.pid is None):
                worker = self.workers[name] = self._make_worker(model)
            worker.n_running += 1
            try:
                if worker.pid is None:
                    await self._make_room(worker)
            except BaseException:
                worker.n_running -= 1
                raise
            return worker

    async def _make_room(self, wanted: Worker) -> None:
        """Unloads idle models until another one fits. Raises ApiError 503 when the others are all in use.

        Models count from the moment they are asked for: two may be on their way at the same time.
        """
        end = time.monotonic() + GRACE_SECONDS
        while True:
            others = [worker for worker in self.workers.values() if worker is not wanted and worker.takes_place]
            too_many = 0 < self.limits.n_models <= len(others)
            needed = sum(worker.needed for worker in others) + wanted.model.size
            if not too_many and not (0 < self.limits.memory < needed and others):
                return
            idle = sorted((w for w in others if not w.n_running), key=lambda worker: worker.last_used)
            if idle:
                await idle[0].stop()
            elif time.monotonic() < end:
                await asyncio.sleep(0.02)
            else:
                raise ApiError(503, "all loaded models are in use, try again later", {"Retry-After": "5"})

    async def unload(self, name: str) -> bool:
        """Ends the process of a model; False if there is none."""
        async with self._lock:
            worker = self.workers.get(name)
            if worker is None or worker.pid is None:
                return False
            await worker.stop()
            return True

    async def watch(self) -> None:
        """Unloads models that are idle for too long or take too much memory, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            async with self._lock:
                for worker in self._superfluous():
                    await worker.stop(asleep=self.limits.sleep)

    def _superfluous(self) -> list[Worker]:
        running = self.loaded()
        idle = [worker for worker in running if not worker.n_running and worker.state is State.LOADED]
        old = time.monotonic() - self.limits.idle_seconds
        found = [worker for worker in idle if self.limits.idle_seconds and worker.last_used < old]
        total = sum(worker.memory for worker in running if worker not in found)
        for worker in idle:
            if 0 < self.limits.memory < total and worker not in found and len(running) > 1:
                found.append(worker)
                total -= worker.memory
        return found

    async def stop(self) -> None:
        """Ends all processes."""
        await asyncio.gather(*(worker.stop() for worker in self.workers.values()))
