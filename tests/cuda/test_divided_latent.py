"""-sm graph: latent attention, of which every device has some heads and the whole cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy._native import core
from ikpy.backends.cuda.emulated import EmulatedStream
from ikpy.cli.logs import context_log
from ikpy.engine.adapter import LoraAdapter
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.memory import memory_report
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.engine.sequence_state import load_sequence, save_sequence
from ikpy.graph.placement import PlacementParams
from ikpy.models.latent_tensors import LatentSizes
from scripts.make_deepseek_header import write_header
from tests.cpu.models.reference_models import RandomModel
from tests.cpu.models.shaped_models import Dims, deepseek2
from tests.cpu.models.sparse_latent_models import Sizes, random_model
from tests.cpu.models.test_adapters import latent, make_pairs, write_adapter
from tests.cpu.models.test_arch_bailingmoe3 import bailingmoe3
from tests.cpu.models.test_arch_kimi_k3 import kimi_k3
from tests.cpu.models.test_arch_kimi_linear import kimi_linear
from tests.cuda.models import emulated, logits_of, recorded_operations, zoo
from tests.cuda.test_divided import EXACT
from tests.cuda.test_divided_attention import ON_CPU, TOKENS, graph, logs_of, n_divided, new_context, steps
from tests.cuda.test_placement_matrix import assert_same, tokens_for, worst

SIZES = Dims(layers=2, heads=4, head=32, rank=64, rot=32, dense=2, experts=2, used=1)
FORMS = ("kv_b", "k_b, v_b", "all")
SPLITS = {"even": (1.0, 1.0), "uneven": (3.0, 1.0), "three devices": (1.0, 2.0, 1.0), "none on one": (1.0, 0.0, 1.0)}
N_TOKENS, N_PROMPT = 134, 131
LONG: dict[str, Any] = {"n_ubatch": 256}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of four heads in each form of its files."""
    folder = tmp_path_factory.mktemp("models")
    return {form: latent(form, SIZES).write(folder / f"{i}.gguf") for i, form in enumerate(FORMS)}


@pytest.fixture(scope="module")
def path(paths: dict[str, Path]) -> Path:
    return paths["all"]


# logits


def both(path: Path, split: tuple[float, ...], tokens: np.ndarray, n_prompt: int, **params: Any) -> tuple[Any, Any]:
    """Logits of divided layers and of the CPU; the heads of each device attend at once."""
    log: list[str] = []
    truth = logits_of(path, tokens, n_prompt, **params)
    with emulated(len(split)) as kernels:
        ours = logits_of(path, tokens, n_prompt, placement=graph(*split), log=log, **params)
    n, total = n_divided(log)
    assert n == total and not any("stays whole" in line for line in log)
    stored = {node.dst.buffer.name for node in kernels.launched if node.kind == "kv_store"}
    assert stored and not any(name.endswith("_l0") for name in stored)
    return ours, truth


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mla", (0, 1, 2, 3))
def test_modes_and_forms_of_files(mla: int, form: str, split: str, paths: dict[str, Path]) -> None:
    """A prompt whose cells are expanded in modes 2 and 3, and single tokens in the absorbed form."""
    ours, truth = both(paths[form], SPLITS[split], tokens_for(3, N_TOKENS), N_PROMPT, mla=mla, **LONG, **EXACT)
    assert_same(ours, truth)


@pytest.mark.parametrize("name", ("deepseek2-lite", "deepseek2-v3-mla"))
def test_models_of_the_zoo(name: str) -> None:
    """Quantized tensors, low-rank queries, two heads: one of three devices has networks and logits only."""
    # A tile unit multiplies a prompt from bf16: sums in another order are other bf16 values here and there (7e-5).
    tolerance = 2e-4 if core.has_tiles() else 2e-5
    for split in ((1.0, 1.0), (1.0, 1.0, 1.0)):
        ours, truth = both(zoo(name), split, tokens_for(4, N_TOKENS), N_PROMPT, **LONG, **EXACT)
        assert_same(ours, truth, tolerance)


def test_queries_with_a_temperature(tmp_path: Path) -> None:
    model, _ = deepseek2(SIZES, "mistral4", 0.1)
    assert_same(*both(model.write(tmp_path / "model.gguf"), (1.0, 1.0), tokens_for(5, 60), 56, **EXACT))


