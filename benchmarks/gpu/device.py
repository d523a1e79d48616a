"""Whether a GPU still works after a kernel failed."""

from __future__ import annotations

from ikpy.backends.cuda.api import Device, DeviceError


def works(device: Device) -> bool:
    """Whether the GPU takes work: a kernel that fails takes the whole context of the process with it."""
    try:
        stream, address = device.new_stream(), device.alloc(256)
        stream.fill(address, 0, 256)
        stream.synchronize()
        device.release(address)
    except DeviceError:
        return False
    return True
