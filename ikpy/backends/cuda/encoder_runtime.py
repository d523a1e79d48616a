"""Runs graphs that take turns on one device, each with inputs of its own: the encoders of pictures."""

from __future__ import annotations

from ikpy.backends.cuda.api import Device, DeviceMemoryError
from ikpy.backends.cuda.inputs import ChangingInputs, InputMemory, Inputs
from ikpy.backends.cuda.runtime import DeviceNeeds, DeviceRuntime
from ikpy.backends.cuda.setup import encoder_setup
from ikpy.backends.cuda.staging import Log
from ikpy.graph.placement import DeviceParams

REMEDY = "keep the projector on the CPU (--no-mmproj-offload), or encode smaller pictures (--image-max-tokens)"


class EncoderRuntime(DeviceRuntime):
    """All of an encoder on one device. plan_only: memory is measured, not taken."""

    def __init__(self, device: Device, params: DeviceParams, log: Log, *, plan_only: bool = False) -> None:
        super().__init__(encoder_setup(device, params), Inputs(), {}, {}, log, plan_only=plan_only)
        self.device = device
        self.inputs: ChangingInputs | None = None

    @property
    def own_needs(self) -> DeviceNeeds:
        """What was measured of the device."""
        return self.needs[self.device.name]

    def input_memory(self, device: Device) -> InputMemory:
        """Memory for the inputs of one graph at a time."""
        self.inputs = ChangingInputs(device)
        return self.inputs

    def commit(self) -> bool:
        """As of DeviceRuntime."""
        try:
            return super().commit()
        except DeviceMemoryError as error:
            raise DeviceMemoryError(f"{str(error).partition(';')[0]}; {REMEDY}") from None
