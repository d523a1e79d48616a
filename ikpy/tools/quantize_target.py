"""Types for a wanted size: every tensor's error is measured in many types on sampled rows, then bytes are spent where
they lower the error most.

The error of a tensor in a type is sum(w (x - y)^2) / sum(w x^2) over the sampled rows, w being the importance of the
column (1 without an importance matrix): the share of the energy of its outputs that quantization destroys. What is
minimized under the limit is the sum over tensors of this error times the number of weights that a token meets, for
experts the share in use. Measured on the bundled model with the bytes of IQ2_K, IQ3_K and IQ4_KS, the KL divergence of
the mixtures is 0.090, 0.016, 0.0054 and of this choice 0.010, 0.0051, 0.0020; with equal weights of all tensors it is
0.018, 0.0062, 0.0036, with absolute errors 0.020, 0.0084, 0.0025.

With every tensor on the lower convex hull of its (bytes, error) points, taking
upgrades in order of error saved per byte is the solution of the Lagrangian; what remains of the limit at the end is
spent on whichever upgrades still fit.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from ikpy.errors import FileFormatError, UsageError, escaped
from ikpy.gguf.metadata import scalar_or
from ikpy.gguf.reader import GGUFFile
from ikpy.gguf.types import align_up
from ikpy.machine.threads import hardware_threads
from ikpy.quants import registry
from ikpy.quants.mixture import TypeOptions
from ikpy.quants.model_shape import is_looked_up
from ikpy.quants.policy import needs_imatrix, plain_type
from ikpy.quants.registry import FileType
from ikpy.tools.quantize_files import output_files
from ikpy.tools.quantize_plan import Plan, QuantizeOptions, Step, make_plan, size_text
from ikpy.tools.quantize_progress import Display
from ikpy.tools.quantize_prune import kept_tensors
from ikpy.tools.tensor_convert import bad_row, beyond_range, can_encode, check_finite, encode, read_rows

# Elements of a tensor that are quantized in every type: 256 super-blocks.
SAMPLE_ELEMENTS = 1 << 16
# Experts (or heads) of a tensor that are looked at.
SAMPLE_MATRICES = 8
CANDIDATES = (
    "iq1_s iq1_m iq2_xxs iq2_ks iq2_k iq2_kl iq3_ks iq3_k iq4_kss iq4_ks iq4_k iq5_ks iq5_k iq6_k q8_0 "
    "q4_0 iq4_nl q5_0 q6_0"
).split()
# Decides the metadata where no file type is given and none has the most used type as its own.
FALLBACK_FILE_TYPE = "IQ4_K"
_NO_ENERGY = 1e-30


@dataclass(frozen=True)
class Point:
    """A type a tensor could get, its bytes in the file with padding, and its cost: relative error times sensitivity."""

    type: str
    nbytes: int
    error: float


@dataclass
class Tensor:
    """A tensor whose type is to be chosen; ``points`` by increasing size, each better than the one before."""

    step: Step
    points: list[Point]
    sensitivity: float = 1.0
    chosen: int = 0

    @property
    def point(self) -> Point:
        return self.points[self.chosen]


@dataclass
class Allocation:
    """The choice: types by tensor name, and what it costs."""

    tensors: list[Tensor]
    limit: str
    n_with_imatrix: int
    types: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.types = {tensor.step.name: tensor.point.type for tensor in self.tensors}

    def report(self) -> list[str]:
        """A line for the whole and one per role: number of tensors, bits per weight, error, types."""
        lines = [
            f"target {self.limit}: chose types of {len(self.tensors)} tensors, "
            f"{self.n_with_imatrix} of them weighted by the importance matrix",
        ]
        roles: dict[str, list[Tensor]] = {}
        for tensor in self.tensors:
            roles.setdefault(_role(tensor.step.name), []).append(tensor)
        for role, members in roles.items():
            counts = Counter(tensor.point.type for tensor in members)
            order = sorted(counts, key=lambda name: registry.by_name(name).bits_per_weight)
            elements = sum(tensor.step.source.element_count for tensor in members)
            bpw = 8 * sum(tensor.point.nbytes for tensor in members) / elements
            error = sum(tensor.point.error / tensor.sensitivity for tensor in members) / len(members)
            types = ", ".join(f"{counts[name]} {name}" for name in order)
            lines.append(f"target: {role:>24} {bpw:6.3f} BPW, relative error {error:.2e}: {types}")
        return lines


def _role(name: str) -> str:
    return escaped(re.sub(r"^blk\.\d+\.", "", name).removesuffix(".weight"))


def allocate(file: GGUFFile, output: str, options: QuantizeOptions, display: Display) -> Allocation:
    """Choose types so that the output stays at or below the target; sets ``options.ftype`` if it is None.

    Rules and options for single tensors are fixed choices. Raises UsageError if the target cannot be reached, and
    whatever planning raises.
    """
    _check(options)
    wants_interleaved = options.ftype is not None and registry.by_name(options.ftype.base_type).interleave > 1
    automatic = options.ftype is None
    options.ftype = options.ftype or registry.ftype_by_name(FALLBACK_FILE_TYPE)
    plan = _draft(file, options)
    free = [step for step in plan.steps if step.free]
    types = {step.name: _types_for(step, options, interleaved=wants_interleaved) for step in free}
    smallest = {name: min(found, key=lambda t: registry.by_name(t).bits_per_weight) for name, found in types.items()}
    base = make_plan(file, options, smallest)
    if base.problem is not None:
        raise base.problem
    if not free:
        raise UsageError("rules and options fix the types of all tensors; there is nothing to choose for the target")
    budget = _budget(file, output, options, base, free)
    tensors = _unchanged(file, free, types, budget)
    if tensors is None:
        tensors = _measure(file, free, types, options, display)
        for tensor in tensors:
            tensor.points = _pareto(tensor.points)
        spend(tensors, budget)
    target = options.target
    limit = size_text(target.nbytes) if target.nbytes else f"{target.bits_per_weight:g} BPW"
    allocation = Allocation(tensors, limit, sum(step.imatrix is not None for step in free))
    if automatic:
        options.ftype = _file_type(tensors)
    return allocation


def _check(options: QuantizeOptions) -> None:
    roles = [name for name in vars(options.types) if getattr(options.types, name)]
    mixture = [name for name in roles if name.startswith(("attn_", "ffn_")) and name != "ffn_gate_inp"]
    if mixture:
        option = TypeOptions.option(mixture[0])
        raise UsageError(f"{option} changes a mixture, a target replaces it; fix these tensors with --custom-q")
    if options.pure or options.repack:
        raise UsageError(f"{'--pure' if options.pure else '--repack'} and a target exclude each other")
    if options.ftype is not None and not registry.by_name(options.ftype.base_type).is_quantized:
        raise UsageError(f"type {options.ftype.name} and a target exclude each other; leave the type out")
    for name in options.target.types:
        if not can_encode(name):
            raise UsageError(f"--target-types: type {name} can be read but not made")


def _draft(file: GGUFFile, options: QuantizeOptions) -> Plan:
    """A plan that tells which tensors are free and gives them their importance values."""
    # Any type but the tensor's own: only conversions look up their importance values.
    tensors = kept_tensors(file, options.prune_layers)
    own = {name: registry.by_id(info.type_id).name for name, info in tensors.items()}
    stand_in = {name: "q8_0" if own[name] == "iq4_nl" else "iq4_nl" for name in own}
    plan = make_plan(file, options, stand_in)
    if plan.problem is not None:
        raise plan.problem
    return plan


def _types_for(step: Step, options: QuantizeOptions, *, interleaved: bool) -> list[str]:
    """Types that this tensor can get; its own counts if that is float."""
    shape = step.source.shape
    found = []
    for name in options.target.types or CANDIDATES:
        row = registry.by_name(name)
        # Errors are measured in the plain type, whose blocks are longer for iq1_s_r4 and iq1_m_r4.
        plain = registry.by_name(plain_type(row)) if row.interleave > 1 else row
        if shape[0] % row.block_elements or shape[0] % plain.block_elements:
            continue
        is_large_block = row.block_elements >= 256
        if not options.target.types and not is_large_block and shape[0] % 256 == 0 and name != "q8_0":
            continue  # for rows that take super-blocks these are never the better choice
        lacks_imatrix = step.imatrix is None and (row.requires_imatrix == "E" or needs_imatrix(step.name, row.name, ""))
        if lacks_imatrix and (row.requires_imatrix == "E" or not options.ignore_imatrix_rules):
            continue
        found.append(_layout(row.name, step, interleaved=interleaved))
    if not registry.by_name(step.source_type).is_quantized:
        found.append(step.source_type)
    if not found:
        raise UsageError(f"none of the types to choose from fits tensor {step.name}; give more in --target-types")
    return list(dict.fromkeys(found))


def _layout(name: str, step: Step, *, interleaved: bool) -> str:
    """The type, in its interleaved form where that is wanted and possible."""
    row = registry.by_name(name)
    rows = (step.source.shape[1], *step.parts)
    if row.interleave > 1:
        return row.name if row.keeps_apart(rows) and not is_looked_up(step.name) else plain_type(row)
    target = registry.repack_target(name) if interleaved and not is_looked_up(step.name) else ""
    return target if target and registry.by_name(target).keeps_apart(rows) else name


def _unchanged(
    file: GGUFFile, steps: Sequence[Step], types: Mapping[str, Sequence[str]], budget: int
) -> list[Tensor] | None:
    """All tensors in their own types if these may be chosen and the budget allows it: no other choice loses less."""
    if not all(step.source_type in types[step.name] for step in steps):
        return None
    tensors = [
        Tensor(step, [Point(step.source_type, _nbytes(file, step, step.source_type), 0.0)], sensitivity(file, step))
        for step in steps
    ]
    return tensors if sum(tensor.point.nbytes for tensor in tensors) <= budget else None


def _nbytes(file: GGUFFile, step: Step, name: str) -> int:
    """Bytes of a tensor of this type in the file, padding included."""
    return align_up(registry.by_name(name).tensor_nbytes(step.source.shape), file.alignment)


# errors


def _measure(
    file: GGUFFile,
    steps: Sequence[Step],
    types: Mapping[str, Sequence[str]],
    options: QuantizeOptions,
    display: Display,
) -> list[Tensor]:
    display.begin("measuring errors", sum(step.source.nbytes for step in steps))
    tensors = []
    try:
        for step in steps:
            errors = tensor_errors(file, step, types[step.name], options.n_threads)
            weight = sensitivity(file, step)
            points = [Point(name, _nbytes(file, step, name), error * weight) for name, error in errors.items()]
            tensors.append(Tensor(step, points, weight))
            file.release(step.source)
            display.advance(step.source.nbytes)
            display.between_lines()
    finally:
        display.end()
    return tensors


def sensitivity(file: GGUFFile, step: Step) -> float:
    """Number of a tensor's weights that a token meets."""
    arch = file.get("general.architecture", "")
    n_expert, n_used = (scalar_or(file.metadata, f"{arch}.{key}", 0) for key in ("expert_count", "expert_used_count"))
    share = n_used / n_expert if "_exps." in step.name and 0 < n_used < n_expert else 1.0
    return step.source.element_count * share


