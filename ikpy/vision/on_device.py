"""What encoders that may run on a device have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from ikpy.backends.cuda.api import MIB
from ikpy.backends.cuda.encoder_runtime import EncoderRuntime
from ikpy.vision.plans import PicturePlans


class OnDevice(ABC):
    """An encoder whose plans run on a device, if it has one. kind: what its lines of the log begin with."""

    kind: ClassVar[str] = "vision"
    _device: EncoderRuntime | None
    _plans: PicturePlans

    @property
    @abstractmethod
    def largest(self) -> tuple[int, int]:
        """Rows and columns of patches of the largest picture or piece of sound."""

    def measure(self) -> None:
        """Counts what the weights and the largest picture take on the device, if there is one."""
        if self._device is not None:
            self._plans.measure(*self.largest)

    @property
    def device_bytes(self) -> dict[str, int]:
        """Bytes that were measured of the device, by its name; nothing without one."""
        return {} if self._device is None else {self._device.device.name: self._device.own_needs.total}

    def take_memory(self, log: Callable[[str], None]) -> None:
        """Brings the weights to the device and makes room for the largest picture, if there is a device."""
        if self._device is None:
            return
        needs, name = self._device.own_needs, self._device.device.name
        self._device.commit()
        log(f"{self.kind}: {name:>10} buffer size = {needs.weight_bytes / MIB:8.2f} MiB")
        log(f"{self.kind}: {name:>10} compute buffer size = {needs.compute_bytes / MIB:8.2f} MiB")
