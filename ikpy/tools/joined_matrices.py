"""Which tensors of a model join several matrices, whose rows groups of interleaved types must not cross."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from ikpy.errors import IkpyError
from ikpy.gguf.reader import GGUFFile, TensorInfo
from ikpy.graph.ir import Value
from ikpy.models import architecture, silent
from ikpy.models.keys import Keys
from ikpy.models.weights import WeightSource


def joined_rows(file: GGUFFile, overrides: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """Rows of the matrices that tensors join, by tensor name; of what the architecture cannot load nothing is known.

    No tensor data is read. overrides: metadata that replace those of the file.
    """
    weights = _NotedParts(file)
    with suppress(IkpyError):
        keys = Keys(file, overrides)
        model = architecture(keys.arch)(keys, weights, silent)
        for number in range(max(1, model.n_prediction_heads)):
            model.prediction_head(weights, number)
    return weights.parts


class _NotedParts(WeightSource):
    """Notes the parts that an architecture takes tensors in, and lets parts in that do not fit their type."""

    def __init__(self, file: GGUFFile) -> None:
        super().__init__(file, silent, header_only=True)
        self.parts: dict[str, tuple[int, ...]] = {}

    def _value(self, info: TensorInfo, parts: Sequence[int]) -> Value:
        if parts:
            self.parts[info.name] = tuple(parts)
        return super()._value(info, ())
