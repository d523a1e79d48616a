"""A step of the engine: one batch with tokens of all slots is put together, evaluated, and its results handed out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ikpy.engine.sampling import NotANumberError
from ikpy.engine.speculative import acceptance_line
from ikpy.errors import IkpyError
from ikpy.server.batching import BatchPlan, PromptFeeder
from ikpy.server.context_fit import ContextShift, RequestError
from ikpy.server.slot_reports import SlotState, timings_of
from ikpy.server.slots import Slot
from ikpy.server.tasks import EmbeddingTask

if TYPE_CHECKING:
    from ikpy.engine.context import Context
    from ikpy.server.checkpoints import Checkpoints
    from ikpy.server.log import ServerLog
    from ikpy.server.metrics import Metrics
    from ikpy.server.reuse import Reuse

PROMPT, GENERATING = SlotState.PROMPT, SlotState.GENERATING


def log_released(log: ServerLog, slot: Slot) -> None:
    """Logs the end of a slot's request."""
    task_id = -1 if slot.last_task is None else slot.last_task.id
    n = len(slot.tokens)
    timings = slot.finished.timings if slot.finished else timings_of(slot)
    log.timings(slot.id, task_id, timings)
    if slot.speculator is not None and timings.draft_n:
        assert timings.draft_n_accepted is not None
        rate = acceptance_line(timings.draft_n_accepted, timings.draft_n)
        log.event("print_timings", rate, id_slot=slot.id, id_task=task_id)
    log.event(
        "release_slots", "slot released", id_slot=slot.id, id_task=task_id, n_ctx=slot.n_ctx, n_past=n,
        n_system_tokens=0, n_cache_tokens=n, truncated=slot.truncated,
    )  # fmt: skip


