import numpy as np
from numpy.typing import NDArray

from ikpy._native.batches import Batch
from ikpy._native.tables import Taken

class InputArrays:
    arrays: NDArray[np.int32]
    turned: NDArray[np.int32]
    scales: NDArray[np.float32]
    scales_by_sequence: NDArray[np.float32]
    def __init__(self, n: int, stretches: list[int], n_adapters: int, turns: bool = False) -> None: ...
    def write(self, batch: Batch, taken: Taken) -> int: ...
