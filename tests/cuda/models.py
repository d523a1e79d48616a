"""Models on emulated devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.backends.cuda import devices as cuda_devices
from ikpy.backends.cuda import setup as cuda_setup
from ikpy.backends.cuda.emulated import LATE, EmulatedDevice, EmulatedStream, Turns
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.graph.ir import Node
from ikpy.graph.placement import DeviceParams, PlacementParams
from tests.cuda.cpu_kernels import CpuKernels
from tests.shared import DATA

MIB = 1 << 20


@contextmanager
def emulated(
    n: int = 1,
    mib: int = 512,
    unsupported: Callable[[Node], str | None] = lambda node: None,
    order: int = LATE,
) -> Iterator[CpuKernels]:
    """n devices whose kernels are the CPU's. order: in which their streams go on."""
    kernels, turns = CpuKernels(unsupported), Turns(order)
    found = [EmulatedDevice(i, mib * MIB, kernels.launch, turns=turns) for i in range(n)]
    opened, default = cuda_devices._open, cuda_setup.default_kernels
    try:
        cuda_devices._open = lambda *_: (found, "")  # type: ignore[assignment]
        cuda_setup.default_kernels = lambda *_: kernels  # type: ignore[assignment]
        yield kernels
    finally:
        cuda_devices._open, cuda_setup.default_kernels = opened, default


def zoo(name: str) -> Path:
    """A tiny random model of the golden captures."""
    return DATA / "zoo" / f"{name}.gguf"


def logits_of(
    path: Path,
    tokens: np.ndarray,
    n_prompt: int,
    *,
    placement: PlacementParams | None = None,
    devices: DeviceParams | None = None,
    log: list[str] | None = None,
    **context: object,
) -> np.ndarray:
    """Logits [n, V] of a prompt in one batch and single steps after it."""
    lines = [] if log is None else log
    params = ModelParams(
        placement=placement or PlacementParams(n_gpu_layers=0),
        devices=devices or DeviceParams(),
        mla=context.get("mla", 3),  # type: ignore[arg-type]
    )
    model = Model.load(path, params, log=lines.append)
    settings = ContextParams(n_ctx=256, n_ubatch=64, n_threads=1)
    ctx = Context(model, dataclasses.replace(settings, **context), log=lines.append)  # type: ignore[arg-type]
    parts = [ctx.decode(Batch.single(tokens[:n_prompt], 0, logits="all"))]
    parts += [ctx.decode(Batch.single(tokens[i : i + 1], i)) for i in range(n_prompt, len(tokens))]
    lines.append(f"splits {ctx.n_graph_splits}")
    return np.concatenate(parts)


def recorded_operations(
    monkeypatch: pytest.MonkeyPatch, kind: Callable[[Any], str] = lambda launched: str(launched.kernel)
) -> list[tuple[str, str]]:
    """What emulated streams are given from now on, in order: device, and "send" or the kind of what is launched."""
    issued: list[tuple[str, str]] = []
    send, launch = EmulatedStream.send, EmulatedStream.launch

    def sent(stream: EmulatedStream, *rest: Any) -> None:
        issued.append((stream.device.name, "send"))
        send(stream, *rest)

    def launched(stream: EmulatedStream, one: Any) -> None:
        issued.append((stream.device.name, kind(one)))
        launch(stream, one)

    monkeypatch.setattr(EmulatedStream, "send", sent)
    monkeypatch.setattr(EmulatedStream, "launch", launched)
    return issued