class BatchSteps:
    """Evaluates batches for the slots of a context, in the engine thread.

    tell: called, from any thread, when a mask is there that a slot waits for.
    """

    def __init__(
        self,
        context: Context,
        slots: Sequence[Slot],
        prompts: PromptFeeder,
        reuse: Reuse,
        checkpoints: Checkpoints,
        metrics: Metrics,
        log: ServerLog,
        tell: Callable[[], None],
    ) -> None:
        self._context = context
        self._slots = slots
        self._prompts = prompts
        self._reuse = reuse
        self._checkpoints = checkpoints
        self._metrics = metrics
        self._log = log
        self._tell = tell

    def run(self) -> None:
        """One batch: assemble, evaluate, hand out."""
        plan = BatchPlan()
        self._resume_held()
        has_prompts = any([slot.state is PROMPT for slot in self._slots])
        if has_prompts:
            self._reuse.share_prefixes()
        self._add_generating(plan)
        if has_prompts:
            self._prompts.add_to(plan)
        if not len(plan.batch):
            return
        began = time.perf_counter()
        try:
            rows = self._context.decode(plan.batch, copy=False)
        except Exception as error:
            self._fail_batch(plan, error)
            return
        seconds = time.perf_counter() - began
        self._prompts.measure(len(plan.batch), seconds)
        self._count(plan, seconds)
        # States behind guesses are not those of the text before these were judged.
        guessing = [slot for slot, _, _ in plan.parts if slot.draft]
        for slot, _, _ in plan.parts:
            if not slot.draft:
                self._checkpoints.keep(slot)
        plan.report_progress()
        self._distribute(plan, rows)
        for slot in guessing:
            self._checkpoints.keep(slot)
        if self._context.token_states is not None:
            self._show_states(plan, self._context.token_states)

    def _add_generating(self, plan: BatchPlan) -> None:
        n_draft_max = self._n_draft_max()
        for slot in self._slots:
            if slot.state is GENERATING and slot.held is None:
                try:
                    tokens = slot.take_pending(n_draft_max)
                except RequestError as error:
                    slot.fail(400, str(error))
                    tokens = []
                if slot.shifted is not None:
                    self._log_shift(slot, slot.shifted)
                if tokens:
                    plan.add(slot, tokens, "all")
                else:
                    log_released(self._log, slot)

    def _log_shift(self, slot: Slot, shift: ContextShift) -> None:
        task_id = -1 if slot.task is None else slot.task.id
        fields = {"id_slot": slot.id, "id_task": task_id, **shift._asdict(), "n_ctx": slot.n_ctx}
        self._log.event("shift_context", "slot context shift", **fields)

    def _n_draft_max(self) -> int:
        """Guesses a slot may add: its share of a batch that is rounded as single tokens are, beside one per slot, and
        no more than can be taken back."""
        share = max(0, self._context.max_uniform_tokens - len(self._slots)) // len(self._slots)
        return min(share, self._context.kv.removable)

    def _count(self, plan: BatchPlan, seconds: float) -> None:
        """Shares the time of a batch between prompts and generation by their tokens."""
        n_tokens = len(plan.batch)
        n_predicted = sum([n for slot, n in plan.outputs if slot.state is GENERATING])
        n_prompt = n_tokens - n_predicted
        totals = self._metrics.totals
        totals.prompt_n += n_prompt
        totals.prompt_s += seconds * n_prompt / n_tokens
        totals.predicted_s += seconds * n_predicted / n_tokens
        batches, slots = self._metrics.batches, [slot for slot, _, _ in plan.parts]
        batches.n += 1
        batches.n_busy += len(slots)
        batches.n_longest = max(batches.n_longest, *[len(slot.tokens) for slot in slots])
        for slot in slots:
            batches.n_drafts += bool(slot.draft)
            batches.n_drafted += len(slot.draft)

    def _distribute(self, plan: BatchPlan, rows: Any) -> None:
        start = 0
        for slot, n in plan.outputs:
            first, start = start, start + n
            task = slot.task
            if task is None or task.cancelled:
                continue
            if slot.state is PROMPT and not slot.n_waiting:
                self._metrics.batches.n_cached += slot.n_cached
            if isinstance(task, EmbeddingTask):
                self._add_states(slot, first, start)
            else:
                self._sample(slot, partial(slot.sample_all, rows[first:start]))
            if slot.task is None:
                log_released(self._log, slot)

    def _add_states(self, slot: Slot, first: int, end: int) -> None:
        """Gives a slot the hidden states of its tokens; a text whose states find no memory is no error of others."""
        assert self._context.embeddings is not None
        try:
            slot.add_states(self._context.embeddings[first:end].copy())
        except Exception as error:
            self._log.caught("embed", "embedding failed", error, id_slot=slot.id)
            slot.fail(500, f"embedding failed: {error}")

    @staticmethod
    def _show_states(plan: BatchPlan, states: NDArray[np.float32]) -> None:
        """Gives the drafters the hidden states of the tokens that were kept."""
        row = 0
        for slot, first, n in plan.parts:
            slot.observe(first, states[row : row + n])
            row += n

    def _resume_held(self) -> None:
        """Draws the tokens whose masks are there; the other slots of a batch did not wait for them."""
        for slot in self._slots:
            if slot.held is not None and not slot.is_held:
                self._sample(slot, slot.resume)
                if slot.task is None:
                    log_released(self._log, slot)

    def _sample(self, slot: Slot, draw: Callable[[], None]) -> None:
        before, n_accepted = slot.n_decoded, slot.n_accepted
        try:
            draw()
            self._metrics.totals.predicted_n += slot.n_decoded - before
            self._metrics.batches.n_accepted += slot.n_accepted - n_accepted
            if slot.held is not None:
                slot.when_ready(self._tell)
            elif slot.token_delay is not None:
                self._metrics.delays.append(slot.token_delay)
        except NotANumberError as error:
            slot.is_stale = True  # tokens before the one that brought a NaN may have got it, too
            slot.fail(500, str(error))
        except IkpyError as error:
            slot.fail(400, str(error))
        except Exception as error:
            self._log.caught("sample", "sampling failed", error, id_slot=slot.id)
            slot.fail(500, f"sampling failed: {error}")

    def _fail_batch(self, plan: BatchPlan, error: Exception) -> None:
        """Ends every request of a batch that could not be evaluated; their caches are emptied."""
        self._log.caught("step", "batch failed", error)
        for slot, _, _ in plan.parts:
            if slot.task is not None:
                slot.truncate(0)
                slot.fail(500, str(error))
