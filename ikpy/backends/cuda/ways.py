"""How large products are computed on the devices at hand: the user's choice, what was measured, or what was computed.

Kernels that are newer than plain mma.sync are used on a device only after they gave the same as those there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from ikpy.backends.cuda import record
from ikpy.backends.cuda.api import Device, DeviceError
from ikpy.backends.cuda.launch import ACT_BF16, ACT_TILES, BF16_TOKENS, Large
from ikpy.backends.cuda.probe import Probe

Log = Callable[[str], None]
HOPPER = (9, 0)
# Newer and plain int8 kernels, as they are named to users.
S8_KERNELS = ("wgmma_TYPE", "matmul_TYPE")
# Products of the check, (n_in, n_out, tokens, gate): fewer steps than the pipeline has stages, several rounds of it,
# tiles that are not full, both halves of a tile.
CHECKED = ((64, 128, 128, False), (1024, 200, 150, False), (448, 328, 260, True))
# Both ways add products of the same bf16 numbers in f32, in another order.
TOLERANCE = 1e-4
# Of the int8 kernels a type of every kind: scales per 32 and per 16, with and without offsets. Their integer sums are
# the same; what is added to what is too, unless the compiler joins multiplications and additions differently.
CHECKED_S8 = ("q8_0", "q4_1", "q6_k", "q2_k")
SHAPES_S8 = ((768, 200, 150, False), (256, 72, 260, True))
TOLERANCE_S8 = 1e-5
# Tokens per matrix from which int8 products of sm_90 are used where nothing was measured, computed as
# kernels/matmul_wgmma.cuh says: a block costs the tensor cores the same for any number of tokens, with 32 about half of
# what unpacking and scaling cost.
WGMMA_S8_TOKENS = 32


class Trial(NamedTuple):
    """A product that plain and newer kernels compute; tolerance: of the largest result."""

    type_name: str
    n_in: int
    n_out: int
    n_tokens: int
    gate: bool
    plain: Large
    newer: Large
    tolerance: float


def log_to_stderr(line: str) -> None:
    """Where findings are said if nobody listens."""
    print(line, file=sys.stderr, flush=True)


def large_products(
    devices: Sequence[Device], tokens: int | None, log: Log = log_to_stderr, *, wgmma: bool = True
) -> dict[str, Large]:
    """How large products are computed on all of the devices, by kernel file ("": of all others).

    tokens: smallest number of tokens of bf16 products, 0 = never, None = as measured, or else as computed. wgmma:
    whether kernels of sm_90 may be used.
    """
    if any(device.compute_capability < (8, 0) for device in devices):
        return {"": Large(0)}
    s8 = WGMMA_S8_TOKENS if wgmma and all([wgmma_s8_works(device, log) for device in devices]) else 0
    if tokens == 0:
        return {"": Large(0, wgmma=s8)}
    tiles = wgmma and all([wgmma_works(device, log) for device in devices])
    default = Large(BF16_TOKENS if tokens is None else tokens, ACT_TILES if tiles else ACT_BF16, s8)
    measured = [record.load(device).large for device in devices] if tokens is None else []
    known = [large for large in measured if large is not None]
    return {"": default, **(_common(known, default) if len(known) == len(devices) else {})}


def known(device: Device) -> str:
    """What the record of a device says, in a few words."""
    found = record.load(device)
    measured = "measured by `ikpy cuda tune`" if found.large is not None else "not measured (`ikpy cuda tune`)"
    if device.compute_capability != HOPPER:
        return measured
    return f"{measured}; {_tried('gemm_wgmma', 'gemm_bf16', found.wgmma)}; {_tried(*S8_KERNELS, found.wgmma_s8)}"


def _tried(name: str, plain: str, works: bool | None) -> str:
    if works is None:
        return f"{name} was not tried yet"
    return f"{name} agrees with {plain}" if works else f"{name} does not give what {plain} gives and is not used"


def _common(measured: Sequence[Mapping[str, Large]], default: Large) -> dict[str, Large]:
    """For every kernel file what is good on all devices: where they differ, the later start and plain kernels."""
    found = {}
    for file in set().union(*measured):
        ways = [large.get(file, default) for large in measured]
        formats = {way.format for way in ways if way.tokens} or {ACT_BF16}
        fmt = formats.pop() if len(formats) == 1 and default.format == ACT_TILES else ACT_BF16
        wgmma = _later(way.wgmma for way in ways) if default.wgmma else 0
        found[file] = Large(_later(way.tokens for way in ways), fmt, wgmma)
    return found


def _later(starts: Iterable[int]) -> int:
    """The latest start; 0, never, if that is one of them."""
    starts = list(starts)
    return max(starts) if all(starts) else 0


def wgmma_works(device: Device, log: Log) -> bool:
    """Whether gemm_wgmma gives what gemm_bf16 gives on this device; tried once, and kept with the device's record."""
    return _works(device, "wgmma", ("gemm_wgmma", "gemm_bf16"), _bf16_trials, log)


