"""The package driver over a stand-in for PyCUDA: contexts, copies, launches, graphs; and launches' parameter buffer."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Collection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ikpy.backends.cuda import devices as cuda_devices
from ikpy.backends.cuda.api import DeviceError, DeviceMemoryError
from ikpy.backends.cuda.arguments import pack
from ikpy.backends.cuda.launch import Launch
from ikpy.cli import main
from ikpy.graph.placement import PlacementParams
from tests.cuda import fake_pycuda
from tests.cuda.models import logits_of, zoo


def test_arguments_lie_at_multiples_of_their_size() -> None:
    assert pack([b"\1" * 4, b"\2" * 8, b"\3" * 4, b"\4" * 64]) == (
        b"\1" * 4 + bytes(4) + b"\2" * 8 + b"\3" * 4 + bytes(4) + b"\4" * 64
    )
    assert pack([b"\1", b"\2" * 2, b"\3" * 4]) == b"\1\0" + b"\2" * 2 + b"\3" * 4


def test_only_the_driver_imports_pycuda() -> None:
    package = Path(cuda_devices.__file__).parents[2]
    text = {path: path.read_text(encoding="utf-8") for path in package.rglob("*.py*") if path.suffix != ".pyc"}
    pattern = re.compile(r"^\s*(import|from) pycuda\b", re.MULTILINE)
    assert {path.parent for path, lines in text.items() if pattern.search(lines)} == {package / "backends/cuda/driver"}


def test_devices_copy_and_launch(driver: Any) -> None:
    one, two = driver.devices
    assert (one.name, two.name, one.description) == ("CUDA0", "CUDA1", "Fake GPU 0")
    values = np.arange(100, dtype=np.float32)
    a, b = one.alloc(values.nbytes), two.alloc(values.nbytes)
    assert a % 256 == 0
    first, second, event = one.new_stream(), two.new_stream(), one.new_event()
    first.upload(a, values)
    first.send(two, b, a, values.nbytes)
    first.record(event)
    second.wait(event)
    back = np.zeros_like(values)
    second.download(back, b)
    second.synchronize()
    assert (back == values).all()
    second.copy(b, b + 200, 200)
    second.fill(b + 200, 0, 200)
    second.download(back, b)
    assert (back == [*values[50:], *[0] * 50]).all()


def test_memory(driver: Any) -> None:
    device = driver.devices[0]
    before = device.memory().free
    address = device.alloc(1 << 20)
    assert device.memory().free <= before - (1 << 20)
    with pytest.raises(
        DeviceMemoryError, match=r"^CUDA0: failed to allocate buffer of 1048576.00 MiB for cache_k_l3: "
    ):
        device.alloc(1 << 40, "cache_k_l3")
    device.release(address)
    assert device.memory().free == before


def test_the_words_at_the_end_of_memory_are_whole(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels cut data of any alignment out of words; a checker of memory accesses knows what was asked for only."""
    asked: list[int] = []
    plain = fake_pycuda.mem_alloc
    monkeypatch.setattr(driver.cuda, "mem_alloc", lambda nbytes: (asked.append(nbytes), plain(nbytes))[1])
    for nbytes in (0, 18, 256, 257):
        driver.devices[0].alloc(nbytes)
    assert asked == [256, 256, 256, 512]


def test_unknown_kernels_are_named(driver: Any) -> None:
    with pytest.raises(DeviceError, match="there is no kernel nonsense"):
        driver.devices[0].new_stream().launch(Launch("nonsense", (1, 1, 1), (32, 1, 1), 0, []))


