"""Copies through pinned buffers, uploads of models, and what an interrupt or a failure leaves behind."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ikpy.backends.cuda import devices as cuda_devices
from ikpy.backends.cuda import memory, staging
from ikpy.backends.cuda.api import DeviceError, too_little
from ikpy.backends.cuda.emulated import EmulatedDevice, EmulatedStream
from ikpy.backends.cuda.staging import StagingRing
from ikpy.engine import context as engine_context
from ikpy.engine import plans as engine_plans
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.gguf.reader import GGUFFile
from ikpy.graph.placement import DeviceParams, PlacementParams
from ikpy.signals.held_interrupts import held_back
from tests.cuda import fake_pycuda
from tests.cuda.models import MIB, emulated, logits_of, zoo

SETTINGS = ContextParams(n_ctx=256, n_ubatch=64, n_threads=1)
EXPERTS = PlacementParams(rules=(("exps", "CPU"),))
TOKENS = np.random.default_rng(5).integers(5, 150, 40).astype(np.int32)


def no_pinning(_: EmulatedDevice, nbytes: int) -> np.ndarray:
    raise DeviceError(f"CUDA0: {nbytes} bytes of host memory cannot be pinned: out of memory")


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "CHUNK", 1 << 10)


# the ring


@pytest.mark.parametrize("n_buffers", [2, 3, 8])
@pytest.mark.parametrize("sizes", [(5000,), (1, 999, 1000, 1001, 64, 7000), (0, 10)])
def test_what_is_copied_arrives(n_buffers: int, sizes: tuple[int, ...]) -> None:
    """Streams run as late as they may: a buffer that is filled again too early spoils a copy."""
    device = EmulatedDevice(0, MIB)
    rng = np.random.default_rng(1)
    sources = [rng.integers(0, 256, n, np.uint8) for n in sizes]
    targets = [device.alloc(n) for n in sizes]
    ring, stream = StagingRing(device, print, 1000, n_buffers), device.new_stream()
    started: list[int] = []
    ring.copy(stream, zip(targets, sources, strict=True), started.append)
    ring.copy(stream, zip(targets, sources, strict=True), started.append)
    assert sum(started) == 2 * sum(sizes)
    for target, source in zip(targets, sources, strict=True):
        found = np.empty_like(source)
        stream.download(found, target)
        stream.synchronize()
        assert (found == source).all()


def test_sources_may_change_after_the_copy() -> None:
    device = EmulatedDevice(0, MIB)
    target, stream = device.alloc(4000), device.new_stream()
    source = np.full(4000, 3, np.uint8)
    ring = StagingRing(device, print, 1000, 8)
    ring.copy(stream, [(target, source)])
    source[:] = 9
    found = np.empty_like(source)
    stream.download(found, target)
    stream.synchronize()
    assert (found == 3).all()


@pytest.mark.parametrize(("limit", "warned"), [(0, True), (1, True), (3, False)])
def test_as_many_buffers_as_can_be_pinned(limit: int, warned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device, lines = EmulatedDevice(0, MIB), list[str]()
    made: list[np.ndarray] = []

    def pinned(nbytes: int) -> np.ndarray:
        if len(made) == limit:
            return no_pinning(device, nbytes)
        made.append(np.empty(nbytes, np.uint8))
        return made[-1]

    monkeypatch.setattr(device, "pinned", pinned)
    target, stream, source = device.alloc(5000), device.new_stream(), np.arange(5000, dtype=np.uint8)
    ring = StagingRing(device, lines.append, 1000, 8)
    ring.copy(stream, [(target, source)])
    found = np.empty_like(source)
    stream.download(found, target)
    stream.synchronize()
    assert (found == source).all()
    expected = "CUDA0: 1000 bytes of host memory cannot be pinned: out of memory; weights are copied from pageable"
    assert len(lines) == warned and all(line.startswith(f"warning: {expected}") for line in lines)


def test_no_thread_writes_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was being filled is finished before the error goes on: the buffers are freed behind it."""
    device = EmulatedDevice(0, MIB)
    stream, ring = device.new_stream(), StagingRing(device, print, 1000, 4)
    target, source = device.alloc(4000), np.full(4000, 3, np.uint8)

    def fail(*_: object) -> None:
        raise DeviceError("CUDA0: the link is down")

    monkeypatch.setattr(stream, "upload", fail)
    with pytest.raises(DeviceError, match="the link is down"):
        ring.copy(stream, [(target, source)])
    assert all(each.empty.synchronize() is None for each in ring._buffers)
    assert all((each.memory[:1000] == 3).all() for each in ring._buffers[:2])


