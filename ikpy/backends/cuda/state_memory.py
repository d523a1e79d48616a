"""States of recurrent layers in device memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ikpy.backends.cuda.api import Stream


class DeviceStates:
    """Slots of one state tensor at an address of the stream's device, n float32 each.

    The stream is the one that runs the kernels, so that nothing has to wait but what hands values to the host or takes
    them from it.
    """

    def __init__(self, stream: Stream, address: int, n: int) -> None:
        self._stream, self._address, self._n = stream, address, n

    def _slot(self, slot: int) -> int:
        return self._address + 4 * self._n * slot

    def zero(self, slot: int) -> None:
        """Makes all values of a slot 0."""
        self._stream.fill(self._slot(slot), 0, 4 * self._n)

    def copy(self, source: int, target: int) -> None:
        """Gives a slot the values of another one."""
        self._stream.copy(self._slot(target), self._slot(source), 4 * self._n)

    def read(self, slot: int) -> NDArray[np.float32]:
        """A copy of a slot's values in host memory."""
        values = np.empty(self._n, np.float32)
        self._stream.download(values, self._slot(slot))
        self._stream.synchronize()
        return values

    def write(self, slot: int, values: NDArray[np.float32]) -> None:
        """Sets a slot's values."""
        self._stream.upload(self._slot(slot), np.ascontiguousarray(values))
        self._stream.synchronize()