def test_errors_of_the_driver_name_the_device(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    event = driver.devices[1].new_event()
    event.synchronize()
    monkeypatch.setattr(fake_pycuda, "broken", [True])
    assert not driver.devices[1].lost
    with pytest.raises(DeviceError, match=r"^CUDA1: cuEventSynchronize failed: an illegal memory access[^;]*$"):
        event.synchronize()
    assert driver.devices[1].lost and not driver.devices[0].lost
    with pytest.raises(DeviceError, match=r"illegal memory access.*; a kernel failed before: the process must be"):
        event.synchronize()


def test_time_of_launches(driver: Any) -> None:
    device = driver.devices[0]
    stream, launch = device.new_stream(), Launch("attention_temperature", (1, 1, 1), (32, 1, 1), 0, [])
    fake_pycuda.Function.launcher = staticmethod(lambda *_: None)  # type: ignore[assignment]
    assert stream.milliseconds(lambda: [stream.launch(launch) for _ in range(3)]) == 1.5
    assert device.software() == "12040"


def test_a_graph_that_cannot_be_captured(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver.library, "cuGraphInstantiateWithFlags", lambda *_: 900, raising=False)
    monkeypatch.setattr(driver.library, "cuGetErrorString", lambda *_: 0, raising=False)
    with pytest.raises(DeviceError, match=r"CUDA0: cuGraphInstantiateWithFlags failed: .* -cuda graphs=0"):
        driver.devices[0].new_stream().capture(lambda: None)


def test_a_driver_that_is_too_old_for_graphs(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(fake_pycuda.Library, "cuGraphInstantiateWithFlags")
    with pytest.raises(DeviceError, match=r"for CUDA 12.4, has no cuGraphInst.*: 11.4 or later .*; -cuda graphs=0"):
        driver.devices[0].new_stream().capture(lambda: None)


def test_a_model_runs_where_graphs_cannot_be_captured(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning per device, and the same logits."""
    monkeypatch.setattr(driver.library, "cuGraphInstantiateWithFlags", lambda *_: 801, raising=False)
    monkeypatch.setattr(driver.library, "cuGetErrorString", lambda *_: 0, raising=False)
    monkeypatch.setattr(cuda_devices, "_open", lambda *_: (driver.devices, ""))
    tokens = np.random.default_rng(3).integers(5, 150, 8).astype(np.int32)
    lines: list[str] = []
    truth = logits_of(zoo("qwen3"), tokens, 4)
    ours = logits_of(zoo("qwen3"), tokens, 4, placement=PlacementParams(), log=lines)
    assert np.abs(ours - truth).max() < 2e-3 * np.abs(truth).max()
    told = [line for line in lines if "launched one by one" in line]
    assert [line.split("slower: ")[1][:6] for line in told] == ["CUDA0:", "CUDA1:"]
    assert driver.library.replays == 0


def test_ptx_ends_with_a_zero(driver: Any, tmp_path: Path) -> None:
    path = tmp_path / "rope.ptx"
    path.write_text("rope rope_table")
    device, loaded = driver.devices[0], []
    device._cubins = lambda capability, names: dict.fromkeys(names, path)

    def load(content: bytes) -> fake_pycuda.Module:
        loaded.append(content)
        return fake_pycuda.Module(content.rstrip(b"\0"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver.cuda, "module_from_buffer", load)
        device.prepare(["rope"])
    assert loaded == [b"rope rope_table\0"]


def test_memory_may_be_freed_during_a_capture(driver: Any) -> None:
    """The collector of Python may run at any time and find memory of another context."""
    device = driver.devices[0]
    address = device.alloc(64)
    stream = device.new_stream()
    graph = stream.capture(lambda: device.release(address))
    stream.replay(graph)


def test_devices_of_this_machine(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are found at start: PyCUDA there or not, GPUs that are too old left out."""
    monkeypatch.delenv(cuda_devices.EMULATE, raising=False)
    for capability, names in (((8, 6), ["CUDA0", "CUDA1"]), ((6, 1), [])):
        monkeypatch.setattr(fake_pycuda.Device, "compute_capability", lambda _, c=capability: c)
        monkeypatch.setattr(cuda_devices, "find_spec", lambda _: True)
        cuda_devices._open.cache_clear()
        assert [device.name for device in cuda_devices.available()] == names
    assert cuda_devices.why_none() == (
        "compute capability 7.5 or later is needed: CUDA0 (Fake GPU 0), CUDA1 (Fake GPU 1)"
    )
    monkeypatch.setattr(cuda_devices, "find_spec", lambda _: None)
    cuda_devices._open.cache_clear()
    assert not cuda_devices.available() and cuda_devices.why_none() == cuda_devices.NO_PYCUDA
    cuda_devices._open.cache_clear()


def test_an_older_gpu_beside_others_is_named(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an Ampere and a Pascal, the first one is used."""
    monkeypatch.delenv(cuda_devices.EMULATE, raising=False)
    monkeypatch.setattr(
        fake_pycuda.Device, "compute_capability", lambda device: (8, 6) if device.index == 0 else (6, 1)
    )
    monkeypatch.setattr(cuda_devices, "find_spec", lambda _: True)
    cuda_devices._open.cache_clear()
    assert cuda_devices.device_lines(cuda_devices.available()) == [
        "ggml_cuda_init: found 1 CUDA devices:",
        "  Device 0: Fake GPU 0, compute capability 8.6",
        "ggml_cuda_init: not used: compute capability 7.5 or later is needed: CUDA1 (Fake GPU 1)",
    ]
    cuda_devices._open.cache_clear()


def test_a_model_through_the_driver(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load, prompt and generation with CUDA graphs, on two devices and the CPU."""
    monkeypatch.setattr(cuda_devices, "_open", lambda *_: (driver.devices, ""))
    tokens = np.random.default_rng(3).integers(5, 150, 8).astype(np.int32)
    truth = logits_of(zoo("qwen3moe"), tokens, 4)
    ours = logits_of(zoo("qwen3moe"), tokens, 4, placement=PlacementParams(n_cpu_moe=1))
    assert np.abs(ours - truth).max() < 2e-3 * np.abs(truth).max()
    assert driver.library.replays > 0


def test_static_shared_memory_counts_towards_what_must_be_asked_for(driver: Any) -> None:
    device = driver.devices[0]
    limit = (48 << 10) - fake_pycuda.STATIC_SHARED
    with device.current():
        assert device.function("rms_norm_q8", limit).shared == limit
        assert device.function("rms_norm_q8", limit + 4).shared == limit + 4
        assert device.function("rms_norm_q8", 0).shared == limit + 4


def test_a_cubin_that_the_driver_does_not_load(driver: Any, tmp_path: Path) -> None:
    path = tmp_path / "damaged.cubin"
    path.write_text("damaged")
    device = driver.devices[0]
    device._cubins = lambda capability, names: dict.fromkeys(names, path)
    with pytest.raises(DeviceError, match=r"^CUDA0: the driver does not load .*damaged.cubin: .*CUDA 12.4.*--force"):
        device.prepare(["rope"])


@pytest.mark.parametrize(("code", "lost"), [(226, True), (220, True), (810, True), (0, False), (2, False)])
def test_errors_after_which_the_process_must_end(
    code: int, lost: bool, driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hardware errors that newer GPUs contain among them; a failed allocation takes nothing along."""
    device, other = driver.devices
    stream = device.new_stream()

    def fail(*_: Any) -> None:
        raise fake_pycuda.Error("cuStreamWaitEvent failed")

    monkeypatch.setattr(fake_pycuda.Stream, "wait_for_event", fail)
    monkeypatch.setattr(fake_pycuda.Library, "cuCtxSynchronize", lambda self: code)
    event = device.new_event()
    raised(lambda: stream.wait(event))
    assert device.lost == lost and not other.lost
    assert ("the process must be started again" in str(raised(lambda: stream.wait(event)))) == lost


def raised(action: Any) -> DeviceError:
    with pytest.raises(DeviceError) as found:
        action()
    return found.value


def test_kernels_that_find_no_memory(driver: Any) -> None:
    """A driver that is too old, or a damaged file, is not what is told then."""
    device = driver.devices[0]
    address = device.alloc(device.memory().free - 64)
    with pytest.raises(DeviceMemoryError, match=r"^CUDA0: failed to allocate buffer of .* for the kernels of rope"):
        device.prepare(["rope"])
    device.release(address)
    device.prepare(["rope"])


def test_pycuda_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without a driver, or when it was built for another numpy: the CPU goes on, and says why."""
    monkeypatch.delenv(cuda_devices.EMULATE, raising=False)
    monkeypatch.setattr(cuda_devices, "find_spec", lambda _: True)
    package = ModuleType("pycuda")
    package.__path__ = []  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pycuda", package)
    installed, older = (
        "is the NVIDIA driver installed?",
        "the driver is older than the toolkit that PyCUDA was built with",
    )
    for error, remedy in (
        (ImportError("libcuda.so.1: cannot open shared object file"), installed),
        (ValueError("numpy.dtype size\nchanged"), installed),
        (ImportError("_driver.so: undefined symbol: cuStreamGetDevice"), older),
    ):

        def fail(name: str, *_: object, error: Exception = error) -> None:
            if name == "pycuda.driver":
                raise error

        monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=fail), *sys.meta_path])
        cuda_devices._open.cache_clear()
        assert not cuda_devices.available()
        text = " ".join(str(error).split())
        assert cuda_devices.why_none().startswith(f"PyCUDA does not load: {text}; {remedy}")
        assert main(["info"]) == 0
    cuda_devices._open.cache_clear()


def test_missing_kernels_are_found_before_weights_are_uploaded(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(capability: tuple[int, int], kernels: Collection[str]) -> dict[str, Path]:
        raise DeviceError("the CUDA compiler nvcc is not found")

    monkeypatch.setattr(cuda_devices, "_open", lambda *_: (driver.devices, ""))
    for device in driver.devices:
        device._cubins = no_compiler
    lines: list[str] = []
    with pytest.raises(DeviceError, match="nvcc is not found"):
        logits_of(zoo("qwen3"), np.arange(5, 9, dtype=np.int32), 4, placement=PlacementParams(), log=lines)
    assert not any("uploaded" in line for line in lines)
    gc.collect()
    assert not any(device.handle.context.memory for device in driver.devices if device.handle.context)