# models


def uploads_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every copy to a device from now on."""
    sizes: list[int] = []
    plain = EmulatedStream.upload

    def upload(self: EmulatedStream, target: int, source: np.ndarray) -> None:
        sizes.append(source.nbytes)
        plain(self, target, source)

    monkeypatch.setattr(EmulatedStream, "upload", upload)
    return sizes


@pytest.mark.parametrize("pinning", [True, False])
@pytest.mark.parametrize("active", [True, False])
def test_experts_of_host_memory_come_through_the_ring(
    pinning: bool, active: bool, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not pinning:
        monkeypatch.setattr(EmulatedDevice, "pinned", no_pinning)
    with emulated(2) as kernels:
        lines: list[str] = []
        devices = DeviceParams(offload_batch=1, only_active_experts=active)
        ours = logits_of(zoo("qwen3moe"), TOKENS, 39, placement=EXPERTS, devices=devices, log=lines)
        assert any("_exps" in v.buffer.name for node in kernels.launched for v in node.src if v is not None)
    truth = logits_of(zoo("qwen3moe"), TOKENS, 39)
    assert np.abs(ours - truth).max() <= 2e-3 * np.abs(truth).max()
    warnings = [line for line in lines if "cannot be pinned" in line]
    assert bool(warnings) == (not pinning)


def test_copies_of_experts_are_small_pieces(small_chunks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated(1):
        model = Model.load(zoo("qwen3moe"), ModelParams(placement=EXPERTS, devices=DeviceParams(offload_batch=1)))
        context = Context(model, SETTINGS)
        sizes = uploads_of(monkeypatch)
        context.decode(Batch.single(TOKENS, 0))
    largest = max(t.nbytes for t in model.gguf.tensors.values() if "_exps" in t.name)
    assert sizes.count(1 << 10) >= largest >> 10 and largest not in sizes


def test_an_upload_tells_how_far_it_is(small_chunks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "REPORT_INTERVAL", 0.0)
    lines: list[str] = []
    with emulated(1):
        Context(Model.load(zoo("qwen3"), ModelParams()), SETTINGS, log=lines.append)
    shares = [int(line.split(":")[-1].split()[0]) for line in lines if "uploading weights" in line]
    assert shares == sorted(shares) and shares[-1] == 100 and len(set(shares)) > 20
    assert any("MiB of weights (" in line and "MiB/s)" in line for line in lines)


def test_pages_of_uploaded_weights_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapped model on devices does not fill host memory as well. Locked pages stay."""
    with emulated(1):
        for mlock in (False, True):
            model = Model.load(zoo("qwen3"), ModelParams(use_mlock=mlock, placement=PlacementParams(n_gpu_layers=1)))
            dropped: list[str] = []
            monkeypatch.setattr(model.gguf, "release", lambda info, names=dropped: names.append(info.name))
            Context(model, SETTINGS)
            assert model.devices is not None
            on_device = {name for name, device in model.placement.tensors.items() if device == "CUDA0"}
            assert set(dropped) == (set() if mlock else on_device) and len(dropped) == len(set(dropped))


