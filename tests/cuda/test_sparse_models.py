"""Models with sparse attention on devices: logits against the CPU's, for lists of chosen cells and masks of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.engine.session import put_state, take_state
from ikpy.graph.ir import Node
from ikpy.graph.placement import PlacementParams
from tests.cpu.models import dots3note_model, minimax_m3_model
from tests.cpu.models.reference_models import N_VOCAB
from tests.cpu.models.sparse_latent_models import PUBLISHED, Sizes, random_model
from tests.cuda.test_placement_matrix import worst

# A cell more or less that a token attends to would be far beyond it.
TOLERANCE = 3e-3
TOKENS = np.random.default_rng(5).integers(0, N_VOCAB, 60)
ON_CPU = PlacementParams(n_gpu_layers=0)
PLACES = {
    "whole": PlacementParams(split_mode="none"),
    "experts on the CPU": PlacementParams(split_mode="none", rules=(("exps", "CPU"),)),
    "indexers on the CPU": PlacementParams(split_mode="none", rules=(("indexer", "CPU"),)),
    "caches on the CPU": PlacementParams(kv_offload=False),
    "two layers": PlacementParams(n_gpu_layers=2, split_mode="none"),
}


def context_on(path: Path, placement: PlacementParams, **params: object) -> Context:
    model = Model.load(path, ModelParams(placement=placement))
    return Context(model, ContextParams(**{"n_ctx": 256, "n_threads": 2, "n_seq_max": 2, **params}))  # type: ignore[arg-type]


def logits(context: Context) -> list[np.ndarray]:
    """Of a prompt, of single tokens and a few, of two sequences at once, and of one that was saved."""
    found = [context.decode(Batch.single(TOKENS[:30], logits="all"))]
    found += [context.decode(Batch.single(TOKENS[30:31], 30)), context.decode(Batch.single(TOKENS[31:35], 31))]
    context.decode(Batch.single(TOKENS[40:45], 0, 1))
    both = Batch()
    both.add(TOKENS[35:37].tolist(), 35, 0, "all")
    both.add(TOKENS[45:48].tolist(), 5, 1, "all")
    found.append(context.decode(both))
    saved = take_state(context, 0, TOKENS[:37].tolist())
    put_state(context, 1, saved)
    return [*found, context.decode(Batch.single(TOKENS[37:40], 37, 1, logits="all"))]


def hold(path: Path, placement: PlacementParams, **params: object) -> Context:
    truth = logits(context_on(path, ON_CPU, **params))
    context = context_on(path, placement, **params)
    for found, expected in zip(logits(context), truth, strict=True):
        assert np.isfinite(found).all()
        assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max(), worst(found, expected)
    return context


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("mla", [0, 1, 3])
def test_placements(mla: int, where: str, tmp_path: Path, cuda_devices: int) -> None:
    path = random_model(Sizes(top_k=12), "deepseek32").write(tmp_path / "model.gguf")
    hold(path, PLACES[where], mla=mla, flash_attn=True)


@pytest.mark.parametrize("mla", [1, 2, 3])
def test_published_sizes(mla: int, tmp_path: Path, cuda_devices: int) -> None:
    """Heads that the fast kernels take; layers without an indexer take the choice of the one before."""
    sizes = replace(PUBLISHED, top_k=12, predict=0, layers=3)
    path = random_model(sizes, "glm-dsa", full=[1, 0, 1]).write(tmp_path / "model.gguf")
    context = hold(path, PLACES["whole"], mla=mla, flash_attn=mla != 2)
    assert context.devices is not None and context.devices.cache_bytes().keys() == {"CUDA0"}


@pytest.mark.parametrize("top_k", [12, 100])
@pytest.mark.parametrize("n_gpu_layers", [1, 2, 3])
def test_choices_of_layers_on_the_cpu(n_gpu_layers: int, top_k: int, tmp_path: Path, cuda_devices: int) -> None:
    """Layers on the device that take the choice of one on the CPU, which makes none while few cells are attended to."""
    path = random_model(Sizes(top_k=top_k), "glm-dsa", full=[1, 0, 0]).write(tmp_path / "model.gguf")
    hold(path, PlacementParams(n_gpu_layers=n_gpu_layers, split_mode="none"), mla=1, flash_attn=True)


def test_index_keys_that_no_kernel_takes(tmp_path: Path, cuda_devices: int) -> None:
    """The choice is made on the CPU for attention on the device."""
    path = random_model(Sizes(top_k=12, index_size=136), "glm-dsa").write(tmp_path / "model.gguf")
    context = hold(path, PLACES["whole"], mla=1, flash_attn=True)
    assert context.devices is not None and set(context.devices.cache_bytes()) == {"CPU", "CUDA0"}


def test_a_prompt_whose_latents_are_expanded(tmp_path: Path, cuda_devices: int) -> None:
    """Some scores of so many are nearly equal: their cells may change places where products round in another way."""
    path = random_model(Sizes(top_k=8, index_heads=8), "glm-dsa").write(tmp_path / "model.gguf")
    batch = Batch.single(np.random.default_rng(3).integers(0, N_VOCAB, 150), logits="all")
    truth, ours = (context_on(path, place, mla=3).decode(batch) for place in (ON_CPU, PLACES["whole"]))
    error = np.sort(np.abs(ours - truth).max(1)) / np.abs(truth).max()
    assert error[len(error) * 9 // 10] <= TOLERANCE, f"of nine tokens in ten the worst is off by {error}"


@pytest.mark.parametrize("where", ["whole", "experts on the CPU", "caches on the CPU", "two layers"])
def test_blocks_of_cells(where: str, tmp_path: Path, cuda_devices: int) -> None:
    """MiniMax M3: an index head for each KV head."""
    path = minimax_m3_model.random_model(minimax_m3_model.Sizes()).write(tmp_path / "model.gguf")
    hold(path, PLACES[where], flash_attn=True)


@pytest.mark.parametrize(("n_tokens", "listed"), [(1, True), (2, False)])
def test_blocks_are_chosen_on_the_device(n_tokens: int, listed: bool, tmp_path: Path, cuda_devices: int) -> None:
    sizes = minimax_m3_model.Sizes()
    path = minimax_m3_model.random_model(sizes).write(tmp_path / "model.gguf")
    nodes = kinds_on(context_on(path, PLACES["whole"]), n_tokens, "CUDA0")
    lists = [node for node in nodes if node.kind == "attention" and node.src[7] is not None]
    assert any(node.kind == "choose_blocks" for node in nodes)
    assert bool(lists) == listed == (not any(node.kind == "chosen_mask" for node in nodes))


@pytest.mark.parametrize("mla", [0, 1, 3])
@pytest.mark.parametrize("where", ["whole", "caches on the CPU", "two layers"])
def test_windows_beside_indexers(where: str, mla: int, tmp_path: Path, cuda_devices: int) -> None:
    """dots3 note: latents of two sizes, of which those of windows have cells of their own."""
    path = dots3note_model.random_model(dots3note_model.Sizes()).write(tmp_path / "model.gguf")
    hold(path, PLACES[where], mla=mla, flash_attn=True)


def kinds_on(context: Context, n_tokens: int, device: str) -> list[Node]:
    """Nodes of a batch on a device."""
    assert context.devices is not None
    nodes, results = context._graphs.nodes(n_tokens, 1)
    kept = {value.buffer for value in results if value is not None}
    return [step.node for step in context.devices.split(nodes, kept).steps(device)]


@pytest.mark.parametrize(("n_tokens", "listed"), [(1, True), (8, True), (9, False)])
def test_what_runs_on_the_device(n_tokens: int, listed: bool, tmp_path: Path, cuda_devices: int) -> None:
    """All of it: few tokens attend to lists, more to masks."""
    path = random_model(Sizes(top_k=12), "deepseek32").write(tmp_path / "model.gguf")
    nodes = kinds_on(context_on(path, PLACES["whole"], mla=1), n_tokens, "CUDA0")
    attention = [node for node in nodes if node.kind == "attention"]
    assert len(attention) == 3 == sum(node.kind == "choose_cells" for node in nodes)
    assert all((node.src[7] is not None) == listed for node in attention)
    assert any(node.kind == "chosen_mask" for node in nodes) != listed
