"""How much work the host has: graphs are built and divided once, copies to one device wait once."""

from __future__ import annotations

import gc
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from ikpy.backends.cuda import runtime
from ikpy.backends.cuda.emulated import EmulatedStream
from ikpy.engine import graphs
from ikpy.engine.batch import Batch
from ikpy.engine.graphs import MicroBatchGraphs
from ikpy.engine.paused_collection import paused_collection
from ikpy.engine.plans import largest_shapes
from ikpy.graph.attention_region import Region
from ikpy.graph.divide_attention import AttentionDivider, Replacements
from ikpy.graph.ir import Node
from ikpy.graph.placement import PlacementParams
from ikpy.signals.held_interrupts import held_back
from tests.cuda.models import emulated, zoo
from tests.cuda.test_divided_attention import graph, new_context
from tests.cuda.test_divided_latent import SIZES, latent


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return latent("all", SIZES).write(tmp_path / "model.gguf")


def test_graphs_are_built_and_divided_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is settled about their attention is not done again when memory is planned."""
    built: list[tuple[int, int]] = []
    divided: list[int] = []
    nodes, parts = MicroBatchGraphs.nodes, AttentionDivider._divided

    def counted_parts(self: AttentionDivider, layer: int, found: Region) -> Replacements:
        divided.append(layer)
        return parts(self, layer, found)

    def counted(self: MicroBatchGraphs, n_tokens: int, n_outputs: int, media: bool) -> graphs.UnplannedGraph:
        built.append((n_tokens, n_outputs))
        return nodes(self, n_tokens, n_outputs, media)

    monkeypatch.setattr(MicroBatchGraphs, "nodes", counted)
    monkeypatch.setattr(AttentionDivider, "_divided", counted_parts)
    with emulated(2):
        context = new_context(path, graph(1.0, 1.0), n_ubatch=64)
        shapes = largest_shapes(64)
        # The check of values runs two plans of its own.
        assert built[: len(shapes)] == [shape[:2] for shape in shapes]
        assert set(built[len(shapes) :]) == {(16, 1), (1, 1)}
        assert len(divided) == len(built) * SIZES.layers
        assert context.devices is not None and not context.devices._divider._attention._settled
        before = context.decode(Batch.single([1, 2, 3], logits="all"))
    assert before.shape[0] == 3


def kernels_of(path: Path, placement: PlacementParams) -> list[dict[str, set[str]]]:
    """Kernels of the devices as measured, and those that lowering every node gives."""
    found: list[dict[str, set[str]]] = [{}, {}]
    measured = runtime.DeviceRuntime._kernel_names

    def both(self: runtime.DeviceRuntime, device: str, steps: list[runtime.Step]) -> set[str]:
        for step in steps:
            launches = self.setup.kernels.lower(step.node, lambda _: 1 << 20, 1 << 20, 1 << 20)
            found[1].setdefault(step.device, set()).update(launch.kernel for launch in launches)
        names = measured(self, device, steps)
        found[0].setdefault(steps[0].device, set()).update(names)
        return names

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime.DeviceRuntime, "_kernel_names", both)
        new_context(path, placement, n_ubatch=64)
    return found


@pytest.mark.parametrize("name", ["deepseek2-v3-mla", "qwen3moe", "llama-moe", "qwen2-yarn"])
def test_alike_layers_have_the_same_kernels(name: str, cuda_devices: int, emulation: None) -> None:
    measured, all_nodes = kernels_of(zoo(name), PlacementParams(split_mode="none"))
    assert measured == all_nodes and measured["CUDA0"]


def test_a_new_shape_is_lowered_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels are those of the launches that the plan makes."""
    with emulated(1) as kernels:
        context = new_context(path, PlacementParams(), n_ubatch=64)
        lowered: list[Node] = []
        lower = kernels.lower

        def counted(node: Node, address: Any, runtime: int, scratch: int) -> list[Any]:
            lowered.append(node)
            return lower(node, address, runtime, scratch)

        monkeypatch.setattr(kernels, "lower", counted)
        context.decode(Batch.single([1, 2, 3, 4, 5]))
    assert lowered and len({id(node) for node in lowered}) == len(lowered)


# single tokens


def test_copies_to_one_device_wait_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries of low rank and the row to be cached cross together: two events, whatever number of values."""
    with emulated(2):
        context = new_context(path, graph(1.0, 1.0))
        context.decode(Batch.single([1]))
        issued: list[str] = []
        send, wait = EmulatedStream.send, EmulatedStream.wait

        def sent(self: EmulatedStream, *rest: Any) -> None:
            issued.append("s")
            send(self, *rest)

        def waited(self: EmulatedStream, event: Any) -> None:
            issued.append("w")
            wait(self, event)

        monkeypatch.setattr(EmulatedStream, "send", sent)
        monkeypatch.setattr(EmulatedStream, "wait", waited)
        context.decode(Batch.single([2], 1))
    assert re.fullmatch("(ws+w)+", "".join(issued)) and "wssw" in "".join(issued)


def test_held_back_within_held_back_asks_for_no_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes as long as the driver's calls; hundreds of operations of a token are such blocks."""
    with held_back() as held:
        monkeypatch.setattr(signal, "getsignal", None)
        monkeypatch.setattr(signal, "signal", None)
        with held_back() as inner:
            assert inner is held
        monkeypatch.undo()
    with held_back() as other:
        assert other is not held


# the collector


def test_the_collector_rests_while_plans_are_made(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    nodes = MicroBatchGraphs.nodes

    def looked(self: MicroBatchGraphs, n_tokens: int, n_outputs: int, media: bool) -> graphs.UnplannedGraph:
        seen.append(gc.isenabled())
        return nodes(self, n_tokens, n_outputs)

    monkeypatch.setattr(MicroBatchGraphs, "nodes", looked)
    with emulated(1):
        context = new_context(path, PlacementParams())
        context.decode(Batch.single([1, 2, 3, 4, 5]))
    assert seen and not any(seen) and gc.isenabled()


def test_pauses_overlap() -> None:
    """The collector goes on behind the last of several threads' blocks, after errors too."""
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with paused_collection():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with pytest.raises(KeyError), paused_collection():
        thread.start()
        assert inside.wait(10)
        raise KeyError
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with paused_collection(), paused_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
