"""Plans a GGUF file from a checkpoint and streams it out, one tensor (of a stack: one expert) at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ikpy.convert.chat_templates import checkpoint_templates, given_template
from ikpy.convert.checkpoint import Checkpoint
from ikpy.convert.config import Config
from ikpy.convert.families import family
from ikpy.convert.families.base import Change
from ikpy.convert.layer_gaps import check_gaps
from ikpy.convert.loading import check_loads
from ikpy.convert.rope import scaling_notes
from ikpy.convert.tensor_map import OutputTensor, Part, map_tensors, pieces
from ikpy.convert.tokenizer import tokenizer_keys
from ikpy.convert.weights import Weights
from ikpy.convert.words import to_float32
from ikpy.errors import FileFormatError, ResourceError, UsageError
from ikpy.gguf.reader import GGUFFile
from ikpy.gguf.types import GGUFValueType as VT
from ikpy.gguf.writer import GGUFWriter, ShardPlan
from ikpy.quants import registry
from ikpy.quants.finite import surely_finite
from ikpy.threads import hardware_threads

OUTPUT_TYPES = ("f32", "f16", "bf16", "q8_0", "auto")
_FILE_TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
_BLOCK_FILE_TYPES = {"q4_0": "Q4_0", "mxfp4": "MXFP4"}  # of checkpoints with such blocks
# Read by the loader as f32, or too small for anything else to matter.
_ALWAYS_F32 = (
    "norm.weight",
    ".bias",
    "ffn_gate_inp.weight",
    "attn_sinks.weight",
    "position_embd.weight",
    *(f"ssm_conv1d{part}.weight" for part in ("", "_q", "_k", "_v")),
    "ssm_a",
    "ssm_d",
    "shortconv.conv.weight",
    "ple_conv1d.weight",
    # DeepSeek V4, Qwen4-Exp: what mixes the residual streams; and the positions within a group of compressed tokens.
    "hc_attn_fn.weight",
    "hc_ffn_fn.weight",
    "output_hc_fn.weight",
    "hc_attn_inject.weight",
    "hc_ffn_inject.weight",
    "_ape.weight",
    # Gemma 3n: what mixes the residual streams.
    "altup_correct_coef.weight",
    "altup_predict_coef.weight",
    "altup_router.weight",
)
_SHOWN = 40
_PIECE_ELEMENTS = 1 << 22
_QUANTIZATION_VERSION = 2
_SHORTEST = 1e-7

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ConvertOptions:
    """outtype: one of OUTPUT_TYPES; outfile "" is `<folder>/<name>-<TYPE>.gguf`; limits per file as GGUFWriter.

    chat_template_file: jinja2 text that replaces the templates of the checkpoint; "" keeps those.
    """

    outtype: str = "auto"
    outfile: str = ""
    model_name: str = ""
    pre: str = ""
    chat_template_file: str = ""
    split_max_tensors: int | None = None
    split_max_bytes: int | None = None


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the file with its type; constant holds values that no checkpoint tensor has."""

    output: OutputTensor
    type: str
    constant: np.ndarray | None = None


