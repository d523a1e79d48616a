"""Which device holds each tensor, layer and cache: -ngl, -sm, -ts, -mg, -ot, -cmoe, -ncmoe, -nkvo.

Pure data: names and sizes in, device names out. No backend is asked and no tensor is read, so that a plan for devices
that are not there can be made and printed.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from ikpy.errors import UsageError
from ikpy.graph.division import TIED_OUTPUT, Division, Matrix, Placed, divide, output_name
from ikpy.quants.name_pattern import compile_pattern

CPU = "CPU"
MIB = 1 << 20
ALL_LAYERS = 999
BLOCK_NAME = re.compile(r"(?:enc\.|dec\.)?blk\.(\d{1,9})\.")
EXPERT_NAME = re.compile(r"blk\.(\d{1,9})\.ffn_(up|down|gate|gate_up)_(?:ch)?exps\.(weight|scale)$")
EMBEDDINGS = ("token_embd.", "per_layer_token_embd.", "token_types.", "position_embd.")


@dataclass(frozen=True)
class Device:
    """A device beside the CPU; free_bytes is its weight when no split is given."""

    name: str
    free_bytes: int = 1


@dataclass(frozen=True)
class PlacementParams:
    """What the user asked for; the defaults are those of the command line.

    n_gpu_layers: last layers on the devices, above the layer count also the output matrix, negative = all.
    rules: (regular expression searched in the tensor name, device), the first match wins. taken: devices and bytes of
    them that the projector of pictures takes before the model does; reserved: those that a draft model takes after it.
    """

    n_gpu_layers: int = -1
    split_mode: str = "layer"
    main_gpu: int = 0
    tensor_split: tuple[float, ...] = ()
    rules: tuple[tuple[str, str], ...] = ()
    n_cpu_moe: int = 0
    kv_offload: bool = True
    taken: tuple[tuple[str, int], ...] = ()
    reserved: tuple[tuple[str, int], ...] = ()

    @property
    def of_others(self) -> dict[str, int]:
        """Bytes of devices that are not for the model."""
        found = dict(self.taken)
        for device, nbytes in self.reserved:
            found[device] = found.get(device, 0) + nbytes
        return found


@dataclass(frozen=True)
class DeviceParams:
    """How devices are used.

    names: devices to use in this order, None = all. policy: operations whose large batches with weights in host memory
    may run on a device, absent = yes. offload_batch: smallest such batch in tokens, times experts over used experts for
    routed ones; 0 = never. only_active_experts: of experts in host memory, copy those that have tokens. graphs: replay
    what ran before as CUDA graphs. bf16_batch: smallest batch in tokens for products on bf16 tensor cores, 0 = never,
    None = as the backend thinks best. wgmma: whether sm_90's own kernels may multiply. check: look for NaN once before
    the first batch.
    """

    names: tuple[str, ...] | None = None
    policy: Mapping[str, bool] = field(default_factory=dict)
    offload_batch: int = 32
    only_active_experts: bool = True
    graphs: bool = True
    bf16_batch: int | None = None
    wgmma: bool = True
    check: bool = True


@dataclass
class RuleReport:
    """How many tensors a rule matched and how many of them it took (earlier rules had the others)."""

    pattern: str
    device: str
    matched: int = 0
    taken: int = 0
    taken_bytes: int = 0
    available: bool = True

    @property
    def warning(self) -> str | None:
        """Why the rule is useless, if it is."""
        rule = f"-ot {self.pattern}={self.device}"
        if not self.available:
            return f"{rule}: there is no device {self.device}; the rule is ignored"
        if not self.matched:
            return f"{rule} matches no tensor of this model"
        if not self.taken:
            taken = f"all {self.matched} tensors" if self.matched > 1 else "the tensor"
            return f"{rule} has no effect: earlier rules take {taken} that it matches"
        return None

    @property
    def line(self) -> str:
        """The rule and what it took."""
        line = f"override {self.pattern}={self.device}: {self.taken} tensors, {self.taken_bytes / MIB:.2f} MiB"
        more = self.matched - self.taken
        return f"{line} ({more} more go by earlier rules)" if more else line


@dataclass
class Placement:
    """Device name of every tensor, repeating layer, layer cache and of the output.

    overridden: tensors that a rule took, with the device it names. divisions: tensors of which several devices hold a
    part; tensors has the device of their layer. notes: how -ncmoe was shared over devices, how much is divided.
    tied: whether the device of the output has the token embeddings as well, which are whole in host memory.
    """

    tensors: dict[str, str]
    layers: tuple[str, ...]
    caches: tuple[str, ...]
    output: str
    overridden: dict[str, str] = field(default_factory=dict)
    rules: list[RuleReport] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    divisions: dict[str, Division] = field(default_factory=dict)
    tied: bool = False

    @property
    def n_offloaded(self) -> int:
        """Repeating layers that are not on the CPU."""
        return sum(device != CPU for device in self.layers)

    def device_of(self, name: str) -> str:
        """Device of a tensor, of one that is derived from the file's tensors too."""
        if name in self.tensors:
            return self.tensors[name]
        for rule in self.rules:
            if rule.available and compile_pattern(rule.pattern).search(name):
                return rule.device
        return _default_device(name, self.layers, self.output)

    def layer_device(self, name: str) -> str:
        """Device of the layer that a tensor belongs to, whatever the rules say of the tensor."""
        return _default_device(name, self.layers, self.output)

    def bytes_per_device(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Bytes of tensors on each device that holds any, the CPU first."""
        totals: dict[str, int] = {}
        for name, device in (*self.tensors.items(), *([(TIED_OUTPUT, self.output)] if self.tied else [])):
            division = self.divisions.get(name) if device != CPU else None
            for holder, nbytes in (division.nbytes(sizes[name]) if division else {device: sizes[name]}).items():
                totals[holder] = totals.get(holder, 0) + nbytes
        return dict(sorted(totals.items(), key=lambda item: (item[0] != CPU, item[0])))


def place(
    sizes: Mapping[str, int],
    n_layer: int,
    params: PlacementParams,
    devices: Sequence[Device] = (),
    matrices: Mapping[str, Matrix] | None = None,
    heads: Sequence[int] = (),
) -> Placement:
    """Places a model whose tensors have these sizes in bytes.

    matrices: those that several devices may share; heads: that attention of the layers may be divided by, 0 for
    those that stay whole.

    Raises UsageError for a device that does not exist, and for splits that do not fit the devices. Without devices
    everything is on the CPU, and rules for other devices are ignored with a warning.
    """
    reports = check_placement(params, [device.name for device in devices])
    layers, output, warnings = _place_layers(sizes, n_layer, params, devices)
    experts = _cpu_experts(sizes, layers, params)
    reports += [
        RuleReport(rf"^blk\.{il}\.ffn_(up|down|gate|gate_up)_(ch)?exps\.(weight|scale)$", CPU) for il in experts
    ]
    tensors, overridden = _apply_rules(sizes, layers, output, reports)
    caches = layers if params.kv_offload else (CPU,) * n_layer
    written = reports[: len(params.rules)]
    warnings += [report.warning for report in written if report.warning]
    notes = _shared_experts_notes(layers, experts, params.n_cpu_moe)
    divisions: dict[str, Division] = {}
    if params.split_mode == "graph" and len(devices) > 1 and matrices:
        shares = _shares(params, devices)
        placed = Placed(matrices, tensors, overridden, layers, output, shares, heads, params.kv_offload)
        divisions, divided = divide(placed)
        notes += [f"llm_load_tensors: {note}" for note in divided]
    tied = output != CPU and output_name(matrices or ()) == TIED_OUTPUT and TIED_OUTPUT not in overridden
    return Placement(tensors, layers, caches, output, overridden, written, warnings, notes, divisions, tied)


def layer_warning(split_mode: str) -> str:
    """What is said of a mode that is not there."""
    return f"-sm {split_mode} is read as -sm layer; -sm graph divides tensors among GPUs"


def check_placement(params: PlacementParams, devices: Sequence[str]) -> list[RuleReport]:
    """The rules, which of them are for devices that exist; before anything is read.

    Raises UsageError for what is wrong for every model: devices that do not exist, more shares than devices.
    """
    names = {CPU, *devices}
    reports = [RuleReport(pattern, device) for pattern, device in params.rules]
    for report in reports:
        report.available = report.device in names
        if devices and not report.available:
            raise UsageError(
                f"Invalid tensor buffer type override: {report.pattern}={report.device}; "
                f"available buffer types: {', '.join(sorted(names))}"
            )
        try:
            compile_pattern(report.pattern)
        except re.error as error:
            raise UsageError(f"-ot {report.pattern}={report.device}: not a regular expression: {error}") from error
    if devices and params.split_mode == "none" and not 0 <= params.main_gpu < len(devices):
        raise UsageError(f"-mg {params.main_gpu}: there are {len(devices)} devices, numbered from 0")
    if devices and params.split_mode != "none" and len(params.tensor_split) > len(devices):
        raise UsageError(f"-ts has {len(params.tensor_split)} values for {len(devices)} devices")
    return reports


def _apply_rules(
    sizes: Mapping[str, int], layers: Sequence[str], output: str, reports: Sequence[RuleReport]
) -> tuple[dict[str, str], dict[str, str]]:
    """Device of every tensor, and the part that the rules decided."""
    patterns = [compile_pattern(report.pattern) for report in reports]
    tensors, overridden = {}, {}
    for name, nbytes in sizes.items():
        tensors[name] = _default_device(name, layers, output)
        for report, pattern in zip(reports, patterns, strict=True):
            if not report.available or not pattern.search(name):
                continue
            report.matched += 1
            if name not in overridden:
                overridden[name] = tensors[name] = report.device
                report.taken += 1
                report.taken_bytes += nbytes
    return tensors, overridden


def _default_device(name: str, layers: Sequence[str], output: str) -> str:
    block = BLOCK_NAME.match(name)
    if block:
        index = int(block[1])
        return layers[index] if index < len(layers) else CPU
    # Token embeddings are looked up row by row: they stay in host memory whatever -ngl says.
    return CPU if name.startswith(EMBEDDINGS) else output


# layers


def _place_layers(
    sizes: Mapping[str, int], n_layer: int, params: PlacementParams, devices: Sequence[Device]
) -> tuple[tuple[str, ...], str, list[str]]:
    """Device of every layer, of the output, and warnings."""
    wanted = n_layer + 1 if params.n_gpu_layers < 0 else min(params.n_gpu_layers, n_layer + 1)
    if not devices or wanted == 0:
        return (CPU,) * n_layer, CPU, []
    warnings = []
    first = max(0, n_layer - wanted)
    offloaded = n_layer - first + (wanted > n_layer)
    if params.split_mode == "none":
        names = [devices[params.main_gpu].name] * offloaded
    else:
        if params.split_mode == "row" or (params.split_mode not in ("layer", "graph") and len(devices) > 1):
            warnings.append(layer_warning(params.split_mode))
        names = _split(_unit_sizes(sizes, n_layer, params)[first : first + offloaded], params, devices)
    layers = (*([CPU] * first), *names[: n_layer - first])
    return layers, names[-1] if wanted > n_layer else CPU, warnings


def _unit_sizes(sizes: Mapping[str, int], n_layer: int, params: PlacementParams) -> list[int]:
    """Bytes of every layer and of the output, without what the rules keep on the CPU."""
    kept = [compile_pattern(pattern) for pattern, device in params.rules if device == CPU]
    units = [0] * (n_layer + 1)
    for name, nbytes in sizes.items():
        block = BLOCK_NAME.match(name)
        index = int(block[1]) if block else n_layer
        # Blocks behind the layers predict further tokens, on the CPU.
        is_placed = index < n_layer if block else not name.startswith(EMBEDDINGS)
        if is_placed and not any(p.search(name) for p in kept):
            units[index] += nbytes
    return units


def _shares(params: PlacementParams, devices: Sequence[Device]) -> dict[str, float]:
    """What every device gets: the values of -ts, or its free memory."""
    shares = [float(device.free_bytes) for device in devices]
    if any(params.tensor_split):
        shares = [*params.tensor_split, *[0.0] * (len(devices) - len(params.tensor_split))]
    if min(shares) < 0 or not sum(shares) > 0:
        raise UsageError("-ts needs values that are not negative, one of them above 0")
    return {device.name: share for device, share in zip(devices, shares, strict=True)}


def _split(units: Sequence[int], params: PlacementParams, devices: Sequence[Device]) -> list[str]:
    """Device of consecutive units in proportion to the shares."""
    shares = list(_shares(params, devices).values())
    limits = list(accumulate(share / sum(shares) for share in shares))
    last = max(i for i, share in enumerate(shares) if share > 0)
    total = sum(units) or 1
    ends = [end / total for end in accumulate(units)]
    # A unit belongs to the device in whose share it ends; rounding must not push the last one off the end.
    return [devices[min(bisect_left(limits, end - 1e-9), last)].name for end in ends]


# experts


def _cpu_experts(sizes: Mapping[str, int], layers: Sequence[str], params: PlacementParams) -> list[int]:
    """Layers of -cmoe and -ncmoe; their rules come after those of -ot."""
    with_experts = sorted({int(m[1]) for m in map(EXPERT_NAME.match, sizes) if m})
    return cpu_expert_layers(with_experts, layers, params.n_cpu_moe)


def _devices_of(layers: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(device for device in layers if device != CPU))


def _shared_experts_notes(layers: Sequence[str], chosen: Sequence[int], n: int) -> list[str]:
    """How -ncmoe n was shared over the devices of a split, in the known wording; nothing where it was not."""
    devices = _devices_of(layers)
    if not 0 < n < len(layers) or len(devices) < 2:
        return []
    head = f"================= llm_load_tensors: split mode layer with ncmoe = {n}, {len(devices)} devices"
    counts = [sum(layers[il] == device for il in chosen if il < len(layers)) for device in devices]
    return [head] + [
        f"    device {i}: {layers.count(device)} layers -> {count} overrides"
        for i, (device, count) in enumerate(zip(devices, counts, strict=True))
    ]


def cpu_expert_layers(with_experts: Sequence[int], layers: Sequence[str], n: int) -> list[int]:
    """Layers whose experts -ncmoe n keeps on the CPU: from the last one down, shared over the devices of a split.

    with_experts: layers that have expert tensors, ascending; layers: device of every layer.
    """
    if n <= 0:
        return []
    devices = _devices_of(layers)
    if len(devices) < 2 or n >= len(layers):
        return list(with_experts[-n:])
    counts = [layers.count(device) for device in devices]
    quota = [round(n * count / sum(counts)) for count in counts]
    while sum(quota) != n:
        step = 1 if sum(quota) < n else -1
        wanted = [n * count / sum(counts) - q for count, q in zip(counts, quota, strict=True)]
        quota[wanted.index(max(wanted) if step > 0 else min(wanted))] += step
    chosen = []
    for device, share in zip(devices, quota, strict=True):
        own = [il for il in with_experts if il < len(layers) and layers[il] == device]
        chosen += own[max(0, len(own) - share) :]
    return sorted(chosen)


# log


def placement_lines(
    placement: Placement, sizes: Mapping[str, int], devices: Sequence[Device], replaced: Collection[str] = ()
) -> list[str]:
    """What the rules took, the offloaded layers, and the bytes per buffer, in the known wording.

    ``replaced`` tensors lie in another buffer (repacked, decoded) and count in none of these.
    """
    prefix = "llm_load_tensors: "
    lines = [*(f"warning: {warning}" for warning in placement.warnings), *placement.notes]
    if devices:
        lines += [
            f"Tensor {name} (size = {sizes[name] / MIB:.2f} MiB) buffer type overridden to {device}"
            for name, device in placement.overridden.items()
        ]
    lines += [prefix + report.line for report in placement.rules if report.available]
    if devices:
        n = placement.n_offloaded
        lines.append(f"{prefix}offloading {n} repeating layers to GPU")
        if placement.output != CPU:
            lines.append(f"{prefix}offloading non-repeating layers to GPU")
        total = len(placement.layers) + 1
        lines.append(f"{prefix}offloaded {n + (placement.output != CPU)}/{total} layers to GPU")
    kept = {name: 0 if name in replaced else size for name, size in sizes.items()}
    return lines + [
        f"{prefix}{device:>10} buffer size = {nbytes / MIB:8.2f} MiB"
        for device, nbytes in placement.bytes_per_device(kept).items()
    ]
