"""Whether a planned file will load: its architecture takes the tensors of the plan before a byte is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ikpy.convert.families.base import Family
from ikpy.convert.output_tensor import OutputTensor
from ikpy.errors import FileFormatError
from ikpy.models import architecture, silent
from ikpy.models.base import Architecture
from ikpy.models.keys import Keys
from ikpy.models.weights import WeightSource

if TYPE_CHECKING:
    from ikpy.gguf.reader import GGUFFile, TensorInfo


def check_loads(planned: GGUFFile, family: Family, outputs: Iterable[OutputTensor]) -> None:
    """FileFormatError for tensors that the architecture lacks, has in another shape or does not know, and for keys.

    planned: a file without data, whose path is that of the checkpoint.
    """
    keys = Keys(planned)
    known = list(outputs)
    weights = _PlannedWeights(planned, family, known)
    model = architecture(keys.arch)(keys, weights, silent)
    weights.check_all_used()
    if family.n_predict:
        _check_prediction_layers(model, planned, family, known)


def _check_prediction_layers(
    model: Architecture, planned: GGUFFile, family: Family, outputs: Iterable[OutputTensor]
) -> None:
    """The same of layers that are no part of the model's own graph: of those that run."""
    for number in range(model.n_prediction_heads):
        weights, prefix = _PlannedWeights(planned, family, outputs), f"blk.{family.config.n_layer + number}."
        model.prediction_head(weights, number)
        weights.skip(*(name for name in planned.tensors if not name.startswith(prefix)))
        weights.check_all_used()


class _PlannedWeights(WeightSource):
    """Errors about a tensor say what it is called in the checkpoint."""

    def __init__(self, planned: GGUFFile, family: Family, outputs: Iterable[OutputTensor]) -> None:
        super().__init__(planned, silent, header_only=True)
        self.family = family
        self.outputs = {output.name: output for output in outputs}

    def find(self, name: str, shapes: Sequence[Sequence[int]], *, required: bool = True) -> TensorInfo | None:
        if required and not self.has(name):
            raise FileFormatError(f"{self.gguf.path}: {self._lack(name)}; the checkpoint is incomplete")
        try:
            return super().find(name, shapes, required=required)
        except FileFormatError as error:
            sources = self.outputs[name].parts if name in self.outputs else []
            raise FileFormatError(f"{error} (from '{sources[0].source}')" if sources else str(error)) from None

    def _lack(self, name: str) -> str:
        """Which tensor is missing where, with the modules of the checkpoint that it is made of."""
        block, _, rest = name.removeprefix("blk.").partition(".")
        is_layer = name.startswith("blk.")
        target = (rest if is_layer else name).removesuffix(".weight")
        modules = [m for m, targets in self._modules(is_layer) if target in targets]
        source = f" (from '{' or '.join(modules)}')" if modules else ""
        return f"layer {block} lacks {name}{source}" if is_layer else f"{name}{source} is missing"

    def _modules(self, is_layer: bool) -> list[tuple[str, tuple[str, ...]]]:
        known = {**self.family.modules, **self.family.prediction_modules} if is_layer else self.family.outer
        return [(m, (targets,) if isinstance(targets, str) else targets) for m, targets in known.items()]
