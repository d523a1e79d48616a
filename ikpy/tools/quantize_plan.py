"""What a quantization run will do: options, and the type and size of every tensor."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType

import numpy as np

from ikpy.errors import IkpyError, UnsupportedError, escaped
from ikpy.gguf.reader import GGUFFile, TensorInfo
from ikpy.quants import registry
from ikpy.quants.mixture import TypeOptions
from ikpy.quants.model_shape import EXTRA_OUTPUT, OUTPUT, TOKEN_EMBEDDING, ModelShape, is_looked_up
from ikpy.quants.policy import (
    REFUSED_WITHOUT_IMATRIX,
    Choice,
    TypePolicy,
    fit_parts,
    is_eligible,
    keeps_type,
    needs_imatrix,
    plain_type,
)
from ikpy.quants.recipe import Recipe, SizeTarget
from ikpy.quants.registry import FileType
from ikpy.tools.imatrix_file import ImportanceMatrix
from ikpy.tools.joined_matrices import joined_rows
from ikpy.tools.quantize_metadata import stored_file_type
from ikpy.tools.quantize_prune import kept_tensors, pruned_values
from ikpy.tools.tensor_convert import can_encode, repack_target

MIB = 1024 * 1024
GIB = 1024 * MIB
INTERNAL = "llama_model_quantize_internal"
# Matrices of latent attention: some files hold a matrix per head, others the rows of all heads in one.
SPLIT_HEADS = re.compile(r"\.attn_((k|v|kv)_b|output_a)\.weight$")
# Names in a line that lists tensors.
SHOWN_NAMES = 5

NEEDS_IMATRIX_BANNER = """
==========================================================================================================
Please do not use IQ1_S, IQ1_M, IQ2_S, IQ2_XXS, IQ2_XS or Q2_K_S quantization without an importance matrix
==========================================================================================================

"""


def size_text(nbytes: int) -> str:
    """Bytes in GiB, or in MiB below that."""
    return f"{nbytes / GIB:.3f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.3f} MiB"


class MissingImatrixError(IkpyError):
    """The file type is useless without an importance matrix."""


class RefusedError(UnsupportedError):
    """A step that is shown before the message, because only its execution is refused."""

    def __init__(self, step: Step, message: str):
        super().__init__(message)
        self.step = step


@dataclass
class QuantizeOptions:
    """What to make.

    ``ftype`` None copies the tensors unchanged, or is found from the chosen types when there is a target. ``n_threads``
    0 = all hardware threads. ``recipe_paths`` are files that rules came from, ``save_recipe`` is one for the decisions
    in the form of rules. ``prune_layers`` are blocks to leave out; rules and other options see the numbers that the
    blocks have in the output.
    """

    ftype: FileType | None
    n_threads: int = 0
    imatrix: ImportanceMatrix | None = None
    imatrix_path: str = ""
    hide_imatrix: bool = False
    ignore_imatrix_rules: bool = False
    types: TypeOptions = field(default_factory=TypeOptions)
    extra_output_type: str = ""
    recipe: Recipe = field(default_factory=Recipe)
    recipe_paths: tuple[str, ...] = ()
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
    target: SizeTarget = field(default_factory=SizeTarget)
    save_recipe: str = ""
    prune_layers: frozenset[int] = frozenset()


@dataclass
class Step:
    """One tensor of the output: its source, type, importance values and the console text of the decision.

    ``decided``: it may be converted, and the policy has chosen its type; ``free``: no option and no rule names that
    type, so that a target may choose it. ``unread``: the model does without, so that importance counts for nothing.
    ``parts``: rows of the matrices that it joins.
    """

    name: str
    source: TensorInfo
    source_type: str
    type: str
    imatrix: np.ndarray | None = None
    note: str = ""
    decided: bool = False
    free: bool = False
    unread: bool = False
    parts: Sequence[int] = ()

    @property
    def nbytes(self) -> int:
        """Bytes in the output."""
        return registry.by_name(self.type).tensor_nbytes(self.source.shape)


@dataclass
class Plan:
    """All steps in file order. ``problem`` is what made planning stop after them, if anything did; ``idle_roles`` are
    options for roles (fields of TypeOptions) that decided no type."""

    steps: list[Step] = field(default_factory=list)
    n_fallbacks: int = 0
    n_convertible: int = 0
    file_type: int = 0
    problem: IkpyError | None = None
    idle_roles: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the output."""
        return sum(step.nbytes for step in self.steps)

    @property
    def bits_per_weight(self) -> float:
        """Of all tensors of the output."""
        return self.nbytes * 8 / max(1, sum(step.source.element_count for step in self.steps))

    def recipe(self) -> str:
        """Rules that give every tensor of this plan the same type again."""
        lines = [f"# {size_text(self.nbytes)}, {self.bits_per_weight:.3f} BPW"]
        lines += [f"^{re.escape(step.name)}$={step.type}" for step in self.steps if step.decided]
        return "\n".join(lines) + "\n"

    def importance(self) -> tuple[str, str]:
        """Which converted tensors have importance values, and a warning ("" if there is no reason for one)."""
        converted = [step for step in self.steps if step.type != step.source_type]
        without = [step.name for step in converted if step.imatrix is None]
        shown = ", ".join(map(escaped, without[:SHOWN_NAMES]))
        text = f"importance values for {len(converted) - len(without)} of {len(converted)} converted tensors"
        if not without:
            return text, ""
        more = f" and {len(without) - SHOWN_NAMES} more" if len(without) > SHOWN_NAMES else ""
        text += f"; none for {shown}{more}"
        needs_none = {OUTPUT, EXTRA_OUTPUT, *filter(is_looked_up, without)}
        if len(without) < len(converted) or set(without) <= needs_none:
            return text, ""
        return text, "the importance matrix has values for none of the converted tensors; is it one of another model?"

    def summary(self) -> list[str]:
        """File type, size, bits per weight and the number of tensors of each type."""
        counts = Counter(step.type for step in self.steps)
        order = sorted(counts, key=lambda name: registry.by_name(name).id)
        return [
            f"{INTERNAL}: file type = {self.file_type} ({registry.ftype_display_name(self.file_type)})",
            f"{INTERNAL}: output size = {self.nbytes / MIB:.3f} MiB ({self.nbytes / MIB / 1024:.3f} GiB), "
            f"{self.bits_per_weight:.3f} BPW",
            f"{INTERNAL}: tensors: " + ", ".join(f"{counts[name]} {name}" for name in order),
        ]


