"""Batches of a step: what they hold, and how many prompt tokens they take.

While something is generating, a batch holds at most one micro-batch of prompt tokens and no more than the measured
speed gets through in the allowed delay, shared evenly among the waiting prompts, so that a long prompt delays neither
the tokens of other requests nor a short prompt by more than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ikpy.engine.batch import Batch
from ikpy.server.slot_reports import SlotState, timings_of
from ikpy.server.slots import Slot
from ikpy.server.tasks import CompletionTask, EmbeddingTask, Progress

if TYPE_CHECKING:
    from ikpy.engine.context import Context
    from ikpy.server.checkpoints import Checkpoints
    from ikpy.server.log import ServerLog
    from ikpy.server.reuse import Reuse
    from ikpy.server.settings import ServerSettings

LEAST_CHUNK = 16
"""Prompt tokens a batch may hold in any case; fewer would make every pass over the weights nearly useless."""
SPEED_MEMORY = 0.7
"""Weight of earlier measurements in the average time of a prompt token."""


class BatchPlan:
    """Tokens of one step and what is to be done with their outputs."""

    def __init__(self) -> None:
        self.batch = Batch()
        self.outputs: list[tuple[Slot, int]] = []
        """Slot and number of its output rows, in batch order."""
        self.parts: list[tuple[Slot, int, int]] = []
        """Slot, position of its first token and number of its tokens, in batch order."""
        self.picture_bytes = 0
        """Of the rows that stand for some of the tokens."""

    def add(self, slot: Slot, tokens: list[int], wanted: str) -> None:
        """Adds tokens the slot has just taken, with its guesses; wanted: outputs of "all", the "last" or "none"."""
        n = len(tokens)
        end = len(slot.tokens) + len(slot.draft)
        self.parts.append((slot, end - n, n))
        self.batch.add(tokens, end - n, slot.id, wanted, turn=slot.turn(end - n))
        if wanted != "none":
            self.outputs.append((slot, n if wanted == "all" else 1))

    def report_progress(self) -> None:
        """Tells clients that want to know how much of their prompts is evaluated."""
        for slot, _, _ in self.parts:
            report_progress(slot, timings_of(slot).prompt_ms)


def report_progress(slot: Slot, ms: float) -> None:
    """Tells a client that wants to know how much of its prompt is evaluated, behind ``ms`` milliseconds."""
    task = slot.task
    if slot.state is SlotState.PROMPT and isinstance(task, CompletionTask) and task.params.return_progress:
        slot.emit(Progress(task.index, slot.id, len(slot.prompt), slot.n_cached, len(slot.tokens), ms))


class PromptFeeder:
    """Adds tokens of waiting prompts to batches. ``token_seconds``: measured time of a prompt token, 0 for none."""

    def __init__(
        self,
        context: Context,
        slots: Sequence[Slot],
        settings: ServerSettings,
        reuse: Reuse,
        checkpoints: Checkpoints,
        log: ServerLog,
    ) -> None:
        self.token_seconds = 0.0
        self._context = context
        self._slots = slots
        self._settings = settings
        self._reuse = reuse
        self._checkpoints = checkpoints
        self._log = log

    def add_to(self, plan: BatchPlan) -> None:
        """Adds prompt tokens to a batch that has the tokens of generating slots."""
        waiting = [slot for slot in self._slots if slot.n_waiting and not self._reuse.waits(slot)]
        generating = len(plan.batch) > 0
        if generating and not self._settings.cont_batching:
            return
        causal = self._context.graph_params.causal
        if not causal:  # every token of a text sees all others: it takes one micro-batch
            budget = self._context.n_ubatch - len(plan.batch)
        else:
            budget = self.chunk() if generating else self._context.n_batch - len(plan.batch)
            if any(slot.scores_prompt for slot in waiting):  # memory for the logits of a micro-batch is there already
                budget = min(budget, self._room(len(plan.batch)))
        waiting.sort(key=lambda slot: slot.began)
        if causal:  # short prompts leave the rest of their shares to longer ones
            waiting = sorted(waiting[: max(0, budget)], key=lambda slot: slot.n_waiting)
        for i, slot in enumerate(waiting):
            n = min(slot.n_waiting, budget, max(1, budget // (len(waiting) - i)))
            if not causal and isinstance(slot.task, EmbeddingTask):  # its tokens see each other: all at once
                n = slot.n_waiting if slot.n_waiting <= budget else 0
            if n <= 0:
                continue
            n = self._checkpoints.piece(slot, n)
            if slot.has_media:
                n = self._uncut(plan, slot, n)
            if n <= 0:
                continue
            budget -= n
            if len(slot.tokens) == slot.n_cached:
                report_progress(slot, 0.0)
            tokens = slot.take_prompt(n)
            if isinstance(slot.task, EmbeddingTask) or slot.scores_prompt:
                plan.add(slot, tokens, "all")
            else:
                plan.add(slot, tokens, "none" if slot.n_waiting else "last")

    def _uncut(self, plan: BatchPlan, slot: Slot, n: int) -> int:
        """Of the next n tokens of a prompt with pictures those that cut none, or all of a picture; 0 if it waits."""
        try:
            n, n_bytes = slot.uncut(n, plan.picture_bytes)
        except Exception as error:
            self._log.caught("uncut", "a picture or a sound was not encoded again", error, id_slot=slot.id)
            slot.fail(500, f"a picture or a sound was not encoded again: {error}")
            return 0
        if len(plan.batch) and len(plan.batch) + n > self._context.n_batch:
            return 0
        plan.picture_bytes += n_bytes
        return n

    def chunk(self) -> int:
        """Prompt tokens a batch may take while answers are being generated.

        Powers of two below one micro-batch, so that few different batch sizes need a compiled plan.
        """
        most = self._room(sum(slot.state is SlotState.GENERATING for slot in self._slots))
        if not self.token_seconds or not self._settings.max_token_delay:
            return most
        wanted = int(self._settings.max_token_delay / self.token_seconds)
        return most if wanted >= most else min(most, max(LEAST_CHUNK, 1 << max(0, wanted.bit_length() - 1)))

    def _room(self, n_taken: int) -> int:
        """Prompt tokens beside so many others in a micro-batch; those of another one where these fill it, or prompts
        would wait for the end of an answer."""
        n_ubatch = self._context.n_ubatch
        return n_ubatch - n_taken if n_taken < n_ubatch else min(LEAST_CHUNK, n_ubatch)

    def measure(self, n_tokens: int, seconds: float) -> None:
        """Learns the time of a prompt token from batches that hold enough of them."""
        if n_tokens >= LEAST_CHUNK:
            each = seconds / n_tokens
            old = self.token_seconds or each
            self.token_seconds = SPEED_MEMORY * old + (1 - SPEED_MEMORY) * each