def test_weights_of_devices_are_not_brought_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read once, while they are copied."""
    monkeypatch.setattr("ikpy.engine.model.LEAST_FILLED", 0)
    monkeypatch.setattr("ikpy.machine.numa.nodes", lambda: {0: (0,)})
    filled: list[str] = []
    monkeypatch.setattr(GGUFFile, "fill", lambda self, tensors: filled.extend(t.name for t in tensors))
    with emulated(1):
        model = Model.load(zoo("qwen3moe"), ModelParams(placement=EXPERTS))
    assert set(filled) == {name for name, device in model.placement.tensors.items() if device == "CPU"}
    assert any("_exps" in name for name in filled) and len(filled) < len(model.gguf.tensors)


def test_of_a_file_that_is_read_devices_take_their_tensors_from_the_disk() -> None:
    """With --no-mmap host memory needs room for what the CPU keeps, not for the whole model."""
    tokens = {}
    for use_mmap in (True, False):
        with emulated(1):
            model = Model.load(zoo("qwen3moe"), ModelParams(use_mmap=use_mmap, placement=EXPERTS))
            tokens[use_mmap] = Context(model, SETTINGS).decode(Batch.single(TOKENS, 0)).copy()
    on_device = [n for n, device in model.placement.tensors.items() if device == "CUDA0"]
    largest = model.gguf.tensors[max(on_device, key=lambda name: model.gguf.tensors[name].nbytes)]
    middle = largest.offset + largest.nbytes // 2
    assert not model.gguf.shards[0].data[middle : middle + 64].any() and model.gguf.data(largest).any()
    experts = model.gguf.tensors["blk.0.ffn_up_exps.weight"]
    assert model.gguf.shards[0].data[experts.offset :][: experts.nbytes].any()
    assert (tokens[True] == tokens[False]).all()


# failures and interrupts


def used(device: Any) -> int:
    """Bytes of a device that are taken."""
    gc.collect()
    return int(device.memory().total - device.memory().free)


@pytest.mark.parametrize("n", range(1, 12))
def test_a_load_that_fails_gives_everything_back(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever allocation it is that fails, as if another program had taken the memory meanwhile."""
    count = iter(range(1, 1000))
    plain = EmulatedDevice.alloc

    def alloc(self: EmulatedDevice, nbytes: int, purpose: str = "") -> int:
        if next(count) == n:
            raise too_little(self, nbytes, purpose, 0)
        return plain(self, nbytes)

    monkeypatch.setattr(EmulatedDevice, "alloc", alloc)
    with emulated(2):
        model = Model.load(zoo("qwen3moe"), ModelParams(placement=EXPERTS))
        with pytest.raises(DeviceError, match=r"^CUDA[01]: failed to allocate buffer"):
            Context(model, SETTINGS)
        assert [used(device) for device in cuda_devices.available()] == [0, 0]
        context = Context(model, SETTINGS)  # and the next try works
        context.decode(Batch.single(TOKENS[:8], 0))


def test_growth_that_fails_leaves_a_context_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated(1):
        context = Context(Model.load(zoo("qwen3"), ModelParams()), SETTINGS)
        truth = context.decode(Batch.single(TOKENS[:8], 0))
        assert context.devices is not None
        state = context.devices.states["CUDA0"]
        plain = type(context.devices).measure

        def measure(self: Any, graph: Any, inputs: int) -> None:
            plain(self, graph, inputs)
            self.needs["CUDA0"].arena = 1 << 40

        monkeypatch.setattr(type(context.devices), "measure", measure)
        context.kv.clear()
        with pytest.raises(DeviceError, match="failed to allocate"):
            context.decode(Batch.single(TOKENS[:9], 0))
        monkeypatch.undo()
        context.kv.clear()
        assert (context.decode(Batch.single(TOKENS[:8], 0)) == truth).all()
        assert 0 < state.arena.nbytes < MIB