def refuse_without_imatrix(options: QuantizeOptions) -> None:
    """Raise MissingImatrixError for file types that are useless without an importance matrix."""
    if options.repack or options.ignore_imatrix_rules or options.imatrix is not None or options.ftype is None:
        return
    if options.ftype.name in REFUSED_WITHOUT_IMATRIX and not options.target.is_given:
        raise MissingImatrixError(NEEDS_IMATRIX_BANNER)


def make_plan(file: GGUFFile, options: QuantizeOptions, assigned: Mapping[str, str] = MappingProxyType({})) -> Plan:
    """Decide the type of every tensor; stops at the first one that cannot be done.

    ``assigned`` holds types chosen for a target, by tensor name; they stand in for the mixture of the file type.
    """
    plan = Plan(file_type=stored_file_type(file, options))
    options.recipe.restart()
    try:
        pruned = pruned_values(file, options.prune_layers)
        tensors = kept_tensors(file, options.prune_layers)
        if options.repack:
            parts = joined_rows(file, options.kv_overrides)
            plan.steps = [_repack_step(name, info, options, parts.get(info.name, ())) for name, info in tensors.items()]
        else:
            shapes = {name: info.shape for name, info in tensors.items()}
            model = ModelShape.of({**file.metadata, **pruned, **options.kv_overrides}, shapes)
            parts = joined_rows(file, options.kv_overrides) if options.ftype else {}
            _plan_types(tensors, model, options, plan, assigned, parts)
    except IkpyError as error:
        plan.problem = error
    return plan


def _repack_step(name: str, info: TensorInfo, options: QuantizeOptions, parts: Sequence[int]) -> Step:
    current = registry.by_id(info.type_id).name
    target = repack_target(current)
    wanted = not options.repack_patterns or any(p.search(name) for p in options.repack_patterns)
    is_fixed = is_looked_up(name) or keeps_type(name)
    if not target or not wanted or is_fixed or not _fits(registry.by_name(target), info.shape):
        target = current
    if target != current and not registry.by_name(target).keeps_apart(parts):
        return Step(name, info, current, current, note=_joined_note(target, current, parts))
    return Step(name, info, current, target)


def _joined_note(wanted: str, used: str, parts: Sequence[int]) -> str:
    rows = ", ".join(map(str, parts))
    group = f"no multiples of {registry.by_name(wanted).interleave}, the row group of {wanted}"
    return f"\ntensor joins matrices of {rows} rows, {group} - using {used}\n"


def _fits(row: registry.TensorType, shape: Sequence[int]) -> bool:
    """Whether rows and their number suit an interleaved type."""
    rows = shape[1] if len(shape) > 1 else 1
    return rows % max(4, row.interleave) == 0 and shape[0] % row.block_elements == 0


