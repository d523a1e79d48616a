"""How large products are computed on the devices at hand: the user's choice, what was measured, or what was computed.

Kernels that are newer than plain mma.sync are used on a device only after they gave the same as those there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import numpy as np

from ikpy.backends.cuda import record
from ikpy.backends.cuda.api import Device, DeviceError
from ikpy.backends.cuda.launch import ACT_BF16, ACT_TILES, BF16_TOKENS, Large
from ikpy.backends.cuda.probe import Probe

Log = Callable[[str], None]
HOPPER = (9, 0)
# Products of the check, (n_in, n_out, tokens, gate): fewer steps than the pipeline has stages, several rounds of it,
# tiles that are not full, both halves of a tile.
CHECKED = ((64, 128, 128, False), (1024, 200, 150, False), (448, 328, 260, True))
# Both ways add products of the same bf16 numbers in f32, in another order.
TOLERANCE = 1e-4


def log_to_stderr(line: str) -> None:
    """Where findings are said if nobody listens."""
    print(line, file=sys.stderr, flush=True)


def large_products(devices: Sequence[Device], tokens: int | None, log: Log = log_to_stderr) -> dict[str, Large]:
    """How large products are computed on all of the devices, by kernel file ("": of all others).

    tokens: smallest number of tokens of such products, 0 = never, None = as measured, or else as computed.
    """
    if tokens == 0 or any(device.compute_capability < (8, 0) for device in devices):
        return {"": Large(0)}
    works = all([wgmma_works(device, log) for device in devices])
    default = Large(BF16_TOKENS if tokens is None else tokens, ACT_TILES if works else ACT_BF16)
    measured = [record.load(device).large for device in devices] if tokens is None else []
    known = [large for large in measured if large is not None]
    return {"": default, **(_common(known, default) if len(known) == len(devices) else {})}


def known(device: Device) -> str:
    """What the record of a device says, in a few words."""
    found = record.load(device)
    measured = "measured by `ikpy cuda tune`" if found.large is not None else "not measured (`ikpy cuda tune`)"
    if device.compute_capability != HOPPER:
        return measured
    tried = {None: "was not tried yet", True: "agrees with gemm_bf16", False: "differs from gemm_bf16 and is not used"}
    return f"{measured}; gemm_wgmma {tried[found.wgmma]}"


def _common(measured: Sequence[Mapping[str, Large]], default: Large) -> dict[str, Large]:
    """For every kernel file what is good on all devices: where they differ, the later start and plain kernels."""
    found = {}
    for file in set().union(*measured):
        ways = [large.get(file, default) for large in measured]
        formats = {way.format for way in ways if way.tokens} or {ACT_BF16}
        fmt = formats.pop() if len(formats) == 1 and default.format == ACT_TILES else ACT_BF16
        found[file] = Large(max(way.tokens for way in ways) if all(way.tokens for way in ways) else 0, fmt)
    return found


def wgmma_works(device: Device, log: Log) -> bool:
    """Whether gemm_wgmma gives what gemm_bf16 gives on this device; tried once, and kept with the device's record."""
    if device.compute_capability != HOPPER:
        return False
    known = record.load(device)
    if known.wgmma is None:
        known.wgmma = _agrees(device, log)
        with suppress(OSError):  # without a place to keep it, it is tried again
            known.save()
    elif not known.wgmma:
        log(f"{device.name}: gemm_wgmma gave other results than gemm_bf16 when it was tried and is not used")
    return known.wgmma


def _agrees(device: Device, log: Log) -> bool:
    for n_in, n_out, n_tokens, gate in CHECKED:
        with Probe(device, "bf16", n_in, n_out, n_tokens, gate=gate) as probe:
            plain, newer = (probe.launches(Large(1, fmt)) for fmt in (ACT_BF16, ACT_TILES))
            expected = probe.result(plain)
            try:
                actual = probe.result(newer)
            except DeviceError as error:
                log(f"{device.name}: gemm_wgmma does not run and is not used: {error}")
                return False
        largest = np.abs(expected).max()
        difference = float(np.nan_to_num(np.abs(actual - expected), nan=np.inf).max() / largest)
        if not difference <= TOLERANCE:
            log(
                f"{device.name}: gemm_wgmma differs from gemm_bf16 by {difference:.1e} of the largest result and is "
                "not used; please report this"
            )
            return False
    log(f"{device.name}: gemm_wgmma gives what gemm_bf16 gives and is used")
    return True