class Conversion:
    """A checked plan: architecture, tensors with types, metadata, notes for the user. write() carries it out.

    Raises IkpyError with one line for checkpoints that are incomplete, unknown or cannot be expressed.
    """

    def __init__(self, folder: str | Path, options: ConvertOptions | None = None) -> None:
        self.options = options or ConvertOptions()
        if self.options.outtype not in OUTPUT_TYPES:
            raise UsageError(f"unknown output type '{self.options.outtype}'; known: {', '.join(OUTPUT_TYPES)}")
        try:
            self._read(Path(folder))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            kind = type(error).__name__
            raise FileFormatError(
                f"{folder}: config.json or a file of the tokenizer holds values that it cannot have ({kind}: {error})"
            ) from error

    def _read(self, folder: Path) -> None:
        """Everything but the numbers. Files are JSON of any form: what is not looked at raises Python's own errors."""
        self.checkpoint = Checkpoint(folder)
        config = Config(self.checkpoint.config, self.checkpoint.folder / "config.json")
        self.family = family(config)
        self.weights = Weights(self.checkpoint)
        mapped = map_tensors(self.weights, self.family)
        self.layer_values = mapped.layer_values
        self.outtype = self._output_type(mapped.outputs)
        extra = self.family.extra_tensors()
        constants = [
            PlannedTensor(OutputTensor(name, None, "f32", shape=values.shape), "f32", values)
            for name, values in extra.items()
        ]
        self.tensors = constants + [PlannedTensor(output, self._tensor_type(output)) for output in mapped.outputs]
        self.name = self.options.model_name or Path(self.checkpoint.folder).resolve().name
        self.notes = self.family.notes() + scaling_notes(config)
        if mapped.skipped_layers:
            self.notes.append(f"{len(mapped.skipped_layers)} tensors of prediction layers (MTP) are left out")
        if mapped.skipped_parts:
            self.notes.append(f"{len(mapped.skipped_parts)} tensors of other parts are left out (the text model alone)")
        self.notes += self._integer_notes()
        self.metadata = self._metadata()
        self.path = self.options.outfile or str(self.checkpoint.folder / f"{self.name}-{self.outtype.upper()}.gguf")
        header = self._declared(GGUFWriter(self.path)).plan()[0].header
        check_loads(GGUFFile.of_header(header, str(self.checkpoint.folder)), self.family, mapped.outputs)
        check_gaps((output.name for output in mapped.outputs), self.family, self.checkpoint.folder)

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

    # types

    def _output_type(self, outputs: list[OutputTensor]) -> str:
        """auto: f16 for checkpoints in f16, bf16 for all others."""
        if self.options.outtype != "auto":
            return self.options.outtype
        return _half_type([output for output in outputs if _is_matrix(output)])

    def _tensor_type(self, output: OutputTensor) -> str:
        if output.kind in ("mxfp4", "i32") or (output.kind == "q4_0" and _is_matrix(output)):
            return output.kind
        if not _is_matrix(output):
            return "f32"
        if output.shape[-1] % registry.by_name(self.outtype).block_elements:
            return _half_type([output])
        return self.outtype

    def _integer_notes(self) -> list[str]:
        """Why matrices of integers are written as floats, each reason with an example."""
        found: dict[tuple[str, str], list[str]] = {}
        for tensor in self.tensors:
            integers = [m for m in (self.weights.integers(part.source) for part in tensor.output.parts) if m]
            if integers and tensor.type != "q4_0":
                reason = next((m.no_blocks for m in integers if m.no_blocks), "")
                mixed = "some experts are no INT4" if len(integers) < len(tensor.output.parts) else "no whole rows"
                found.setdefault((tensor.type, reason or mixed), []).append(tensor.output.name)
        return [
            f"{len(names)} tensors of integers are decoded and written as {kind} ({reason}), the first is {names[0]}"
            for (kind, reason), names in found.items()
        ]

    # metadata

    def _metadata(self) -> dict[str, Any]:
        types = {tensor.type for tensor in self.tensors}
        file_type = next((name for t, name in _BLOCK_FILE_TYPES.items() if t in types), _FILE_TYPES[self.outtype])
        arch = self.family.arch
        values: dict[str, Any] = {
            "general.architecture": arch,
            "general.type": "model",
            "general.name": self.name,
            "general.file_type": registry.ftype_by_name(file_type).id,
            "general.quantization_version": _QUANTIZATION_VERSION,
        }
        embedding = next(t.output for t in self.tensors if t.output.name == "token_embd.weight")
        n_vocab = embedding.shape[0]
        values |= {f"{arch}.{key}": value for key, value in self.family.keys().items()}
        values[f"{arch}.vocab_size"] = n_vocab
        values |= self._layer_values()
        keys = tokenizer_keys(
            self.checkpoint,
            n_vocab,
            self.notes,
            name=self.name,
            pre=self.options.pre,
            usual_pre=self.family.usual_pre,
        )
        return values | keys | self._templates()

    def _layer_values(self) -> dict[str, list[float] | np.ndarray]:
        """Keys that list a number per layer, or hold the integers of a tensor of one layer."""
        values: dict[str, list[float] | np.ndarray] = self._layer_lists()
        for module, (key, default) in self.family.layer_values.items():
            sources = self.layer_values.get(module)
            if sources is None and default is not None:
                values[key] = [default] * self.family.config.n_layer
                continue
            missing = [il for il in range(self.family.config.n_layer) if il not in (sources or {})]
            if missing or not sources:
                raise FileFormatError(
                    f"{self.checkpoint.folder}: layer {missing[0]} lacks {module}; the checkpoint is incomplete"
                )
            values[key] = [self._number(sources[il]) for il in sorted(sources)]
        return values

    def _layer_lists(self) -> dict[str, list[float] | np.ndarray]:
        """Keys that hold the integers of a tensor of one layer, u64."""
        values: dict[str, list[float] | np.ndarray] = {}
        for module, key in self.family.layer_lists.items():
            sources = list(self.layer_values.get(module, {}).values())
            if not sources and not self.family.needs_list(module):
                continue
            if len(sources) != 1:
                raise FileFormatError(f"{self.checkpoint.folder}: one layer must have {module}, found {len(sources)}")
            stored = self.checkpoint.raw(sources[0])
            if stored.dtype.kind not in "iu" or (stored < 0).any():
                raise FileFormatError(f"{self.checkpoint.folder}: '{sources[0]}' must hold integers, none below 0")
            values[f"{self.family.arch}.{key}"] = stored.reshape(-1).astype(np.uint64)
        return values

    def _number(self, source: str) -> float:
        """The value of a tensor that holds one."""
        numbers = to_float32(self.weights.load(source), self.weights.kind(source)).reshape(-1)
        if len(numbers) != 1 or not np.isfinite(numbers[0]):
            raise FileFormatError(f"{self.checkpoint.folder}: tensor '{source}' is not one finite number")
        return float(numbers[0])

    def _templates(self) -> dict[str, Any]:
        path = self.options.chat_template_file
        keys = given_template(path) if path else checkpoint_templates(self.checkpoint)
        if not keys and self.family.writes_texts:
            self.notes.append("the checkpoint has no chat template: conversations will be written as ChatML")
        return keys

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
            except (AttributeError, LookupError, TypeError, UsageError, ValueError):
                raise FileFormatError(
                    f"{self.checkpoint.folder}: {key} of the GGUF file cannot be {str(value)[:_SHOWN]!r}; "
                    "config.json or a file of the tokenizer holds a value that it cannot have"
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
        for part in tensor.output.parts:
            try:
                yield from self._encoded_part(tensor, part)
            except MemoryError:
                raise ResourceError(f"not enough memory to convert tensor '{part.source}' to {tensor.type}") from None
            self.weights.release(part.source)
        if tensor.output.n_repeated:
            yield from self._repeated_row(tensor, tensor.output.parts[0])

    def _repeated_row(self, tensor: PlannedTensor, part: Part) -> Iterator[np.ndarray]:
        """The first row of a matrix as often as it follows the last."""
        first = self.weights.load(part.source, self.weights.kind(part.source))[:1]
        coded = encode(first, self.weights.kind(part.source), tensor.type, tensor.output.change, part.source)
        for _ in range(tensor.output.n_repeated):
            yield coded

    def _floats(self, source: str) -> np.ndarray:
        """The values f32 of a checkpoint tensor."""
        return to_float32(self.weights.load(source, self.weights.kind(source)), self.weights.kind(source))

    def _encoded_part(self, tensor: PlannedTensor, part: Part) -> Iterator[np.ndarray]:
        kind = self.weights.kind(part.source)
        if kind in ("q4_0", "mxfp4") and kind != tensor.type:
            kind = "f32"
        array = self.weights.load(part.source, kind)
        array = array if part.view is None else part.view(array)
        lengths = column_lengths(array, kind) if tensor.output.unit_columns else None
        first = 0
        for rows in pieces(array, _PIECE_ELEMENTS):
            change = tensor.output.change
            if lengths is not None:
                change = unit_columns(lengths)
            if tensor.output.factor:
                change = multiplied(self._floats(tensor.output.factor))
            if tensor.output.row_factors is not None:
                change = scaled_rows(tensor.output.row_factors[first : first + len(rows)])
            yield encode(rows, kind, tensor.type, change, part.source)
            first += len(rows)


def multiplied(factors: np.ndarray) -> Change:
    """Values times as many factors."""
    return lambda values: values * factors.reshape(values.shape)


def scaled_rows(factors: np.ndarray) -> Change:
    """Rows times a factor each."""
    return lambda values: values * factors[:, None]


def column_lengths(matrix: np.ndarray, kind: str) -> np.ndarray:
    """Lengths f32 [ne0] of the columns of a matrix [n, ne0] of a kind, at least _SHORTEST."""
    squares = np.zeros(matrix.shape[-1])
    for rows in pieces(matrix, _PIECE_ELEMENTS):
        squares += np.square(to_float32(rows, kind), dtype=np.float64).sum(axis=0)
    return np.maximum(np.sqrt(squares), _SHORTEST).astype(np.float32)


def unit_columns(lengths: np.ndarray) -> Change:
    """Columns divided by their lengths."""
    return lambda values: values / lengths


def encode(rows: np.ndarray, kind: str, target: str, change: Change | None, name: str) -> np.ndarray:
    """Rows [n, ne0] of a kind as bytes of a type. FileFormatError for values that are not finite or do not fit."""
    if kind == target and change is None:
        if not _is_finite(rows.view(np.uint8).reshape(-1), target, registry.by_name(target).block_elements):
            raise _not_finite(name)
        return rows.view(np.uint8)
    values = to_float32(rows, kind)
    if change is not None:
        values = change(values)
    if not np.isfinite(values).all():
        raise _not_finite(name)
    if target == "f32":
        return values.view(np.uint8)
    from ikpy._native import core

    coded = np.asarray(core.quantize(values, registry.by_name(target).id, None, hardware_threads()))
    if not _is_finite(coded, target, values.shape[-1]):
        wider = "f32" if target == "bf16" else "bf16"
        raise FileFormatError(f"tensor '{name}' has values beyond the range of {target}; use --outtype {wider}")
    return coded


def _is_finite(data: np.ndarray, target: str, ne0: int) -> bool:
    """Whether rows of a type, uint8 [nbytes], hold finite values alone."""
    from ikpy._native import core

    row = registry.by_name(target)
    if surely_finite(data, row, ne0):
        return True
    return bool(np.isfinite(core.dequantize(data, row.id, ne0, len(data) // row.row_nbytes(ne0))).all())


def _not_finite(name: str) -> FileFormatError:
    return FileFormatError(f"tensor '{name}' contains NaN or infinite values; the checkpoint is damaged")


def _half_type(outputs: list[OutputTensor]) -> str:
    return "f16" if outputs and all(output.kind in ("f16", "mxfp4", "q4_0", "i32") for output in outputs) else "bf16"


def _is_matrix(output: OutputTensor) -> bool:
    return len(output.shape) > 1 and not output.name.endswith(_ALWAYS_F32)


def _add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    """Stores a value: str, bool, int as u32, float as f32, lists of these, arrays of f32, u64 or i32."""
    if isinstance(value, np.ndarray):
        types_of = {np.dtype(np.float32): VT.FLOAT32, np.dtype(np.uint64): VT.UINT64}
        writer.add_array(key, types_of.get(value.dtype, VT.INT32), value.tolist())
    elif isinstance(value, list):
        kinds = {str: VT.STRING, bool: VT.BOOL, float: VT.FLOAT32}
        writer.add_array(key, kinds.get(type(value[0]) if value else int, VT.UINT32), value)
    else:
        types = {str: VT.STRING, bool: VT.BOOL, int: VT.UINT32, float: VT.FLOAT32}
        writer.add(key, types[type(value)], value)