def _plan_types(
    tensors: Mapping[str, TensorInfo],
    model: ModelShape,
    options: QuantizeOptions,
    plan: Plan,
    assigned: Mapping[str, str],
    parts: Mapping[str, Sequence[int]],
) -> None:
    imatrix = options.imatrix if options.imatrix and options.imatrix.values else None
    policy = options.ftype and TypePolicy(
        options.ftype,
        model,
        has_imatrix=imatrix is not None,
        options=options.types,
        pure=options.pure,
        custom_rule=options.recipe.type_for,
        assigned=assigned,
    )
    duplicated = OUTPUT if model.has_output else TOKEN_EMBEDDING
    for name, info in tensors.items():
        current = registry.by_id(info.type_id).name
        step = Step(name, info, current, current, unread=not model.reads(name), parts=parts.get(info.name, ()))
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
            choice = TypePolicy.of_option(options.extra_output_type, EXTRA_OUTPUT, info.shape)
            extra = Step(EXTRA_OUTPUT, info, current, choice.type)
            _note_fallback(extra, choice, plan)
            if extra.type != current:
                _prepare_conversion(extra, options)
            plan.steps.append(extra)
    if policy:
        asked = [item.name for item in fields(TypeOptions) if getattr(options.types, item.name)]
        plan.idle_roles = [role for role in asked if role not in policy.used_roles]


def _decide(step: Step, policy: TypePolicy, options: QuantizeOptions, plan: Plan) -> None:
    choice = policy.choose(step.name, step.source.shape)
    fit_parts(choice, step.name, step.source.shape, step.parts)
    step.type = choice.type
    step.decided = True
    step.free = not choice.custom and not choice.forced
    plan.n_convertible += 1
    if choice.custom:
        step.note += f"Using custom type {choice.custom} for tensor {escaped(step.name)}\n"
        rule = options.recipe.match(step.name)
        if rule is not None:
            rule.nbytes += step.nbytes
            rule.overruled += choice.forced not in ("", choice.custom)
    if choice.embedding_from:
        step.note += (
            "\n============ Token embeddings cannot be quantized with row-interleaved quants\n"
            f"---> Changed {choice.embedding_from} to {plain_type(registry.by_name(choice.embedding_from))}\n"
        )
    _note_fallback(step, choice, plan)
    if step.type == step.source_type:
        return
    _prepare_conversion(step, options)


def _note_fallback(step: Step, choice: Choice, plan: Plan) -> None:
    if choice.fallback_from:
        plan.n_fallbacks += 1
        shape = step.source.shape
        step.note += (
            f"\ntensor cols {shape[0]} x {shape[1]} are not divisible by "
            f"{registry.by_name(choice.fallback_from).block_elements}, required for {choice.fallback_from} - "
            f"using fallback quantization {choice.type}\n"
        )
    if choice.joined_from:
        step.note += _joined_note(choice.joined_from, choice.type, step.parts)


def _prepare_conversion(step: Step, options: QuantizeOptions) -> None:
    """Look up the importance values and check that the conversion is possible and allowed."""
    if options.imatrix and options.imatrix.values:
        step.imatrix = _importance(step, options.imatrix)
    ftype = options.ftype.name if options.ftype else ""
    is_blind = step.imatrix is None and not step.unread and needs_imatrix(step.name, step.type, ftype)
    if is_blind and not options.ignore_imatrix_rules:
        raise UnsupportedError(
            f"Missing importance matrix for tensor {step.name} in a very low-bit quantization; "
            "give --imatrix with data for it, choose another type, or use --ignore-imatrix-rules"
        )
    if not can_encode(step.type):
        raise UnsupportedError(f"type {step.type}, chosen for tensor {step.name}, can be read but not made")
    if registry.by_name(step.source_type).is_quantized and not (options.allow_requantize or options.dry_run):
        step.note += f"converting to {step.type} .. "
        raise RefusedError(
            step, f"requantizing from type {step.source_type} is disabled; --allow-requantize permits it"
        )


def _importance(step: Step, imatrix: ImportanceMatrix) -> np.ndarray | None:
    # The importance matrix is that of the whole model; a second output matrix has the inputs of the first one.
    values = imatrix.find(step.source.name)
    if values is None:
        step.note += f"\n====== {INTERNAL}: did not find weights for {escaped(step.name)}\n"
        return None
    shape = step.source.shape
    expected = shape[0] * (shape[2] if len(shape) > 2 else 1)
    if len(values) == expected:
        return values.reshape(-1, shape[0])
    if SPLIT_HEADS.search(step.name) and len(values) % shape[0] == 0:
        heads = values.reshape(-1, shape[0])
        if len(shape) < 3:
            return heads.mean(axis=0, keepdims=True)
        if len(heads) == 1:
            return heads
    text = f"imatrix size {len(values)} is different from tensor size {expected} for {step.name}"
    step.note += f"\n====== {INTERNAL}: {escaped(text)}\n"
    if step.name != TOKEN_EMBEDDING:
        raise UnsupportedError(f"{text}; the importance matrix belongs to another model")
    return None
