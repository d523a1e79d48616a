"""Classification head of encoders that score texts (rerankers)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import FileFormatError
from ikpy.models.weights import WeightSource


@dataclass
class Classifier:
    """output(tanh(dense(x))) of a text's first state x; either layer may be missing. Weights are [n_out, n_in]."""

    dense: NDArray[np.float32] | None
    dense_bias: NDArray[np.float32] | None
    output: NDArray[np.float32] | None
    output_bias: NDArray[np.float32] | None

    @classmethod
    def take(cls, weights: WeightSource, n_embd: int) -> Classifier | None:
        """The head tensors cls and cls.output of a file; None if it has neither."""
        dense = weights.array("cls.weight", n_embd, n_embd)
        n_classes = 1
        if weights.has("cls.output.weight"):
            shape = weights.gguf.tensors["cls.output.weight"].shape
            n_classes = shape[1] if len(shape) > 1 else 1
        output = weights.array("cls.output.weight", n_embd, n_classes)
        if dense is None and output is None:
            return None
        biases = weights.array("cls.bias", n_embd), weights.array("cls.output.bias", n_classes)
        if (biases[0] is not None and dense is None) or (biases[1] is not None and output is None):
            raise FileFormatError(f"{weights.gguf.path}: a bias of the classification head has no weight")
        return cls(dense, biases[0], None if output is None else output.reshape(n_classes, n_embd), biases[1])

    def __call__(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Scores float32 [n_classes] of a state [n_embd]."""
        if self.dense is not None:
            x = np.tanh(self.dense @ x + (0.0 if self.dense_bias is None else self.dense_bias))
        if self.output is not None:
            x = self.output @ x + (0.0 if self.output_bias is None else self.output_bias)
        return x.astype(np.float32)
