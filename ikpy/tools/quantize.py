"""Make a quantized (or repacked) copy of a model: planning, console lines, metadata and output files (tools 2).

``quantize`` works in two steps: every tensor's type is decided first, which costs nothing and finds all problems of
the request; then the tensors are converted one after another, a piece of rows at a time, into files that get their
names only when they are complete.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ikpy.errors import IkpyError, UnsupportedError, UsageError
from ikpy.gguf import encode
from ikpy.gguf.reader import GGUFFile, TensorInfo
from ikpy.gguf.splits import output_prefix, split_path
from ikpy.gguf.types import KEY_SPLIT_COUNT, KEY_SPLIT_NO, KEY_SPLIT_TENSORS, SPLIT_KEYS, GGUFValueType
from ikpy.gguf.writer import GGUFWriter
from ikpy.quants import registry
from ikpy.quants.policy import (
    EMBEDDINGS,
    OUTPUT,
    REFUSED_WITHOUT_IMATRIX,
    TOKEN_EMBEDDING,
    ModelShape,
    TypeOptions,
    TypePolicy,
    is_eligible,
    needs_imatrix,
)
from ikpy.quants.recipe import Recipe
from ikpy.quants.registry import FileType
from ikpy.tools.imatrix_file import ImportanceMatrix
from ikpy.tools.tensor_convert import can_encode, convert_rows, repack_target

MIB = 1024 * 1024
INTERNAL = "llama_model_quantize_internal"
EXTRA_OUTPUT = "output_extra.weight"
QUANTIZATION_VERSION = 2
MAX_STORED_NAME = 127

NEEDS_IMATRIX_BANNER = """
==========================================================================================================
Please do not use IQ1_S, IQ1_M, IQ2_S, IQ2_XXS, IQ2_XS or Q2_K_S quantization without an importance matrix
==========================================================================================================

"""

Print = Callable[[str], None]


class MissingImatrixError(IkpyError):
    """The file type is useless without an importance matrix."""


@dataclass
class QuantizeOptions:
    """What to make. ``ftype`` None copies the tensors unchanged; ``n_threads`` 0 = all hardware threads."""

    ftype: FileType | None
    n_threads: int = 0
    imatrix: ImportanceMatrix | None = None
    imatrix_path: str = ""
    hide_imatrix: bool = False
    ignore_imatrix_rules: bool = False
    types: TypeOptions = field(default_factory=TypeOptions)
    extra_output_type: str = ""
    recipe: Recipe = field(default_factory=Recipe)
    pure: bool = False
    allow_requantize: bool = False
    leave_output_tensor: bool = False
    repack: bool = False
    repack_patterns: tuple[re.Pattern[str], ...] = ()
    keep_split: bool = False
    partial_requant: bool = False
    dry_run: bool = False
    symmetric_q4_0: bool = False
    kv_overrides: Mapping[str, object] = field(default_factory=dict)


@dataclass
class Step:
    """One tensor of the output: its source, type, importance values and the console text of the decision."""

    name: str
    source: TensorInfo
    source_type: str
    type: str
    imatrix: np.ndarray | None = None
    note: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes in the output."""
        return registry.by_name(self.type).tensor_nbytes(self.source.shape)


