"""Plans the projector file (mmproj) of a checkpoint: an encoder of pictures or sound, and what leads to the text."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from ikpy.convert.checkpoint import Checkpoint
from ikpy.convert.conversion import QUANTIZATION_VERSION
from ikpy.convert.model_parts import THINKER
from ikpy.convert.output_tensor import OutputTensor, Part
from ikpy.convert.planned_file import FILE_TYPES, PlannedFile, PlannedTensor, half_type
from ikpy.convert.projectors import projector
from ikpy.convert.projectors.tensors import Wanted
from ikpy.convert.stored_matrix import BLOCK_TYPES
from ikpy.convert.weights import Weights
from ikpy.errors import FileFormatError, UnsupportedError, UsageError
from ikpy.quants import registry

PREFIX = "mmproj-"
# Tables that are computed anyway.
_COMPUTED = re.compile(r"\b(position_ids|inv_freq)$")
_PACKED = (*BLOCK_TYPES, "mxfp4")


class ProjectorConversion(PlannedFile):
    """The projector file of a model that takes pictures or sound, and what PlannedFile has."""

    beside = "picture processor"
    arch = "clip"

    def _read(self, folder: Path) -> None:
        self._check_options()
        self.checkpoint = Checkpoint(folder)
        self.projector = projector(self.checkpoint)
        self.weights = Weights(self.checkpoint)
        self.notes = self.projector.notes()
        wanted = self._found(list(self.projector.tensors()))
        outputs = [self._output(tensor, names) for tensor, names in wanted]
        self.outtype = self._output_type([output for output in outputs if len(output.shape) > 1])
        self.tensors = [
            PlannedTensor(output, self._tensor_type(tensor, output), tensor.values)
            for (tensor, _), output in zip(wanted, outputs, strict=True)
        ]
        self.name = self.options.model_name or Path(self.checkpoint.folder).resolve().name
        self.metadata = {
            "general.architecture": self.arch,
            "general.type": "mmproj",
            "general.name": self.name,
            "general.file_type": registry.ftype_by_name(FILE_TYPES[self.outtype]).id,
            "general.quantization_version": QUANTIZATION_VERSION,
            **{f"clip.{key}": value for key, value in self.projector.keys().items()},
        }
        self.path = self._path()
        self._writer().plan()

    def _check_options(self) -> None:
        options = self.options
        for name, value in (("--pre", options.pre), ("--chat-template-file", options.chat_template_file)):
            if value:
                raise UsageError(f"{name} is of no use with --mmproj: a projector file has no text")
        if options.split_max_bytes or options.split_max_tensors:
            raise UsageError("a projector file is never split; leave out --split-max-size and --split-max-tensors")

    def _path(self) -> str:
        """Names of projector files begin with mmproj-, by which they are found beside a model."""
        given = Path(self.options.outfile or f"{self.name}-{self.outtype.upper()}.gguf")
        named = given if "mmproj" in given.name else given.with_name(f"{PREFIX}{given.name}")
        return str(named if self.options.outfile else self.checkpoint.folder / named)

    # tensors

    def _found(self, wanted: list[Wanted]) -> list[tuple[Wanted, list[str]]]:
        """Tensors with their names in the checkpoint. FileFormatError for one that is missing or of another shape,
        UnsupportedError for one that has no place."""
        folder, names = self.checkpoint.folder, self._names()
        used: set[str] = set()
        for tensor in wanted:
            for source in tensor.sources:
                self._check_source(tensor, source, names.get(source))
            used.update(tensor.sources)
        left_out = self.projector.left_out()
        unknown = [names[path] for path in names if path not in used and self._is_known_part(path, left_out)]
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise UnsupportedError(
                f"{folder}: tensor '{unknown[0]}'{more} has no place in a projector of type {self.projector.kind}"
            )
        return [(tensor, [names[source] for source in tensor.sources]) for tensor in wanted]

    def _check_source(self, tensor: Wanted, source: str, name: str | None) -> None:
        """FileFormatError unless a tensor is there, in its shape."""
        folder = self.checkpoint.folder
        if name is None:
            raise FileFormatError(
                f"{folder}: tensor '{source}' ({tensor.target}) is missing; the checkpoint is incomplete"
            )
        shape = self.weights.shape(name)
        if shape != tensor.shape:
            raise FileFormatError(
                f"{folder}: tensor '{name}' has shape {list(shape)}, not {list(tensor.shape)} as config.json says"
            )

    def _is_known_part(self, path: str, left_out: tuple[str, ...]) -> bool:
        return path.startswith(self.projector.parts) and not (path.startswith(left_out) or _COMPUTED.search(path))

    def _names(self) -> dict[str, str]:
        """Names in the checkpoint by those that the projector asks for."""
        names: dict[str, str] = {}
        for name in self.weights.names():
            path = name.removeprefix(THINKER).removeprefix("model.")
            for old, new in self.projector.renames.items():
                path = new + path.removeprefix(old) if path.startswith(old) else path
            if path in names:
                raise FileFormatError(f"{self.checkpoint.folder}: tensors '{names[path]}' and '{name}' are both {path}")
            names[path] = name
        return names

    def _output(self, tensor: Wanted, names: list[str]) -> OutputTensor:
        kinds = {self._kind(name) for name in names}
        output = OutputTensor(tensor.target, tensor.change, kinds.pop() if len(kinds) == 1 else "f32")
        output.parts += [Part(name, tensor.view, e if tensor.stack else None) for e, name in enumerate(names)]
        seen = np.broadcast_to(np.uint8(0), tensor.shape)
        shape = (tensor.view(seen) if tensor.view else seen).shape
        output.shape = (tensor.stack, *shape) if tensor.stack else shape
        return output

    def _kind(self, name: str) -> str:
        """Of the numbers of a tensor, f32 for those in blocks."""
        kind = self.weights.kind(name)
        if kind == "i32":
            raise self.weights.unknown_type(name)
        self.weights.check_scales(name)
        return "f32" if kind in _PACKED else kind

    def _tensor_type(self, tensor: Wanted, output: OutputTensor) -> str:
        if len(output.shape) < 2 or tensor.exact:
            return "f32"
        if tensor.half:
            return "f16"
        if tensor.floats:
            return "f16" if self.outtype == "f16" else "f32"
        if output.shape[-1] % registry.by_name(self.outtype).block_elements:
            return half_type([output])
        return self.outtype
