"""Which models are loaded: on demand, within limits of number, memory and idle time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ikpy.server.errors import ApiError, shutting_down
from ikpy.server.router.catalog import Catalog, ModelFile, no_model, shown_names
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
        request_tokens: Callable[[ModelFile], int | None] = lambda _: None,
    ) -> None:
        self.catalog = Catalog(catalog)
        self.request_tokens = request_tokens
        """Tokens that a request to a model may have at most, as far as its file and options tell."""
        self.limits = limits
        self.is_single = is_single
        self.problem: str | None = None
        """Why the only model could not be loaded at the start."""
        self.workers: dict[str, Worker] = {}
        self.is_closed = False
        """Whether no process is started any more."""
        self._make_worker = make_worker

    def loaded(self) -> list[Worker]:
        """Processes that run or start, the one used least recently first."""
        running = [worker for worker in self.workers.values() if worker.pid is not None]
        return sorted(running, key=lambda worker: worker.last_used)

    def state_of(self, name: str) -> State:
        """What the process of a model is doing."""
        worker = self.workers.get(name)
        return State.UNLOADED if worker is None else worker.state

    async def pick(self, name: str | None) -> str:
        """The model a request means: the named one, or the only one there is or that is loaded.

        Raises ApiError 404 for an unknown name, 400 when a name is needed.
        """
        if name is not None and not self.is_single and await self.catalog.find(name) is not None:
            return name
        models = await self.catalog.all()
        if self.is_single:
            return next(iter(models))
        running = self.loaded()
        if name is None and (len(models) == 1 or len(running) == 1):
            return next(iter(models)) if len(models) == 1 else running[0].model.name
        shown = shown_names(models)
        if name is None:
            raise ApiError(400, f'"model" is required; models: {shown}')
        raise no_model(name, f"; models: {shown}")

    def check_loaded(self, name: str) -> None:
        """Raises ApiError 400 for a model that a request may not load."""
        worker = self.workers.get(name)
        stays = worker is not None and worker.takes_place and worker.stopping is None
        if worker is None or not (stays or worker.state is State.SLEEPING):
            raise ApiError(400, f"the model {name} is not loaded: POST /models/load loads it")

    @asynccontextmanager
    async def use(self, name: str, *, counts: bool = True) -> AsyncIterator[Worker]:
        """The process of a model, which is loaded if needed and stays loaded meanwhile; its idle time begins anew if
        this ``counts``."""
        worker = await self._reserve(name)
        try:
            await self._load(worker)
            if counts:
                worker.last_used = time.monotonic()
            yield worker
        finally:
            worker.n_running -= 1
            if counts:
                worker.last_used = time.monotonic()

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
        """Waits for the end of another process before a new start: one that ends anyway, else the idle one used least
        recently. True at once if another request has begun a start meanwhile; False if no process ends."""
        if not wanted.failed_with(error):
            return True
        others = [worker for worker in self.loaded() if worker is not wanted]
        ends = {end for worker in others if (end := worker.stopping) is not None}
        idle = [worker for worker in others if not worker.n_running]
        if not ends and idle:
            ends = {idle[0].stop()}
        if ends:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        return bool(ends)

    async def _reserve(self, name: str) -> Worker:
        """The process of a model, which is in use from now on; others are unloaded if there is no room for it.

        Raises ApiError 404 for an unknown name, 503 when the others are all in use. Nothing is awaited between the look
        at the others and the use: models count from then on, and two requests never take the same place.
        """
        model = await self.catalog.find(name)
        if model is None:
            raise no_model(name)
        latest = time.monotonic() + GRACE_SECONDS
        while True:
            worker = self._worker_of(model)
            if worker.stopping is None and (worker.takes_place or self._fits(worker, self._others(worker))):
                worker.n_running += 1
                return worker
            ends = self._ends(worker)
            if ends:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                latest = time.monotonic() + GRACE_SECONDS
            elif time.monotonic() < latest:
                await asyncio.sleep(0.02)
            else:
                raise ApiError(503, "all loaded models are in use, try again later", {"Retry-After": "5"})

    def _worker_of(self, model: ModelFile) -> Worker:
        """The worker of a model; a new one if there is none, or if the model has changed since its process ended."""
        if self.is_closed:
            raise shutting_down()
        worker = self.workers.get(model.name)
        if worker is None or (worker.model != model and not worker.takes_place):
            worker = self.workers[model.name] = self._make_worker(model)
        return worker

    def _others(self, wanted: Worker) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker is not wanted and worker.takes_place]

    def _fits(self, wanted: Worker, others: Collection[Worker]) -> bool:
        """Whether a model may be loaded beside others."""
        too_many = 0 < self.limits.n_models <= len(others)
        needed = sum(worker.needed for worker in others) + wanted.model.size
        return not too_many and not (0 < self.limits.memory < needed and others)

    def _ends(self, wanted: Worker) -> set[asyncio.Task[None]]:
        """Ends of processes that a model has to wait for: its own, else those under way, and that of the idle process
        used least recently if these leave too little room. None if waiting for them is of no use."""
        if wanted.stopping is not None:
            return {wanted.stopping}
        others = self._others(wanted)
        ends = {end for worker in others if (end := worker.stopping) is not None}
        staying = [worker for worker in others if worker.stopping is None]
        if self._fits(wanted, staying):
            return ends
        idle = sorted((worker for worker in staying if not worker.n_running), key=lambda worker: worker.last_used)
        return ends | {idle[0].stop()} if idle else set()

    async def unload(self, name: str) -> bool:
        """Ends the process of a model, or its start, and returns when it has ended; False if there is none. An only
        model sleeps then."""
        worker = self.workers.get(name)
        if worker is None or not worker.is_active:
            return False
        await asyncio.shield(worker.stop(asleep=self.is_single))
        return True

    async def watch(self) -> None:
        """Unloads models that are idle for too long or take too much memory, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            for worker in self._superfluous():
                worker.stop(asleep=self.limits.sleep)

    def _superfluous(self) -> list[Worker]:
        running = [worker for worker in self.loaded() if worker.stopping is None]
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
        """Ends all processes; no other is started."""
        self.is_closed = True
        await asyncio.gather(*(asyncio.shield(worker.close()) for worker in self.workers.values()))
