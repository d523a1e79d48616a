"""Experts that are read ahead of their products, for models that are larger than memory."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ikpy
from ikpy._native import core
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.expert_reads import ExpertReads
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.graph.builder import Graph
from ikpy.graph.ir import I32, external
from ikpy.graph.plan import CompiledPlan
from ikpy.graph.planner import plan_arena
from tests.cpu.engine.cold_files import cold_bytes, resident
from tests.cpu.engine.test_loading import quantized

ZOO = Path(__file__).parents[2] / "data" / "zoo"
TINY = ikpy.default_model_path()
N_EXPERTS = 8
PAGES = 16  # of an expert's matrix
NBYTES = PAGES * mmap.PAGESIZE
MATRICES = 3
DEADLINE = 20.0  # seconds
Log = Callable[[str], None]


def wait_for(condition: Callable[[], bool], what: Callable[[], object]) -> None:
    """Until other threads have done their work."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.002)


@pytest.fixture
def cold(tmp_path: Path) -> np.ndarray:
    """Mapped bytes of [matrices, experts, NBYTES] of which no page is in memory."""
    return cold_bytes(tmp_path / "experts", MATRICES * N_EXPERTS * NBYTES)


def group(ids: list[list[int]], reader: object, layer: int) -> np.ndarray:
    """Runs moe_group on expert ids of some tokens; the offsets [E + 1] that it leaves."""
    g = Graph(core)
    chosen = np.array(ids, np.int32)
    values = external(chosen.ctypes.data, chosen, I32, chosen.shape[::-1], "ids", "input")
    groups = g.moe_group(values, N_EXPERTS)
    g.nodes[0].ip = [N_EXPERTS, layer + 1]
    arena = plan_arena(g.nodes, {groups.buffer})
    memory = np.zeros(arena.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    CompiledPlan(core, g.nodes, arena, memory.ctypes.data + start, reader).run(0, 2)
    first = start + arena.offsets[groups.buffer]
    return memory[first : first + 4 * (N_EXPERTS + 1)].view(np.int32).copy()


def layer_at(data: np.ndarray) -> np.ndarray:
    """Records of a layer of which two matrices are multiplied together, and the third afterwards."""
    starts = data.ctypes.data + np.arange(MATRICES) * N_EXPERTS * NBYTES
    return np.array([[start, NBYTES, NBYTES, stage] for start, stage in zip(starts, (0, 0, 1), strict=True)], np.int64)


@pytest.mark.parametrize("n_threads", [1, 4])
def test_chosen_experts_come_into_memory(cold: np.ndarray, n_threads: int) -> None:
    """Their pages and no others, with nobody touching them."""
    reader = core.ExpertReader(n_threads)
    assert reader.add_layer(layer_at(cold), N_EXPERTS) == 0
    offsets = group([[1, 6], [6, 3]], reader, 0)
    assert offsets.tolist() == [0, 0, 1, 1, 2, 2, 2, 4, 4]
    wanted = np.zeros((MATRICES, N_EXPERTS, PAGES), bool)
    wanted[:, [1, 3, 6]] = True

    def counts() -> np.ndarray:
        return resident(cold).reshape(wanted.shape).sum(2)

    wait_for(lambda: bool((resident(cold) >= wanted.ravel()).all()), counts)
    assert reader.bytes_asked == 3 * MATRICES * NBYTES
    assert not resident(cold)[~wanted.ravel()].any(), counts()


def test_what_is_read_after_a_layer() -> None:
    """The next layer follows where three quarters of the experts are wanted, and only that one."""
    weights = np.zeros((MATRICES, N_EXPERTS, NBYTES), np.uint8)
    one = np.array([[weights.ctypes.data, NBYTES, NBYTES, 0]], np.int64)
    reader = core.ExpertReader(2)
    for layer in range(3):
        shift = np.array([[layer * N_EXPERTS * NBYTES, 0, 0, 0]])
        assert reader.add_layer(one + shift, N_EXPERTS) == layer
    assert reader.add_layer(one, N_EXPERTS) == 0
    asked = 0
    for layer, n_used, n_read in [(0, 5, 5), (0, 6, 6 + N_EXPERTS), (1, 8, 2 * N_EXPERTS), (2, 8, 8), (2, 1, 1)]:
        group([list(range(n_used))], reader, layer)
        asked += n_read * NBYTES
        wait_for(lambda: reader.bytes_asked == asked, lambda: (layer, n_used, reader.bytes_asked / NBYTES))  # noqa: B023
    group([[0]], reader, 3)  # a layer that does not exist
    group([[-1, -1]], reader, 0)  # no expert: all were dropped
    time.sleep(0.05)
    assert reader.bytes_asked == asked


def load(path: str | Path, log: Log = print, **params: Any) -> Context:
    """A context on two threads."""
    model = Model.load(path, ModelParams(prefetch_threads=2, **params))
    return Context(model, ContextParams(n_ctx=256, n_threads=2), log=log)


def logits(context: Context) -> list[np.ndarray]:
    """Of a prompt and two tokens."""
    batches = [Batch.single(np.arange(40)), Batch.single([7], 40), Batch.single([9], 41)]
    return [context.decode(batch).copy() for batch in batches]


def bytes_asked(context: Context) -> int:
    """By the plans of a context."""
    reads = context._plans._reads
    assert reads is not None
    return reads.reader.bytes_asked


def test_a_model_that_is_read_ahead() -> None:
    """Same numbers; a token asks for the experts that it uses, of a layer as long as the next one does not ask."""
    context = load(TINY, prefetch_experts=True)
    for expected, got in zip(logits(load(TINY)), logits(context), strict=True):
        np.testing.assert_array_equal(got, expected)
    hp = context.model.hparams
    experts = [w for name, w in context.model.weights.items() if "_exps." in name]
    assert len(experts) == 3 * (hp.n_layer - hp.n_dense_layers)
    per_token = sum(w.strides[2] for w in experts) * hp.n_expert_used
    before = bytes_asked(context)
    context.decode(Batch.single([11], 42))
    of_last = sum(w.strides[2] for w in experts[-3:]) * hp.n_expert_used
    wait_for(lambda: bytes_asked(context) >= before + of_last, lambda: bytes_asked(context) - before)
    assert bytes_asked(context) <= before + 2 * per_token  # what the token before asked for may have been under way


@pytest.mark.parametrize("path", [TINY, ZOO / "qwen3moe.gguf"], ids=lambda path: path.stem)
def test_layers_have_one_number_in_all_plans(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are picked in front of the last layer's network in some plans: behind itself it would be read once more."""
    numbers: list[int] = []
    add = ExpertReads._add_layer
    monkeypatch.setattr(ExpertReads, "_add_layer", lambda *a: numbers.append(add(*a)) or numbers[-1])
    context = load(path, prefetch_experts=True)
    logits(context)
    context.decode(Batch.single([3, 4, 5], 42, logits="all"))
    hp = context.model.hparams
    n_layers = hp.n_layer - hp.n_dense_layers
    assert numbers == [*range(n_layers)] * (len(numbers) // n_layers) and len(numbers) >= 3 * n_layers


def test_contexts_of_a_model_read_by_themselves() -> None:
    """What one asks for ends what it asked for before, not what another one is about to need."""
    first = load(TINY, prefetch_experts=True)
    second = Context(first.model, ContextParams(n_ctx=256, n_threads=2))
    for context in (first, second):
        logits(context)
    one, other = (context._plans._reads for context in (first, second))
    assert one is not None and other is not None and one.reader is not other.reader


def test_what_is_in_memory_is_not_read_ahead(tmp_path: Path) -> None:
    lines: list[str] = []
    assert load(TINY, lines.append, prefetch_experts=True, use_mmap=False)._plans._reads is None
    assert "warning: experts are not read ahead: the weights are not mapped" in lines
    path = quantized(tmp_path, "Q4_0")
    rearranged, mapped = (load(path, prefetch_experts=True, repack=repack) for repack in (True, False))
    for context in (rearranged, mapped):
        logits(context)
    wait_for(lambda: bytes_asked(mapped) > 0, lambda: "the same file is read ahead as it is")
    assert bytes_asked(rearranged) == 0


def test_models_without_experts() -> None:
    lines: list[str] = []
    assert load(ZOO / "qwen3.gguf", lines.append, prefetch_experts=True)._plans._reads is None
    assert "warning: experts are not read ahead: the model has no experts" in lines


def test_models_larger_than_memory_are_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless that is turned off."""
    size = sum(info.nbytes for info in Model.load(TINY).gguf.tensors.values())

    def reads(memory: int, wanted: bool | None = None, path: Path = TINY) -> bool:
        monkeypatch.setattr("ikpy.engine.expert_reads.machine_memory", lambda swap: memory)
        lines: list[str] = []
        has_reads = load(path, lines.append, prefetch_experts=wanted)._plans._reads is not None
        assert any(line.startswith("experts are read ahead by 2 threads: ") for line in lines) == has_reads
        assert not any("not read ahead" in line for line in lines)
        return has_reads

    assert not reads(size) and reads(size, True)
    assert reads(size - 1) and not reads(size - 1, False)
    assert not reads(1, path=ZOO / "qwen3.gguf")


def test_records_are_checked() -> None:
    with pytest.raises(ValueError, match="four numbers"):
        core.ExpertReader(1).add_layer(np.zeros((1, 3), np.int64), N_EXPERTS)


def test_groups_without_a_reader() -> None:
    assert group([[0, 1]], None, 0).tolist() == [0, 1, 2] + [2] * 6
