"""Whether copies between devices arrive.

Where an IOMMU or PCIe access control is in the way of direct ones, the driver offers them and reports no error, and
other bytes arrive.
"""

from __future__ import annotations

import numpy as np

from ikpy.backends.cuda.api import Device, DeviceMemoryError

NBYTES = 1 << 20


def arrives(source: Device, target: Device) -> bool:
    """Whether a MiB that is copied from one device to another is the same there; True where there is no room for it."""
    sent = np.random.default_rng(source.index).integers(0, 256, NBYTES, np.uint8)
    found = np.zeros_like(sent)
    try:
        start = source.alloc(NBYTES)
    except DeviceMemoryError:
        return True
    try:
        end = target.alloc(NBYTES)
    except DeviceMemoryError:
        source.release(start)
        return True
    there = target.new_stream()
    there.fill(end, 0, NBYTES)
    there.synchronize()
    here = source.new_stream()
    here.upload(start, sent)
    here.send(target, end, start, NBYTES)
    here.synchronize()
    there.download(found, end)
    there.synchronize()
    source.release(start)
    target.release(end)
    return bool((found == sent).all())
