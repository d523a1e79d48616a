"""-sm graph: attention of which every device has some heads, with their part of the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.engine.adapter import LoraAdapter
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.memory import memory_report
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.engine.sequence_state import load_sequence, save_sequence, unshare_sequence
from ikpy.engine.session import put_state, take_state
from ikpy.graph import division
from ikpy.graph.activations import ActivationCollector
from ikpy.graph.placement import PlacementParams
from tests.cpu.models import test_arch_step35
from tests.cpu.models.reference_models import RandomModel
from tests.cpu.models.shaped_models import Dims, gemma3, llama
from tests.cpu.models.test_adapters import make_pairs, write_adapter
from tests.cpu.models.test_arch_afmoe import afmoe
from tests.cpu.models.test_arch_cohere2moe import cohere2moe
from tests.cpu.models.test_arch_dense import apertus
from tests.cpu.models.test_arch_gemma4 import gemma4
from tests.cpu.models.test_arch_granite_hybrid import granite_hybrid_moe
from tests.cpu.models.test_arch_granite_swa import granite_swa
from tests.cpu.models.test_arch_laguna import laguna
from tests.cpu.models.test_arch_lfm2 import lfm2, lfm2moe
from tests.cpu.models.test_arch_mimo2 import mimo2
from tests.cpu.models.test_arch_nemotron_h import nemotron_h
from tests.cpu.models.test_arch_olmo import olmo2
from tests.cpu.models.test_arch_qwen3next import qwen3next_grouped, qwen35moe
from tests.cpu.models.test_arch_qwen_vl import qwen3vlmoe
from tests.cpu.models.test_encoders import MODELS
from tests.cpu.models.test_zoo_holdouts import (
    command_r_plus,
    gemma2_27b,
    llama4_two_experts,
    mistral3,
    phi3_short_context,
)
from tests.cuda.models import emulated, logits_of, recorded_operations, zoo
from tests.cuda.test_divided import EXACT
from tests.cuda.test_placement_matrix import assert_same, tokens_for, worst

ON_CPU = PlacementParams(n_gpu_layers=0)
TOKENS = [int(t) for t in tokens_for(4, 60)]


def graph(*split: float, **rest: Any) -> PlacementParams:
    return PlacementParams(split_mode="graph", tensor_split=split, **rest)


# logits

BUILT: list[Callable[[], Any]] = [
    afmoe,
    apertus,
    cohere2moe,
    command_r_plus,
    gemma2_27b,
    gemma4,
    laguna,
    lfm2,
    lfm2moe,
    nemotron_h,
    granite_hybrid_moe,
    granite_swa,
    llama4_two_experts,
    mimo2,
    mistral3,
    phi3_short_context,
    qwen3next_grouped,
    qwen35moe,
    qwen3vlmoe,
    test_arch_step35.step35,
]
# Layers that are divided, where not all are: shared caches and single K/V heads.
SOME = {"gemma4": 2, "mimo2": 2}


def n_divided(log: list[str]) -> tuple[int, int]:
    """Divided layers and all with attention, as the log has them."""
    line = next(line for line in log if "devices share attention of" in line)
    n, total = line.partition("attention of ")[2].split()[:3:2]
    return int(n), int(total)


@pytest.mark.parametrize("make", BUILT, ids=lambda make: make.__name__)
def test_forms_of_attention(make: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates, norms, biases, sinks, joined matrices, windows, temperatures, heads of two sizes."""
    monkeypatch.setattr(division, "GROUP", 8)
    monkeypatch.setattr(test_arch_step35, "KV", 2)
    monkeypatch.setattr(test_arch_step35, "HEADS", [2, 4, 4, 2])
    made = afmoe(heads=4, kv=2) if make is afmoe else make()
    model: RandomModel = made[0] if isinstance(made, tuple) else made
    path, tokens = model.write(tmp_path / "model.gguf"), tokens_for(9) % 60
    truth, log = logits_of(path, tokens, 16, **EXACT), list[str]()
    with emulated(2) as kernels:
        ours = logits_of(path, tokens, 16, placement=graph(1.0, 1.0), log=log, **EXACT)
    n, total = n_divided(log)
    assert n == SOME.get(make.__name__, total)
    heads = [node.src[1].buffer for node in kernels.launched if node.kind == "attention" and node.src[1] is not None]
    assert len({buffer.name for buffer in heads if buffer.gather}) == 2 * n
    assert_same(ours, truth)


