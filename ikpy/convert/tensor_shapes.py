"""Order of the parts of planned tensors, and their shapes."""

from __future__ import annotations

import numpy as np

from ikpy.convert.families.base import Family
from ikpy.convert.output_tensor import OutputTensor, Part
from ikpy.convert.stored_matrix import BLOCK_TYPES
from ikpy.convert.weights import MXFP4_BLOCK, MXFP4_BYTES, Weights
from ikpy.errors import FileFormatError


class Arranger:
    """Puts the parts of tensors in order; FileFormatError for those that are missing or do not fit."""

    def __init__(self, weights: Weights, family: Family) -> None:
        self.weights, self.family = weights, family

    def arrange(self, output: OutputTensor) -> None:
        """Puts experts in order and computes the shape."""
        folder = self.weights.checkpoint.folder
        if output.is_sharded:
            self._join_shards(output)
            return
        if output.joins_columns:
            self._join_columns(output)
            return
        shapes = {self._part_shape(part) for part in output.parts}
        if len(shapes) != 1:
            raise FileFormatError(f"{folder}: the experts of {output.name} differ in shape: {sorted(shapes)}")
        shape = shapes.pop()
        if output.parts[0].expert is not None:
            target = output.name.removesuffix(".weight").split(".", 2)[-1]
            kind, kinds = ("expert", "experts") if "exps" in target else ("part", "parts")
            numbers, needed = [part.expert for part in output.parts], self.family.n_parts(target)
            missing = sorted(set(range(needed)).difference(numbers))
            if missing or len(numbers) != needed:
                which = f"{kind} {missing[0]} is missing" if missing else "there are more"
                raise FileFormatError(f"{folder}: {output.name} needs {needed} {kinds}, found {len(numbers)} ({which})")
            output.parts.sort(key=lambda part: part.expert or 0)
            shape = (len(numbers), *shape)
        rows = self.family.padded_rows(output.name.removesuffix(".weight"))
        if rows > shape[0] > 0:
            output.n_repeated = rows - shape[0]
            output.kind = "f32" if output.kind in BLOCK_TYPES else output.kind
            shape = (rows, *shape[1:])
        output.shape = shape

    def _join_shards(self, output: OutputTensor) -> None:
        """Puts shards in order, whose rows follow each other."""
        folder, n = self.weights.checkpoint.folder, self.family.n_shards
        output.parts.sort(key=lambda part: part.expert or 0)
        numbers = [part.expert for part in output.parts]
        if numbers != list(range(n)):
            missing = next((i for i in range(n) if i not in numbers), None)
            which = f"shard {missing} is missing" if missing is not None else "there are more"
            raise FileFormatError(f"{folder}: {output.name} needs {n} shards, found {len(numbers)} ({which})")
        shapes = [self._part_shape(part) for part in output.parts]
        if any(len(shape) != 2 or shape[1] != shapes[0][1] for shape in shapes):
            raise FileFormatError(f"{folder}: the shards of {output.name} differ in shape: {sorted(set(shapes))}")
        output.shape = (sum(shape[0] for shape in shapes), shapes[0][1])

    def _join_columns(self, output: OutputTensor) -> None:
        """Puts matrices in order whose columns lie beside each other."""
        output.parts.sort(key=lambda part: part.expert or 0)
        numbers = [part.expert for part in output.parts]
        if numbers != list(range(len(self.family.prediction_columns))):
            sources = ", ".join(f"'{part.source}'" for part in output.parts)
            raise FileFormatError(f"{self.weights.checkpoint.folder}: {output.name} needs more than {sources}")
        shapes = [self._part_shape(part) for part in output.parts]
        if any(len(shape) != 2 or shape[0] != shapes[0][0] for shape in shapes):
            raise FileFormatError(
                f"{self.weights.checkpoint.folder}: the parts of {output.name} differ in rows: {sorted(set(shapes))}"
            )
        output.shape = (shapes[0][0], sum(shape[1] for shape in shapes))

    def _part_shape(self, part: Part) -> tuple[int, ...]:
        """Shape after the view, found without reading: views are applied to an array without memory."""
        shape = self.weights.shape(part.source)
        is_mxfp4 = self.weights.kind(part.source) == "mxfp4"
        if is_mxfp4:
            shape = (*shape[:-1], shape[-1] // MXFP4_BLOCK * MXFP4_BYTES)
        if part.view is not None:
            try:
                shape = part.view(np.broadcast_to(np.uint8(0), shape)).shape
            except (ValueError, IndexError):
                raise FileFormatError(
                    f"{self.weights.checkpoint.folder}: shape {list(shape)} of tensor '{part.source}' does not fit "
                    "config.json"
                ) from None
        return (*shape[:-1], shape[-1] // MXFP4_BYTES * MXFP4_BLOCK) if is_mxfp4 else shape
