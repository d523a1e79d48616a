"""How graphs are divided: what crosses between devices, and what runs while another device works."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from ikpy._native import core
from ikpy.backends.cuda import launch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.graph.assign import DeviceRules, assign, read, written
from ikpy.graph.builder import Graph
from ikpy.graph.ir import F32, I32, PLANNED_ADDRESS, Role, Value, external
from ikpy.graph.placement import CPU, Placement, PlacementParams
from ikpy.graph.split import Split, SplitGraph, split_graph
from scripts.make_deepseek_header import write_header
from tests.cuda.models import emulated, zoo


def split_of(name: str, placement: PlacementParams, n_devices: int = 1, n_tokens: int = 1) -> SplitGraph:
    """The graph of a batch, planned only."""
    with emulated(n_devices):
        model = Model.load(zoo(name), ModelParams(header_only=True, placement=placement))
        graph = (
            Context(model, ContextParams(n_ctx=256, n_ubatch=64, n_threads=1))._plans.build(n_tokens, n_tokens).graph
        )
    assert graph is not None
    return graph


def weights(split: Split) -> set[str]:
    return {v.buffer.name for step in split.steps for v in read(step.node) if v.buffer.role == "weight"}


def test_a_model_wholly_on_a_device_has_two_splits() -> None:
    graph = split_of("qwen3", PlacementParams())
    assert [split.device for split in graph.splits] == [CPU, "CUDA0"]
    assert [step.node.kind for step in graph.splits[0].steps] == ["get_rows"]
    assert len(graph.splits[1].transfers) == 1 and len(graph.results) == 1


def test_layers_on_two_devices_pass_on_the_residual_stream() -> None:
    graph = split_of("qwen3", PlacementParams(tensor_split=(1.0, 1.0)), 2)
    assert [split.device for split in graph.splits] == [CPU, "CUDA0", "CUDA1"]
    n_embd = next(s.node.dst.shape[0] for s in graph.splits[0].steps)
    crossing = graph.splits[2].transfers
    assert {t.source for t in crossing} == {"CUDA0"}
    assert len(crossing) <= 2 and all(t.buffer.nbytes == 4 * n_embd for t in crossing)


def test_every_device_has_the_cache_of_its_layers() -> None:
    placement = PlacementParams(tensor_split=(1.0, 1.0))
    with emulated(2):
        model = Model.load(zoo("qwen3"), ModelParams(header_only=True, placement=placement))
        context = Context(model, ContextParams(n_ctx=256, n_ubatch=64, n_threads=1))
        graph = context._plans.build(1, 1).graph
    assert context.devices is not None and graph is not None
    stores = {
        split.device: [step.node.dst.buffer for step in split.steps if step.node.kind == "kv_store"]
        for split in graph.splits
        if split.device != CPU
    }
    sizes = {device: sum(buffer.nbytes for buffer in buffers) for device, buffers in stores.items()}
    assert set(sizes) == {"CUDA0", "CUDA1"} and sizes == context.devices.cache_bytes()
    layers = [{int(buffer.name.rpartition("l")[2]) for buffer in buffers} for buffers in stores.values()]
    assert not layers[0] & layers[1] and len(layers[0] | layers[1]) == model.hparams.n_layer


@pytest.mark.parametrize("name", ["qwen3moe", "deepseek2-v3-mla"])
def test_activations_cross_once_each_way_for_experts_on_the_cpu(name: str) -> None:
    graph = split_of(name, PlacementParams(rules=(("exps", CPU),)))
    with_experts = [split for split in graph.splits if any("_exps" in weight for weight in weights(split))]
    assert with_experts and all(split.device == CPU for split in with_experts)
    n_embd = next(s.node.dst.shape[0] for s in graph.splits[0].steps)
    for split in with_experts:
        sizes = Counter(t.buffer.nbytes for t in split.transfers)
        assert sizes.pop(4 * n_embd) == 1
        assert sum(sizes.values()) == 2 and max(sizes) <= 64, "expert numbers and weights, nothing else"
        behind = graph.splits[graph.splits.index(split) + 1]
        assert [t.buffer.nbytes for t in behind.transfers if t.source == CPU] == [4 * n_embd]
    assert graph.n_splits == 2 + 2 * len(with_experts)


def test_the_shared_expert_runs_while_the_cpu_works() -> None:
    graph = split_of("deepseek2-v3-mla", PlacementParams(rules=(("exps", CPU),)))
    for i, split in enumerate(graph.splits):
        if any("_exps" in weight for weight in weights(split)):
            shared = {w for w in weights(graph.splits[i - 1]) if "_shexp" in w}
            assert {w.split(".")[2] for w in shared} == {"ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"}


def test_products_of_the_same_activations_follow_each_other() -> None:
    """So that a device launches them at once: latents of keys do not wait for the norm of those of queries."""
    graph = split_of("deepseek2-v3-mla", PlacementParams())
    kinds = [s.node.src[0].buffer.name.split(".", 2)[-1] for s in graph.steps("CUDA0") if s.node.kind == "mul_mat"]
    assert kinds[:4] == ["attn_q_a.weight", "attn_kv_a_mqa.weight", "attn_q_b.weight", "attn_k_b.weight"]


def test_prepared_activations_and_masks_never_cross() -> None:
    graph = split_of("qwen3moe", PlacementParams(rules=(("attn_k", CPU), ("ffn_up", "CUDA1"), ("exps", CPU))), 2, 8)
    private = {
        v.buffer
        for split in graph.splits
        for step in split.steps
        if step.node.kind in ("act_prepare", "kq_mask", "rope_table", "moe_group")
        for v in written(step.node)
    }
    assert private
    assert not [t for split in graph.splits for t in split.transfers if t.buffer in private]


def test_buffers_alive_at_the_same_time_do_not_overlap() -> None:
    graph = split_of("deepseek2-lite", PlacementParams(rules=(("exps", CPU),)), 2, 16)
    steps = [(split.device, step) for split in graph.splits for step in split.steps]
    for device, arena in graph.arenas.items():
        first: dict[object, int] = {}
        last: dict[object, int] = {}
        for i, (where, step) in enumerate(steps):
            if where == device:
                for value in (*read(step.node), *written(step.node)):
                    if value.buffer.role == "value":
                        first.setdefault(value.buffer, i)
                        last[value.buffer] = i
        buffers = list(first)
        for n, a in enumerate(buffers):
            for b in buffers[:n]:
                if first[a] <= last[b] and first[b] <= last[a]:
                    start, other = arena.offsets[a], arena.offsets[b]  # type: ignore[index]
                    assert start + a.nbytes <= other or other + b.nbytes <= start, (a, b)  # type: ignore[attr-defined]


RECURRENT = {"causal_conv", "gated_delta_rule"}


@pytest.mark.parametrize(("role", "where"), [("host", CPU), ("cache", CPU), ("cache", "CUDA0")])
def test_recurrent_layers_run_where_their_states_are(role: Role, where: str) -> None:
    """Products on the device; what has a state where that is, in order, and the state does not cross."""
    n_tokens, heads, size = 3, 2, 64
    channels = 3 * heads * size

    def known(name: str, *shape: int, type_id: int = F32, role: Role = "weight") -> Value:
        return external(PLANNED_ADDRESS, None, type_id, shape, name, role)

    g = Graph(core)
    slots = known("slots", n_tokens, type_id=I32, role="input")
    x = g.mul_mat(known("blk.0.in.weight", size, channels), known("x", size, n_tokens, role="input"))
    past = known("past", 3, channels, 4, role=role)
    x = g.causal_conv(x, known("blk.0.ssm_conv1d.weight", 4, channels), past, slots, silu=True)
    state = known("state", size, size, heads, 4, role=role)
    q, k, v = (x.reshape(size, 3 * heads, n_tokens).slice(1, i * heads, heads) for i in range(3))
    decay, beta = (
        g.mul_mat(known(f"blk.0.{name}.weight", size, heads), g.scale(x.slice0(0, size), 2.0)) for name in "ab"
    )
    decay = g.unary(decay, "softplus")
    options = {"l2_eps": 1e-6, "scale": 1.0, "interleaved": True}
    for _ in range(2):
        out = g.gated_delta_rule(q, k, v, decay, beta, state, slots, **options)
    result = g.mul_mat(known("blk.0.out.weight", heads * size, size), out.reshape(heads * size, n_tokens))
    placement = Placement({}, ("CUDA0",), ("CUDA0",), "CUDA0")
    rules = DeviceRules(
        placement, {"past": where, "state": where}, lambda node, _: launch.supports(node), lambda *_: 0, lambda *_: 0
    )
    assigned = assign(g.nodes, rules)
    graph = split_graph(assigned.steps, {result.buffer})
    devices = {step.node.kind: split.device for split in graph.splits for step in split.steps}
    assert {devices[kind] for kind in RECURRENT} == {where} and devices["mul_mat"] == "CUDA0"
    assert not assigned.fallbacks
    order = [step.node for step in graph.steps(where) if step.node.kind in RECURRENT]
    assert order == [node for node in g.nodes if node.kind in RECURRENT]
    crossing = {transfer.buffer for split in graph.splits for transfer in split.transfers}
    assert not crossing & {past.buffer, state.buffer}
    assert ({decay.buffer, out.buffer} <= crossing) == (where == CPU)


def test_cells_are_expanded_for_some_heads_at_a_time(tmp_path: Path) -> None:
    """Products of the same latents stay apart on devices: -amb bounds the compute memory of long contexts."""
    path = tmp_path / "deepseek.gguf"
    write_header(str(path), "q8_0", layers=4)
    for cache, most in (("f16", 640), ("q8_0", 800)):
        with emulated(1, mib=1 << 16):
            placement = PlacementParams(rules=(("exps", CPU),))
            model = Model.load(path, ModelParams(header_only=True, placement=placement))
            for n_ctx, times in ((32768, 1), (163840, 2)):
                context = Context(model, ContextParams(n_ctx=n_ctx, type_k=cache, attn_max_batch=256))
                assert context.devices is not None
                mib = context.devices.needs["CUDA0"].compute_bytes >> 20
                assert mib < times * most, (cache, n_ctx, mib)
