"""Matrices that make an embedding of what pooling gives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ikpy.models.weights import WeightSource


@dataclass
class Projection:
    """dense_3(dense_2(x)) without biases; weights are f32 [n_out, n_in]."""

    first: NDArray[np.float32]
    second: NDArray[np.float32]

    @classmethod
    def take(cls, weights: WeightSource, n_embd: int) -> Projection | None:
        """dense_2.weight [n_embd, n] and dense_3.weight [n, n_embd] of a file; None if it has neither."""
        if not weights.has("dense_2.weight") and not weights.has("dense_3.weight"):
            return None
        inner = weights.gguf.tensors.get("dense_2.weight")
        n = inner.shape[-1] if inner else 0
        parts = [matrix(weights, name, shape) for name, shape in (("dense_2", (n_embd, n)), ("dense_3", (n, n_embd)))]
        return cls(*parts)

    def __call__(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Embeddings f32 [.., n_embd] of vectors [.., n_embd]."""
        return np.asarray(x @ self.first.T @ self.second.T, np.float32)


def matrix(weights: WeightSource, name: str, shape: tuple[int, int]) -> NDArray[np.float32]:
    """A weight that must be there as f32 [n_out, n_in]; shape as in the file."""
    weights.find(f"{name}.weight", [shape])
    found = weights.array(f"{name}.weight", *shape)
    assert found is not None
    return found
