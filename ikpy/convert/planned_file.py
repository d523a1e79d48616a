"""A GGUF file that is planned from a checkpoint and streamed out, one tensor (of a stack: one expert) at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ikpy.convert.checkpoint import Checkpoint
from ikpy.convert.encoding import PIECE_ELEMENTS, column_lengths, encode, multiplied, scaled_rows, unit_columns
from ikpy.convert.odd_values import odd_value
from ikpy.convert.options import OUTPUT_TYPES, ConvertOptions
from ikpy.convert.output_tensor import OutputTensor, Part, pieces
from ikpy.convert.stored_matrix import BLOCK_TYPES
from ikpy.convert.weights import Weights
from ikpy.convert.words import to_float32
from ikpy.errors import FileFormatError, ResourceError, UsageError
from ikpy.gguf.types import GGUFValueType as VT
from ikpy.gguf.writer import GGUFWriter, ShardPlan
from ikpy.quants import registry

FILE_TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
_SHOWN = 40

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the file with its type; constant holds values that no checkpoint tensor has."""

    output: OutputTensor
    type: str
    constant: np.ndarray | None = None


class PlannedFile:
    """A checked plan: tensors with types, metadata, notes for the user. write() carries it out.

    Raises IkpyError with one line for checkpoints that are incomplete, unknown or cannot be expressed.
    """

    checkpoint: Checkpoint
    weights: Weights
    tensors: list[PlannedTensor]
    metadata: dict[str, Any]
    notes: list[str]
    outtype: str
    name: str
    path: str

    def __init__(self, folder: str | Path, options: ConvertOptions | None = None) -> None:
        self.options = options or ConvertOptions()
        if self.options.outtype not in OUTPUT_TYPES:
            raise UsageError(f"unknown output type '{self.options.outtype}'; known: {', '.join(OUTPUT_TYPES)}")
        try:
            self._read(Path(folder))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            kind = type(error).__name__
            if found := self._odd_value(error):
                raise FileFormatError(f"{folder}/config.json: {found} ({kind}: {error})") from error
            raise FileFormatError(
                f"{folder}: config.json or a file of the {self.beside} holds values that it cannot have "
                f"({kind}: {error})"
            ) from error

    beside = "tokenizer"
    """What is read beside config.json and the tensors."""

    @property
    def arch(self) -> str:
        """general.architecture."""
        raise NotImplementedError

    def _read(self, folder: Path) -> None:
        """Everything but the numbers. Files are JSON of any form: what is not looked at raises Python's own errors."""
        raise NotImplementedError

    def _odd_value(self, error: Exception) -> str | None:
        """Words for the value of config.json that an error probably comes from."""
        checkpoint = getattr(self, "checkpoint", None)
        return odd_value(checkpoint.config, error) if checkpoint else None

    def plan(self) -> list[ShardPlan]:
        """The files that would be written."""
        return self._writer().plan()

    def write(self, progress: Progress = lambda done, total: None) -> list[ShardPlan]:
        """Write the file or files; they appear under their names when all is complete. progress: bytes done, total."""
        with self._writer() as writer:
            plan = writer.plan()
            total = sum(tensor.nbytes for shard in plan for tensor in shard.tensors)
            done = 0
            for tensor in self.tensors:
                for chunk in self._encoded(tensor):
                    writer.write(tensor.output.name, chunk)
                    done += chunk.nbytes
                    progress(done, total)
        return plan

    def _output_type(self, matrices: list[OutputTensor]) -> str:
        """Type that most matrices get."""
        return half_type(matrices) if self.options.outtype == "auto" else self.options.outtype

    def _writer(self) -> GGUFWriter:
        options = self.options
        return self._declared(
            GGUFWriter(self.path, split_max_tensors=options.split_max_tensors, split_max_bytes=options.split_max_bytes)
        )

    def _declared(self, writer: GGUFWriter) -> GGUFWriter:
        """The writer, told all keys and tensors."""
        for key, value in self.metadata.items():
            try:
                _add_value(writer, key, value)
            except (AttributeError, LookupError, TypeError, UsageError, ValueError) as error:
                if found := self._odd_value(error):
                    raise FileFormatError(f"{self.checkpoint.folder}/config.json: {found} ({key})") from None
                raise FileFormatError(
                    f"{self.checkpoint.folder}: {key} of the GGUF file cannot be {str(value)[:_SHOWN]!r}; "
                    f"config.json or a file of the {self.beside} holds a value that it cannot have"
                ) from None
        for tensor in self.tensors:
            shape = tuple(reversed(tensor.output.shape))
            writer.add_tensor(tensor.output.name, shape, registry.by_name(tensor.type).id)
        return writer

    # data

    def _encoded(self, tensor: PlannedTensor) -> Iterator[np.ndarray]:
        """The bytes of a tensor in pieces."""
        if tensor.constant is not None:
            yield tensor.constant.view(np.uint8)
            return
        if tensor.output.joins_columns:
            yield from self._joined(tensor)
            return
        for part in tensor.output.parts:
            try:
                yield from self._encoded_part(tensor, part)
            except MemoryError:
                raise ResourceError(f"not enough memory to convert tensor '{part.source}' to {tensor.type}") from None
            self.weights.release(part.source)
        if tensor.output.n_repeated:
            yield from self._repeated_row(tensor, tensor.output.parts[0])

    def _joined(self, tensor: PlannedTensor) -> Iterator[np.ndarray]:
        """Matrices whose columns lie beside each other."""
        sources = [part.source for part in tensor.output.parts]
        try:
            values = np.concatenate([self._decoded(source) for source in sources], axis=1)
        except MemoryError:
            raise ResourceError(f"not enough memory to convert tensor '{sources[0]}' to {tensor.type}") from None
        for source in sources:
            self.weights.release(source)
        for rows in pieces(values, PIECE_ELEMENTS):
            yield encode(rows, "f32", tensor.type, None, sources[0])

    def _repeated_row(self, tensor: PlannedTensor, part: Part) -> Iterator[np.ndarray]:
        """The first row of a matrix as often as it follows the last."""
        first = self.weights.load(part.source, self.weights.kind(part.source))[:1]
        coded = encode(first, self.weights.kind(part.source), tensor.type, tensor.output.change, part.source)
        for _ in range(tensor.output.n_repeated):
            yield coded

    def _decoded(self, source: str) -> np.ndarray:
        """The values f32 of a checkpoint tensor, whatever they are stored as."""
        kind = self.weights.kind(source)
        kind = "f32" if kind in (*BLOCK_TYPES, "mxfp4") else kind
        return to_float32(self.weights.load(source, kind), kind)

    def _floats(self, source: str) -> np.ndarray:
        """The values f32 of a checkpoint tensor."""
        return to_float32(self.weights.load(source, self.weights.kind(source)), self.weights.kind(source))

    def _encoded_part(self, tensor: PlannedTensor, part: Part) -> Iterator[np.ndarray]:
        kind = self.weights.kind(part.source)
        if kind in (*BLOCK_TYPES, "mxfp4") and kind != tensor.type:
            kind = "f32"
        array = self.weights.load(part.source, kind)
        array = array if part.view is None else part.view(array)
        lengths = column_lengths(array, kind) if tensor.output.unit_columns else None
        first = 0
        for rows in pieces(array, PIECE_ELEMENTS):
            change = tensor.output.change
            if lengths is not None:
                change = unit_columns(lengths)
            if tensor.output.factor:
                change = multiplied(self._floats(tensor.output.factor))
            if tensor.output.row_factors is not None:
                change = scaled_rows(tensor.output.row_factors[first : first + len(rows)])
            yield encode(rows, kind, tensor.type, change, part.source)
            first += len(rows)


def half_type(outputs: list[OutputTensor]) -> str:
    """f16 for tensors of checkpoints in f16, bf16 for all others."""
    kinds = {output.kind for output in outputs}
    return "f16" if outputs and kinds <= {"f16", "i32", "mxfp4", *BLOCK_TYPES} else "bf16"


def _add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    """Stores a value: str, bool, int as u32, float as f32, np.int32, lists of the first, arrays of f32, u64, u8 or
    i32."""
    if isinstance(value, np.ndarray):
        types_of = {np.dtype(np.float32): VT.FLOAT32, np.dtype(np.uint64): VT.UINT64, np.dtype(np.uint8): VT.UINT8}
        writer.add_array(key, types_of.get(value.dtype, VT.INT32), value.tolist())
    elif isinstance(value, list):
        kinds = {str: VT.STRING, bool: VT.BOOL, float: VT.FLOAT32}
        writer.add_array(key, kinds.get(type(value[0]) if value else int, VT.UINT32), value)
    else:
        types = {str: VT.STRING, bool: VT.BOOL, int: VT.UINT32, float: VT.FLOAT32, np.int32: VT.INT32}
        writer.add(key, types[type(value)], value)
