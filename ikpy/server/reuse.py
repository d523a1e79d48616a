"""Which evaluated text serves which prompt: that of a slot, of another one, of one at work, or a saved one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ikpy.engine.kv_cache import KVCacheFullError
from ikpy.engine.prefix import common_prefix
from ikpy.errors import ResourceError
from ikpy.server.pieces import Piece, find_pieces
from ikpy.server.slot_reports import SlotState
from ikpy.server.slots import Slot
from ikpy.server.tasks import CompletionTask, Task

if TYPE_CHECKING:
    from ikpy.server.adapters import Adapters
    from ikpy.server.log import ServerLog
    from ikpy.server.prompt_cache import PromptCache, SavedText
    from ikpy.server.settings import ServerSettings


LEAST_SHARED = 16
"""Tokens of a common beginning that are worth sharing between slots."""


def share(slot: Slot, donor: Slot) -> None:
    """Gives a slot the part of a donor's cache that its prompt begins with; the cells are stored once."""
    if not slot.may_reuse:
        return
    n = donor.reusable(min(common_prefix(donor.tokens, slot.prompt), len(slot.prompt) - 1))
    if n >= len(slot.tokens) + LEAST_SHARED and slot.extend_from(donor, n):
        slot.n_cached = n


def should_wait(slot: Slot, other: Slot) -> bool:
    """Whether another slot is about to evaluate the next tokens of a slot's prompt."""
    ahead = (len(other.tokens), -other.id) > (len(slot.tokens), -slot.id)
    if not (ahead and other.n_waiting and slot.may_reuse):
        return False
    return common_prefix(other.prompt, slot.prompt) >= max(len(slot.tokens), len(other.tokens)) + LEAST_SHARED


class Reuse:
    """Finds what of a prompt is evaluated already. Texts serve sequences with the same adapter scales only."""

    def __init__(
        self,
        slots: Sequence[Slot],
        adapters: Adapters,
        prompt_cache: PromptCache,
        settings: ServerSettings,
        log: ServerLog,
    ) -> None:
        self._slots = slots
        self._adapters = adapters
        self._prompt_cache = prompt_cache
        self._settings = settings
        self._log = log
        self._can_move = all(slot.can_move for slot in slots)
        if settings.cache_reuse > 0 and not self._can_move:
            log.event("init", "cache_reuse has no effect: the cache of this model cannot be shifted")

    def choose(self, task: Task) -> Slot | None:
        """Idle slot for a task: the wanted one, the one with the most similar cache, or the one unused for longest."""
        idle = [slot for slot in self._slots if slot.state is SlotState.IDLE]
        wanted = task.params.id_slot if isinstance(task, CompletionTask) else -1
        if wanted >= 0:
            idle = [slot for slot in idle if slot.id == wanted]
        if not idle:
            return None
        best = max(idle, key=lambda slot: self._similarity(slot, task))
        if self._similarity(best, task) > self._settings.slot_prompt_similarity:
            return best
        return min(idle, key=lambda slot: slot.last_used)

    def _similarity(self, slot: Slot, task: Task) -> float:
        """How much of a task's prompt a slot could keep: 2 * tokens / (prompt + cache)."""
        if not self._adapters.serves(slot.id, task.params.lora if isinstance(task, CompletionTask) else None):
            return 0.0
        total = len(task.tokens) + len(slot.tokens)
        same = common_prefix(slot.tokens, list(task.tokens))
        pieces = self._pieces(slot, task, task.tokens, same)
        return 2.0 * (same + sum(piece.n_tokens for piece in pieces)) / total if total else 0.0

    def _pieces(self, slot: Slot, task: Task | None, prompt: Sequence[int], same: int) -> list[Piece]:
        """Pieces of a slot's text that continue a prompt behind the tokens that both begin with."""
        n_min = task.params.cache_reuse if isinstance(task, CompletionTask) and task.params.cache_prompt else 0
        if n_min <= 0 or not self._can_move or same == len(slot.tokens):
            return []
        if slot.holds_media or (task is not None and task.media):
            return []
        return find_pieces(slot.tokens, prompt, same, n_min)

    def find_text(self, slot: Slot) -> None:
        """Fills a slot with the longest beginning of its prompt that was evaluated anywhere: in its own cache, in
        another slot, or in a saved text; with ``cache_reuse`` pieces of its own text are moved. What is lost of its own
        text is saved."""
        same = slot.reusable(common_prefix(slot.tokens, slot.prompt))
        pieces = self._pieces(slot, slot.task, slot.prompt, same)
        own = same + sum(piece.n_tokens for piece in pieces)
        others = ((other.reusable(common_prefix(other.tokens, slot.prompt)), other) for other in self._others(slot))
        shared, other = max(others, key=lambda pair: pair[0], default=(0, slot))
        n_saved, saved = self._prompt_cache.best(slot.prompt, slot.scales)
        old = self._lost_text(slot, own)
        if saved is not None and n_saved > max(own, shared):
            self._prompt_cache.use(saved)
            if not slot.put_state(saved):
                self._log.event("find_text", "no room for the saved text", id_slot=slot.id, n_saved=len(saved.tokens))
        elif shared > own:
            slot.adopt(other, shared)
        elif pieces:
            self._move(slot, same, pieces)
        if old is not None:  # last, as it may push out the state that was just used
            self._prompt_cache.store(old)

    def save_text(self, slot: Slot) -> None:
        """Saves the text of a slot whose request goes on from none."""
        old = self._lost_text(slot, 0)
        if old is not None:
            self._prompt_cache.store(old)

    def _lost_text(self, slot: Slot, n_kept: int) -> SavedText | None:
        """A copy of what a slot holds, if a request keeps too few tokens of it and the cache of texts wants it."""
        n, settings = len(slot.tokens), self._settings
        is_lost = n >= max(1, settings.cache_ram_n_min) and n_kept < settings.cache_ram_similarity * n
        return self._state_to_keep(slot) if is_lost else None

    def _move(self, slot: Slot, same: int, pieces: Sequence[Piece]) -> None:
        """Moves pieces of a slot's own text to where its prompt has them."""
        try:
            slot.move_pieces(same, pieces)
        except KVCacheFullError:
            self._log.event("find_text", "no room to move pieces of the text", id_slot=slot.id)
            return
        n = sum(piece.n_tokens for piece in pieces)
        self._log.event("find_text", "pieces of the text moved", id_slot=slot.id, n_pieces=len(pieces), n_moved=n)

    def _state_to_keep(self, slot: Slot) -> SavedText | None:
        """A copy of what a slot holds, if the cache of texts wants it."""
        cache = self._prompt_cache
        wanted = cache.wants(slot.tokens, slot.scales) and cache.has_room_for(slot.state_nbytes)
        try:
            return slot.take_state() if wanted else None
        except (MemoryError, ResourceError) as error:  # the request goes on without
            self._log.event("find_text", "the text is not saved", id_slot=slot.id, error=str(error))
            return None

    def share_prefixes(self) -> None:
        """Prompts take over what other slots have evaluated meanwhile."""
        for slot in self._slots:
            if slot.n_waiting:
                for donor in self._others(slot):
                    share(slot, donor)

    def waits(self, slot: Slot) -> bool:
        """Whether a prompt should wait until another slot has evaluated their common beginning."""
        return any(should_wait(slot, other) for other in self._others(slot))

    def _others(self, slot: Slot) -> Iterator[Slot]:
        """Slots whose texts can serve a slot."""
        return (
            other
            for other in self._slots
            if other is not slot and not other.is_stale and self._adapters.are_equal(slot.id, other.id)
        )
