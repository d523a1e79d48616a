"""Models of every kind of layer on another machine: the same numbers to the last bit as on this one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy._native import available_tiers, tier
from ikpy.backends.remote import hosts
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.engine.session import put_state, take_state
from ikpy.graph.placement import PlacementParams
from tests.cpu.convert import deepseek4_checkpoints as tiny
from tests.cpu.convert.checkpoints import convert
from tests.cpu.engine.remote_hosts import RunningHost, running
from tests.cpu.models import dots3note_model, minimax_m3_model
from tests.cpu.models.definition_checks import TOKENS
from tests.cpu.models.sparse_latent_models import Sizes, random_model
from tests.cuda import test_adapters as adapters
from tests.cuda import test_compressed_models as compressed
from tests.cuda import test_encoder_models as encoders
from tests.cuda import test_recurrent_models as recurrent
from tests.cuda.models import emulated, logits_of
from tests.shared import DATA

ON_CPU = PlacementParams(n_gpu_layers=0)


@pytest.fixture(scope="module")
def host() -> Iterator[RunningHost]:
    with running() as one:
        yield one


@pytest.fixture(autouse=True)
def no_hosts() -> Iterator[None]:
    yield
    hosts.use(())


def context_on(path: Path, placement: PlacementParams, **settings: Any) -> Context:
    model = Model.load(path, ModelParams(placement=placement))
    return Context(model, ContextParams(**{"n_ctx": 256, "n_threads": 1, "n_seq_max": 2, **settings}))


def results(context: Context) -> list[np.ndarray]:
    """Of a prompt, of tokens one by one, of a copied sequence, and of one that was saved."""
    tokens = TOKENS[:36]
    found = [context.decode(Batch.single(tokens[:20], logits="all"))]
    found += [context.decode(Batch.single(tokens[i : i + 1], i)) for i in range(20, 24)]
    context.kv.seq_cp(0, 1)
    found.append(context.decode(Batch.single(tokens[24:30], 24, 1, logits="all")))
    saved = take_state(context, 0, list(map(int, tokens[:24])))
    context.kv.clear()
    put_state(context, 0, saved)
    found.append(context.decode(Batch.single(tokens[24:30], 24, logits="all")))
    return found


def check(path: Path, host: RunningHost, placements: list[PlacementParams], **settings: Any) -> None:
    wanted = results(context_on(path, ON_CPU, **settings))
    hosts.use([host.endpoint])
    for placement in placements:
        for found, truth in zip(results(context_on(path, placement, **settings)), wanted, strict=True):
            assert np.array_equal(found, truth, equal_nan=True), placement


@pytest.mark.parametrize("make", recurrent.MODELS, ids=lambda make: make.__name__)
def test_recurrent_layers(make: Callable[[], tuple[Any, Any]], host: RunningHost, tmp_path: Path) -> None:
    made = make()
    path = (made[0] if isinstance(made, tuple) else made).write(tmp_path / "model.gguf")
    check(path, host, [PlacementParams(), PlacementParams(n_gpu_layers=2), PlacementParams(kv_offload=False)])


SPARSE: dict[str, Callable[[], Any]] = {
    "deepseek32": lambda: random_model(Sizes(top_k=12), "deepseek32"),
    "glm-dsa": lambda: random_model(Sizes(top_k=8, index_heads=8), "glm-dsa"),
    "minimax-m3": lambda: minimax_m3_model.random_model(minimax_m3_model.Sizes()),
    "dots3note": lambda: dots3note_model.random_model(dots3note_model.Sizes()),
}


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_attention(name: str, host: RunningHost, tmp_path: Path) -> None:
    path = SPARSE[name]().write(tmp_path / "model.gguf")
    placements = [PlacementParams(), PlacementParams(n_gpu_layers=2), PlacementParams(rules=(("exps|indexer", "CPU"),))]
    check(path, host, placements)


@pytest.mark.parametrize("where", ["whole", "some layers", "experts on the CPU", "cache in host memory"])
def test_compressed_caches(where: str, host: RunningHost, tmp_path: Path) -> None:
    path = Path(convert(tiny.write(tmp_path / "checkpoint"), tmp_path, outtype="f16").path)
    wanted = compressed.logits(compressed.context_on(path, ON_CPU))
    hosts.use([host.endpoint])
    assert np.array_equal(compressed.logits(compressed.context_on(path, compressed.PLACES[where])), wanted)


def test_adapters_and_control_vectors(host: RunningHost, tmp_path: Path) -> None:
    model, pairs = adapters.written(adapters.llama, tmp_path)
    contexts = [adapters.adapted(model, pairs, ON_CPU)]
    hosts.use([host.endpoint])
    contexts += [adapters.adapted(model, pairs, placement) for placement in adapters.PLACEMENTS.values()]
    hp = contexts[0].model.hparams
    directions = np.random.default_rng(3).normal(0, 0.5, (hp.n_layer, hp.n_embd)).astype(np.float32)
    for scales, vectors in (((1.0, 0.0), None), ((-0.5, 2.0), directions), ((0.0, 1.0), 2 * directions)):
        found = []
        for context in contexts:
            context.adapter_scales[:] = scales
            context.steer(vectors)
            found.append(adapters.logits(context))
        assert all(np.array_equal(each, found[0]) for each in found)


@pytest.mark.parametrize(
    "placement",
    [
        PlacementParams(tensor_split=(1, 1)),
        PlacementParams(n_gpu_layers=2, tensor_split=(2, 1)),
        PlacementParams(tensor_split=(1, 0), rules=(("exps", "RPC"),)),
        PlacementParams(tensor_split=(0, 1), rules=(("exps", "CUDA0"),)),
        PlacementParams(tensor_split=(1, 1), kv_offload=False),
    ],
)
def test_beside_a_gpu(placement: PlacementParams, host: RunningHost) -> None:
    """Layers and experts on a GPU and on another machine: copies between the two go by way of this one."""
    path = DATA / "zoo" / "qwen3moe.gguf"
    wanted = logits_of(path, TOKENS[:40], 30)
    rules = tuple((pattern, host.name if device == "RPC" else device) for pattern, device in placement.rules)
    with emulated(1):
        hosts.use([host.endpoint])
        log: list[str] = []
        found = logits_of(path, TOKENS[:40], 30, placement=replace(placement, rules=rules), log=log)
        assert np.array_equal(found, wanted)
        for name in ("CUDA0", host.name):
            assert any(name in line and "buffer size" in line for line in log), name


@pytest.mark.parametrize("isa", ["portable", "avx2"])
def test_a_host_of_another_kind(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels read activations in formats of their own: the same numbers but for rounding."""
    if isa not in available_tiers or isa == tier:
        pytest.skip(f"no {isa}, or no other")
    path = DATA / "zoo" / "deepseek2-lite.gguf"
    wanted = logits_of(path, TOKENS[:40], 30)
    with monkeypatch.context() as patch:
        patch.setenv("IKPY_ISA", isa)
        other = RunningHost()
    try:
        hosts.use([other.endpoint])
        for placement in (
            PlacementParams(),
            PlacementParams(n_gpu_layers=2),
            PlacementParams(rules=(("exps", "CPU"),)),
        ):
            found = logits_of(path, TOKENS[:40], 30, placement=placement)
            error = np.abs(found - wanted).max(axis=1) / np.abs(wanted).max()
            assert error.max() < 3e-3, f"token {error.argmax()} is off by {error.max():.1e} relative"
    finally:
        hosts.use(())
        other.stop()


@pytest.mark.parametrize("make", encoders.MODELS, ids=lambda make: make.__name__)
def test_encoders(make: Callable[[], tuple[Any, Any]], host: RunningHost, tmp_path: Path) -> None:
    path = make()[0].write(tmp_path / "model.gguf")
    wanted = encoders.states_of(path, ON_CPU)
    hosts.use([host.endpoint])
    assert np.array_equal(encoders.states_of(path, PlacementParams()), wanted)
    assert np.array_equal(encoders.states_of(path, PlacementParams(n_gpu_layers=2)), wanted)