@dataclass
class Plan:
    """All steps in file order. ``problem`` is what made planning stop after them, if anything did."""

    steps: list[Step] = field(default_factory=list)
    n_fallbacks: int = 0
    n_convertible: int = 0
    problem: IkpyError | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the output."""
        return sum(step.nbytes for step in self.steps)

    def summary(self) -> list[str]:
        """Size, bits per weight and the number of tensors of each type."""
        elements = sum(step.source.element_count for step in self.steps)
        counts = Counter(step.type for step in self.steps)
        order = sorted(counts, key=lambda name: registry.by_name(name).id)
        return [
            f"{INTERNAL}: output size = {self.nbytes / MIB:.3f} MiB ({self.nbytes / MIB / 1024:.3f} GiB), "
            f"{self.nbytes * 8 / max(1, elements):.3f} BPW",
            f"{INTERNAL}: tensors: " + ", ".join(f"{counts[name]} {name}" for name in order),
        ]


def make_plan(file: GGUFFile, options: QuantizeOptions) -> Plan:
    """Decide the type of every tensor; stops at the first one that cannot be done."""
    plan = Plan()
    try:
        if options.repack:
            plan.steps = [_repack_step(info, options) for info in file.tensors.values()]
        else:
            _plan_types(file, options, plan)
    except IkpyError as error:
        plan.problem = error
    return plan


def _repack_step(info: TensorInfo, options: QuantizeOptions) -> Step:
    current = registry.by_id(info.type_id).name
    target = repack_target(current)
    wanted = not options.repack_patterns or any(p.search(info.name) for p in options.repack_patterns)
    rows = info.shape[1] if len(info.shape) > 1 else 1
    if not target or not wanted or info.name in EMBEDDINGS or rows % max(4, registry.by_name(target).interleave):
        target = current
    return Step(info.name, info, current, target)


def _plan_types(file: GGUFFile, options: QuantizeOptions, plan: Plan) -> None:
    shapes = {name: info.shape for name, info in file.tensors.items()}
    model = ModelShape.of({**file.metadata, **options.kv_overrides}, shapes)
    imatrix = options.imatrix if options.imatrix and options.imatrix.values else None
    policy = options.ftype and TypePolicy(
        options.ftype,
        model,
        has_imatrix=imatrix is not None,
        options=options.types,
        pure=options.pure,
        custom_rule=options.recipe.type_for,
    )
    duplicated = OUTPUT if model.has_output else TOKEN_EMBEDDING
    for name, info in file.tensors.items():
        current = registry.by_id(info.type_id).name
        step = Step(name, info, current, current)
        if policy and is_eligible(
            name,
            info.shape,
            current,
            leave_output=options.leave_output_tensor,
            router_type=options.types.ffn_gate_inp,
        ):
            _decide(step, policy, options, plan)
        plan.steps.append(step)
        if options.extra_output_type and name == duplicated:
            extra = Step(EXTRA_OUTPUT, info, current, options.extra_output_type)
            if extra.type != current:
                _prepare_conversion(extra, options)
            plan.steps.append(extra)


def _decide(step: Step, policy: TypePolicy, options: QuantizeOptions, plan: Plan) -> None:
    choice = policy.choose(step.name, step.source.shape)
    step.type = choice.type
    plan.n_convertible += 1
    if choice.custom:
        step.note += f"Using custom type {choice.custom} for tensor {step.name}\n"
    if choice.fallback_from:
        plan.n_fallbacks += 1
        shape = step.source.shape
        step.note += (
            f"\ntensor cols {shape[0]} x {shape[1]} are not divisible by "
            f"{registry.by_name(choice.fallback_from).block_elements}, required for {choice.fallback_from} - "
            f"using fallback quantization {choice.type}\n"
        )
    if choice.embedding_from:
        step.note += (
            "\n============ Token embeddings cannot be quantized with row-interleaved quants\n"
            f"---> Changed {choice.embedding_from} to {registry.by_name(choice.embedding_from).plain_partner}\n"
        )
    if step.type == step.source_type:
        return
    _prepare_conversion(step, options)


def _prepare_conversion(step: Step, options: QuantizeOptions) -> None:
    """Look up the importance values and check that the conversion is possible and allowed."""
    if options.imatrix and options.imatrix.values:
        step.imatrix = _importance(step, options.imatrix)
    ftype = options.ftype.name if options.ftype else ""
    if step.imatrix is None and needs_imatrix(step.name, step.type, ftype) and not options.ignore_imatrix_rules:
        raise UnsupportedError(
            f"Missing importance matrix for tensor {step.name} in a very low-bit quantization; "
            "give --imatrix with data for it, choose another type, or use --ignore-imatrix-rules"
        )
    if not can_encode(step.type):
        raise UnsupportedError(f"type {step.type}, chosen for tensor {step.name}, can be read but not made")
    if registry.by_name(step.source_type).is_quantized and not (options.allow_requantize or options.dry_run):
        step.note += f"converting to {step.type} .. "
        raise _Refused(step, f"requantizing from type {step.source_type} is disabled; --allow-requantize permits it")


class _Refused(UnsupportedError):
    """A step that is shown before the message, because only its execution is refused."""

    def __init__(self, step: Step, message: str):
        super().__init__(message)
        self.step = step


def _importance(step: Step, imatrix: ImportanceMatrix) -> np.ndarray | None:
    values = imatrix.find(step.name)
    if values is None:
        step.note += f"\n====== {INTERNAL}: did not find weights for {step.name}\n"
        return None
    shape = step.source.shape
    expected = shape[0] * (shape[2] if len(shape) > 2 else 1)
    if len(values) == expected:
        return values.reshape(-1, shape[0])
    text = f"imatrix size {len(values)} is different from tensor size {expected} for {step.name}"
    step.note += f"\n====== {INTERNAL}: {text}\n"
    if step.name != TOKEN_EMBEDDING:
        raise UnsupportedError(f"{text}; the importance matrix belongs to another model")
    return None


# -- metadata ----------------------------------------------------------------------------------------------


def output_metadata(file: GGUFFile, options: QuantizeOptions) -> dict[str, encode.StoredValue]:
    """Metadata values that the output adds or changes (tools 2.10)."""
    u32, i32, text = GGUFValueType.UINT32, GGUFValueType.INT32, GGUFValueType.STRING
    values = {"general.quantization_version": encode.scalar(u32, QUANTIZATION_VERSION)}
    number = options.ftype.id if options.ftype else int(file.get("general.file_type", 0))
    if options.repack:
        number = repacked_ftype(int(file.get("general.file_type", 0)))
    values["general.file_type"] = encode.scalar(u32, number)
    if options.imatrix and not options.repack:
        path, dataset = options.imatrix_path, options.imatrix.dataset
        entries, chunks = len(options.imatrix.values), options.imatrix.chunks
        if options.hide_imatrix:
            path = dataset = "top_secret"
            entries = chunks = 0
        values["quantize.imatrix.file"] = encode.scalar(text, _shortened(path))
        if dataset:
            values["quantize.imatrix.dataset"] = encode.scalar(text, _shortened(dataset))
        values["quantize.imatrix.entries_count"] = encode.scalar(i32, entries)
        if chunks > 0 or options.hide_imatrix:
            values["quantize.imatrix.chunks_count"] = encode.scalar(i32, chunks)
    for key, value in options.kv_overrides.items():
        values[key] = _override(value)
    return values


def _shortened(value: str) -> str:
    return value.encode()[:MAX_STORED_NAME].decode("utf-8", "ignore")


def _override(value: object) -> encode.StoredValue:
    kinds = (
        (bool, GGUFValueType.BOOL),
        (int, GGUFValueType.INT32),
        (float, GGUFValueType.FLOAT32),
        (str, GGUFValueType.STRING),
    )
    for python_type, value_type in kinds:
        if isinstance(value, python_type):
            return encode.scalar(value_type, value)
    raise UsageError(f"metadata override {value!r} is no number, bool or text")


def repacked_ftype(number: int) -> int:
    """File type after repacking; unchanged where there is no interleaved one."""
    try:
        after = registry.ftype_by_id(number).after_repack
    except IkpyError:
        return number
    return number if after < 0 else after


# -- execution ---------------------------------------------------------------------------------------------


@dataclass
class _Output:
    """One file to write: its path, steps and split keys; the model's metadata go to the first."""

    path: str
    steps: list[Step]
    split_values: dict[str, tuple[GGUFValueType, int]]
    first: bool = True


