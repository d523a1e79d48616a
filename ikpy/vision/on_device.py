"""What encoders that may run on a device have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ikpy.backends.cuda.api import MIB
from ikpy.backends.cuda.encoder_runtime import EncoderRuntime
from ikpy.errors import FileFormatError, UsageError
from ikpy.gguf.reader import GGUFFile
from ikpy.models.weights import page_dropper
from ikpy.vision.plans import PicturePlans


class OnDevice(ABC):
    """An encoder whose plans run on a device, if it has one. kind: what its lines of the log begin with; what: a thing
    that it encodes."""

    kind: ClassVar[str] = "vision"
    what: ClassVar[str] = "picture"
    path: str
    _device: EncoderRuntime | None
    _plans: PicturePlans

    @property
    @abstractmethod
    def largest(self) -> tuple[int, int]:
        """Rows and columns of patches of the largest picture or piece of sound."""

    def evaluated(self, patches: NDArray[np.float32], rows: int, columns: int) -> NDArray[np.float32]:
        """The rows of so many patches. Raises FileFormatError if they are no numbers."""
        values = self._plans.run(patches, rows, columns)
        if not np.isfinite(values).all():
            wrong = ""
            if self._device is not None:
                wrong = f", or a kernel of {self._device.device.name} is wrong (--no-mmproj-offload)"
            raise FileFormatError(f"{self.path}: the rows of a {self.what} are no numbers: the file is damaged{wrong}")
        return values

    def measure(self, gguf: GGUFFile) -> None:
        """Counts what the weights and the largest picture take on the device, if there is one; pages of the file that
        were brought there are given back."""
        if self._device is not None:
            self._device.setup.weights.when_uploaded(page_dropper(gguf))
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


def check_width(path: str, n_made: int, n_embd: int) -> None:
    """UsageError if rows are not those of the text model."""
    if n_made != n_embd:
        raise UsageError(
            f"{path} makes rows of {n_made} elements, the text model wants {n_embd}: it is another model's"
        )


def unknown_kind(gguf: GGUFFile, what: str, kind: str | None, families: Collection[str]) -> str:
    """Why an encoder of a file, of "pictures" or "sound", cannot be used; kind None: there is none."""
    if kind is None:
        return f"{gguf.path} holds no encoder of {what}"
    return f"{gguf.path}: unknown projector type '{kind}' of {what}; known are {', '.join(sorted(families))}"