@pytest.mark.parametrize("placement", [EXPERTS, PlacementParams(split_mode="layer", tensor_split=(1.0, 1.0))])
def test_growth_waits_for_what_is_under_way(placement: PlacementParams, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch without results is not waited for, and memory of the host and of devices that it uses grows."""

    def later() -> np.ndarray:
        context = Context(Model.load(zoo("qwen3moe"), ModelParams(placement=placement)), SETTINGS)
        context.decode(Batch.single(TOKENS[:1], 0, logits="none"))
        return context.decode(Batch.single(TOKENS[1:12], 1, logits="all"))

    with emulated(2):
        truth = later()
    monkeypatch.setattr(engine_context, "largest_shapes", lambda n_ubatch, media, offloaded: [engine_plans.Shape(1, 1)])
    monkeypatch.setattr(engine_context, "CHECK_TOKENS", 1)
    with emulated(2):
        assert (later() == truth).all()


@pytest.fixture
def ctrl_c(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The usual handler, whatever the test runner's is; launches before SIGINT arrives go into the list."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield [5]
    signal.signal(signal.SIGINT, before)


def pressing(device: Any, countdown: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Presses Ctrl-C when the countdown of launches ends."""
    launch = device.new_stream().__class__.launch

    def launching(self: Any, what: Any) -> None:
        countdown[0] -= 1
        if countdown[0] == 0:
            signal.raise_signal(signal.SIGINT)
        launch(self, what)

    monkeypatch.setattr(device.new_stream().__class__, "launch", launching)


@pytest.mark.parametrize("n_before", [0, 1, 2])
def test_ctrl_c_in_a_run(n_before: int, ctrl_c: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first run, in one that captures a CUDA graph, in one that replays: the next run is right."""
    with emulated(2):
        placement = PlacementParams(n_cpu_moe=1)
        truth = logits_of(zoo("qwen3moe"), TOKENS[:12], 8, placement=placement)[7:]
        context = Context(Model.load(zoo("qwen3moe"), ModelParams(placement=placement)), SETTINGS)
        context.decode(Batch.single(TOKENS[:8], 0))
        for i in range(n_before):
            context.decode(Batch.single(TOKENS[8 + i : 9 + i], 8 + i))
        at = 8 + n_before
        pressing(cuda_devices.available()[0], ctrl_c, monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            context.decode(Batch.single(TOKENS[at : at + 1], at))
        assert ctrl_c[0] <= 0 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ours = context.decode(Batch.single(TOKENS[at : at + 1], at))
    assert np.abs(ours[0] - truth[at - 7]).max() <= 2e-3 * np.abs(truth).max()


@pytest.mark.parametrize("loading", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3, 30])
def test_ctrl_c_leaves_no_context_behind(
    driver: Any, n: int, loading: bool, ctrl_c: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyCUDA ends the process with an abort if a context is still current at exit. Here Ctrl-C arrives just when one
    has become current.
    """
    ctrl_c[0] = n
    plain = fake_pycuda.FakeContext.push

    def push(self: fake_pycuda.FakeContext) -> None:
        plain(self)
        ctrl_c[0] -= 1
        if ctrl_c[0] == 0:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(cuda_devices, "_open", lambda *_: (driver.devices, ""))
    model = Model.load(zoo("qwen3"), ModelParams())
    if loading:
        monkeypatch.setattr(fake_pycuda.FakeContext, "push", push)
        with pytest.raises(KeyboardInterrupt):
            Context(model, SETTINGS)
    else:
        context = Context(model, SETTINGS)
        monkeypatch.setattr(fake_pycuda.FakeContext, "push", push)
        with pytest.raises(KeyboardInterrupt):
            context.decode(Batch.single(TOKENS[:4], 0))
        assert context.decode(Batch.single(TOKENS[:4], 0)).shape[0] == 1
    assert ctrl_c[0] <= 0 and not fake_pycuda.stack.contexts


def test_ctrl_c_while_weights_are_uploaded(
    ctrl_c: list[int], small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with emulated(1):
        model = Model.load(zoo("qwen3"), ModelParams())
        sizes = uploads_of(monkeypatch)
        plain = EmulatedStream.record

        def record(self: EmulatedStream, event: Any) -> None:
            if len(sizes) == 50:
                signal.raise_signal(signal.SIGINT)
            plain(self, event)

        monkeypatch.setattr(EmulatedStream, "record", record)
        with pytest.raises(KeyboardInterrupt):
            Context(model, SETTINGS)
        total = sum(t.nbytes for t in model.gguf.tensors.values())
        assert sum(sizes) < total / 2
        assert used(cuda_devices.available()[0]) == 0


def test_a_second_press_acts_at_once(ctrl_c: list[int]) -> None:
    steps: list[str] = []
    with pytest.raises(KeyboardInterrupt), held_back():
        signal.raise_signal(signal.SIGINT)
        steps.append("held back")
        signal.raise_signal(signal.SIGINT)
        steps.append("not reached")
    assert steps == ["held back"]


def test_other_handlers_get_what_was_held_back(ctrl_c: list[int]) -> None:
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    with held_back():
        signal.raise_signal(signal.SIGINT)
        assert not pressed
    assert pressed == [signal.SIGINT]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with held_back():
        signal.raise_signal(signal.SIGINT)
