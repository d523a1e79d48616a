"""`ikpy cuda tune`: which way of computing products of a family of weight types is fastest from how many tokens on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ikpy.backends.cuda import record, ways
from ikpy.backends.cuda.api import Device
from ikpy.backends.cuda.launch import ACT_BF16, ACT_TILES, FLOAT_WEIGHTS, Large, family_types
from ikpy.backends.cuda.probe import Probe
from ikpy.backends.cuda.ways import Log

TOKENS = (16, 32, 64, 128, 256, 512, 1024)
# A matrix of an 8B model; those of larger ones fill more multiprocessors with few tokens already.
N_IN, N_OUT = 4096, 4096
REPEATS = 3
# The kernels that large products are measured against: int8, or for BF16 weights the ones for few tokens.
PLAIN = "matmul"
# The int8 kernels of sm_90.
WGMMA_S8 = "wgmma"

# Milliseconds by way (PLAIN or the kernel of a format), for every number of tokens.
Times = Mapping[int, Mapping[str, float]]


def tune(device: Device, log: Log) -> record.Record:
    """Measures all families on a device and writes its record, which models that are loaded later follow."""
    formats = [ACT_BF16] if device.compute_capability >= (8, 0) else []
    if ways.wgmma_works(device, log):
        formats.append(ACT_TILES)
    s8 = ways.wgmma_s8_works(device, log)
    found = record.load(device)
    found.large, found.milliseconds = {}, []
    for file, type_name in family_types().items():
        times = {n: _times(device, type_name, n, formats, s8 and type_name not in FLOAT_WEIGHTS) for n in TOKENS}
        found.large[file] = choose(times, formats)
        found.milliseconds += [_row(file, type_name, n, of_n) for n, of_n in times.items()]
        log(_line(device, file, type_name, found.large[file]))
    found.save()
    return found


def _times(device: Device, type_name: str, n_tokens: int, formats: Sequence[int], s8: bool) -> dict[str, float]:
    with Probe(device, type_name, N_IN, N_OUT, n_tokens) as probe:
        found = {PLAIN: probe.milliseconds(Large(0), REPEATS)}
        if s8:
            found[WGMMA_S8] = probe.milliseconds(Large(0, wgmma=1), REPEATS)
        for fmt in formats:
            found[record.GEMM_KERNELS[fmt]] = probe.milliseconds(Large(1, fmt), REPEATS)
    return found


def choose(times: Times, formats: Sequence[int]) -> Large:
    """The format that is fastest with most tokens, from the tokens on from which it always beats the int8 kernels; of
    those the ones of sm_90 likewise.
    """
    most = max(times)
    wgmma = _first(times, WGMMA_S8, [PLAIN]) if WGMMA_S8 in times[most] else 0
    best = min(formats, key=lambda fmt: times[most][record.GEMM_KERNELS[fmt]], default=None)
    if best is None:
        return Large(0, wgmma=wgmma)
    return Large(_first(times, record.GEMM_KERNELS[best], [PLAIN, WGMMA_S8]), best, wgmma)


def _first(times: Times, kernel: str, others: Sequence[str]) -> int:
    """The number of tokens from which a way always beats the others that were measured; 0 if it never does."""
    first = 0
    for n in sorted(times, reverse=True):
        if times[n][kernel] >= min(times[n][way] for way in others if way in times[n]):
            break
        first = n
    return first


def _row(file: str, type_name: str, n_tokens: int, times: Mapping[str, float]) -> dict[str, Any]:
    return {"file": file, "type": type_name, "tokens": n_tokens, **{way: round(ms, 5) for way, ms in times.items()}}


def _line(device: Device, file: str, type_name: str, large: Large) -> str:
    starts = [(WGMMA_S8, large.wgmma), (record.GEMM_KERNELS[large.format], large.tokens)]
    way = ", ".join(f"{kernel} from {first} tokens on" for kernel, first in starts if first) or f"{PLAIN} always"
    return f"{device.name}: {file} ({type_name}): {way}"
