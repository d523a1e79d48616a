from typing import Any

import numpy as np
from numpy.typing import NDArray

from ikpy._native.batches import Batch
from ikpy._native.inputs import InputArrays
from ikpy._native.tables import CellTables

class Ready:
    n_tokens: int
    n_outputs: int
    n_threads: int
    plan: Any
    results: tuple[NDArray[np.float32] | None, ...]
    maxima: NDArray[np.float32] | None
    media: bool
    def __init__(
        self,
        n_tokens: int,
        n_outputs: int,
        n_threads: int,
        plan: object,
        results: tuple[NDArray[np.float32] | None, ...],
        maxima: NDArray[np.float32] | None,
        native: object,
        direct: bool = True,
        media: bool = False,
    ) -> None: ...

class Steps:
    work: Any
    def __init__(
        self,
        run_plan: object,
        inputs: InputArrays,
        tables: CellTables,
        n_vocab: int,
        n_positions: int,
        pad: int,
        n_plans: int,
    ) -> None: ...
    def n_kv(self) -> int: ...
    def get(self, n_tokens: int, n_outputs: int, media: bool = False) -> Ready | None: ...
    def put(self, ready: Ready) -> None: ...
    def block_maxima(self, logits: NDArray[np.float32]) -> NDArray[np.float32] | None: ...
    def likeliest(self, logits: NDArray[np.float32]) -> int: ...
    def clear(self) -> None: ...
    def run(self, batch: Batch) -> tuple[NDArray[np.float32] | None, ...] | None: ...
