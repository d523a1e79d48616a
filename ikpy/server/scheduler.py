"""The engine thread: queue, slots, continuous batching.

Every step evaluates one batch: one token of every generating slot first, then prompt tokens of the others.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ikpy.engine.sampling import NotANumberError
from ikpy.engine.speculative import acceptance_line
from ikpy.errors import IkpyError, UsageError
from ikpy.server.adapters import Adapters
from ikpy.server.batching import BatchPlan, PromptFeeder
from ikpy.server.errors import SHUTTING_DOWN, queue_full, shutting_down
from ikpy.server.metrics import Metrics
from ikpy.server.prompt_cache import PromptCache
from ikpy.server.reuse import Reuse
from ikpy.server.slots import RequestError, Slot, SlotState
from ikpy.server.task_queue import TaskQueue
from ikpy.server.tasks import CompletionTask, EmbeddingTask, Failed, Task

if TYPE_CHECKING:
    from ikpy.engine.context import Context
    from ikpy.engine.speculative import Speculation
    from ikpy.server.log import ServerLog
    from ikpy.server.settings import ServerSettings
    from ikpy.vocab import Vocab

T = TypeVar("T")
PROMPT, GENERATING = SlotState.PROMPT, SlotState.GENERATING


class Engine:
    """Owns a context and its slots; all work on them happens in its thread.

    ``submit``, ``cancel`` and ``call`` may be used from any thread.
    """

    def __init__(
        self,
        context: Context,
        vocab: Vocab,
        settings: ServerSettings,
        log: ServerLog,
        speculation: Speculation | None = None,
        directions: NDArray[np.float32] | None = None,
    ) -> None:
        self.context = context
        self.settings = settings
        self.log = log
        self.metrics = Metrics()
        self.adapters = Adapters(context, directions)
        self.n_ctx_slot = context.n_ctx // settings.n_slots
        self.slots = [
            Slot(
                i,
                self.n_ctx_slot,
                context,
                vocab,
                shift=settings.context_shift,
                special=settings.special,
                speculator=speculation.speculator(i) if speculation else None,
            )
            for i in range(settings.n_slots)
        ]
        self.prompt_cache = PromptCache(settings.cache_ram)
        self.reuse = Reuse(self.slots, self.adapters, self.prompt_cache, settings, log)
        self.prompts = PromptFeeder(context, self.slots, settings, self.reuse)
        self._queue = TaskQueue()
        self._calls: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._any_cancelled = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        log.event("init", "initializing slots", n_slots=settings.n_slots)
        for slot in self.slots:
            log.event("init", "new slot", id_slot=slot.id, n_ctx_slot=slot.n_ctx)

    # --- other threads ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, *tasks: Task) -> None:
        """Queues the tasks of a request, all or none.

        Raises ApiError 503 when too many requests wait already or the server is stopping.
        """
        with self._wake:
            if self._stopping:
                raise shutting_down()
            waiting = self._queue.n_requests
            if waiting >= max(self.settings.queue_limit, 1) + self.n_idle:
                raise queue_full(waiting)
            self._queue.extend(tasks)
            self._wake.notify()

    def cancel(self, *tasks: Task) -> None:
        """Gives up tasks; their slots are free before the next batch."""
        with self._wake:
            for task in tasks:
                task.cancelled = True
            self._any_cancelled = True
            self._wake.notify()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs a function in the engine thread between two batches."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():  # whoever asked has gone
                return
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
        self._refuse()
        if not self._thread.is_alive():
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            self.cancel(*(slot.task for slot in self.slots if slot.task is not None))
            self._thread.join(timeout)

    def give_up(self) -> None:
        """Refuses new tasks and ends running ones with an error before the next batch."""
        self.call(self._fail_running)
        self._refuse()

    def _refuse(self) -> None:
        with self._wake:
            self._stopping = True
            waiting = self._queue.clear()
            self._wake.notify()
        for task in waiting:
            task.sink(Failed(task.index, 503, SHUTTING_DOWN))
            task.wake()

    def _fail_running(self) -> None:
        for slot in self.slots:
            if slot.task is not None:
                slot.fail(503, SHUTTING_DOWN)
                self._log_released(slot)

    def finish_drafts(self) -> None:
        """Logs the statistics of the drafters and lets them write their files; for after the thread's end."""
        for slot in self.slots:
            if slot.speculator is not None and slot.speculator.n_drafted:
                slot.speculator.save()
                for line in slot.speculator.lines():
                    self.log.event("print_stats", line, id_slot=slot.id)

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
            try:
                self._work()
            except Exception as error:
                self._fail_all(error)
            self._wake_readers()

    def _wake_readers(self) -> None:
        """Has the events of all slots delivered."""
        for wake in {slot.last_task.wake for slot in self.slots if slot.last_task is not None}:
            wake()

    def _work(self) -> None:
        """What has to be done between two waits."""
        self._run_calls()
        self._drop_cancelled()
        self._assign()
        if any(slot.task for slot in self.slots):
            self._step()
            if not any(slot.task for slot in self.slots) and not self._queue:
                self.log.event("slots_idle", "all slots are idle")

    def _fail_all(self, error: Exception) -> None:
        """After an error that nothing expected: the running requests end, the server goes on with empty slots."""
        self.log.caught("engine", "internal error", error)
        for slot in self.slots:
            slot.truncate(0)
            if slot.task is not None:
                slot.fail(500, f"internal error: {type(error).__name__}: {error}")

    def _wait(self) -> bool:
        """Sleeps until there is work; False when the thread should end."""
        with self._wake:
            while True:
                working = [slot for slot in self.slots if slot.task]
                if self._calls or any(not slot.is_held for slot in working):
                    return True
                if any(self.reuse.choose(task) is not None for task in self._queue):
                    return True
                if self._stopping and not working:
                    return False
                self._wake.wait()

    def _run_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def _drop_cancelled(self) -> None:
        if not self._any_cancelled:
            return
        with self._wake:
            self._any_cancelled = False
            self._queue.drop_cancelled()
        for slot in self.slots:
            if slot.task is not None and slot.task.cancelled:
                self._release(slot)

    def _assign(self) -> None:
        """Gives waiting tasks to idle slots. The queue is free meanwhile: saving a long text takes time."""
        while (pair := self._next()) is not None:
            self._start(*pair)

    def _next(self) -> tuple[Slot, Task] | None:
        """Takes the next task that has a slot from the queue."""
        if not self._queue or not self.n_idle:
            return None
        with self._wake:
            return self._queue.take(self.reuse.choose)

    def set_lora(self, scales: Mapping[int, float]) -> None:
        """Scales of requests that do not name their own; saved texts, evaluated with others, go."""
        self.adapters.set_lora(scales)
        self.prompt_cache.clear()

    def change_vectors(self, change: Callable[[Adapters], object]) -> None:
        """Changes the control vectors; caches of idle slots and saved texts go, since other vectors made them."""
        change(self.adapters)
        self.prompt_cache.clear()
        for slot in self.slots:
            if slot.state is SlotState.IDLE:
                slot.truncate(0)

    def _start(self, slot: Slot, task: Task) -> None:
        self.log.event("launch_slot_with_task", "slot is processing task", id_slot=slot.id, id_task=task.id)
        try:
            if self.adapters.use(slot.id, task.params.lora if isinstance(task, CompletionTask) else None):
                slot.truncate(0)
            slot.start(task)
        except (RequestError, UsageError) as error:
            slot.task = task
            slot.fail(400, str(error))
            task.wake()
            return
        if slot.may_reuse:
            self.reuse.find_text(slot)
        slot.keep_prefix()
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
        if slot.speculator is not None and timings.draft_n:
            assert timings.draft_n_accepted is not None
            rate = acceptance_line(timings.draft_n_accepted, timings.draft_n)
            self.log.event("print_timings", rate, id_slot=slot.id, id_task=task_id)
        self.log.event(
            "release_slots", "slot released", id_slot=slot.id, id_task=task_id, n_ctx=slot.n_ctx, n_past=n,
            n_system_tokens=0, n_cache_tokens=n, truncated=slot.truncated,
        )  # fmt: skip

    def _step(self) -> None:
        """One batch: assemble, evaluate, hand out."""
        plan = BatchPlan()
        self._resume_held()
        has_prompts = any([slot.state is PROMPT for slot in self.slots])
        if has_prompts:
            self.reuse.share_prefixes()
        self._add_generating(plan)
        if has_prompts:
            self.prompts.add_to(plan)
        if not len(plan.batch):
            return
        began = time.perf_counter()
        try:
            rows = self.context.decode(plan.batch, copy=False)
        except Exception as error:
            self._fail_batch(plan, error)
            return
        seconds = time.perf_counter() - began
        self.prompts.measure(len(plan.batch), seconds)
        self._count(plan, seconds)
        plan.report_progress()
        self._distribute(plan, rows)
        if self.context.token_states is not None:
            self._show_states(plan, self.context.token_states)

    def _add_generating(self, plan: BatchPlan) -> None:
        n_draft_max = self._n_draft_max()
        for slot in self.slots:
            if slot.state is GENERATING and slot.held is None:
                try:
                    tokens = slot.take_pending(n_draft_max)
                except RequestError as error:
                    slot.fail(400, str(error))
                    tokens = []
                if tokens:
                    plan.add(slot, tokens, "all")
                else:
                    self._log_released(slot)

    def _n_draft_max(self) -> int:
        """Guesses a slot may add: its share of a batch that is rounded as single tokens are, beside one per slot."""
        return max(0, self.context.max_uniform_tokens - len(self.slots)) // len(self.slots)

    def _count(self, plan: BatchPlan, seconds: float) -> None:
        """Shares the time of a batch between prompts and generation by their tokens."""
        n_tokens = len(plan.batch)
        n_predicted = sum([n for slot, n in plan.outputs if slot.state is GENERATING])
        n_prompt = n_tokens - n_predicted
        totals = self.metrics.totals
        totals.prompt_n += n_prompt
        totals.prompt_s += seconds * n_prompt / n_tokens
        totals.predicted_s += seconds * n_predicted / n_tokens

    def _distribute(self, plan: BatchPlan, rows: Any) -> None:
        start = 0
        for slot, n in plan.outputs:
            first, start = start, start + n
            task = slot.task
            if task is None or task.cancelled:
                continue
            if isinstance(task, EmbeddingTask):
                assert self.context.embeddings is not None
                slot.add_states(self.context.embeddings[first:start].copy())
            else:
                self._sample(slot, partial(slot.sample_all, rows[first:start]))
            if slot.task is None:
                self._log_released(slot)

    @staticmethod
    def _show_states(plan: BatchPlan, states: NDArray[np.float32]) -> None:
        """Gives the drafters the hidden states of the tokens that were kept."""
        row = 0
        for slot, first, n in plan.parts:
            slot.observe(first, states[row : row + n])
            row += n

    def _resume_held(self) -> None:
        """Draws the tokens whose masks are there; the other slots of a batch did not wait for them."""
        for slot in self.slots:
            if slot.held is not None and not slot.is_held:
                self._sample(slot, slot.resume)
                if slot.task is None:
                    self._log_released(slot)

    def _tell(self) -> None:
        with self._wake:
            self._wake.notify()

    def _sample(self, slot: Slot, draw: Callable[[], None]) -> None:
        before = slot.n_decoded
        try:
            draw()
            self.metrics.totals.predicted_n += slot.n_decoded - before
            if slot.held is not None:
                slot.when_ready(self._tell)
            elif slot.token_delay is not None:
                self.metrics.delays.append(slot.token_delay)
        except NotANumberError as error:
            slot.fail(500, str(error))
        except IkpyError as error:
            slot.fail(400, str(error))
        except Exception as error:
            self.log.caught("sample", "sampling failed", error, id_slot=slot.id)
            slot.fail(500, f"sampling failed: {error}")

    def _fail_batch(self, plan: BatchPlan, error: Exception) -> None:
        """Ends every request of a batch that could not be evaluated; their caches are emptied."""
        self.log.caught("step", "batch failed", error)
        for slot, _, _ in plan.parts:
            if slot.task is not None:
                slot.truncate(0)
                slot.fail(500, str(error))
