"""What slots tell of their requests: what they do, answers, times, the fields that ``/slots`` shows."""

from __future__ import annotations

import time
from enum import Enum
from typing import TYPE_CHECKING, Any

from ikpy.server.tasks import CompletionTask, Finished, Task, Timings

if TYPE_CHECKING:
    from ikpy.server.answer import Answer
    from ikpy.server.slots import Slot

MOST_CHARACTERS = 16
"""Characters of a prompt per token of the context that reports show."""


class SlotState(Enum):
    """What a slot is doing."""

    IDLE = 0
    PROMPT = 1
    GENERATING = 2


def shown_prompt(task: Task, n_ctx: int) -> Any:
    """The prompt as reports show it: of one that may not have fitted the context, so much of its beginning."""
    if isinstance(task.prompt, str):
        return task.prompt[: MOST_CHARACTERS * n_ctx]
    return task.prompt[:n_ctx] if isinstance(task.prompt, list) else task.prompt


def finished(slot: Slot, answer: Answer) -> Finished:
    """The answer of a request that ends."""
    word = answer.stopping_word
    return Finished(
        index=answer.task.index,
        id_slot=slot.id,
        text=answer.text,
        tokens=tuple(answer.tokens),
        n_prompt=len(slot.prompt),
        n_cached=slot.n_cached,
        n_decoded=answer.n_decoded,
        n_past=len(slot.tokens),
        truncated=slot.truncated,
        stopped_eos=answer.ended and word is None,
        stopped_word=word is not None,
        stopped_limit=not answer.ended and word is None,
        stopping_word=word or "",
        probabilities=tuple(answer.probabilities),
        timings=timings_of(slot),
        prompt_probabilities=tuple(slot.scores.found) if slot.scores is not None else (),
    )


def timings_of(slot: Slot) -> Timings:
    """Times of the request so far."""
    now = time.perf_counter()
    first = (slot.answer.first if slot.answer is not None else 0.0) or now
    n_prompt = len(slot.prompt) - slot.n_cached
    return Timings(
        n_prompt,
        1e3 * (first - slot.began),
        slot.n_decoded,
        1e3 * (now - first),
        slot.n_ctx,
        len(slot.tokens),
        slot.n_cached,
        slot.n_drafted if slot.speculator else None,
        slot.n_accepted if slot.speculator else None,
    )


def status(slot: Slot) -> dict[str, Any]:
    """Fields of the slot behind its generation settings."""
    task, last = slot.last_task, slot.finished
    limit = task.params.limit if isinstance(task, CompletionTask) else -1
    return {
        "id": slot.id,
        "id_task": -1 if task is None else task.id,
        "state": int(slot.state is not SlotState.IDLE),
        "is_processing": slot.state is not SlotState.IDLE,
        "speculative": slot.speculator is not None,
        "n_prompt_tokens": len(slot.tokens),
        "n_prompt_tokens_processed": max(0, min(len(slot.prompt), len(slot.tokens)) - slot.n_cached),
        "n_prompt_tokens_cache": slot.n_cached,
        "prompt": None if task is None else shown_prompt(task, slot.n_ctx),
        "next_token": {
            "has_next_token": last is None,
            "n_remain": limit - slot.n_decoded if limit >= 0 else -1,
            "n_decoded": slot.n_decoded,
            "stopped_eos": bool(last and last.stopped_eos),
            "stopped_word": bool(last and last.stopped_word),
            "stopped_limit": bool(last and last.stopped_limit),
            "stopping_word": last.stopping_word if last else "",
        },
    }