def tensor_errors(file: GGUFFile, step: Step, types: Sequence[str], n_threads: int) -> dict[str, float]:
    """Relative weighted error of a tensor in each type, from a sample of its rows (all rows of small tensors)."""
    from ikpy._native import core

    read = registry.by_name(step.source_type)
    data, shape = file.data(step.source), step.source.shape
    lost = dict.fromkeys(types, 0.0)
    energy = 0.0
    for matrix, rows in sample(shape, read.interleave):
        parts = [read_rows(data, read, shape, row, read.interleave) for row in rows]
        values = np.concatenate(parts)
        numbers = [row + k for row in rows for k in range(read.interleave)]
        check_finite(values, step.name, numbers)
        weights = None if step.imatrix is None else np.ascontiguousarray(step.imatrix[matrix % len(step.imatrix)])
        scale = np.ones(shape[0]) if weights is None else weights.astype(np.float64)
        energy += float((values.astype(np.float64) ** 2 @ scale).sum())
        for name in types:
            if name == step.source_type:
                continue
            row = registry.by_name(name)
            plain = registry.by_name(plain_type(row)) if row.interleave > 1 else row
            coded = encode(values, plain, weights, n_threads or hardware_threads(), step.name)
            decoded = core.dequantize(coded, plain.id, shape[0], len(values), compute_scale=True)  # as products use it
            if bad := bad_row(decoded):
                raise beyond_range(plain, numbers[bad[0]], step.name)
            lost[name] += float(((values - decoded).astype(np.float64) ** 2 @ scale).sum())
    return {name: value / max(energy, _NO_ENERGY) for name, value in lost.items()}


