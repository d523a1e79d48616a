"""Drafters whose errors end no answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from ikpy.engine.speculative import Speculator

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ikpy.engine.session import SequenceState
    from ikpy.server.log import ServerLog

P = ParamSpec("P")
T = TypeVar("T")


class GuardedSpeculator(Speculator):
    """The drafters of a slot. An error of one is logged, and nothing is guessed until the next answer begins: guesses
    save time and change no text."""

    def __init__(self, speculator: Speculator, id_slot: int, log: ServerLog) -> None:
        super().__init__(speculator.drafters, speculator.params, speculator.media)
        self._id_slot = id_slot
        self._log = log
        self._failed = False

    def begin(self, tokens: Sequence[int]) -> None:
        self._failed = False
        self._try(super().begin, tokens)

    def draft(
        self, tokens: Sequence[int], n_max: int | None = None, n_min: int | None = None, p_min: float | None = None
    ) -> list[int]:
        return self._try(super().draft, tokens, n_max, n_min, p_min) or []

    def accept(self, n_accepted: int) -> None:
        self._try(super().accept, n_accepted)

    def observe(self, text: Sequence[int], states: NDArray[np.float32]) -> None:
        self._try(super().observe, text, states)

    def adopt(self, other: Speculator, n: int) -> None:
        self._try(super().adopt, other, n)

    def shift(self, keep: int, drop: int) -> None:
        self._try(super().shift, keep, drop)

    def take_states(self) -> tuple[SequenceState | None, ...]:
        return self._try(super().take_states) or (None,) * len(self.drafters)

    def put_states(self, states: Sequence[SequenceState | None]) -> None:
        self._try(super().put_states, states)

    @property
    def state_nbytes(self) -> int:
        return self._try(lambda: sum(drafter.state_nbytes for drafter in self.drafters)) or 0

    def _try(self, call: Callable[P, T], *args: P.args, **more: P.kwargs) -> T | None:
        """What a call gives; None if it fails, or one has failed before."""
        if self._failed:
            return None
        try:
            return call(*args, **more)
        except Exception as error:
            self._failed = True
            self._log.caught("draft", "drafting failed, the answer goes on without", error, id_slot=self._id_slot)
            return None
