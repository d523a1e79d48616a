"""Devices of a model: which there are, where its tensors go, and the weights on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ikpy.backends.cuda.api import Device
from ikpy.backends.cuda.memory import WeightStore
from ikpy.backends.cuda.state import Kernels
from ikpy.graph.placement import CPU, DeviceParams, Placement, PlacementParams
from ikpy.graph.placement import Device as PlacementDevice


@dataclass
class DeviceSetup:
    """A model's devices, the placement of its tensors, and how the devices are used."""

    devices: Sequence[Device]
    placement: Placement
    kernels: Kernels
    params: DeviceParams
    weights: WeightStore = field(default_factory=WeightStore)


def placement_devices(devices: Sequence[Device], params: PlacementParams) -> tuple[PlacementDevice, ...]:
    """Devices as the placement sees them; their memory is looked at where it decides how layers are divided."""
    divided = len(devices) > 1 and params.split_mode != "none" and not any(params.tensor_split)
    return tuple(PlacementDevice(device.name, device.memory_estimate().free if divided else 1) for device in devices)


def device_setup(devices: Sequence[Device], where: Placement, params: DeviceParams) -> DeviceSetup | None:
    """The devices that hold anything or have layers; None if everything is on the CPU.

    A device whose layers' tensors are all in host memory (-ot, -nkvo) still multiplies their large batches.
    """
    shared = {part.device for division in where.divisions.values() for part in division.parts}
    used = {*where.tensors.values(), *where.caches, *where.layers, where.output, *shared} - {CPU}
    chosen = [device for device in devices if device.name in used]
    return DeviceSetup(chosen, where, default_kernels(chosen, params), params) if chosen else None


def default_kernels(devices: Sequence[Device], params: DeviceParams) -> Kernels:
    """The CUDA kernels, of sizes that fit all the devices."""
    from ikpy.backends.cuda.lowering import CudaKernels
    from ikpy.backends.cuda.ways import large_products

    large = large_products(devices, params.bf16_batch, wgmma=params.wgmma)
    return CudaKernels([device.compute_capability for device in devices], large)
