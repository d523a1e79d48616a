"""What an encoder makes of a picture or a sound: rows that take the place of token embeddings."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class MediaRows:
    """Rows float32 [n, n_embd * (1 + n_deep)] of n consecutive tokens, n_embd being that of the text model.

    The first n_embd elements of a row are its token's embedding; the next ones are added behind layers that
    the model says. grid: rows and columns of a picture, n being their product, for models whose rotation tells them
    apart (M-RoPE); None counts on like text. both_ways: all rows see each other. counted: rotation tells pictures with
    a grid apart by their number in the text, while positions go on like text (XD-RoPE).
    """

    values: NDArray[np.float32]
    grid: tuple[int, int] | None = None
    both_ways: bool = False
    counted: bool = False

    def __len__(self) -> int:
        return len(self.values)

    def widened(self, n_deep: int) -> MediaRows:
        """Rows that have n_deep further parts, which add nothing."""
        n = self.values.shape[1]
        return replace(self, values=np.pad(self.values, ((0, 0), (0, n * n_deep))))

    @property
    def n_positions(self) -> int:
        """Rotation positions that they take."""
        return max(self.grid) if self.grid and not self.counted else len(self.values)

    @property
    def turn(self) -> int:
        """What they add to the turn of the tokens behind them: positions less rows, or 1 of what is counted."""
        return int(self.counted and self.grid is not None) or self.n_positions - len(self.values)
