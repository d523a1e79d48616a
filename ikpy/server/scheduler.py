"""The engine thread: queue, slots, continuous batching.

Every step evaluates one batch: one token of every generating slot first, then prompt tokens of the others. While
something is generating, a batch holds at most one micro-batch of prompt tokens, shared evenly among the waiting
prompts, so that a long prompt delays neither the tokens of other requests nor a short prompt by more than that.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ikpy.engine.batch import Batch
from ikpy.errors import IkpyError
from ikpy.server.errors import queue_full, shutting_down
from ikpy.server.metrics import Metrics
from ikpy.server.slots import RequestError, Slot, SlotState
from ikpy.server.tasks import CompletionTask, EmbeddingTask, Failed, Task

if TYPE_CHECKING:
    from ikpy.engine.context import Context
    from ikpy.server.log import ServerLog
    from ikpy.server.settings import ServerSettings
    from ikpy.vocab import Vocab

T = TypeVar("T")


class _BatchPlan:
    """Tokens of one step and what is to be done with their outputs."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.pos: list[int] = []
        self.seq: list[int] = []
        self.logits: list[bool] = []
        self.outputs: list[tuple[Slot, int]] = []
        """Slot and number of its output rows, in batch order."""

    def add(self, slot: Slot, tokens: list[int], wanted: str) -> None:
        """Adds tokens the slot has just taken; wanted: outputs of "all", the "last" or "none" of them."""
        n = len(tokens)
        end = len(slot.tokens)
        self.tokens += tokens
        self.pos += range(end - n, end)
        self.seq += [slot.id] * n
        self.logits += [wanted == "all"] * (n - 1) + [wanted != "none"]
        if wanted != "none":
            self.outputs.append((slot, n if wanted == "all" else 1))

    def batch(self) -> Batch:
        """The batch for the context."""
        return Batch(np.array(self.tokens), np.array(self.pos), [(s,) for s in self.seq], np.array(self.logits))


