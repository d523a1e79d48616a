"""Contexts, streams, events, graphs and pinned memory of the package driver: made late, destroyed in any thread."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ikpy.backends.cuda import devices as cuda_devices
from ikpy.backends.cuda import nvml
from ikpy.backends.cuda.api import DeviceError, MemoryInfo
from ikpy.cli import main
from ikpy.graph.placement import PlacementParams
from tests.cuda import fake_pycuda
from tests.cuda.models import logits_of, zoo

TOKENS = np.array([7, 11, 13, 17, 19, 23], np.int32)


def in_thread(work: Callable[[], None]) -> None:
    """Runs something in another thread, whose failure is the test's."""
    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
            gc.collect()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def alive() -> int:
    """Objects of the stand-in that were not destroyed."""
    gc.collect()
    return fake_pycuda.live.total()


def contexts(driver: Any) -> list[bool]:
    """Which devices have a context."""
    return [device.handle.context is not None for device in driver.devices]


def make(device: Any) -> list[Any]:
    """One of everything that has a destructor."""
    stream = device.new_stream()
    return [stream, device.new_event(), device.pinned(64)[8:16], stream.capture(lambda: None)]


def test_what_dies_in_another_thread_is_destroyed(driver: Any) -> None:
    kept = [thing for device in driver.devices for thing in make(device)]
    assert fake_pycuda.live == {"Stream": 2, "Event": 2, "PagelockedHostAllocation": 2}
    in_thread(kept.clear)
    assert alive() == 0 and not driver.library.executables


def test_what_was_made_in_other_threads_is_destroyed_here(driver: Any) -> None:
    kept: list[Any] = []
    for device in driver.devices:  # the second one's context is made in a thread that has ended
        in_thread(lambda device=device: kept.extend(make(device)))  # type: ignore[misc]
    with driver.devices[0].session():
        kept.clear()
        assert alive() == 0 and not driver.library.executables
        driver.devices[0].new_event()


def test_many_threads_at_once(driver: Any) -> None:
    def work() -> None:
        for i in range(40):
            things = make(driver.devices[i % 2])
            with driver.devices[(i + 1) % 2].session():
                things.clear()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert alive() == 0 and not driver.library.executables


def test_pinned_memory_lives_as_long_as_a_view(driver: Any) -> None:
    view = driver.devices[0].pinned(1 << 12)[16:32].view(np.int32)
    view[:] = 5
    assert alive() == 1 and (view == 5).all()
    del view
    assert alive() == 0


def test_a_model_in_another_thread_leaves_nothing(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_devices, "_open", lambda *_: (driver.devices, ""))

    def work() -> None:
        logits_of(zoo("qwen3moe"), TOKENS, 3, placement=PlacementParams())

    in_thread(work)
    assert alive() == 0 and not driver.library.executables
    assert all(not device.handle.context.memory for device in driver.devices)


# contexts


@pytest.fixture
def on_driver(driver: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Commands use the devices of the driver, of whose memory the management library knows."""
    monkeypatch.setattr(cuda_devices, "_open", lambda *_: (driver.devices, ""))
    monkeypatch.setattr(nvml, "memory_of", lambda _: MemoryInfo(fake_pycuda.FREE, fake_pycuda.TOTAL))
    return driver


def test_looking_at_devices_makes_no_context(on_driver: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0 and main(["cuda", "info"]) == 0
    assert "CUDA1: Fake GPU 1, compute capability 8.6, 1024 of 2048 MiB free" in capsys.readouterr().out
    assert contexts(on_driver) == [False, False]


@pytest.mark.parametrize(
    ("placement", "used"),
    [
        (PlacementParams(), [True, True]),
        (PlacementParams(split_mode="none", main_gpu=1), [False, True]),
        (PlacementParams(tensor_split=(1.0, 0.0)), [True, False]),
        (PlacementParams(n_gpu_layers=0), [False, False]),
    ],
)
def test_only_devices_that_hold_something_get_a_context(
    on_driver: Any, placement: PlacementParams, used: list[bool]
) -> None:
    logits_of(zoo("qwen3"), TOKENS[:4], 4, placement=placement)
    assert contexts(on_driver) == used


def test_without_the_management_library_memory_is_asked_of_the_device(
    driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = driver.devices
    monkeypatch.setattr(nvml, "_library", lambda: None)
    assert one.memory_estimate() == (fake_pycuda.FREE, fake_pycuda.TOTAL) and contexts(driver) == [True, False]
    # A slice of a GPU: the library tells the whole one's memory.
    monkeypatch.setattr(nvml, "memory_of", lambda _: MemoryInfo(70 << 30, 80 << 30))
    assert two.memory_estimate().total == fake_pycuda.TOTAL


def test_devices_meet_when_the_second_is_opened(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[tuple[int, int]] = []

    def enable(peer: fake_pycuda.FakeContext, flags: int = 0) -> None:
        met.append((fake_pycuda._need_context().device.index, peer.device.index))

    monkeypatch.setattr(fake_pycuda.FakeContext, "enable_peer_access", staticmethod(enable))
    for device in driver.devices:
        device.alloc(64)
    assert sorted(met) == [(0, 1), (1, 0)]


def open_both(driver: Any, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Lines of the log when both devices get a context and are used again."""
    for device in [*driver.devices, *driver.devices]:
        device.alloc(64)
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_devices_without_a_direct_way_are_told_once(
    driver: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fake_pycuda.Device, "can_access_peer", lambda *_: False)
    (line,) = open_both(driver, caplog)
    assert line.startswith("copies between CUDA1 and CUDA0 go through host memory: the hardware")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("cuCtxEnablePeerAccess failed: peer mapping resources exhausted", 1),
        ("cuCtxEnablePeerAccess failed: peer access is already enabled", 0),
    ],
)
def test_direct_copies_that_the_driver_refuses(
    driver: Any, error: str, told: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []

    def enable(peer: fake_pycuda.FakeContext, flags: int = 0) -> None:
        asked.append(peer.device.index)
        raise fake_pycuda.LogicError(error)

    monkeypatch.setattr(fake_pycuda.FakeContext, "enable_peer_access", staticmethod(enable))
    lines = open_both(driver, caplog)
    assert len(lines) == told and all(line.endswith(error) for line in lines)
    assert sorted(asked) == [0, 1]  # each direction, although the first one failed


def test_a_device_that_cannot_be_used(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: fake_pycuda.Device) -> None:
        raise fake_pycuda.Error("CUDA-capable device(s) is/are busy or unavailable")

    monkeypatch.setattr(fake_pycuda.Device, "retain_primary_context", refuse)
    with pytest.raises(DeviceError, match=r"^CUDA1: the device cannot be used: .*busy or unavailable"):
        driver.devices[1].alloc(64)


def test_threads_load_a_kernel_once(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding a kernel's file may take as long as compiling it."""
    device, loaded = driver.devices[0], []
    cubins = device._cubins
    slow = threading.Event()

    def find(*arguments: Any) -> Any:
        slow.wait(0.2)
        return cubins(*arguments)

    module = fake_pycuda.Module
    monkeypatch.setattr(device, "_cubins", find)
    monkeypatch.setattr(driver.cuda, "module_from_buffer", lambda content: (loaded.append(1), module(content))[1])
    threads = [threading.Thread(target=device.prepare, args=(["rope"],)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loaded) == 1
