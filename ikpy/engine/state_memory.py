"""Where the state of a recurrent layer lies: one tensor of it, with a slot for every sequence."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class StateMemory(Protocol):
    """The slots of one state tensor."""

    def zero(self, slot: int) -> None:
        """Makes all values of a slot 0."""

    def copy(self, source: int, target: int) -> None:
        """Gives a slot the values of another one."""

    def read(self, slot: int) -> NDArray[np.float32]:
        """A copy of a slot's values, float32 [n]."""

    def write(self, slot: int, values: NDArray[np.float32]) -> None:
        """Sets a slot's values, float32 [n]."""


class HostStates:
    """Slots in host memory: rows float32 [n_slots, n]."""

    def __init__(self, rows: NDArray[np.float32]) -> None:
        self._rows = rows

    def zero(self, slot: int) -> None:
        self._rows[slot] = 0

    def copy(self, source: int, target: int) -> None:
        self._rows[target] = self._rows[source]

    def read(self, slot: int) -> NDArray[np.float32]:
        return self._rows[slot].copy()

    def write(self, slot: int, values: NDArray[np.float32]) -> None:
        self._rows[slot] = values