class Quantizer:
    """One run of the tool; ``out`` and ``err`` receive text with its line ends."""

    def __init__(self, file: GGUFFile, output: str, options: QuantizeOptions, *, out: Print, err: Print):
        self.file = file
        self.output = output
        self.options = options
        self.out, self.err = out, err
        self.done = self.total = 0

    def run(self) -> Plan:
        """Plan and convert; raises IkpyError. Nothing is written in a dry run."""
        options = self.options
        if not options.dry_run:
            self._check_paths()
        if options.imatrix and not options.repack:
            self.err(f"================================ Have weights data with {len(options.imatrix.values)} entries\n")
        plan = make_plan(self.file, options)
        self.total = len(self.file.tensors)
        if options.repack and plan.problem is None:
            if all(step.type == step.source_type for step in plan.steps):
                self.out(f"=========================== {INTERNAL}: nothing to do for only_repack option\n")
                return plan
            self._print_repack_summary()
        if options.extra_output_type:
            duplicated = OUTPUT if OUTPUT in self.file.tensors else TOKEN_EMBEDDING
            self.err(f"{'X' * 45} Will duplicate {duplicated} as {options.extra_output_type}\n")
        if plan.problem is not None or options.dry_run:
            self._show_plan(plan)
        else:
            self._write(plan)
        self._print_sizes(plan)
        return plan

    def _check_paths(self) -> None:
        inputs = {os.path.realpath(shard.path) for shard in self.file.shards}
        if os.path.realpath(self.output) in inputs:
            raise UsageError(f"{self.output} is the input; give another output name")
        folder = os.path.dirname(os.path.abspath(self.output))
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot create folder {folder}: {error.strerror}") from None

    def _print_repack_summary(self) -> None:
        number = int(self.file.get("general.file_type", 0))
        names = [registry.ftype_display_name(n) for n in (number, repacked_ftype(number))]
        self.out(f"===================== Model ftype: {names[0]}: Repacked ftype: {names[1]}\n")

    def _show_plan(self, plan: Plan) -> None:
        for step in plan.steps:
            self._begin_line(step)
            self._end_line(step)
        problem = plan.problem
        if isinstance(problem, _Refused):
            self._begin_line(problem.step, refused=True)
        if problem is not None:
            raise problem

    def _begin_line(self, step: Step, *, refused: bool = False) -> None:
        self.done += 1
        shape = (*step.source.shape, 1, 1, 1)[:4]
        dims = ", ".join(f"{n:5d}" for n in shape)
        self.err(f"[{self.done:4d}/{self.total:4d}] {step.source.name:>36} - [{dims}], type = {step.source_type:>6}, ")
        if self.options.repack:
            return
        self.err(step.note)
        if step.type != step.source_type and not refused:
            self.err(f"converting to {step.type} .. ")

    def _end_line(self, step: Step) -> None:
        before, after = step.source.nbytes / MIB, step.nbytes / MIB
        if self.options.repack:
            self.err(f"size = {before:8.3f} MB, type = {step.type}\n")
        elif step.type == step.source_type:
            self.err(f"size = {before:8.3f} MB\n")
        else:
            self.err(f"size = {before:8.2f} MiB -> {after:8.2f} MiB\n")

    def _print_sizes(self, plan: Plan) -> None:
        before = sum(step.source.nbytes for step in plan.steps if step.name != EXTRA_OUTPUT)
        self.err(f"{INTERNAL}: model size  = {before / MIB:8.2f} MB\n")
        self.err(f"{INTERNAL}: quant size  = {plan.nbytes / MIB:8.2f} MB\n")
        for line in plan.summary():
            self.err(line + "\n")
        for rule in self.options.recipe.rules:
            self.err(f"{INTERNAL}: custom rule {rule.pattern} -> {rule.type}: {rule.matched} tensors\n")
        for line in self.options.recipe.warnings():
            self.err(f"WARNING: {line}\n")
        if plan.n_fallbacks:
            self.err(
                f"{INTERNAL}: WARNING: {plan.n_fallbacks} of {plan.n_convertible} tensor(s) "
                "required fallback quantization\n"
            )

    def _outputs(self, plan: Plan) -> list[_Output]:
        count = len(self.file.shards)
        if not self.options.keep_split or count < 2:
            return [_Output(self.output, plan.steps, {})]
        prefix = output_prefix(self.output)
        outputs = []
        for index in range(count):
            split = {
                KEY_SPLIT_NO: (GGUFValueType.UINT16, index),
                KEY_SPLIT_COUNT: (GGUFValueType.UINT16, count),
                KEY_SPLIT_TENSORS: (GGUFValueType.INT32, len(plan.steps)),
            }
            steps = [step for step in plan.steps if step.source.shard == index]
            outputs.append(_Output(split_path(prefix, index, count), steps, split, index == 0))
        return outputs

    def _write(self, plan: Plan) -> None:
        outputs = self._outputs(plan)
        for output in outputs:
            if self.options.partial_requant and os.path.exists(output.path):
                kind = "output file" if len(outputs) == 1 else "split file"
                self.err(f"{kind} {output.path} exists, skipping\n")
                self.done += len(output.steps)
                continue
            self._write_file(output)

    def _write_file(self, output: _Output) -> None:
        with GGUFWriter(output.path, alignment=self.file.alignment) as writer:
            if output.first:
                values = output_metadata(self.file, self.options)
                writer.copy_metadata(self.file, skip=SPLIT_KEYS, replace=values)
            for key, (value_type, value) in output.split_values.items():
                writer.add(key, value_type, value)
            for step in output.steps:
                writer.add_tensor(step.name, step.source.shape, registry.by_name(step.type).id)
            for step in output.steps:
                self._begin_line(step)
                data = self.file.data(step.source)
                for chunk in convert_rows(
                    data,
                    step.source_type,
                    step.type,
                    step.source.shape,
                    name=step.name,
                    imatrix=step.imatrix,
                    n_threads=self.options.n_threads,
                    symmetric_q4_0=self.options.symmetric_q4_0,
                ):
                    writer.write(step.name, chunk)
                self._end_line(step)


