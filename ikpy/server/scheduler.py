"""The engine thread: queue, slots, continuous batching.

Every step evaluates one batch: one token of every generating slot first, then prompt tokens of the others. While
something is generating, a batch holds at most one micro-batch of prompt tokens and no more than the measured speed
gets through in the allowed delay, shared evenly among the waiting prompts, so that a long prompt delays neither the
tokens of other requests nor a short prompt by more than that.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ikpy.engine.batch import Batch
from ikpy.engine.prefix import common_prefix
from ikpy.engine.speculative import acceptance_line
from ikpy.errors import IkpyError, UsageError
from ikpy.server.adapters import Adapters
from ikpy.server.errors import queue_full, shutting_down
from ikpy.server.metrics import Metrics
from ikpy.server.prompt_cache import PromptCache, SavedText
from ikpy.server.slots import RequestError, Slot, SlotState
from ikpy.server.tasks import CompletionTask, EmbeddingTask, Failed, Task

if TYPE_CHECKING:
    from ikpy.engine.context import Context
    from ikpy.engine.speculative import Speculation
    from ikpy.server.log import ServerLog
    from ikpy.server.settings import ServerSettings
    from ikpy.vocab import Vocab

T = TypeVar("T")
PROMPT, GENERATING = SlotState.PROMPT, SlotState.GENERATING
LEAST_CHUNK = 16
"""Prompt tokens a batch may hold in any case; fewer would make every pass over the weights nearly useless."""
LONG_WAIT = 5.0
"""Seconds in the queue after which a task is no longer overtaken."""
SPEED_MEMORY = 0.7
"""Weight of earlier measurements in the average time of a prompt token."""


class _BatchPlan:
    """Tokens of one step and what is to be done with their outputs."""

    def __init__(self) -> None:
        self.batch = Batch()
        self.outputs: list[tuple[Slot, int]] = []
        """Slot and number of its output rows, in batch order."""
        self.parts: list[tuple[Slot, int, int]] = []
        """Slot, position of its first token and number of its tokens, in batch order."""

    def add(self, slot: Slot, tokens: list[int], wanted: str) -> None:
        """Adds tokens the slot has just taken, with its guesses; wanted: outputs of "all", the "last" or "none"."""
        n = len(tokens)
        end = len(slot.tokens) + len(slot.draft)
        self.parts.append((slot, end - n, n))
        self.batch.add(tokens, end - n, slot.id, wanted)
        if wanted != "none":
            self.outputs.append((slot, n if wanted == "all" else 1))


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
        self._token_seconds = 0.0
        self._queue: deque[Task] = deque()
        self._started: Counter[int] = Counter()
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
            waiting = len({task.request for task in self._queue})
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
        with self._wake:
            self._stopping = True
            waiting = list(self._queue)
            self._queue.clear()
            self._wake.notify()
        for task in waiting:
            task.sink(Failed(task.index, 503, "the server is shutting down"))
            task.wake()
        if not self._thread.is_alive():
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            self.cancel(*(slot.task for slot in self.slots if slot.task is not None))
            self._thread.join(timeout)

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
        self.log.failure("engine", "internal error", error=repr(error))
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
                if any(self._choose(task) is not None for task in self._queue):
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
            self._queue = deque(task for task in self._queue if not task.cancelled)
        for slot in self.slots:
            if slot.task is not None and slot.task.cancelled:
                self._release(slot)

    def _assign(self) -> None:
        """Gives waiting tasks to idle slots. The queue is free meanwhile: saving a long text takes time."""
        while (pair := self._next()) is not None:
            self._start(*pair)

    def _next(self) -> tuple[Slot, Task] | None:
        """Takes the next task that has a slot from the queue.

        First come tasks of requests of which the fewest were started, then the oldest: a request with many prompts
        cannot keep a later one waiting until all of its own are answered. Who has waited for long comes first in any
        case.
        """
        if not self._queue or not self.n_idle:
            return None
        old = time.monotonic() - LONG_WAIT
        with self._wake:
            first: dict[int, Task] = {}
            for task in self._queue:
                first.setdefault(task.request, task)
            self._started = Counter({request: n for request, n in self._started.items() if request in first})
            # Other tasks of a request want the same slot and come later.
            for task in sorted(first.values(), key=lambda t: 0 if t.queued < old else self._started[t.request]):
                slot = self._choose(task)
                if slot is not None:
                    self._queue.remove(task)
                    self._started[task.request] += 1
                    return slot, task
        return None

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
            if self.adapters.use(slot.id, task.params.lora if isinstance(task, CompletionTask) else None):
                slot.truncate(0)
            slot.start(task)
        except (RequestError, UsageError) as error:
            slot.task = task
            slot.fail(400, str(error))
            task.wake()
            return
        if slot.may_reuse:
            self._find_text(slot)
        slot.keep_prefix()
        where = {"id_slot": slot.id, "id_task": task.id}
        if isinstance(task, CompletionTask) and slot.n_cached == len(slot.prompt) - 1 and slot.n_cached:
            message = "we have to evaluate at least 1 token to generate logits"
            self.log.event("batch_pending_prompt", message, **where)
        self.log.event("batch_pending_prompt", "kv cache rm [p0, end)", **where, p0=slot.n_cached)

    def _find_text(self, slot: Slot) -> None:
        """Fills a slot with the longest beginning of its prompt that was evaluated anywhere: in its own cache, in
        another slot, or in a saved text. What is lost of its own text is saved (specification 10.7)."""
        own = common_prefix(slot.tokens, slot.prompt)
        n_min = max(1, self.settings.cache_ram_n_min)
        lost = len(slot.tokens) >= n_min and own < self.settings.cache_ram_similarity * len(slot.tokens)
        others = [s for s in self.slots if s is not slot and self.adapters.are_equal(slot.id, s.id)]
        other = max(others, key=lambda other: common_prefix(other.tokens, slot.prompt), default=slot)
        shared = common_prefix(other.tokens, slot.prompt)
        # Saved texts were evaluated with the server's own adapter scales.
        saving = self.adapters.is_default(slot.id)
        n_saved, saved = self.prompt_cache.best(slot.prompt) if saving else (0, None)
        old = self._state_to_keep(slot) if saving and lost else None
        if saved is not None and n_saved > max(own, shared):
            self.prompt_cache.use(saved)
            slot.put_state(saved)
        elif shared > own:
            slot.adopt(other, shared)
        if old is not None:  # last, as it may push out the state that was just used
            self.prompt_cache.store(old)

    def _state_to_keep(self, slot: Slot) -> SavedText | None:
        """A copy of what a slot holds, if the cache of texts wants it."""
        wanted = self.prompt_cache.wants(slot.tokens) and self.prompt_cache.has_room_for(slot.state_nbytes)
        return slot.take_state() if wanted else None

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
        plan = _BatchPlan()
        self._resume_held()
        has_prompts = any([slot.state is PROMPT for slot in self.slots])
        if has_prompts:
            self._share_prefixes()
        self._add_generating(plan)
        if has_prompts:
            self._add_prompts(plan)
        if not len(plan.batch):
            return
        began = time.perf_counter()
        try:
            rows = self.context.decode(plan.batch, copy=False)
        except Exception as error:
            self._fail_batch(plan, error)
            return
        seconds = time.perf_counter() - began
        self._measure(plan, seconds)
        self._count(plan, seconds)
        self._distribute(plan, rows)
        if self.context.token_states is not None:
            self._show_states(plan, self.context.token_states)

    def _share_prefixes(self) -> None:
        """Prompts take over what other slots have evaluated already under the same adapter scales."""
        for slot in self.slots:
            if slot.n_waiting:
                for donor in self.slots:
                    if donor is not slot and self.adapters.are_equal(slot.id, donor.id):
                        slot.share(donor)

    def _waits(self, slot: Slot) -> bool:
        """Whether a prompt should wait until another slot has evaluated their common beginning."""
        others = (other for other in self.slots if other is not slot and self.adapters.are_equal(slot.id, other.id))
        return any(slot.should_wait_for(other) for other in others)

    def _add_generating(self, plan: _BatchPlan) -> None:
        n_draft_max = self._n_draft_max()
        for slot in self.slots:
            if slot.state is GENERATING and slot.held is None:
                try:
                    plan.add(slot, slot.take_pending(n_draft_max), "all")
                except RequestError as error:
                    slot.fail(400, str(error))
                    self._log_released(slot)

    def _n_draft_max(self) -> int:
        """Guesses a slot may add: its share of a batch that is rounded as single tokens are, beside one per slot."""
        return max(0, self.context.max_uniform_tokens - len(self.slots)) // len(self.slots)

    def _add_prompts(self, plan: _BatchPlan) -> None:
        waiting = [slot for slot in self.slots if slot.n_waiting and not self._waits(slot)]
        generating = len(plan.batch) > 0
        if generating and not self.settings.cont_batching:
            return
        causal = self.context.graph_params.causal
        if not causal:  # every token of a text sees all others: it takes one micro-batch
            budget = self.context.n_ubatch - len(plan.batch)
        else:
            budget = self._chunk() if generating else self.context.n_batch - len(plan.batch)
        waiting.sort(key=lambda slot: slot.n_waiting)
        for i, slot in enumerate(waiting):
            n = min(slot.n_waiting, max(0, budget) // (len(waiting) - i))
            if not causal and isinstance(slot.task, EmbeddingTask):  # its tokens see each other: all at once
                n = slot.n_waiting if slot.n_waiting <= budget else 0
            if n == 0:
                continue
            budget -= n
            tokens = slot.take_prompt(n)
            if isinstance(slot.task, EmbeddingTask):
                plan.add(slot, tokens, "all")
            else:
                plan.add(slot, tokens, "none" if slot.n_waiting else "last")

    def _chunk(self) -> int:
        """Prompt tokens a batch may take while answers are being generated.

        Powers of two below one micro-batch, so that few different batch sizes need a compiled plan.
        """
        most = self.context.n_ubatch - sum(slot.state is SlotState.GENERATING for slot in self.slots)
        if not self._token_seconds or not self.settings.max_token_delay:
            return most
        wanted = int(self.settings.max_token_delay / self._token_seconds)
        return most if wanted >= most else min(most, max(LEAST_CHUNK, 1 << max(0, wanted.bit_length() - 1)))

    def _measure(self, plan: _BatchPlan, seconds: float) -> None:
        """Learns the time of a prompt token from batches that hold enough of them."""
        if len(plan.batch) >= LEAST_CHUNK:
            each = seconds / len(plan.batch)
            old = self._token_seconds or each
            self._token_seconds = SPEED_MEMORY * old + (1 - SPEED_MEMORY) * each

    def _count(self, plan: _BatchPlan, seconds: float) -> None:
        """Shares the time of a batch between prompts and generation by their tokens."""
        n_tokens = len(plan.batch)
        n_predicted = sum([n for slot, n in plan.outputs if slot.state is GENERATING])
        n_prompt = n_tokens - n_predicted
        totals = self.metrics.totals
        totals.prompt_n += n_prompt
        totals.prompt_s += seconds * n_prompt / n_tokens
        totals.predicted_s += seconds * n_predicted / n_tokens

    def _distribute(self, plan: _BatchPlan, rows: Any) -> None:
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
    def _show_states(plan: _BatchPlan, states: NDArray[np.float32]) -> None:
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
        except IkpyError as error:
            slot.fail(400, str(error))
        except Exception as error:
            self.log.failure("sample", "sampling failed", id_slot=slot.id, error=repr(error))
            slot.fail(500, f"sampling failed: {error}")

    def _fail_batch(self, plan: _BatchPlan, error: Exception) -> None:
        """Ends every request of a batch that could not be evaluated; their caches are emptied."""
        self.log.failure("step", "batch failed", error=repr(error))
        for slot, _, _ in plan.parts:
            if slot.task is not None:
                slot.truncate(0)
                slot.fail(500, str(error))
