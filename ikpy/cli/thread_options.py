"""Options of the threads of computations: their CPUs, priority and waiting; see `ikpy.machine.thread_sets`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from ikpy.cli.values import Warn
from ikpy.errors import UsageError
from ikpy.machine.thread_sets import USUAL_POLL, ThreadSet, use

if TYPE_CHECKING:
    from ikpy.cli.params import CommonParams

MOST_CPUS = 1024
"""Of a mask of the system."""


@dataclass
class ThreadOptions:
    """CPUs by mask and by range, which are added, and what else was said of some threads; None: as of others."""

    mask: tuple[int, ...] | None = None
    range: tuple[int, ...] | None = None
    strict: bool | None = None
    priority: int | None = None
    poll: int | None = None

    def over(self, base: ThreadOptions) -> ThreadOptions:
        """These options, with those of others where nothing was said; CPUs are one matter."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        has_cpus = self.mask is not None or self.range is not None
        kept = [name for name, value in own.items() if value is not None or (has_cpus and name in ("mask", "range"))]
        return ThreadOptions(**{name: (self if name in kept else base).__dict__[name] for name in own})

    def as_set(self) -> ThreadSet:
        """What holds for the threads."""
        cpus = tuple(sorted({*(self.mask or ()), *(self.range or ())}))
        return ThreadSet(cpus, bool(self.strict), self.priority or 0, USUAL_POLL if self.poll is None else self.poll)


def to_mask(text: str, warn: Warn) -> tuple[int, ...]:
    """CPUs of a mask in hexadecimal digits, with or without 0x: bit i stands for CPU i."""
    try:
        mask = int(text, 16)
    except ValueError:
        mask = 0
    if mask <= 0 or mask >> MOST_CPUS:
        raise ValueError(f"expected a mask in hexadecimal digits such as 0xff, got {text!r}")
    return tuple(cpu for cpu in range(mask.bit_length()) if mask >> cpu & 1)


def to_range(text: str, warn: Warn) -> tuple[int, ...]:
    """CPUs of `lo-hi`, both included; without lo from the first, without hi to the last one of this process."""
    from ikpy.machine.threads import usable_cpus

    low, dash, high = text.partition("-")
    if not dash or not (low + high).isdigit():
        raise ValueError(f"expected a range of CPUs such as 0-7, got {text!r}")
    first, last = int(low or 0), int(high) if high else max(usable_cpus())
    if not first <= last < MOST_CPUS:
        raise ValueError(f"expected a range of CPUs from low to high, below {MOST_CPUS}, got {text!r}")
    return tuple(range(first, last + 1))


def place_threads(params: CommonParams, warn: Callable[[str], None]) -> None:
    """Does what the options say; where threads are not counted with -t and the like, there are at most as many as CPUs.

    Raises:
        UsageError: CPUs that this process may not use, or another placement beside.
    """
    main, empty = params.threads, ThreadOptions()
    batch, draft = params.threads_batch.over(main), params.threads_draft.over(main)
    options = [main, batch, draft, params.threads_batch_draft.over(params.threads_draft.over(batch))]
    if all(each == empty for each in options):
        return
    sets = [each.as_set() for each in options]
    use_sets(sets, params.model.numa, warn)
    counts = [params.n_threads, params.n_threads_batch]
    for name, own, n in zip(("n_threads", "n_threads_batch"), sets, counts, strict=False):
        if getattr(params.context, name) is None:
            setattr(params.context, name, min(n, len(own.cpus) or n))
        elif own.cpus and n > len(own.cpus):
            warn(f"{n} threads share the {len(own.cpus)} CPUs of --cpu-mask and --cpu-range")


def use_sets(sets: list[ThreadSet], numa: str | None, warn: Callable[[str], None]) -> None:
    """Applies the sets. UsageError beside --numa distribute, which places threads as well."""
    if numa == "distribute" and any(own.cpus or own.strict for own in sets):
        raise UsageError("--numa distribute and CPUs of threads (-C, -Cr, --cpu-strict) exclude each other")
    use(sets, warn)
