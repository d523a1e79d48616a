"""Large batches of products with weights in host memory: from how many tokens on, what is copied, and the two slots."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ikpy.backends.cuda.emulated import EmulatedStream
from ikpy.backends.cuda.plan import HybridPlan
from ikpy.backends.cuda.state import DeviceState, WeightSlot
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.memory import memory_report
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.graph.placement import CPU, DeviceParams, PlacementParams
from ikpy.models.latent_tensors import LatentSizes
from scripts.make_deepseek_header import write_header
from tests.cpu.engine.test_expert_reads import bytes_asked, wait_for
from tests.cuda.models import emulated, zoo
from tests.cuda.test_placement_matrix import tokens_for

EXPERTS = PlacementParams(rules=(("exps", CPU),))
SETTINGS = ContextParams(n_ctx=256, n_ubatch=64, n_threads=1)


def context_of(name: str, placement: PlacementParams, **devices: object) -> Context:
    params = ModelParams(placement=placement, devices=DeviceParams(**devices))  # type: ignore[arg-type]
    return Context(Model.load(zoo(name), params), SETTINGS)


@pytest.mark.parametrize(
    ("name", "placement", "first"),
    [("qwen3moe", EXPERTS, 3 * 10 // 3), ("llama-ropefreqs", PlacementParams(rules=(("ffn", CPU),)), 3)],
)
def test_products_go_to_the_device_from_some_number_of_tokens_on(
    name: str, placement: PlacementParams, first: int
) -> None:
    """Three, times experts over used experts (10 and 3 in this model) for routed ones."""
    with emulated(1) as kernels:
        context = context_of(name, placement, offload_batch=3)
        for n_tokens in (first - 1, first):
            kernels.launched.clear()
            context.decode(Batch.single(tokens_for(1, n_tokens), 0))
            weights = [node.src[0].buffer.name for node in kernels.launched if node.src and node.src[0] is not None]
            assert any("ffn_down" in weight for weight in weights) == (n_tokens == first), n_tokens


def test_experts_of_deepseek_v3_go_to_the_device_from_1024_tokens_on(tmp_path: Path) -> None:
    """32 tokens, unless somebody says otherwise, times 256 experts over 8 used ones; attention needs no copies."""
    path = tmp_path / "deepseek-v3.gguf"
    write_header(path, "q8_0")
    found = {}
    with emulated(1, mib=1 << 16):
        context = Context(
            Model.load(path, ModelParams(header_only=True, placement=EXPERTS)), ContextParams(n_ctx=2048, n_ubatch=1024)
        )
        for n_tokens in (1023, 1024):
            graph = context._plans.build(n_tokens, 1).graph
            assert graph is not None
            copied = [step.uploads[0].buffer.name for split in graph.splits for step in split.steps if step.uploads]
            found[n_tokens] = {name.split(".")[2] for name in copied}
    experts = {f"ffn_{part}_exps" for part in ("up", "gate", "down")}
    assert found == {1023: set(), 1024: experts}


def test_only_experts_with_tokens_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four equal tokens choose few of the ten experts."""
    plain, copied = EmulatedStream.upload, [0]

    def upload(self: EmulatedStream, target: int, source: np.ndarray) -> None:
        copied[0] += source.nbytes
        plain(self, target, source)

    found, tokens = {}, np.full(4, 17, np.int32)
    with emulated(1):
        for active in (True, False):
            context = context_of("qwen3moe", EXPERTS, offload_batch=1, only_active_experts=active)
            context.decode(Batch.single(tokens, 0, logits="all"))  # plans are made, weights of the device copied
            with monkeypatch.context() as patch:
                patch.setattr(EmulatedStream, "upload", upload)
                copied[0] = 0
                context.decode(Batch.single(tokens, 4, logits="all"))
            found[active] = copied[0]
    experts = [tensor for tensor in context.model.gguf.tensors.values() if "_exps" in tensor.name]
    left_out, rest = divmod(found[False] - found[True], experts[0].nbytes // 10)
    assert rest == 0 and found[False] >= sum(tensor.nbytes for tensor in experts)
    # Three parts of every layer; four tokens choose at least three experts.
    assert len(experts) <= left_out <= 7 * len(experts)


@pytest.mark.parametrize("heads", [0, 1])
def test_keys_and_values_of_latents_are_made_where_the_cache_is(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where attn_kv_b is: they are larger than it by cells over columns. Some heads at a time copy their rows."""
    if heads:
        monkeypatch.setattr(LatentSizes, "heads_per_expansion", lambda *_: heads)
    name, settings = "deepseek2-v3-mla", ContextParams(n_ctx=256, n_ubatch=256, n_threads=1, mla=3)
    tokens, found = tokens_for(1, 140), {}
    copied: list[tuple[str, int]] = []
    plain = DeviceState.fill_slot

    def fill(self: DeviceState, slot: WeightSlot, parts: Iterable[tuple[int, np.ndarray]]) -> None:
        listed = list(parts)
        copied.append((self.device.name, sum(source.nbytes for _, source in listed)))
        plain(self, slot, listed)

    monkeypatch.setattr(DeviceState, "fill_slot", fill)
    for where, rules in {"device": (), "host": (("attn_kv_b", CPU),), "cache too": (("attn", CPU),)}.items():
        with emulated(1) as kernels:
            placement = PlacementParams(rules=rules, kv_offload=where != "cache too")
            model = Model.load(zoo(name), ModelParams(placement=placement, devices=DeviceParams(offload_batch=200)))
            context = Context(model, settings)
            copied.clear()
            kernels.launched.clear()
            found[where] = context.decode(Batch.single(tokens, 0, logits="all")).copy()
            weights = {node.src[0].buffer.name for node in kernels.launched if node.src and node.src[0] is not None}
            assert any("attn_kv_b" in weight for weight in weights) == (where != "cache too")
        sizes = [t.nbytes for t in model.gguf.tensors.values() if t.name.split(".")[-2] in ("attn_k_b", "attn_v_b")]
        assert sum(nbytes for _, nbytes in copied) == (sum(sizes) if where == "host" else 0), (where, copied)
    assert np.abs(found["host"] - found["device"]).max() <= 1e-5 * np.abs(found["device"]).max()


def test_a_weight_is_copied_while_the_last_one_is_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slots take turns, and a copy waits for nothing but the product that used its slot before."""
    slots: list[WeightSlot] = []
    waits: list[tuple[int, bool]] = []
    plain_fill, plain_wait = DeviceState.fill_slot, EmulatedStream.wait

    def fill(self: DeviceState, slot: WeightSlot, parts: object) -> None:
        slots.append(slot)

        def wait(stream: EmulatedStream, event: object) -> None:
            if stream is self.copy_stream:
                waits.append((len(slots), event is slot.free))
            plain_wait(stream, event)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(EmulatedStream, "wait", wait)
            plain_fill(self, slot, parts)  # type: ignore[arg-type]

    monkeypatch.setattr(DeviceState, "fill_slot", fill)
    with emulated(1):
        context_of("qwen3moe", EXPERTS, offload_batch=1).decode(Batch.single(tokens_for(1, 20), 0))
    assert len(slots) >= 4 and len({id(slot) for slot in slots}) == 2
    assert all(one is not other for one, other in pairwise(slots))
    assert waits == [(i + 1, True) for i in range(len(slots))]


def test_a_plan_knows_what_is_free(tmp_path: Path) -> None:
    path = tmp_path / "deepseek-v3.gguf"
    write_header(str(path), "q8_0")
    with emulated(2, mib=14000):
        model = Model.load(path, ModelParams(header_only=True, placement=EXPERTS))
        report = memory_report(Context(model, ContextParams(n_ctx=512)))
        assert not [line for line in report.shortages() if "CUDA" in line]
        report = memory_report(Context(model, ContextParams(n_ctx=163840)))
    found = [line.split(":")[1] for line in report.shortages() if "CUDA" in line]
    assert found == [" CUDA0", " CUDA1"] and set(report.free) == {"CUDA0", "CUDA1"}


@pytest.mark.parametrize("rule", ["exps", r"blk\.[01]\..*exps", "up_exps", "down_exps", "ffn_gate_inp"])
@pytest.mark.parametrize("mode", ["layer", "graph"])
def test_experts_on_the_cpu_are_read_ahead(mode: str, rule: str) -> None:
    """Whichever of them stay there; the numbers do too."""
    found = []
    placement = PlacementParams(n_gpu_layers=99, split_mode=mode, rules=((rule, "CPU"),))
    for wanted in (False, True):
        with emulated(2):
            model = Model.load(zoo("qwen3moe"), ModelParams(placement=placement, prefetch_experts=wanted))
            context = Context(model, SETTINGS)
            found.append(context.decode(Batch.single(np.arange(8))))
    np.testing.assert_array_equal(*found)
    if "exps" in rule:
        wait_for(lambda: bytes_asked(context) > 0, lambda: "nothing is read ahead")
    assert "exps" in rule or bytes_asked(context) == 0


@pytest.mark.parametrize("mode", ["layer", "graph"])
def test_experts_that_a_device_takes_are_read_ahead(mode: str) -> None:
    """Those with tokens, once per layer, before the first of its matrices is copied; the numbers stay."""
    found = []
    placement = PlacementParams(n_gpu_layers=99, split_mode=mode, rules=(("exps", CPU),))
    for wanted in (False, True):
        with emulated(2):
            params = ModelParams(
                placement=placement, devices=DeviceParams(offload_batch=1), prefetch_experts=wanted, prefetch_threads=2
            )
            context = Context(Model.load(zoo("qwen3moe"), params), SETTINGS)
            batch = Batch.single(np.full(4, 17, np.int32), 0, logits="all")
            found.append(context.decode(batch).copy())
    np.testing.assert_array_equal(*found)
    hp = context.model.hparams
    plan = context._plans.get(4, 4).plan
    assert isinstance(plan, HybridPlan) and len(plan._told) == hp.n_layer
    told = dict(plan._told)
    seen: list[np.ndarray] = []
    for groups, ask in told.items():
        plan._told[groups] = lambda offsets, ask=ask: (seen.append(np.diff(offsets)), ask(offsets))  # type: ignore[misc]
    before = bytes_asked(context)
    with emulated(2):
        context.decode(Batch.single(np.full(4, 17, np.int32), 4, logits="all"))
    assert len(seen) == hp.n_layer
    assert all(counts.sum() == 4 * hp.n_expert_used and counts.max() <= 4 for counts in seen)
    of_last = (
        np.count_nonzero(seen[-1])
        * sum(
            tensor.nbytes
            for tensor in context.model.gguf.tensors.values()
            if f"blk.{hp.n_layer - 1}.ffn" in tensor.name and "exps" in tensor.name
        )
        // hp.n_expert
    )
    wait_for(lambda: bytes_asked(context) >= before + of_last, lambda: (bytes_asked(context) - before, of_last))
