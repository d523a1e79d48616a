"""Automatic placement (--fit): as much on the devices as their free memory holds, by the exact plan of every try."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace

from ikpy.backends.cuda.devices import wanted_devices
from ikpy.engine.context import Context
from ikpy.engine.model import Model, open_model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.errors import OutOfMemoryError
from ikpy.graph.placement import ALL_LAYERS, PlacementParams

MIB = 1 << 20
DEFAULT_MARGIN = 1024


def fit(
    path: str | os.PathLike[str],
    model_params: ModelParams,
    context_params: ContextParams,
    *,
    margin: int = DEFAULT_MARGIN,
    margins: Mapping[int, int] | None = None,
    context: Callable[[Model, ContextParams], Context] = Context,
    log: Callable[[str], None] = lambda _: None,
) -> PlacementParams:
    """The placement that keeps most on the devices while `margin` MiB (margins: of single devices) stay free on each.

    Experts of the last layers go to the CPU first, whole layers after all experts. What the projector of pictures and a
    draft model take counts (`PlacementParams.taken`, `reserved`). ``context`` makes what is measured. Nothing but the
    header of the file is read. Raises OutOfMemoryError if not even one layer fits.
    """
    devices = wanted_devices(model_params.placement, model_params.devices)
    if not devices:
        return model_params.placement
    others = model_params.placement.of_others
    room = {
        d.name: d.memory().free - (margins or {}).get(d.index, margin) * MIB - others.get(d.name, 0) for d in devices
    }
    planned = replace(model_params, header_only=True, use_mlock=False)
    gguf = open_model(path, planned)
    wanted = replace(model_params.placement, n_gpu_layers=ALL_LAYERS, n_cpu_moe=0)

    def needs(placement: PlacementParams) -> dict[str, int]:
        model = Model.load(gguf, replace(planned, placement=placement))
        devices = context(model, context_params).devices
        return {name: need.total for name, need in devices.needs.items()} if devices else {}

    def fits(placement: PlacementParams) -> bool:
        return all(nbytes <= room[name] for name, nbytes in needs(placement).items())

    placement = _search(wanted, fits, _sizes(planned, gguf))
    if placement is None:
        free = ", ".join(f"{name} {max(0, nbytes) // MIB} MiB" for name, nbytes in room.items())
        asked = model_params.placement
        further = "--no-mmproj-offload, " * bool(asked.taken) + "-ngld 0, " * bool(asked.reserved)
        raise OutOfMemoryError(
            f"Unable to auto-fit model: not one layer fits the devices (free after the margin: {free}); "
            f"use a smaller -c or -ub, a smaller --fit-margin, {further}or -ngl 0"
        )
    for name, nbytes in needs(placement).items():
        log(f"fit: {name}: {nbytes / MIB:.2f} MiB of {room[name] / MIB:.2f} MiB")
    log(f"fit: -ngl {placement.n_gpu_layers} --n-cpu-moe {placement.n_cpu_moe}")
    return placement


def _sizes(params: ModelParams, gguf: object) -> tuple[int, int]:
    """Repeating layers, and layers with experts."""
    model = Model.load(gguf, replace(params, placement=PlacementParams(n_gpu_layers=0)))  # type: ignore[arg-type]
    n_layer = model.hparams.n_layer
    n_expert_layers = sum(f"blk.{il}.ffn_down_exps.weight" in model.gguf.tensors for il in range(n_layer))
    return n_layer, n_expert_layers


def _search(
    wanted: PlacementParams, fits: Callable[[PlacementParams], bool], sizes: tuple[int, int]
) -> PlacementParams | None:
    n_layer, n_expert_layers = sizes
    if fits(wanted):
        return wanted
    if n_expert_layers:
        least = _first(lambda n: fits(replace(wanted, n_cpu_moe=n)), 1, n_expert_layers)
        if least is not None:
            return replace(wanted, n_cpu_moe=least)
        wanted = replace(wanted, n_cpu_moe=ALL_LAYERS)
    removed = _first(lambda n: fits(replace(wanted, n_gpu_layers=n_layer + 1 - n)), 1, n_layer)
    return None if removed is None else replace(wanted, n_gpu_layers=n_layer + 1 - removed)


def _first(holds: Callable[[int], bool], low: int, high: int) -> int | None:
    """Smallest n in low..high for which a condition holds that, once true, stays true."""
    if not holds(high):
        return None
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