class Engine:
    """Owns a context and its slots; all work on them happens in its thread.

    ``submit``, ``cancel`` and ``call`` may be used from any thread.
    """

    def __init__(self, context: Context, vocab: Vocab, settings: ServerSettings, log: ServerLog) -> None:
        self.context = context
        self.settings = settings
        self.log = log
        self.metrics = Metrics()
        self.n_ctx_slot = context.n_ctx // settings.n_slots
        self.slots = [
            Slot(i, self.n_ctx_slot, context.kv, vocab, shift=settings.context_shift, special=settings.special)
            for i in range(settings.n_slots)
        ]
        self._queue: deque[Task] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        log.event("init", "initializing slots", n_slots=settings.n_slots)
        for slot in self.slots:
            log.event("init", "new slot", id_slot=slot.id, n_ctx_slot=slot.n_ctx)

    # --- other threads ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, *tasks: Task) -> None:
        """Queues tasks, all or none. Raises ApiError 503 when the queue is full or the server is stopping."""
        with self._wake:
            if self._stopping:
                raise shutting_down()
            if len(self._queue) + len(tasks) > max(self.settings.queue_limit, 1) + self.n_idle:
                raise queue_full(len(self._queue))
            self._queue.extend(tasks)
            self._wake.notify()

    def cancel(self, *tasks: Task) -> None:
        """Gives up tasks; their slots are free before the next batch."""
        with self._wake:
            for task in tasks:
                task.cancelled = True
            self._wake.notify()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs a function in the engine thread between two batches."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        with self._wake:
            self._calls.append(run)
            self._wake.notify()
        return future

    def stop(self, timeout: float = 30.0) -> None:
        """Refuses new tasks, lets running ones end (at most ``timeout`` seconds), ends the thread."""
        with self._wake:
            self._stopping = True
            waiting = list(self._queue)
            self._queue.clear()
            self._wake.notify()
        for task in waiting:
            task.sink(Failed(task.index, 503, "the server is shutting down"))
        if not self._thread.is_alive():
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            self.cancel(*(slot.task for slot in self.slots if slot.task is not None))
            self._thread.join(timeout)

    @property
    def n_idle(self) -> int:
        """Slots without a request."""
        return sum(slot.state is SlotState.IDLE for slot in self.slots)

    @property
    def n_deferred(self) -> int:
        """Requests that wait for a slot."""
        return len(self._queue)

    # --- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self.log.event("slots_idle", "all slots are idle")
        while self._wait():
            self._run_calls()
            self._drop_cancelled()
            self._assign()
            if any(slot.task for slot in self.slots):
                self._step()
                if not any(slot.task for slot in self.slots) and not self._queue:
                    self.log.event("slots_idle", "all slots are idle")

    def _wait(self) -> bool:
        """Sleeps until there is work; False when the thread should end."""
        with self._wake:
            while True:
                busy = any(slot.task for slot in self.slots)
                if busy or self._queue or self._calls:
                    return True
                if self._stopping:
                    return False
                self._wake.wait()

    def _run_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def _drop_cancelled(self) -> None:
        with self._wake:
            if any(task.cancelled for task in self._queue):
                self._queue = deque(task for task in self._queue if not task.cancelled)
        for slot in self.slots:
            if slot.task is not None and slot.task.cancelled:
                self._release(slot)

    def _assign(self) -> None:
        """Gives waiting tasks to idle slots, oldest first."""
        with self._wake:
            for task in list(self._queue):
                slot = self._choose(task)
                if slot is None:
                    continue
                self._queue.remove(task)
                self._start(slot, task)

    def _choose(self, task: Task) -> Slot | None:
        """Idle slot for a task: the wanted one, the one with the most similar cache, or the one unused for longest."""
        idle = [slot for slot in self.slots if slot.state is SlotState.IDLE]
        wanted = task.params.id_slot if isinstance(task, CompletionTask) else -1
        if wanted >= 0:
            idle = [slot for slot in idle if slot.id == wanted]
        if not idle:
            return None
        best = max(idle, key=lambda slot: slot.similarity(task.tokens))
        if best.similarity(task.tokens) > self.settings.slot_prompt_similarity:
            return best
        return min(idle, key=lambda slot: slot.last_used)

    def _start(self, slot: Slot, task: Task) -> None:
        self.log.event("launch_slot_with_task", "slot is processing task", id_slot=slot.id, id_task=task.id)
        try:
            slot.start(task)
        except RequestError as error:
            slot.fail(400, str(error))
            return
        where = {"id_slot": slot.id, "id_task": task.id}
        if isinstance(task, CompletionTask) and slot.n_cached == len(slot.prompt) - 1 and slot.n_cached:
            message = "we have to evaluate at least 1 token to generate logits"
            self.log.event("batch_pending_prompt", message, **where)
        self.log.event("batch_pending_prompt", "kv cache rm [p0, end)", **where, p0=slot.n_cached)

    def _release(self, slot: Slot) -> None:
        """Ends the request of a slot and logs it."""
        slot.release()
        self._log_released(slot)

    def _log_released(self, slot: Slot) -> None:
        task_id = -1 if slot.last_task is None else slot.last_task.id
        n = len(slot.tokens)
        timings = slot.finished.timings if slot.finished else slot.timings()
        self.log.timings(slot.id, task_id, timings)
        self.log.event(
            "release_slots", "slot released", id_slot=slot.id, id_task=task_id, n_ctx=slot.n_ctx, n_past=n,
            n_system_tokens=0, n_cache_tokens=n, truncated=slot.truncated,
        )  # fmt: skip

    def _step(self) -> None:
        """One batch: assemble, evaluate, hand out."""
        plan = _BatchPlan()
        self._add_generating(plan)
        self._add_prompts(plan)
        if not plan.tokens:
            return
        began = time.perf_counter()
        try:
            rows = self.context.decode(plan.batch())
        except Exception as error:
            self._fail_batch(plan, error)
            return
        self._count(plan, time.perf_counter() - began)
        self._distribute(plan, rows)

    def _add_generating(self, plan: _BatchPlan) -> None:
        for slot in self.slots:
            if slot.state is SlotState.GENERATING:
                try:
                    plan.add(slot, [slot.take_pending()], "last")
                except RequestError as error:
                    slot.fail(400, str(error))
                    self._log_released(slot)

    def _add_prompts(self, plan: _BatchPlan) -> None:
        waiting = [slot for slot in self.slots if slot.n_waiting]
        generating = bool(plan.tokens)
        if generating and not self.settings.cont_batching:
            return
        budget = (self.context.n_ubatch if generating else self.context.n_batch) - len(plan.tokens)
        waiting.sort(key=lambda slot: slot.n_waiting)
        for i, slot in enumerate(waiting):
            n = min(slot.n_waiting, max(0, budget) // (len(waiting) - i))
            if n == 0:
                continue
            budget -= n
            tokens = slot.take_prompt(n)
            if isinstance(slot.task, EmbeddingTask):
                plan.add(slot, tokens, "all")
            else:
                plan.add(slot, tokens, "none" if slot.n_waiting else "last")

    def _count(self, plan: _BatchPlan, seconds: float) -> None:
        """Shares the time of a batch between prompts and generation by their tokens."""
        n_predicted = sum(slot.state is SlotState.GENERATING for slot, _ in plan.outputs)
        n_prompt = len(plan.tokens) - n_predicted
        totals = self.metrics.totals
        totals.prompt_n += n_prompt
        totals.prompt_s += seconds * n_prompt / len(plan.tokens)
        totals.predicted_s += seconds * n_predicted / len(plan.tokens)

    def _distribute(self, plan: _BatchPlan, rows: Any) -> None:
        start = 0
        for slot, n in plan.outputs:
            part = slice(start, start + n)
            start += n
            task = slot.task
            if task is None or task.cancelled:
                continue
            if isinstance(task, EmbeddingTask):
                assert self.context.embeddings is not None
                slot.add_states(self.context.embeddings[part].copy())
            else:
                self._sample(slot, rows[part][-1])
            if slot.task is None:
                self._log_released(slot)

    def _sample(self, slot: Slot, logits: Any) -> None:
        try:
            slot.sample(logits)
            self.metrics.totals.predicted_n += 1
        except IkpyError as error:
            slot.fail(400, str(error))
        except Exception as error:
            self.log.failure("sample", "sampling failed", id_slot=slot.id, error=repr(error))
            slot.fail(500, f"sampling failed: {error}")

    def _fail_batch(self, plan: _BatchPlan, error: Exception) -> None:
        """Ends every request of a batch that could not be evaluated; their caches are emptied."""
        self.log.failure("step", "batch failed", error=repr(error))
        for slot in self.slots:
            if slot.task is not None and slot.id in plan.seq:
                slot.truncate(0)
                slot.fail(500, str(error))