def wgmma_s8_works(device: Device, log: Log) -> bool:
    """As wgmma_works, of the int8 kernels: whether wgmma_TYPE gives what matmul_TYPE gives."""
    return _works(device, "wgmma_s8", S8_KERNELS, _s8_trials, log)


def _bf16_trials() -> Iterator[Trial]:
    for n_in, n_out, n_tokens, gate in CHECKED:
        yield Trial("bf16", n_in, n_out, n_tokens, gate, Large(1, ACT_BF16), Large(1, ACT_TILES), TOLERANCE)


def _s8_trials() -> Iterator[Trial]:
    for type_name, (n_in, n_out, n_tokens, gate) in product(CHECKED_S8, SHAPES_S8):
        yield Trial(type_name, n_in, n_out, n_tokens, gate, Large(0), Large(0, wgmma=1), TOLERANCE_S8)


def _works(device: Device, field: str, names: tuple[str, str], trials: Callable[[], Iterator[Trial]], log: Log) -> bool:
    """What the record says of newer kernels, or else what the trials say; names: of them, and of the plain ones."""
    if device.compute_capability != HOPPER:
        return False
    known = record.load(device)

    def keep(works: bool | None) -> None:
        setattr(known, field, works)
        known.keep()

    if getattr(known, field) is None:
        try:
            # A kernel that never ends, or takes the process with it, must not do so at every start.
            keep(_agrees(device, names, trials(), log, under_way=lambda: keep(False)))
        except BaseException:
            keep(None)
            raise
    elif not getattr(known, field):
        log(f"{device.name}: {names[0]} did not give what {names[1]} gives when it was tried, and is not used")
    return bool(getattr(known, field))


def _agrees(
    device: Device, names: tuple[str, str], trials: Iterator[Trial], log: Log, under_way: Callable[[], None]
) -> bool | None:
    """None: there are no such kernels. under_way: is called when a kernel is about to be tried."""
    newer_name, plain_name = names
    for trial in trials:
        with Probe(
            device, trial.type_name, trial.n_in, trial.n_out, trial.n_tokens, gate=trial.gate, encoded=True
        ) as probe:
            plain, newer = probe.launches(trial.plain), probe.launches(trial.newer)
            expected = probe.result(plain)
            try:
                device.prepare({step.kernel for step in newer})
            except DeviceError as error:
                log(f"{device.name}: {newer_name} is not there and is not used: {error}")
                return None
            under_way()
            try:
                actual = probe.result(newer)
            except DeviceError as error:
                log(f"{device.name}: {newer_name} does not run and is not used: {error}")
                return False
        largest = np.abs(expected).max()
        difference = float(np.nan_to_num(np.abs(actual - expected), nan=np.inf).max() / largest)
        if not difference <= trial.tolerance:
            log(
                f"{device.name}: {newer_name} differs from {plain_name} by {difference:.1e} of the largest result and "
                "is not used; please report this"
            )
            return False
    log(f"{device.name}: {newer_name} gives what {plain_name} gives and is used")
    return True
