"""Where the models of draft files go: what is not asked for goes as the model itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ikpy.backends.cuda.api import Device
from ikpy.backends.cuda.devices import selected
from ikpy.engine.params import ModelParams
from ikpy.graph.placement import PlacementParams, check_placement

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class DraftPlacement:
    """What is asked for, as the fields of PlacementParams and DeviceParams; None: as the model's."""

    n_gpu_layers: int | None = None
    devices: tuple[str, ...] | None = None
    rules: tuple[tuple[str, str], ...] = ()
    n_cpu_moe: int = 0


def draft_model_params(model: ModelParams, wanted: DraftPlacement | None = None, *, undivided: bool) -> ModelParams:
    """How a draft file is loaded beside a model that is loaded with these parameters.

    All of it is on the GPUs that the model may use, unless the model uses none. ``undivided``: several devices do not
    share its layers. Shares are fixed here, by the memory that is free now. Raises UsageError for devices that do not
    exist.
    """
    wanted = wanted or DraftPlacement()
    is_named = wanted.devices is not None
    names = wanted.devices if is_named else model.devices.names
    n_layers = wanted.n_gpu_layers
    if n_layers is None:
        n_layers = -1 if is_named or model.placement.n_gpu_layers else 0
    devices = [] if n_layers == 0 else selected(names, "--device-draft" if is_named else "--device")
    placement = PlacementParams(
        n_gpu_layers=n_layers,
        rules=wanted.rules,
        n_cpu_moe=wanted.n_cpu_moe,
        kv_offload=model.placement.kv_offload,
    )
    if devices:
        placement = _shared(placement, devices, PlacementParams() if is_named else model.placement, undivided)
    check_placement(placement, [device.name for device in devices])
    return ModelParams(header_only=model.header_only, placement=placement, devices=replace(model.devices, names=names))


def _shared(
    placement: PlacementParams, devices: Sequence[Device], model: PlacementParams, undivided: bool
) -> PlacementParams:
    """The placement with what each of the devices gets."""
    main = model.main_gpu if model.main_gpu < len(devices) else 0
    if model.split_mode == "none":
        return replace(placement, split_mode="none", main_gpu=main)
    shares = model.tensor_split
    if undivided:
        if any(shares) and not (main < len(shares) and shares[main] > 0):
            main = next(i for i, share in enumerate(shares) if share > 0)
        return replace(placement, split_mode="none", main_gpu=main)
    if len(devices) > 1 and not any(shares):
        shares = tuple(float(device.memory_estimate().free) for device in devices)
    return replace(placement, tensor_split=shares)
