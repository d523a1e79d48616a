"""Classification head of encoders that score texts (rerankers)."""

from __future__ import annotations

import math
from collections.abc import Sized
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import FileFormatError
from ikpy.models.weights import WeightSource

HEAD_POOLINGS = ("cls", "mean")
LABELS = "classifier.output_labels"


@dataclass
class Classifier:
    """output(norm(act(dense(x)))) of a text's first state x, or of the mean of all; any layer may be missing. Weights
    are [n_out, n_in]; activation: tanh, or gelu, the exact one. dense without output may have a single row.
    """

    dense: NDArray[np.float32] | None
    dense_bias: NDArray[np.float32] | None
    output: NDArray[np.float32] | None
    output_bias: NDArray[np.float32] | None
    norm: NDArray[np.float32] | None = None
    activation: str = "tanh"
    pooling: str = "cls"
    norm_eps: float = 0.0

    @classmethod
    def take(
        cls, weights: WeightSource, n_embd: int, norm_eps: float, *, activation: str = "tanh", pooling: str = "cls"
    ) -> Classifier | None:
        """The head tensors cls, cls.norm and cls.output of a file; None if it has none. norm_eps: of the model."""
        has_output = weights.has("cls.output.weight")
        n_dense = 1 if weights.rows("cls.weight", n_embd) == 1 and not has_output else n_embd
        dense = weights.array("cls.weight", n_embd, n_dense)
        n_classes = 1
        if has_output:
            shape = weights.gguf.tensors["cls.output.weight"].shape
            n_classes = shape[1] if len(shape) > 1 else 1
        output = weights.array("cls.output.weight", n_embd, n_classes)
        if dense is None and output is None:
            return None
        if output is not None or n_dense == 1:
            _check_labels(weights, n_classes)
        biases = weights.array("cls.bias", n_dense), weights.array("cls.output.bias", n_classes)
        if (biases[0] is not None and dense is None) or (biases[1] is not None and output is None):
            raise FileFormatError(f"{weights.gguf.path}: a bias of the classification head has no weight")
        norm = weights.array("cls.norm.weight", n_embd) if dense is not None else None
        matrix = None if output is None else output.reshape(n_classes, n_embd)
        return cls(dense, biases[0], matrix, biases[1], norm, activation, pooling, norm_eps)

    def __call__(self, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """Scores float32 [n_classes] of a text with these states [n_tokens, n_embd]."""
        x = states[0] if self.pooling == "cls" else states.mean(axis=0, dtype=np.float64)
        if self.dense is not None:
            x = self._act(self.dense @ x + (0.0 if self.dense_bias is None else self.dense_bias))
        if self.norm is not None:
            x = (x - x.mean()) / np.sqrt(x.var() + self.norm_eps) * self.norm
        if self.output is not None:
            x = self.output @ x + (0.0 if self.output_bias is None else self.output_bias)
        return x.astype(np.float32)

    def _act(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        if self.activation == "tanh":
            return np.tanh(x)
        erf = np.array([math.erf(v) for v in x / math.sqrt(2.0)])
        return np.asarray(0.5 * x * (1.0 + erf))


def _check_labels(weights: WeightSource, n_scores: int) -> None:
    """FileFormatError if the file names fewer or more scores than these."""
    gguf = weights.gguf
    key = f"{gguf.get('general.architecture')}.{LABELS}"
    labels = gguf.get(key)
    if labels is None:
        return
    n_labels = 1 if isinstance(labels, str) or not isinstance(labels, Sized) else len(labels)
    if n_labels != n_scores:
        raise FileFormatError(f"{gguf.path}: {key} names {n_labels} scores, the classification head gives {n_scores}")
