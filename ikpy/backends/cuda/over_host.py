"""Copies between devices of which one is another machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ikpy.backends.cuda.state import DeviceState


def send_over_host(
    source: DeviceState, target: DeviceState, copies: Sequence[tuple[int, int]], sizes: Sequence[int]
) -> Callable[[Any], None]:
    """Copies between devices that do not reach each other, by way of host memory; copies: target and source."""
    memory = [np.empty(nbytes, np.uint8) for nbytes in sizes]
    arrived, left = source.device.new_event(), target.device.new_event()

    def send(run: Any) -> None:
        left.synchronize()
        for data, (_, start) in zip(memory, copies, strict=True):
            source.stream.download(data, start)
        source.stream.record(arrived)
        arrived.synchronize()
        for data, (end, _) in zip(memory, copies, strict=True):
            target.stream.upload(end, data)
        target.stream.record(left)

    return send