@pytest.mark.parametrize("mla", (0, 1, 2, 3))
@pytest.mark.parametrize("make", (kimi_linear, bailingmoe3, kimi_k3), ids=lambda f: f.__name__)
def test_layers_beside_recurrent_ones(make: Callable[[], tuple[RandomModel, Any]], mla: int, tmp_path: Path) -> None:
    """Latent attention, without positions or with a gate per head, is divided, KDA layers stay whole."""
    model, log = make()[0], list[str]()
    path, attends = model.write(tmp_path / "model.gguf"), model.keys["attention.head_count_kv"]
    tokens, params = tokens_for(6, N_TOKENS), {"mla": mla, **LONG, **EXACT}
    truth = logits_of(path, tokens, N_PROMPT, **params)
    with emulated(2):
        ours = logits_of(path, tokens, N_PROMPT, placement=graph(1.0, 1.0), log=log, **params)
    assert n_divided(log) == (sum(attends), len(attends))
    whole = attends.count(0)
    assert any(f"attention of {whole} layers stays whole: it is of a kind that is not divided" in line for line in log)
    assert_same(ours, truth)


@pytest.mark.parametrize("step", (1, 2))
def test_some_heads_at_a_time(step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """-amb: cells are expanded for heads that lie on one device, or on both."""
    monkeypatch.setattr(LatentSizes, "heads_per_expansion", lambda *_: step)
    path = latent("kv_b", Dims(**{**SIZES.__dict__, "heads": 6})).write(tmp_path / "model.gguf")
    for split in ((1.0, 1.0), (1.0, 3.0, 2.0)):
        assert_same(*both(path, split, tokens_for(3, N_TOKENS), N_PROMPT, **LONG, **EXACT))


def test_heads_are_worked_on_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other device reads leaves before a device starts on its own heads."""

    def weight(launched: Any) -> str:
        source = launched.node.src[0]
        return source.buffer.name.partition(" [")[0] if launched.kernel == "mul_mat" else ""

    issued = recorded_operations(monkeypatch, weight)
    with emulated(2):
        logits_of(zoo("deepseek2-v3-mla"), tokens_for(n=1), 1, placement=graph(1.0, 1.0))
    heads = [i for i, (_, kind) in enumerate(issued) if kind.endswith("attn_q_b.weight")]
    assert len(heads) >= 6
    for first, second in zip(heads[::2], heads[1::2], strict=True):
        own, other = issued[first][0], issued[second][0]
        assert own != other and issued[first - 1] == (own, "send")
        assert (own, "send") not in issued[first:second]


CACHES: dict[str, dict[str, Any]] = {
    "f16": {},
    "quantized": {"type_k": "q8_0"},
    "transformed": {"type_k": "q8_0", "k_hadamard": True},
    "two caches": {"type_k": "q8_KV"},
    "heads": {"type_k": "q8_0", "type_v": "q8_0"},
    "without flash attention": {"flash_attn": False, "attn_max_batch": 1, **EXACT},
}


@pytest.mark.parametrize("caches", CACHES)
def test_forms_of_caches(caches: str, path: Path) -> None:
    for mla in (0,) if caches == "heads" else (1, 2, 3):
        params = {**LONG, **CACHES[caches], "mla": mla}
        ours, truth = both(path, (1.0, 2.0, 1.0), tokens_for(3, N_TOKENS), N_PROMPT, **params)
        if params.get("type_k") == "f32":
            assert_same(ours, truth)
        # A rounded cache may round what differs in the last bit to another number.
        assert np.abs(ours - truth).max() <= (1e-3 if caches == "f16" else 3e-2) * np.abs(truth).max(), worst(
            ours, truth
        )


# what becomes of caches


@pytest.mark.parametrize("n_devices", (2, 3))
@pytest.mark.parametrize("mla", (0, 3))
def test_what_becomes_of_caches(mla: int, n_devices: int, path: Path, tmp_path: Path) -> None:
    """Sequences that share cells, are cut, taken out and put back."""
    log: list[str] = []
    truth = list(steps(new_context(path, ON_CPU, mla=mla), tmp_path, moves=False))
    with emulated(n_devices):
        ours = list(steps(new_context(path, graph(*[1.0] * n_devices), log=log, mla=mla), tmp_path, moves=False))
    assert n_divided(log) == (2, 2)
    for made, expected in zip(ours, truth, strict=True):
        assert_same(made, expected)


@pytest.mark.parametrize("type_k", ("q8_0", "q8_KV"))
def test_states_are_those_of_one_cache(type_k: str, path: Path, tmp_path: Path) -> None:
    """A state of a cache on the CPU becomes the same bytes again, whatever devices it went through."""
    files = [tmp_path / name for name in ("cpu", "divided", "layers", "end")]
    placements = [ON_CPU, graph(2.0, 1.0), PlacementParams(tensor_split=(1.0, 1.0)), ON_CPU]
    context = new_context(path, ON_CPU, type_k=type_k)
    context.decode(Batch.single(TOKENS[:40], 0, 1))
    save_sequence(files[0], context, 1, TOKENS[:40])
    for before, file, placement in zip(files[:-1], files[1:], placements[1:], strict=True):
        with emulated(2):
            context = new_context(path, placement, type_k=type_k)
            load_sequence(before, context, 3, 100)
            save_sequence(file, context, 3, TOKENS[:40])
    assert len({file.read_bytes() for file in files}) == 1


def test_a_state_is_read_from_one_device(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And goes to all of them."""
    moved: list[tuple[str, int]] = []

    def noted(kind: str, move: Any) -> Any:
        def noting(stream: EmulatedStream, *args: Any) -> None:
            moved.append((kind, next(a.nbytes for a in args if isinstance(a, np.ndarray))))
            move(stream, *args)

        return noting

    with emulated(3):
        context = new_context(path, graph(1.0, 1.0, 1.0))
        assert context.devices is not None
        for kind in ("download", "upload"):
            monkeypatch.setattr(EmulatedStream, kind, noted(kind, getattr(EmulatedStream, kind)))
        context.devices.download_caches()
        context.devices.upload_caches()
    whole = context.kv.nbytes()
    assert sum(n for kind, n in moved if kind == "download") == whole
    assert sum(n for kind, n in moved if kind == "upload") == 3 * whole


# memory


def held(path: Path, placement: PlacementParams, *, header_only: bool, mla: int) -> tuple[dict[str, int], Any]:
    """Bytes of caches by device, and of weights, as planned; they are those that are taken."""
    log: list[str] = []
    model = Model.load(path, ModelParams(placement=placement, header_only=header_only, mla=mla), log=log.append)
    context = Context(model, ContextParams(n_ctx=256, n_ubatch=16, n_threads=1), log=log.append)
    assert context.devices is not None
    caches, needs = context.devices.cache_bytes(), context.devices.needs
    assert {name: kinds["KV cache"] for name, kinds in memory_report(context).devices.items()} == {"CPU": 0, **caches}
    weights = {name: sorted((b.name, b.nbytes) for b in each.weights.values()) for name, each in needs.items()}
    if not header_only:
        for name, state in context.devices.states.items():
            assert sum(buffer.nbytes for _, buffer in state._caches.values()) == caches[name] == needs[name].cache
            assert not state.weights.missing(state.device, needs[name].weights.values())
    return caches, weights


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mla", (1, 3))
def test_every_device_has_the_cache_and_a_part_of_the_tensors(mla: int, form: str, paths: dict[str, Path]) -> None:
    """Planned as they are taken; parts of tensors make up the whole."""
    with emulated(3):
        caches, weights = held(paths[form], PlacementParams(split_mode="none"), header_only=True, mla=mla)
        for header_only in (True, False):
            copies, parts = held(paths[form], graph(2.0, 1.0, 1.0), header_only=header_only, mla=mla)
            assert copies == dict.fromkeys(("CUDA0", "CUDA1", "CUDA2"), caches["CUDA0"])
            of = {
                device: {
                    name: sum(n for part, n in found if part.partition(" [")[0] == name) for name, _ in weights["CUDA0"]
                }
                for device, found in parts.items()
            }
            for name, nbytes in weights["CUDA0"]:
                counts = [of[device][name] for device in parts]
                assert sum(counts) == nbytes, name
                if name.partition(".attn_")[2].startswith(("q", "kv_b", "k_b", "v_b", "output")):
                    assert counts == [nbytes // 2, nbytes // 4, nbytes // 4], name


def test_sizes_in_the_log(path: Path) -> None:
    """What the log says of the file's tensors is what is uploaded of them."""
    with emulated(2):
        model = Model.load(path, ModelParams(placement=graph(3.0, 1.0), mla=3))
        context = Context(model, ContextParams(n_ctx=256, n_ubatch=256, n_threads=1))
    assert context.devices is not None
    placed = model.placement.bytes_per_device({info.name: info.nbytes for info in model.gguf.tensors.values()})
    for name, needs in context.devices.needs.items():
        assert placed[name] == sum(buffer.nbytes for buffer in needs.weights.values())


def test_sizes_of_caches_in_the_log(path: Path) -> None:
    with emulated(2):
        lines = context_log(new_context(path, graph(1.0, 1.0), n_ctx=8192))
    whole = 2 * 8192 * 96 * 4 / (1 << 20)
    sizes = [line for line in lines if "KV buffer size" in line]
    assert sizes == [f"llama_kv_cache_init:      CUDA{i} KV buffer size = {whole:8.2f} MiB" for i in range(2)]
    assert any(f"KV self size  = {whole:7.2f} MiB" in line for line in lines)


def test_deepseek_v3(tmp_path: Path) -> None:
    """128 heads of 61 layers on three devices, as planned from the header of its file."""
    path, log = tmp_path / "deepseek-v3.gguf", list[str]()
    write_header(path, "q8_0")
    params = ModelParams(header_only=True, placement=graph(2.0, 1.0, 1.0))
    with emulated(3, mib=1 << 20):
        settings = ContextParams(n_ctx=4096, n_ubatch=512, n_threads=8, type_k="q8_0")
        context = Context(Model.load(path, params, log=log.append), settings, log=log.append)
    path.unlink()
    assert n_divided(log) == (61, 61) and not any("stays whole" in line for line in log)
    assert context.devices is not None
    cache = 61 * 4096 * 576 // 32 * 34
    assert context.devices.cache_bytes() == {f"CUDA{i}": cache for i in range(3)}
    n = {name: sum(b.nbytes for b in needs.weights.values()) for name, needs in context.devices.needs.items()}
    assert 0.48 < n["CUDA0"] / sum(n.values()) < 0.52


# what stays whole


def test_rules_and_caches_in_host_memory(paths: dict[str, Path]) -> None:
    log, stores = logs_of(paths["all"], graph(1.0, 1.0, rules=((r"blk\.1\.attn_kv_a", "CUDA1"),)))
    assert n_divided(log) == (1, 2) and "cache_kv_l1" in stores and "cache_kv_l0" not in stores
    assert "llm_load_tensors: attention of 1 layer stays whole: a rule takes a tensor of it" in log
    # A tensor that only the loader makes is where a rule says, too.
    log, stores = logs_of(paths["kv_b"], graph(1.0, 1.0, rules=((r"blk\.1\.attn_k_b", "CPU"),)))
    assert "llama_kv_cache_init: attention of 1 layer stays whole: a rule takes a tensor of it" in log
    log, stores = logs_of(paths["all"], graph(1.0, 1.0, kv_offload=False))
    assert n_divided(log) == (0, 2) and not stores
    assert "llm_load_tensors: attention of 2 layers stays whole: its cache is in host memory" in log


def test_heads_that_cannot_be_parted(tmp_path: Path) -> None:
    for heads, head, reason in ((1, 32, "it has one head"), (2, 16, "its heads cannot be parted where blocks of")):
        model = latent("kv_b", Dims(**{**SIZES.__dict__, "heads": heads, "head": head}))
        log, _ = logs_of(model.write(tmp_path / "model.gguf"), graph(1.0, 1.0))
        assert any(f"attention of 2 layers stays whole: {reason}" in line for line in log)


def test_adapters(tmp_path: Path, path: Path) -> None:
    model = latent("all", SIZES)
    pairs = {name: pair for name, pair in make_pairs(model, 3).items() if name == "blk.1.attn_q"}
    adapter = write_adapter(tmp_path / "lora.gguf", model.arch, pairs, 4.0)
    log, stores = logs_of(path, graph(1.0, 1.0), adapters=(LoraAdapter.load(adapter, Model.load(path)),))
    assert "llama_kv_cache_init: attention of 1 layer stays whole: add needs all heads together" in log
    assert "cache_kv_l1" in stores and "cache_kv_l0" not in stores


def test_attention_to_chosen_cells(tmp_path: Path) -> None:
    """Indexers choose on one device."""
    log, _ = logs_of(random_model(Sizes(), "glm-dsa").write(tmp_path / "model.gguf"), graph(1.0, 1.0))
    assert any("stay whole" in line for line in log)
    assert any(line.endswith("stays whole: it is of a kind that is not divided") for line in log)


@pytest.mark.parametrize("kind", ("attention", "mul_mat"))
def test_parts_without_a_kernel(kind: str, path: Path) -> None:
    """A layer whose heads have a kernel only together stays whole, and works."""
    log: list[str] = []

    def refuse(node: Any) -> str | None:
        is_part = node.dst.shape[1] < 4 if kind == "attention" else node.dst.shape[2] in (2, 3)
        return "too few heads" if node.kind == kind and is_part else None

    truth = logits_of(path, tokens_for(3), 16, **EXACT)
    with emulated(2, unsupported=refuse):
        ours = logits_of(path, tokens_for(3), 16, placement=graph(1.0, 1.0), log=log, **EXACT)
    assert f"llama_kv_cache_init: attention of 2 layers stays whole: no kernel for {kind} of a part" in log
    assert_same(ours, truth)
