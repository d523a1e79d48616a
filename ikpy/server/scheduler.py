"""The engine thread: queue, slots, continuous batching.

Every step evaluates one batch: one token of every generating slot first, then prompt tokens of the others.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import UsageError
from ikpy.server.adapters import Adapters
from ikpy.server.batch_steps import BatchSteps, log_released
from ikpy.server.batching import PromptFeeder
from ikpy.server.checkpoints import Checkpoints
from ikpy.server.context_fit import RequestError
from ikpy.server.engine_calls import EngineCall
from ikpy.server.errors import SHUTTING_DOWN, ApiError, engine_ended, queue_full, shutting_down
from ikpy.server.guarded_speculator import GuardedSpeculator
from ikpy.server.metrics import Metrics
from ikpy.server.prompt_cache import PromptCache
from ikpy.server.reuse import Reuse
from ikpy.server.slot_reports import SlotState
from ikpy.server.slots import Slot
from ikpy.server.task_queue import TaskQueue
from ikpy.server.tasks import CompletionTask, Failed, Task

if TYPE_CHECKING:
    from ikpy.engine.context import Context
    from ikpy.engine.speculative import Speculation
    from ikpy.server.log import ServerLog
    from ikpy.server.settings import ServerSettings
    from ikpy.tools.media_tokens import MediaReader
    from ikpy.vocab import Vocab

T = TypeVar("T")
LONG_CALL_SECONDS = 0.05
LAST_BATCH_SECONDS = 5.0
"""The batch at work when all requests have ended may take so long before slots are given up."""


def internal_error(error: Exception) -> str:
    """What clients are told of an error that nothing expected."""
    return f"internal error: {type(error).__name__}: {error}"


def fail(tasks: Iterable[Task], code: int, message: str) -> None:
    """Ends tasks with an error."""
    for task in tasks:
        task.sink(Failed(task.index, code, message))
        task.wake()


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
        media: MediaReader | None = None,
    ) -> None:
        self.context = context
        self.settings = settings
        self.log = log
        self.metrics = Metrics()
        self.adapters = Adapters(context, directions)
        self.n_ctx_slot = min(context.n_ctx // settings.n_slots, context.n_ctx_seq)
        self.slots = [
            Slot(
                i,
                self.n_ctx_slot,
                context,
                vocab,
                shift=settings.context_shift,
                special=settings.special,
                speculator=GuardedSpeculator(speculation.speculator(i), i, log) if speculation else None,
                media=media,
            )
            for i in range(settings.n_slots)
        ]
        self.prompt_cache = PromptCache(settings.cache_ram)
        self.reuse = Reuse(self.slots, self.adapters, self.prompt_cache, settings, log)
        checkpoints = Checkpoints(context.kv.recurrent, settings)
        self.prompts = PromptFeeder(context, self.slots, settings, self.reuse, checkpoints, log)
        parts = self.prompts, self.reuse, checkpoints
        self._steps = BatchSteps(context, self.slots, *parts, self.metrics, log, self._tell)
        self._queue = TaskQueue()
        self._calls: deque[EngineCall[Any]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._ended = False
        """Whether nobody looks for calls any more."""
        self.failure: str | None = None
        """The error that ended the thread."""
        self._any_cancelled = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        log.event("init", "initializing slots", n_slots=settings.n_slots, **checkpoints.limits)
        for slot in self.slots:
            log.event("init", "new slot", id_slot=slot.id, n_ctx_slot=slot.n_ctx)

    # other threads

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, *tasks: Task) -> None:
        """Queues the tasks of a request, all or none.

        Raises ApiError 503 when too many requests wait already or the server is stopping.
        """
        with self._wake:
            self.check_room()
            self._queue.extend(tasks)
            self._wake.notify()

    def check_room(self) -> None:
        """Raises ApiError 503 if no more requests are taken at the moment."""
        if self._stopping:
            raise self._refusal()
        waiting = self._queue.n_requests
        if waiting >= max(self.settings.queue_limit, 1) + self.n_idle:
            raise queue_full(waiting)

    def cancel(self, *tasks: Task) -> None:
        """Gives up tasks; their slots are free before the next batch."""
        with self._wake:
            self._any_cancelled = True  # first: a batch that ends meanwhile leaves out what is cancelled
            for task in tasks:
                task.cancelled = True
            self._wake.notify()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs a function in the engine thread between two batches; ApiError 503 once the thread has ended."""
        call = EngineCall(function)
        with self._wake:
            if not self._ended:
                self._calls.append(call)
                self._wake.notify()
                return call.future
        call.refuse(self._refusal())
        return call.future

    def _refusal(self) -> ApiError:
        """What those are told who come after the end."""
        return shutting_down() if self.failure is None else engine_ended(self.failure)

    def stop(self, timeout: float = 30.0) -> None:
        """Refuses new tasks, lets running ones end (at most ``timeout`` seconds), ends the thread."""
        self._refuse()
        if not self._thread.is_alive():
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            running = [slot.task for slot in self.slots]  # asked once: they may end meanwhile
            self.cancel(*(task for task in running if task is not None))
            self._thread.join(max(timeout, LAST_BATCH_SECONDS))

    @property
    def is_running(self) -> bool:
        """Whether the thread works on slots."""
        return self._thread.is_alive()

    def give_up(self) -> None:
        """Refuses new tasks and ends running ones with an error before the next batch."""
        self._refuse()  # first: those that wait would take the slots of those that ran
        self.call(self._fail_running)

    def _refuse(self) -> None:
        with self._wake:
            self._stopping = True
            waiting = self._queue.clear()
            self._wake.notify()
        fail(waiting, 503, SHUTTING_DOWN)

    def _fail_running(self) -> None:
        for slot in self.slots:
            if slot.task is not None:
                slot.fail(503, SHUTTING_DOWN)
                log_released(self.log, slot)

    def finish_drafts(self) -> None:
        """Logs the statistics of the drafters and lets them write their files; for after the thread's end, before which
        a batch may be at work on them."""
        if self.is_running:
            self.log.failure("finish_drafts", "drafts not saved", error="a batch has not ended")
            return
        failures: dict[str, None] = {}  # slots share files
        for slot in self.slots:
            if slot.speculator is not None:
                failures |= dict.fromkeys(slot.speculator.save())
                for line in slot.speculator.lines() if slot.speculator.n_drafted else []:
                    self.log.event("print_stats", line, id_slot=slot.id)
        for reason in failures:
            self.log.caution("finish_drafts", "drafts not saved", error=reason)

    @property
    def longest_answer(self) -> int:
        """Most tokens of an answer without a limit."""
        return self.slots[0].n_endless

    @property
    def n_idle(self) -> int:
        """Slots without a request."""
        return sum(slot.state is SlotState.IDLE for slot in self.slots)

    @property
    def n_deferred(self) -> int:
        """Requests that wait for a slot."""
        return len(self._queue)

    # the thread

    def _run(self) -> None:
        self.log.event("slots_idle", "all slots are idle")
        try:
            while self._go_on():
                self._wake_readers()
        except BaseException as error:  # the panic of an extension module is no Exception
            self._break_down(error)

    def _go_on(self) -> bool:
        """Waits for work and does it; False when the thread should end."""
        try:
            if not self._wait():
                return False
            self._work()
        except Exception as error:
            self._fail_all(error)
        return True

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
            self._steps.run()
            if not any(slot.task for slot in self.slots) and not self._queue:
                self.log.event("slots_idle", "all slots are idle")

    def _fail_all(self, error: Exception) -> None:
        """After an error that nothing expected: the running requests end, the server goes on with empty slots."""
        self.log.caught("engine", "internal error", error)
        for slot in self.slots:
            slot.truncate(0)
            if slot.task is not None:
                slot.fail(500, internal_error(error))

    def _fail_waiting(self, error: Exception) -> None:
        """After an error while slots were chosen for them: the next look would end in it as well."""
        with self._wake:
            waiting = self._queue.clear()
        fail(waiting, 500, internal_error(error))

    def _break_down(self, error: BaseException) -> None:
        """After an error that the slots could not be freed from: all requests end, and later ones are refused."""
        self.log.caught("engine", "the engine has ended, the server must be started again", error)
        with self._wake:
            self.failure = f"{type(error).__name__}: {error}"
            self._stopping = self._ended = True
            tasks = self._queue.clear() + [slot.task for slot in self.slots if slot.task is not None]
        fail(tasks, 503, engine_ended(self.failure).message)
        for call in self._calls:
            call.refuse(engine_ended(self.failure))
        self._wake_readers()

    def _wait(self) -> bool:
        """Sleeps until there is work; False when the thread should end."""
        try:
            with self._wake:
                while not self._has_work():
                    if self._stopping and not any(slot.task for slot in self.slots):
                        self._ended = True
                        return False
                    self._wake.wait()
        except Exception as error:
            self._fail_waiting(error)
            raise
        return True

    def _has_work(self) -> bool:
        if self._calls or any(slot.task and not slot.is_held for slot in self.slots):
            return True
        return any(self.reuse.choose(task) is not None for task in self._queue)

    def _run_calls(self) -> None:
        """Runs what others wait for; while answers are written, no more than one that takes long."""
        began = time.monotonic()
        while self._calls:
            self._calls.popleft().run()
            if time.monotonic() - began > LONG_CALL_SECONDS and any(slot.task for slot in self.slots):
                break

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
        try:
            with self._wake:
                return self._queue.take(self.reuse.choose)
        except Exception as error:
            self._fail_waiting(error)
            raise

    def set_lora(self, scales: Mapping[int, float]) -> None:
        """Scales of requests that do not name their own."""
        self.adapters.set_lora(scales)

    def change_vectors(self, change: Callable[[Adapters], object]) -> None:
        """Changes the control vectors; caches of slots and saved texts go, since other vectors made them, those of busy
        slots when their requests end."""
        change(self.adapters)
        self.prompt_cache.clear()
        for slot in self.slots:
            if slot.state is SlotState.IDLE:
                slot.truncate(0)
            else:
                slot.is_stale = True

    def _start(self, slot: Slot, task: Task) -> None:
        self.log.event("launch_slot_with_task", "slot is processing task", id_slot=slot.id, id_task=task.id)
        slot.task = slot.last_task = task  # which ends with any error from here on
        try:
            self._use_adapters(slot, task)
            slot.start(task)
        except (RequestError, UsageError) as error:
            slot.fail(400, str(error))
            task.wake()
            return
        if slot.may_reuse:
            self.reuse.find_text(slot)
        else:
            self.reuse.save_text(slot)
        slot.keep_prefix()
        where = {"id_slot": slot.id, "id_task": task.id}
        if isinstance(task, CompletionTask) and slot.n_cached == len(slot.prompt) - 1 and slot.n_cached:
            message = "we have to evaluate at least 1 token to generate logits"
            self.log.event("batch_pending_prompt", message, **where)
        self.log.event("batch_pending_prompt", "kv cache rm [p0, end)", **where, p0=slot.n_cached)

    def _use_adapters(self, slot: Slot, task: Task) -> None:
        """Gives a slot the adapter scales of a request; a text of others is saved and goes. Raises UsageError for an
        unknown adapter."""
        wanted = self.adapters.wanted(task.params.lora if isinstance(task, CompletionTask) else None)
        if not self.adapters.has(slot.id, wanted):
            self.reuse.save_text(slot)
            self.adapters.use(slot.id, wanted)
            slot.truncate(0)

    def _release(self, slot: Slot) -> None:
        """Ends the request of a slot and logs it."""
        slot.release()
        log_released(self.log, slot)

    def _tell(self) -> None:
        """A mask that a slot waits for is there."""
        with self._wake:
            self._wake.notify()
