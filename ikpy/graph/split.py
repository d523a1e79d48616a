"""Divides a graph into splits that each run on one device, with the copies between them.

Nodes are reordered within their dependencies so that a device goes on as long as it can: what does not need the result
of another device runs before the border, while the other device works.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ikpy.graph.assign import REPLICATED, Step, read, written
from ikpy.graph.ir import Buffer, Value, contiguous_strides
from ikpy.graph.placement import CPU
from ikpy.graph.planner import ALIGNMENT, Arena, place_buffers

# Whole memory transactions of a GPU, and what bulk copies between its memories ask for.
DEVICE_ALIGNMENT = 256
# Columns up to which a device launches products of the same activations at once.
TOGETHER_COLUMNS = 8
# Nodes that add inputs of products to statistics, and the bytes of inputs after which they run before others go on.
STATISTICS = ("act_stats", "act_similarity")
OBSERVED_BYTES = 256 << 20


@dataclass
class Transfer:
    """A whole buffer copied between two devices. place: of a result in parts, where the part belongs on the CPU."""

    buffer: Buffer
    source: str
    target: str
    place: Value | None = None

    @property
    def target_buffer(self) -> Buffer:
        """The buffer that is written."""
        return self.place.buffer if self.place else self.buffer


@dataclass
class Split:
    """Consecutive steps of one device. transfers: copies that must be done before the first step; start: its number."""

    device: str
    start: int
    steps: list[Step] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)


@dataclass
class SplitGraph:
    """The splits in order, results copied back to the CPU, and the arena of every device."""

    splits: list[Split]
    results: list[Transfer]
    arenas: dict[str, Arena]

    @property
    def n_splits(self) -> int:
        """Number of splits, as graphs are reported."""
        return len(self.splits)

    @property
    def devices(self) -> list[str]:
        """Devices other than the CPU that run a part, in order of first use."""
        return list(dict.fromkeys(split.device for split in self.splits if split.device != CPU))

    def steps(self, device: str) -> list[Step]:
        """All steps of a device in order."""
        return [step for split in self.splits if split.device == device for step in split.steps]


def split_graph(steps: list[Step], results: set[Buffer], parts: Sequence[tuple[Value, Value]] = ()) -> SplitGraph:
    """Orders and divides the steps; results are wanted in host memory at the end.

    parts: contiguous values f32 [n, T] that results are put together of, and their places there.
    """
    splits = _divide(_schedule(steps))
    returned = _add_transfers(splits, results, parts)
    return SplitGraph(splits, returned, _plan_arenas(splits, returned, results))


# order


def _own(step: Step, replicated: set[Buffer], buffer: Buffer) -> tuple[Buffer, str]:
    """Key of a buffer for ordering: what every device makes for itself is a buffer per device."""
    return buffer, step.device if buffer in replicated else ""


def _made_everywhere(steps: list[Step]) -> set[Buffer]:
    """Buffers that every device that reads them makes for itself; what one of them cannot make is copied."""
    made = {(v.buffer, s.device) for s in steps if s.node.kind in REPLICATED for v in written(s.node)}
    replicated = {buffer for buffer, _ in made}
    lacking = {v.buffer for s in steps for v in read(s.node) if (v.buffer, s.device) not in made}
    return replicated - lacking


def _dependencies(steps: list[Step]) -> list[set[int]]:
    """Steps that must come before each step: those that wrote what it reads, or touched what it writes."""
    replicated = _made_everywhere(steps)
    writer: dict[tuple[Buffer, str], int] = {}
    readers: dict[tuple[Buffer, str], list[int]] = {}
    result: list[set[int]] = []
    for i, step in enumerate(steps):
        before: set[int] = set()
        for value in read(step.node):
            key = _own(step, replicated, value.buffer)
            if key in writer:
                before.add(writer[key])
            readers.setdefault(key, []).append(i)
        for value in written(step.node):
            key = _own(step, replicated, value.buffer)
            if key in writer:
                before.add(writer[key])
            before.update(readers.get(key, ()))
            writer[key] = i
            readers[key] = []
        before.discard(i)
        result.append(before)
    return result


def _schedule(steps: list[Step]) -> list[Step]:
    """Steps in the original order as far as the current device can go on, then on the device of the first one left.

    Statistics of inputs (importance matrices), which nothing waits for, are taken before much memory is held for them.
    """
    needs = _dependencies(steps)
    users: list[list[int]] = [[] for _ in steps]
    missing = [len(before) for before in needs]
    for i, before in enumerate(needs):
        for j in before:
            users[j].append(i)
    ready: dict[str, list[int]] = {}
    for i, n in enumerate(missing):
        if n == 0:
            ready.setdefault(steps[i].device, []).append(i)
    order: list[Step] = []
    device = ""
    observed: set[Buffer] = set()
    while len(order) < len(steps):
        if ready.get(CPU) and sum(buffer.nbytes for buffer in observed) > OBSERVED_BYTES:
            device = CPU
        if device == CPU:
            observed.clear()
        if not ready.get(device):
            device = min((queue[0], name) for name, queue in ready.items() if queue)[1]
        i = ready[device].pop(_next(order[-1:], [steps[j] for j in ready[device]]))
        order.append(steps[i])
        for j in users[i]:
            missing[j] -= 1
            if missing[j] == 0:
                if steps[j].node.kind in STATISTICS:
                    observed.update(value.buffer for value in read(steps[j].node))
                queue = ready.setdefault(steps[j].device, [])
                queue.append(j)
                queue.sort()
    return order


def _next(last: list[Step], ready: list[Step]) -> int:
    """Index of the ready step that goes on behind the last one, if there is one.

    It is a product that a device can launch together with the last one, which has the same activations and weights of
    the same type, or else the first.
    """
    together = (i for step in last for i, other in enumerate(ready) if _go_together(step, other))
    return next(together, 0)


def _go_together(one: Step, other: Step) -> bool:
    """Products of many columns stay where they are: of cells that are expanded for some heads at a time, the results of
    all would be held at once."""
    if one.device == CPU or one.device != other.device or one.uploads or other.uploads:
        return False
    if not one.node.kind == other.node.kind == "mul_mat":
        return False
    if any(step.node.dst is None or step.node.dst.shape[1] > TOGETHER_COLUMNS for step in (one, other)):
        return False
    (weight, x), (other_weight, other_x) = one.node.src[:2], other.node.src[:2]
    assert weight is not None and x is not None and other_weight is not None and other_x is not None
    place, other_place = ((v.buffer, v.offset, v.shape) for v in (x, other_x))
    return weight.type_id == other_weight.type_id and place == other_place


def _divide(steps: list[Step]) -> list[Split]:
    splits: list[Split] = []
    for i, step in enumerate(steps):
        if not splits or splits[-1].device != step.device:
            splits.append(Split(step.device, i))
        splits[-1].steps.append(step)
    return splits


# copies


def _add_transfers(splits: list[Split], results: set[Buffer], parts: Sequence[tuple[Value, Value]]) -> list[Transfer]:
    """Adds the copies every split needs; returns those of the results."""
    valid: dict[Buffer, list[str]] = {}

    def require(buffer: Buffer, device: str, transfers: list[Transfer]) -> None:
        where = valid.get(buffer)
        if where and device not in where:
            transfers.append(Transfer(buffer, where[0], device))
            where.append(device)

    for split in splits:
        for step in split.steps:
            for value in read(step.node):
                if value.buffer.role == "value":
                    require(value.buffer, split.device, split.transfers)
            for value in written(step.node):
                buffer = value.buffer
                if buffer.role != "value":
                    continue
                if step.node.kind in REPLICATED:
                    valid.setdefault(buffer, [])
                    if split.device not in valid[buffer]:
                        valid[buffer].append(split.device)
                    continue
                if not _is_whole(value):
                    require(buffer, split.device, split.transfers)
                valid[buffer] = [split.device]
    returned: list[Transfer] = []
    for buffer in results:
        require(buffer, CPU, returned)
    return returned + [Transfer(part.buffer, valid[part.buffer][0], CPU, place) for part, place in parts]


def _is_whole(value: Value) -> bool:
    """Whether a value has all bytes of its buffer. Its strides do not tell: those of single rows are of any length."""
    nbytes = contiguous_strides(value.type_id, value.shape)[3] * value.shape[3]
    return value.is_contiguous and nbytes >= value.buffer.nbytes


# memory


def _plan_arenas(splits: list[Split], returned: list[Transfer], results: set[Buffer]) -> dict[str, Arena]:
    """Offsets of the buffers of every device by the steps during which they hold something."""
    end = sum(len(split.steps) for split in splits)
    first: dict[str, dict[Buffer, int]] = {CPU: {}}
    last: dict[str, dict[Buffer, int]] = {CPU: {}}

    def use(device: str, buffer: Buffer, start: int, stop: int) -> None:
        begins = first.setdefault(device, {})
        ends = last.setdefault(device, {})
        begins[buffer] = min(begins.get(buffer, start), start)
        ends[buffer] = max(ends.get(buffer, stop), stop)

    for i, split in enumerate(splits):
        for transfer in split.transfers:
            # A copy from a device may be started as soon as the buffer is written, one from the host may be done as
            # late as the host next waits for the device.
            early = split.start if transfer.source == CPU else _split_before(splits, i, transfer.source).start
            late = _next_wait(splits, i, transfer.target, end) if transfer.source == CPU else split.start
            use(transfer.source, transfer.buffer, split.start, late)
            use(transfer.target, transfer.buffer, early, split.start)
        for n, step in enumerate(split.steps, split.start):
            for value in (*read(step.node), *written(step.node)):
                if value.buffer.role == "value":
                    use(split.device, value.buffer, n, n)
    for transfer in returned:
        use(transfer.source, transfer.buffer, end, end)
        use(CPU, transfer.target_buffer, splits[-1].start, end)
    for buffer in results:
        if buffer in first[CPU]:
            use(CPU, buffer, 0, end)
    return {
        device: place_buffers(first[device], last[device], ALIGNMENT if device == CPU else DEVICE_ALIGNMENT)
        for device in first
    }


def _split_before(splits: list[Split], i: int, device: str) -> Split:
    return next(split for split in reversed(splits[:i]) if split.device == device)


def _next_wait(splits: list[Split], i: int, device: str, end: int) -> int:
    """Number of the step before which the host waits for a device after split i."""
    for split in splits[i + 1 :]:
        if split.device == CPU and any(t.source == device for t in split.transfers):
            return split.start
    return end
