"""When checkpoints of recurrent states are made, so that a prompt which parts from its slot's text is not evaluated
from its first token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ikpy.server.slot_reports import SlotState
from ikpy.server.tasks import CompletionTask

if TYPE_CHECKING:
    from ikpy.engine.recurrent import RecurrentStates
    from ikpy.server.settings import ServerSettings
    from ikpy.server.slots import Slot


class Checkpoints:
    """Checkpoints of the slots' states: before the last tokens of every prompt, which a template writes otherwise once
    the answer is there, and every so many tokens."""

    def __init__(self, states: RecurrentStates | None, settings: ServerSettings) -> None:
        self._states = states if settings.ctx_checkpoints > 0 else None
        self._most = settings.ctx_checkpoints
        self._interval = settings.ctx_checkpoints_interval
        self._tolerance = settings.ctx_checkpoints_tolerance

    @property
    def limits(self) -> dict[str, int]:
        """For the log: most checkpoints of a slot and bytes of each; nothing for a model without states."""
        if self._states is None:
            return {}
        return {"n_checkpoints": self._most, "checkpoint_bytes": self._states.slot_nbytes}

    def piece(self, slot: Slot, n: int) -> int:
        """Of the next n tokens of a slot's prompt, those before the next checkpoint."""
        if self._states is None or not isinstance(slot.task, CompletionTask):
            return n
        left = slot.n_waiting - self._tolerance
        return left if 0 < left < n else n

    def keep(self, slot: Slot) -> None:
        """Makes a checkpoint behind the text of a slot, which has been evaluated, if one is due."""
        if self._states is None or not isinstance(slot.task, CompletionTask):
            return
        kept = self._states.checkpoints[slot.id]
        distance = len(slot.tokens) - (kept[-1].end if kept else 0)
        due = 0 < self._interval <= distance
        if due or (slot.state is SlotState.PROMPT and slot.n_waiting == self._tolerance):
            self._states.keep_checkpoint(slot.id, self._most)
