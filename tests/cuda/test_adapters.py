"""LoRA adapters and control vectors on emulated devices give what they give on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ikpy.backends.cuda import devices as cuda_devices
from ikpy.engine.adapter import LoraAdapter
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ModelParams
from ikpy.graph.adapters import adapted_tensor
from ikpy.graph.placement import PlacementParams
from tests.cpu.models.reference_models import RandomModel
from tests.cpu.models.test_adapters import RANDOM, TOKENS, llama, make_pairs, params, write_adapter
from tests.cpu.models.test_zoo_holdouts import gpt_oss
from tests.cuda.models import emulated

CPU = PlacementParams(n_gpu_layers=0)
PLACEMENTS = {
    "all": PlacementParams(),
    "some layers": PlacementParams(n_gpu_layers=2),
    "adapted tensors in host memory": PlacementParams(rules=(("ffn_(up|down)|attn_q|exps", "CPU"),)),
}


def written(make, folder: Path) -> tuple[Path, list[Path]]:
    """A model and two adapters of its tensors."""
    made = make()
    model: RandomModel = made[0] if isinstance(made, tuple) else made
    adapters = [
        write_adapter(folder / f"lora{i}.gguf", model.arch, make_pairs(model, rank), 4.0)
        for i, rank in enumerate((3, 8))
    ]
    return model.write(folder / "model.gguf"), adapters


def adapted(model: Path, adapters: list[Path], placement: PlacementParams) -> Context:
    loaded = Model.load(model, ModelParams(placement=placement))
    return Context(loaded, params(adapters=tuple(LoraAdapter.load(path, loaded) for path in adapters)))


def logits(context: Context) -> np.ndarray:
    """A prompt of two sequences with logits of few tokens, and single tokens behind it."""
    context.kv.clear()
    parts = [context.decode(Batch.single(TOKENS[:20], logits="all")), context.decode(Batch.single(TOKENS[20:23], 20))]
    parts += [context.decode(Batch.single(TOKENS[i : i + 1], i)) for i in range(23, len(TOKENS))]
    return np.concatenate(parts)


def assert_same(ours: np.ndarray, wanted: np.ndarray, bound: float) -> None:
    assert np.abs(ours - wanted).max() < bound * np.abs(wanted).max()


@pytest.mark.parametrize("make", [llama, gpt_oss], ids=lambda f: f.__name__)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_adapters_on_devices(make, placement: str, tmp_path: Path) -> None:
    model, adapters = written(make, tmp_path)
    on_cpu = adapted(model, adapters, CPU)
    with emulated(2):
        on_devices = adapted(model, adapters, PLACEMENTS[placement])
        for scales in ((1.0, 0.0), (-0.5, 2.0)):
            for context in (on_cpu, on_devices):
                context.adapter_scales[:] = scales
            assert_same(logits(on_devices), logits(on_cpu), 1e-5)


def test_pairs_and_scales_add_no_splits(tmp_path: Path) -> None:
    model, adapters = written(llama, tmp_path)
    with emulated(1):
        assert (
            adapted(model, adapters, PlacementParams()).n_graph_splits
            == adapted(model, [], PLACEMENTS["all"]).n_graph_splits
        )


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_pairs_lie_where_their_tensor_is(placement: str, tmp_path: Path) -> None:
    model, adapters = written(llama, tmp_path)
    with emulated(2):
        context = adapted(model, adapters, PLACEMENTS[placement])
        assert context.devices is not None
        place = context.model.placement
        for name, needs in context.devices.needs.items():
            tensors = [adapted_tensor(weight) for weight in needs.weights if weight not in context.model.weights]
            own = [t for adapter in context.params.adapters for t in adapter.pairs if place.device_of(t) == name]
            assert sorted(tensors) == sorted(2 * own), name


def test_control_vectors_on_devices(tmp_path: Path) -> None:
    model, _ = written(llama, tmp_path)
    on_cpu = adapted(model, [], CPU)
    hp = on_cpu.model.hparams
    with emulated(2):
        on_devices = adapted(model, [], PlacementParams())
        plain = logits(on_devices)
        for _ in range(2):  # set, and changed
            directions = RANDOM.normal(0, 0.5, (hp.n_layer, hp.n_embd)).astype(np.float32)
            for context in (on_cpu, on_devices):
                context.steer(directions)
            steered = logits(on_devices)
            assert np.abs(steered - plain).max() > 0.05 * np.abs(plain).max()
            assert_same(steered, logits(on_cpu), 1e-5)
        on_devices.steer(None)
        assert_same(logits(on_devices), plain, 1e-6)
        free = [device.memory().free for device in cuda_devices.available()]
        assert on_devices.devices is not None
        on_devices.devices.release()
        assert all(device.memory().free > before for device, before in zip(cuda_devices.available(), free, strict=True))


def test_adapters_and_control_vectors_with_the_cuda_kernels(tmp_path: Path, cuda_devices: int) -> None:
    model, adapters = written(llama, tmp_path)
    found = []
    for placement in (CPU, PlacementParams()):
        context = adapted(model, adapters, placement)
        context.adapter_scales[:] = (1.0, 0.5)
        hp = context.model.hparams
        context.steer(np.full((hp.n_layer, hp.n_embd), 0.1, np.float32))
        found.append(logits(context))
    assert_same(found[1], found[0], 2e-3)
