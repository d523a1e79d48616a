"""Streams that run early, or by chance one ahead of another: nothing is copied, or overwritten, before it may be."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from ikpy.backends.cuda.api import Device, DeviceError, Stream
from ikpy.backends.cuda.emulated import EARLY, LATE, EmulatedDevice, Turns
from ikpy.backends.cuda.plan import HybridPlan
from ikpy.backends.cuda.state import DeviceState
from ikpy.graph.placement import DeviceParams, PlacementParams
from ikpy.graph.split import Transfer
from tests.cuda.models import MIB, emulated, logits_of, zoo
from tests.cuda.test_placement_matrix import PLACEMENTS, tokens_for

ORDERS = (EARLY, *range(2, 8))
N_TOKENS, N_PROMPT = 14, 10
# (model, placement, devices): experts and attention on the CPU, layers that lie scattered, networks in parts, weights
# that are copied for one product.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{
        f"{name}, {where}": (name, PLACEMENTS[where], {})
        for name, where in (
            ("qwen3moe", "experts on the CPU"),
            ("qwen3moe", "up and gate apart"),
            ("qwen3moe", "some experts per device"),
            ("deepseek2-lite", "experts on the CPU"),
            ("deepseek2-lite", "attention on the CPU"),
            ("llama-moe", "cache in host memory"),
            ("qwen3", "all"),
        )
    },
    "qwen3, networks in parts": ("qwen3", {"split_mode": "graph"}, {}),
    "qwen3moe, experts in parts": ("qwen3moe", {"split_mode": "graph", "n_cpu_moe": 1}, {}),
    "deepseek2-v3-mla, latent attention in parts": ("deepseek2-v3-mla", {"split_mode": "graph"}, {}),
    "qwen3moe, experts copied": ("qwen3moe", PLACEMENTS["experts on the CPU"], {"offload_batch": 1}),
    "llama-ropefreqs, weights copied": ("llama-ropefreqs", {"rules": (("ffn", "CPU"),)}, {"offload_batch": 1}),
}


def logits(case: str, order: int) -> np.ndarray:
    name, where, devices = CASES[case]
    with emulated(2, order=order):
        return logits_of(
            zoo(name),
            tokens_for(3, N_TOKENS),
            N_PROMPT,
            placement=PlacementParams(**where),
            devices=DeviceParams(**devices),
        )


@pytest.mark.parametrize("case", CASES)
def test_logits_are_the_same_in_every_order(case: str) -> None:
    expected = logits(case, LATE)
    assert np.isfinite(expected).all()
    for order in ORDERS:
        assert logits(case, order).tobytes() == expected.tobytes(), f"order {order}"


def shows(case: str) -> bool:
    """Whether some order gives something else, or nothing at all."""
    try:
        return len({logits(case, order).tobytes() for order in (LATE, *ORDERS)}) > 1
    except DeviceError:
        return True


def test_a_slot_that_is_filled_before_its_product_is_done_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(self: DeviceState, slot: Any, parts: Any) -> None:
        assert self._ring is not None
        self._ring.copy(self.copy_stream, parts)
        self.copy_stream.record(slot.ready)
        self.stream.wait(slot.ready)

    monkeypatch.setattr(DeviceState, "fill_slot", fill)
    assert shows("llama-ropefreqs, weights copied")


def test_a_copy_between_devices_that_waits_for_nothing_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def add_sends(self: HybridPlan, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            source, target = self.states[transfer.source], self.states[transfer.target]
            start = source.base(transfer.buffer, self.graph.arenas[transfer.source])
            end = target.base(transfer.buffer, self.graph.arenas[transfer.target])
            size = transfer.buffer.nbytes
            send = partial(source.stream.send, target.device, end, start, size)
            self._operations.append(lambda run, send=send: send())  # type: ignore[misc]

    monkeypatch.setattr(HybridPlan, "_add_sends", add_sends)
    assert shows("qwen3, networks in parts")


def test_a_pinned_array_that_goes_too_early_is_an_error() -> None:
    device = EmulatedDevice(0, MIB)
    address, stream = device.alloc(64), device.new_stream()
    pinned, pageable = device.pinned(64), np.full(64, 7, np.uint8)
    pinned[:] = 5
    stream.upload(address, pinned[:32])
    stream.upload(address + 32, pageable[:32])
    del pinned, pageable
    with pytest.raises(DeviceError, match="CUDA0: pinned memory was given back before a copy of it was done"):
        stream.synchronize()


def copied(stream: Stream, device: Device) -> np.ndarray:
    """What a copy finds that is issued before its source is changed."""
    address, source, found = device.alloc(16), np.zeros(4, np.float32), np.zeros(4, np.float32)
    stream.upload(address, source)
    source[:] = 1
    stream.download(found, address)
    stream.synchronize()
    return found


def test_orders() -> None:
    for order, expected in ((LATE, 1), (EARLY, 0)):
        device = EmulatedDevice(0, MIB, turns=Turns(order))
        assert (copied(device.new_stream(), device) == expected).all()
    found = set()
    for order in range(2, 40):
        device = EmulatedDevice(0, MIB, turns=Turns(order))
        found.add(float(copied(device.new_stream(), device)[0]))
    assert found == {0.0, 1.0}
