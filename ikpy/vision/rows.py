"""What an encoder makes of a picture: rows that take the place of token embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class MediaRows:
    """Rows float32 [n, n_embd * (1 + n_deep)] of n consecutive tokens, n_embd being that of the text model.

    The first n_embd elements of a row are its token's embedding; the next ones are added behind the first n_deep
    layers. grid: rows and columns of a picture, n being their product, for models whose rotation tells them apart
    (M-RoPE); None counts on like text. both_ways: all rows see each other.
    """

    values: NDArray[np.float32]
    grid: tuple[int, int] | None = None
    both_ways: bool = False

    def __len__(self) -> int:
        return len(self.values)

    @property
    def n_positions(self) -> int:
        """Rotation positions that they take."""
        return max(self.grid) if self.grid else len(self.values)