def default_output(source: str, type_name: str, *, keep_split: bool) -> str:
    """Output name when none is given: ``ggml-model-TYPE.gguf`` next to the input."""
    return str(Path(source).parent / f"ggml-model-{type_name}{'' if keep_split else '.gguf'}")


def refuse_without_imatrix(options: QuantizeOptions) -> None:
    """Raise MissingImatrixError for file types that are useless without an importance matrix (tools 2.7)."""
    if options.repack or options.ignore_imatrix_rules or options.imatrix is not None or options.ftype is None:
        return
    if options.ftype.name in REFUSED_WITHOUT_IMATRIX:
        raise MissingImatrixError(NEEDS_IMATRIX_BANNER)


def quantize(source: str, output: str, options: QuantizeOptions, *, out: Print, err: Print) -> Plan:
    """Quantize the model at ``source`` to ``output``; both may be the first of several shards.

    Raises UsageError, FileFormatError, UnsupportedError or ResourceError; an existing output stays as it was then.
    """
    refuse_without_imatrix(options)
    with GGUFFile.open(source, header_only=options.dry_run) as file:
        return Quantizer(file, output, options, out=out, err=err).run()


class Stopwatch:
    """Milliseconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def milliseconds(self) -> float:
        return (time.perf_counter() - self._start) * 1e3


def output_files(output: str, shards: int, *, keep_split: bool) -> Sequence[str]:
    """Files a run creates."""
    if not keep_split or shards < 2:
        return [output]
    return [split_path(output_prefix(output), i, shards) for i in range(shards)]
