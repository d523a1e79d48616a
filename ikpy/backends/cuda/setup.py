"""Devices of a model: which there are, where its tensors go, and the weights on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ikpy.backends.cuda.api import Device
from ikpy.backends.cuda.memory import WeightStore
from ikpy.backends.cuda.state import Kernels
from ikpy.graph.ir import Buffer
from ikpy.graph.placement import CPU, DeviceParams, Placement
from ikpy.graph.placement import Device as PlacementDevice

MIB = 1 << 20


@dataclass
class DeviceSetup:
    """A model's devices, the placement of its tensors, and how the devices are used."""

    devices: Sequence[Device]
    placement: Placement
    kernels: Kernels
    params: DeviceParams
    weights: WeightStore = field(default_factory=WeightStore)

    def upload(self, device: Device, buffers: Iterable[Buffer], log: Callable[[str], None]) -> None:
        """Uploads the weights that the device lacks."""
        nbytes = self.weights.upload(device, buffers)
        if nbytes:
            log(f"llm_load_tensors: {device.name}: uploaded {nbytes / MIB:.2f} MiB of weights")


def placement_devices(devices: Iterable[Device]) -> tuple[PlacementDevice, ...]:
    """Devices as the placement sees them."""
    return tuple(PlacementDevice(device.name, device.memory().free) for device in devices)


def device_setup(devices: Sequence[Device], where: Placement, params: DeviceParams) -> DeviceSetup | None:
    """The devices that hold anything; None if everything is on the CPU."""
    used = {*where.tensors.values(), *where.caches} - {CPU}
    chosen = [device for device in devices if device.name in used]
    return DeviceSetup(chosen, where, default_kernels(chosen, params), params) if chosen else None


def default_kernels(devices: Sequence[Device], params: DeviceParams) -> Kernels:
    """The CUDA kernels, of sizes that fit all the devices."""
    from ikpy.backends.cuda.lowering import CudaKernels
    from ikpy.backends.cuda.ways import large_products

    large = large_products(devices, params.bf16_batch)
    return CudaKernels([device.compute_capability for device in devices], large)