@pytest.mark.parametrize("name", ("bert", "bert-fused", "nomic-bias"))
def test_encoders(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that see each other, joined projections with biases; encoders have no output matrix."""
    monkeypatch.setattr(division, "GROUP", 8)
    path, log = MODELS[name]().write(tmp_path / "model.gguf"), list[str]()

    def states(placement: PlacementParams) -> np.ndarray:
        context = new_context(path, placement, log=log, embeddings=True, causal=False)
        context.decode(Batch.single(TOKENS[:14], logits="all"))
        assert context.embeddings is not None
        return context.embeddings

    truth = states(ON_CPU)
    with emulated(2):
        ours = states(graph(1.0, 1.0))
    n, total = n_divided(log)
    assert n == total and not any("output matrix" in line for line in log)
    assert_same(ours, truth)


def test_states_of_all_tokens(path: Path) -> None:
    """Prediction heads read them; the last layer goes on with some rows and with all."""

    def states(placement: PlacementParams) -> list[np.ndarray]:
        context = new_context(path, placement, token_states=True)
        found = [context.decode(Batch.single(TOKENS[:14])), context.decode(Batch.single(TOKENS[14:15], 14))]
        assert context.token_states is not None
        return [*found, context.token_states]

    truth = states(ON_CPU)
    with emulated(2):
        ours = states(graph(1.0, 1.0))
    for made, expected in zip(ours, truth, strict=True):
        assert_same(made, expected)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of 8 heads and 4 K/V heads."""
    model, _ = llama(Dims(layers=3, heads=8, kv=4, head=32, d=128))
    return model.write(tmp_path_factory.mktemp("model") / "model.gguf")


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Windows of 7 tokens, but for the last layer."""
    model, _ = gemma3(Dims(layers=6, heads=4, kv=2, head=64, d=64))
    return model.write(tmp_path_factory.mktemp("model") / "model.gguf")


CACHES: dict[str, dict[str, Any]] = {
    "exact": EXACT,
    "f16": {},
    "quantized": {"type_k": "q8_0", "type_v": "q4_0"},
    "transformed": {"type_k": "q8_0", "type_v": "q8_0", "k_hadamard": True, "v_hadamard": True},
    "without flash attention": {"flash_attn": False, "attn_max_batch": 1, **EXACT},
}
SPLITS = {"even": (1.0, 1.0), "uneven": (3.0, 1.0), "three devices": (1.0, 2.0, 1.0), "none on one": (1.0, 0.0, 1.0)}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("caches", CACHES)
def test_forms_of_caches(caches: str, split: str, path: Path) -> None:
    truth, log = logits_of(path, tokens_for(3), 16, **CACHES[caches]), list[str]()
    with emulated(len(SPLITS[split])):
        ours = logits_of(path, tokens_for(3), 16, placement=graph(*SPLITS[split]), log=log, **CACHES[caches])
    assert n_divided(log) == (3, 3)
    if CACHES[caches].get("type_k") == "f32":
        assert_same(ours, truth)
    # A rounded cache may round what differs in the last bit to another number.
    assert np.abs(ours - truth).max() <= (1e-3 if caches == "f16" else 3e-2) * np.abs(truth).max(), worst(ours, truth)


def test_heads_are_attended_to_at_the_same_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a layer reads leaves for the other device before its own part is started."""
    issued = recorded_operations(monkeypatch)
    with emulated(2):
        logits_of(path, tokens_for(n=1), 1, placement=graph(1.0, 1.0))
    heads = [i for i, (_, kind) in enumerate(issued) if kind == "attention"]
    assert len(heads) >= 6
    for first, second in zip(heads[::2], heads[1::2], strict=True):
        own, other = issued[first][0], issued[second][0]
        assert own != other
        assert (own, "send") not in issued[first:second], f"CUDA operations: {issued[first - 6 : second + 1]}"


# what becomes of caches


def new_context(path: Path, placement: PlacementParams, *, log: list[str] | None = None, **params: Any) -> Context:
    lines = [] if log is None else log
    settings = ContextParams(**{"n_ctx": 256, "n_ubatch": 16, "n_threads": 1, "n_seq_max": 4, **EXACT, **params})
    return Context(Model.load(path, ModelParams(placement=placement), log=lines.append), settings, log=lines.append)


def steps(context: Context, folder: Path, *, moves: bool = True) -> Iterator[np.ndarray]:
    """Logits behind everything that can happen to a cache; moves: whether its cells may get other positions."""
    kv = context.kv

    def go_on(n: int, start: int, seq: int) -> np.ndarray:
        return context.decode(Batch.single(TOKENS[start : start + n], start, seq, logits="all"))

    context.decode(Batch.single(TOKENS[:18], 0, 0, logits="none"))
    yield go_on(6, 18, 0)
    yield go_on(5, 0, 1)
    kv.seq_cp(0, 2)
    kv.seq_rm(0, 20, -1)
    yield go_on(3, 20, 0)
    if moves:
        kv.seq_rm(0, 4, 8)
    unshare_sequence(context, 0)
    if moves:
        kv.seq_add(0, 8, -1, -4)
    yield go_on(4, 19 if moves else 23, 0)
    saved = take_state(context, 2, TOKENS[:24])
    put_state(context, 3, saved)
    yield go_on(2, 24, 3)
    save_sequence(folder / "state", context, 1, TOKENS[:5])
    kv.clear()
    assert load_sequence(folder / "state", context, 2, 100)[0] == TOKENS[:5]
    yield go_on(3, 5, 2)


@pytest.mark.parametrize("n_devices", (2, 3))
@pytest.mark.parametrize("form", ("exact", "transformed"))
@pytest.mark.parametrize("name", ("path", "windows"))
def test_what_becomes_of_caches(
    name: str, form: str, n_devices: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Sequences that share cells, are cut, moved, taken out and put back."""
    model, log = request.getfixturevalue(name), list[str]()
    truth = list(steps(new_context(model, ON_CPU, **CACHES[form]), tmp_path))
    with emulated(n_devices):
        ours = list(steps(new_context(model, graph(*[1.0] * n_devices), log=log, **CACHES[form]), tmp_path))
    assert n_divided(log)[0] >= 3
    for made, expected in zip(ours, truth, strict=True):
        if form == "exact":
            assert_same(made, expected)
        assert np.abs(made - expected).max() <= 3e-2 * np.abs(expected).max(), worst(made, expected)


def test_states_are_those_of_whole_caches(path: Path, tmp_path: Path) -> None:
    """A state of a cache on the CPU becomes the same bytes again, whatever devices it went through."""
    files = [tmp_path / name for name in ("cpu", "divided", "layers")]
    context = new_context(path, ON_CPU, type_k="q8_0", type_v="f16")
    context.decode(Batch.single(TOKENS[:40], 0, 1))
    save_sequence(files[0], context, 1, TOKENS[:40])
    for i, placement in ((1, graph(2.0, 1.0)), (2, PlacementParams(tensor_split=(1.0, 1.0)))):
        with emulated(2):
            context = new_context(path, placement, type_k="q8_0", type_v="f16")
            load_sequence(files[i - 1], context, 3, 100)
            save_sequence(files[i], context, 3, TOKENS[:40])
    contents = {file.read_bytes() for file in files}
    assert len(contents) == 1


def test_caches_are_where_their_heads_are(path: Path) -> None:
    """The sizes of the parts are those that the plan has, and together those of the whole caches."""

    def sizes(placement: PlacementParams, *, header_only: bool) -> dict[str, int]:
        model = Model.load(path, ModelParams(placement=placement, header_only=header_only))
        context = Context(model, ContextParams(n_ctx=256, n_ubatch=16, n_threads=1))
        assert context.devices is not None
        held = context.devices.cache_bytes()
        assert {name: kinds["KV cache"] for name, kinds in memory_report(context).devices.items()} == {"CPU": 0, **held}
        if not header_only:
            for name, state in context.devices.states.items():
                assert sum(buffer.nbytes for _, buffer in state._caches.values()) == held[name]
        return held

    with emulated(2):
        whole = sizes(PlacementParams(split_mode="none"), header_only=True)["CUDA0"]
        for header_only in (True, False):
            assert sizes(graph(3.0, 1.0), header_only=header_only) == {"CUDA0": 3 * whole // 4, "CUDA1": whole // 4}


# what stays whole


def logs_of(path: Path, placement: PlacementParams, **params: Any) -> tuple[list[str], set[str]]:
    """What is said, and the names of caches that tokens went to; logits are those of the CPU."""

    def logits(where: PlacementParams, log: list[str]) -> np.ndarray:
        context = new_context(path, where, log=log, **params)
        return np.asarray(context.decode(Batch.single(TOKENS[:20], 0, logits="all")))

    log: list[str] = []
    with emulated(2) as kernels:
        ours = logits(placement, log)
    assert_same(ours, logits(ON_CPU, []))
    return log, {node.dst.buffer.name for node in kernels.launched if node.kind == "kv_store"}


def test_rules_and_caches_in_host_memory(path: Path) -> None:
    log, stores = logs_of(path, graph(1.0, 1.0, rules=((r"blk\.1\.attn_k", "CUDA1"),)))
    assert n_divided(log) == (2, 3) and "cache_k_l1" in stores and "cache_k_l0" not in stores
    assert "llm_load_tensors: attention of 1 layer stays whole: a rule takes a tensor of it" in log
    log, stores = logs_of(path, graph(1.0, 1.0, kv_offload=False))
    assert n_divided(log) == (0, 3) and not stores
    assert "llm_load_tensors: attention of 3 layers stays whole: its cache is in host memory" in log
    log, stores = logs_of(path, graph(1.0, 1.0, n_gpu_layers=2))
    assert n_divided(log) == (2, 2) and not any(name.startswith("cache_k_l0") for name in stores)


def test_adapters_and_statistics(tmp_path: Path) -> None:
    """Both need inputs of products as a whole."""
    model, _ = llama(Dims(layers=2, heads=8, kv=4, head=32, d=128))
    path = model.write(tmp_path / "model.gguf")
    said = "llama_kv_cache_init: attention of {} stays whole: {} needs all heads together"
    log, stores = logs_of(path, graph(1.0, 1.0), collector=ActivationCollector({}))
    assert said.format("2 layers", "act_stats") in log and "cache_k_l0" in stores
    pairs = {name: pair for name, pair in make_pairs(model, 3).items() if name == "blk.1.attn_q"}
    adapter = write_adapter(tmp_path / "lora.gguf", model.arch, pairs, 4.0)
    log, stores = logs_of(path, graph(1.0, 1.0), adapters=(LoraAdapter.load(adapter, Model.load(path)),))
    assert said.format("1 layer", "add") in log and "cache_k_l1" in stores and "cache_k_l0" not in stores


def test_norms_of_all_heads(tmp_path: Path) -> None:
    model, _ = olmo2()
    log, stores = logs_of(model.write(tmp_path / "model.gguf"), graph(1.0, 1.0))
    assert n_divided(log)[0] == 0 and "cache_k_l0" in stores
    assert "llm_load_tensors: attention of 2 layers stays whole: it is of a kind that is not divided" in log


def test_parts_without_a_kernel(path: Path) -> None:
    """A layer whose heads have a kernel only together stays whole, and works."""
    log: list[str] = []
    unsupported = {"attention": 8}

    def refuse(node: Any) -> str | None:
        return "too few heads" if node.kind in unsupported and node.dst.shape[1] < 8 else None

    truth = logits_of(path, tokens_for(3), 16, **EXACT)
    with emulated(2, unsupported=refuse):
        ours = logits_of(path, tokens_for(3), 16, placement=graph(1.0, 1.0), log=log, **EXACT)
    assert "llama_kv_cache_init: attention of 3 layers stays whole: no kernel for attention of a part" in log
    assert_same(ours, truth)


def test_attention_without_a_kernel(path: Path) -> None:
    """Its cache goes to host memory, whole."""
    log: list[str] = []
    truth = logits_of(path, tokens_for(3), 16, **EXACT)
    with emulated(2, unsupported=lambda node: "none" if node.kind == "attention" else None):
        ours = logits_of(path, tokens_for(3), 16, placement=graph(1.0, 1.0), log=log, **EXACT)
    assert "llama_kv_cache_init: attention of 3 layers stays whole: its cache is in host memory" in log
    assert_same(ours, truth)


def test_models_of_the_zoo_on_three_devices() -> None:
    """Two K/V heads: one of the devices has networks and logits only."""
    truth, log = logits_of(zoo("qwen3moe"), tokens_for(3), 16, **EXACT), list[str]()
    with emulated(3):
        ours = logits_of(zoo("qwen3moe"), tokens_for(3), 16, placement=graph(1.0, 1.0, 1.0), log=log, **EXACT)
    assert n_divided(log) == (2, 2)
    assert_same(ours, truth)
