"""What a model and a context take in memory, per device and kind: planned from the header, or of a loaded model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ikpy.backends.cuda.api import aligned
from ikpy.backends.cuda.devices import selected
from ikpy.graph.placement import CPU
from ikpy.machine.memory import machine_memory, memory_owner

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ikpy.engine.context import Context
    from ikpy.engine.speculative import Speculation

MIB = 1 << 20
KINDS = ("mapped", "copied", "derived", "KV cache", "compute")
"""Tensors used in the file's mapping; repacked, decoded and joined ones; computed ones (MLA); cache; compute buffer."""
PROJECTOR = "projector"
"""A further kind, where there is one on a device: weights of the encoder of pictures, and what the largest takes."""
DRAFTER = "drafter"
"""A further kind, where there is a draft model or a prediction layer: all that it takes."""


@dataclass
class MemoryReport:
    """Bytes per device and kind; of devices also the free ones. is_mapped: the CPU's weights are pages of the file."""

    devices: dict[str, dict[str, int]] = field(default_factory=dict)
    free: dict[str, int] = field(default_factory=dict)
    is_mapped: bool = True

    def add(self, device: str, kind: str, nbytes: int) -> None:
        """Counts bytes of a kind on a device."""
        kinds = self.devices.setdefault(device, dict.fromkeys(KINDS, 0))
        kinds[kind] = kinds.get(kind, 0) + nbytes

    @property
    def total(self) -> int:
        """Bytes on all devices."""
        return sum(sum(kinds.values()) for kinds in self.devices.values())

    def lines(self) -> list[str]:
        """A table in MiB: a row per device, a column per kind."""
        further = [name for name in (PROJECTOR, DRAFTER) if any(name in kinds for kinds in self.devices.values())]
        columns = (*KINDS, *further, "total")
        lines = [f"memory plan (MiB): {'device':>10}" + "".join(f" {name:>12}" for name in columns)]
        for device, kinds in self.devices.items():
            values = (*(kinds.get(kind, 0) for kind in (*KINDS, *further)), sum(kinds.values()))
            lines.append(f"memory plan (MiB): {device:>10}" + "".join(f" {value / MIB:12.2f}" for value in values))
        return lines + self.shortages()

    def shortages(self) -> list[str]:
        """A warning for every device, the machine included, that has less memory than is planned."""
        totals = {device: sum(kinds.values()) for device, kinds in self.devices.items()}
        lines = [
            f"warning: {device}: {totals[device] / MIB:.0f} MiB are needed, {free / MIB:.0f} MiB are free"
            for device, free in self.free.items()
            if totals.get(device, 0) > free
        ]
        total, machine = totals.get(CPU, 0), machine_memory(swap=False)
        if total > machine:
            kept = total - self.devices[CPU]["mapped"] if self.is_mapped else total
            effect = "" if kept > machine else ": weights will be read from the disk again and again"
            needed = f"{total / MIB:.0f} MiB are needed, {memory_owner()} {machine / MIB:.0f} MiB"
            lines.append(f"warning: {CPU}: {needed}{effect}")
        return lines


def memory_report(context: Context, drafts: Speculation | None = None) -> MemoryReport:
    """What the context and its model take, and what drafts for it."""
    model, report = context.model, MemoryReport(is_mapped=context.model.params.use_mmap)
    report.add(CPU, "mapped", model.mapped_bytes.get(CPU, 0))
    report.add(CPU, "copied", model.own_bytes)
    report.add(CPU, "derived", model.arch.derived_bytes)
    for device, kind, nbytes in _context_bytes(context):
        report.add(device, kind, nbytes)
    taken = dict(model.params.placement.taken)
    for device, nbytes in taken.items():
        report.add(device, PROJECTOR, nbytes)
    for device, nbytes in (drafter_bytes(drafts, context) if drafts else {}).items():
        report.add(device, DRAFTER, nbytes)
    contexts = (context, *(drafts.contexts if drafts else ()))
    used = {device.name: device for each in contexts if each.devices for device in each.devices.setup.devices}
    used |= {device.name: device for device in (selected(tuple(taken)) if taken else ())}
    report.free = {name: device.memory().free for name, device in used.items()}
    return report


def drafter_bytes(drafts: Speculation, context: Context | None = None) -> dict[str, int]:
    """Bytes of drafters by device. ``context``: of the model, from which they take weights that it has on devices."""
    found: dict[str, int] = {}
    for model in drafts.models:
        found[CPU] = found.get(CPU, 0) + model.mapped_bytes.get(CPU, 0) + model.own_bytes
    for each in drafts.contexts:
        found[CPU] = found.get(CPU, 0) + each.model.arch.derived_bytes
        for device, _, nbytes in _context_bytes(each):
            found[device] = found.get(device, 0) + nbytes
        for device, needs in (each.devices.needs if each.devices else {}).items():
            held = context.devices.needs.get(device) if context and context.devices else None
            shared = each.model.lent & needs.weights.keys() & (held.weights.keys() if held else set())
            found[device] -= sum(aligned(needs.weights[name].nbytes) for name in shared)
    return {device: nbytes for device, nbytes in found.items() if nbytes}


def _context_bytes(context: Context) -> Iterator[tuple[str, str, int]]:
    """Device, kind and bytes of what a context takes."""
    devices = context.devices
    kinds = [devices.cache_bytes(), devices.state_bytes()] if devices else [{CPU: context.kv.nbytes()}]
    yield from ((device, "KV cache", nbytes) for sizes in kinds for device, nbytes in sizes.items())
    yield CPU, "compute", context.compute_bytes
    for device, needs in (devices.needs if devices else {}).items():
        # What graphs read there: output matrices that are embeddings in host memory too, derived tensors, parts.
        yield device, "mapped", needs.weight_bytes
        yield device, "compute", needs.compute_bytes
