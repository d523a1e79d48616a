import numpy as np
from numpy.typing import NDArray

from ikpy._native.cells import CellTable

class WindowTable(CellTable):
    kind: str
    size: int
    lost: NDArray[np.int64]
    def __init__(self, n_cells: int, kind: str, size: int) -> None: ...
    def lowest_kept(self, pos: int) -> int: ...
    def make_room(self, n: int, next_pos: dict[int, int]) -> None: ...
