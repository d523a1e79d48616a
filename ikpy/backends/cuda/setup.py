"""Devices of a model: which there are, where its tensors go, and the weights on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ikpy.backends.cuda.api import Device
from ikpy.backends.cuda.memory import WeightStore
from ikpy.backends.cuda.state import Kernels
from ikpy.errors import UsageError
from ikpy.graph.assign import smallest_expert_batch
from ikpy.graph.placement import CPU, EMBEDDINGS, DeviceParams, Placement, PlacementParams
from ikpy.graph.placement import Device as PlacementDevice


@dataclass
class DeviceSetup:
    """A model's devices, the placement of its tensors, and how the devices are used. taken: bytes of devices that the
    projector of pictures has."""

    devices: Sequence[Device]
    placement: Placement
    kernels: Kernels
    params: DeviceParams
    weights: WeightStore = field(default_factory=WeightStore)
    taken: Mapping[str, int] = field(default_factory=dict)

    def kernels_on(self, name: str) -> Kernels:
        """What runs nodes on a device."""
        found = next((device.kernels for device in self.devices if device.name == name), None)
        return found or self.kernels

    @property
    def has_gpus(self) -> bool:
        """Whether one of the devices is in this machine."""
        return any(not device.is_remote for device in self.devices)

    def offloaded_sizes(self, n_expert: int, n_used: int) -> set[int]:
        """Smallest batches whose products with weights in host memory may run on a device."""
        smallest, tensors = self.params.offload_batch, self.placement.tensors
        if not smallest or all(device != CPU or name.startswith(EMBEDDINGS) for name, device in tensors.items()):
            return set()
        return {smallest, smallest_expert_batch(smallest, n_expert, n_used)}


def placement_devices(devices: Sequence[Device], params: PlacementParams) -> tuple[PlacementDevice, ...]:
    """Devices as the placement sees them; their memory is looked at where it decides how layers are divided."""
    divided = len(devices) > 1 and params.split_mode != "none" and not any(params.tensor_split)
    others = params.of_others

    def free(device: Device) -> int:
        return max(1, device.memory_estimate().free - others.get(device.name, 0))

    return tuple(PlacementDevice(device.name, free(device) if divided else 1) for device in devices)


def device_setup(
    devices: Sequence[Device], where: Placement, params: DeviceParams, taken: Mapping[str, int]
) -> DeviceSetup | None:
    """The devices that hold anything or have layers; None if everything is on the CPU. taken: as of DeviceSetup.

    A device whose layers' tensors are all in host memory (-ot, -nkvo) still multiplies their large batches.
    """
    shared = {part.device for division in where.divisions.values() for part in division.parts}
    used = {*where.tensors.values(), *where.caches, *where.layers, where.output, *shared} - {CPU}
    chosen = [device for device in devices if device.name in used]
    if not chosen:
        return None
    remote = [device for device in chosen if device.is_remote]
    if remote and where.divisions:
        raise UsageError(f"-sm graph: {remote[0].name} holds whole layers only; use -sm layer")
    local = [device for device in chosen if not device.is_remote]
    if remote:
        # Weights would cross the network for every batch.
        params = replace(params, offload_batch=0, check=params.check and bool(local))
    kernels = default_kernels(local, params) if local else remote[0].kernels
    return DeviceSetup(chosen, where, kernels, params, taken=taken)


def encoder_setup(device: Device, params: DeviceParams) -> DeviceSetup:
    """A device that holds all of an encoder."""
    return DeviceSetup([device], Placement({}, (), (), device.name), default_kernels([device], params), params)


def default_kernels(devices: Sequence[Device], params: DeviceParams) -> Kernels:
    """The CUDA kernels, of sizes that fit all the devices."""
    from ikpy.backends.cuda.lowering import CudaKernels
    from ikpy.backends.cuda.ways import large_products

    large = large_products(devices, params.bf16_batch, wgmma=params.wgmma)
    return CudaKernels([device.compute_capability for device in devices], large)