def sample(shape: Sequence[int], interleave: int) -> list[tuple[int, list[int]]]:
    """Matrices to look at and, in each, the first rows of evenly spaced row groups (counted through all matrices)."""
    ne0, ne1 = shape[0], shape[1]
    n_matrices = int(np.prod(shape[2:], dtype=np.int64))
    matrices = np.unique(np.linspace(0, n_matrices - 1, min(n_matrices, SAMPLE_MATRICES)).round().astype(int))
    groups = ne1 // interleave
    wanted = max(1, SAMPLE_ELEMENTS // (ne0 * interleave * len(matrices)))
    chosen = np.unique(np.linspace(0, groups - 1, min(groups, wanted)).round().astype(int))
    return [(int(m), [int(m * ne1 + group * interleave) for group in chosen]) for m in matrices]


# choice


def _pareto(points: Sequence[Point]) -> list[Point]:
    """Points by size without those that another one beats in both size and error."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.nbytes, p.error)):
        if not kept or point.error < kept[-1].error:
            kept.append(point)
    return kept


def _hull(points: Sequence[Point]) -> list[int]:
    """Indices of the lower convex hull of points by size."""
    hull: list[int] = []
    for index, point in enumerate(points):
        while len(hull) > 1:
            a, b = points[hull[-2]], points[hull[-1]]
            if (b.error - a.error) * (point.nbytes - a.nbytes) < (point.error - a.error) * (b.nbytes - a.nbytes):
                break
            hull.pop()
        hull.append(index)
    return hull


def _budget(file: GGUFFile, output: str, options: QuantizeOptions, base: Plan, free: Sequence[Step]) -> int:
    """Bytes that the free tensors may take together; UsageError if even their types of ``base``, the smallest ones,
    are too much."""
    names = {step.name for step in free}
    smallest = sum(align_up(step.nbytes, file.alignment) for step in base.steps if step.name in names)
    if options.target.nbytes:
        files = sum(item.layout.nbytes for item in output_files(file, output, options, base))
        fixed, limit = files - smallest, options.target.nbytes
    else:
        fixed = sum(step.nbytes for step in base.steps if step.name not in names)
        limit = int(options.target.bits_per_weight * sum(step.source.element_count for step in base.steps) / 8)
    if fixed + smallest > limit:
        raise UsageError(
            f"the target of {limit} bytes is below the smallest possible size of {fixed + smallest} bytes "
            f"({fixed} of them are fixed); raise it, or allow smaller types with --imatrix and --target-types"
        )
    return limit - fixed


def spend(tensors: Sequence[Tensor], budget: int) -> None:
    """Choose points whose bytes stay within the budget."""
    left = budget - sum(tensor.points[0].nbytes for tensor in tensors)
    upgrades = []
    for index, tensor in enumerate(tensors):
        hull = _hull(tensor.points)
        for low, high in pairwise(hull):
            a, b = tensor.points[low], tensor.points[high]
            upgrades.append(((a.error - b.error) / (b.nbytes - a.nbytes), index, low, high))
    for _, index, low, high in sorted(upgrades, key=lambda item: (-item[0], item[1], item[2])):
        tensor = tensors[index]
        cost = tensor.points[high].nbytes - tensor.points[low].nbytes
        if tensor.chosen == low and cost <= left:
            tensor.chosen = high
            left -= cost
    _fill(tensors, left)


def _fill(tensors: Sequence[Tensor], left: int) -> None:
    """Spend what remains on the single upgrades that save the most error and still fit."""
    while True:
        best = (0.0, 0, 0, 0)
        for index, tensor in enumerate(tensors):
            now = tensor.point
            for choice in range(tensor.chosen + 1, len(tensor.points)):
                cost = tensor.points[choice].nbytes - now.nbytes
                if cost <= left:
                    best = max(best, (now.error - tensor.points[choice].error, -cost, -index, choice))
        if best[0] <= 0:
            return
        tensors[-best[2]].chosen = best[3]
        left += best[1]


def _file_type(tensors: Sequence[Tensor]) -> FileType:
    """The file type whose own tensor type takes the most weights."""
    weights: Counter[str] = Counter()
    for tensor in tensors:
        weights[tensor.point.type] += tensor.step.source.element_count
    for name, _ in weights.most_common():
        for row in registry.all_ftypes():
            if row.base_type == name and row.selectable:
                return row
    raise FileFormatError("no file type for the chosen types")
