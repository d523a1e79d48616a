"""DFlash and DSpark drafters on the CPU and on devices, beside models on both."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from ikpy.backends.cuda.lowering import CudaKernels
from ikpy.engine.block_draft import BlockDraft
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.engine.reading_layer import reading_layer
from ikpy.engine.sampling import Sampler
from ikpy.engine.sampling_params import SamplingParams
from ikpy.engine.speculative import SpeculativeParams, Speculator
from ikpy.graph.ir import Node
from ikpy.graph.placement import PlacementParams
from ikpy.tools.generation import GrowingSequence
from tests.cpu.models import dflash_model as dflash
from tests.cpu.models import eagle3_model as eagle3
from tests.cpu.models.definition_checks import TOKENS
from tests.cpu.models.reference_models import N_VOCAB
from tests.cuda.models import emulated

ON_CPU = PlacementParams(n_gpu_layers=0)
PLACES = {
    "CPU": ON_CPU,
    "some layers": PlacementParams(n_gpu_layers=3, split_mode="none"),
    "two devices": PlacementParams(tensor_split=(1.0, 1.0)),
    "heads and networks divided": PlacementParams(split_mode="graph", tensor_split=(1.0, 1.0)),
}
DRAFTERS = {
    "CPU": ON_CPU,
    "CUDA1": PlacementParams(split_mode="none", main_gpu=1),
    "last layer": PlacementParams(n_gpu_layers=2, split_mode="none"),
    "cache in host memory": PlacementParams(split_mode="none", kv_offload=False),
}
KINDS = {
    "dflash": {},
    "dspark": {"markov": "anchor"},
    "dspark of some tokens, with windows": {"markov": "bonus", "own": True, "windows": True},
    "dflash 2": {"selector": True},
}
SIZES = {"n_ctx": 256, "n_threads": 2}


def generated(folder: Path, place: PlacementParams, own: PlacementParams | None) -> tuple[list[int], int, int]:
    """24 tokens, the guesses of them, and those that were right. own: where the drafter is, None for no drafts."""
    model = Model.load(folder / "model.gguf", ModelParams(placement=place))
    speculator = None
    if own is not None:
        layers = reading_layer(model, folder / "draft.gguf", ModelParams(placement=own))
        sizes = ContextParams(**SIZES, n_batch=64, n_ubatch=64, embeddings=True, swa_full=True)
        drafter = BlockDraft(Context(layers, sizes), p_min=0.0, n_ctx=256)
        speculator = Speculator([drafter], SpeculativeParams(n_max=3))
    main = Context(model, ContextParams(**SIZES, n_ubatch=16, token_states=own is not None))
    sequence = GrowingSequence(main, speculator=speculator)
    sampler = Sampler(SamplingParams(temperature=0.0), N_VOCAB)
    text = list(islice(sequence.generate(sampler, sequence.feed(TOKENS.tolist()), frozenset()), 24))
    return (text, speculator.n_drafted, speculator.n_accepted) if speculator else (text, 0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_cpu(kind: str, tmp_path: Path) -> None:
    """As many guesses, and as many right ones, wherever model and drafter are; the text is that without drafts."""
    eagle3.target().write(tmp_path / "model.gguf")
    dflash.drafter(**KINDS[kind]).write(tmp_path / "draft.gguf")  # type: ignore[arg-type]
    plain, _, _ = generated(tmp_path, ON_CPU, None)
    truth = generated(tmp_path, ON_CPU, ON_CPU)
    assert truth[0] == plain and truth[1] > 20
    for place, own in [*((place, "CUDA1") for place in PLACES), *(("two devices", own) for own in DRAFTERS)]:
        with emulated(2) as kernels:
            found = generated(tmp_path, PLACES[place], DRAFTERS[own])
            assert kernels.launched
        assert found == truth, f"model: {place}, drafter: {own}: {found[1:]} instead of {truth[1:]}"


@pytest.mark.parametrize("kind", KINDS)
def test_all_nodes_have_kernels(kind: str, tmp_path: Path) -> None:
    """Those of CUDA run every node of a drafter but the look-up of embeddings."""
    eagle3.target().write(tmp_path / "model.gguf")
    dflash.drafter(**KINDS[kind]).write(tmp_path / "draft.gguf")  # type: ignore[arg-type]
    kernels, missing = CudaKernels([(8, 0)]), list[str]()

    def unsupported(node: Node) -> str | None:
        if reason := kernels.supports(node):
            missing.append(f"{node.kind}: {reason}")
        return None

    with emulated(1, unsupported=unsupported):
        generated(tmp_path, ON_CPU, PlacementParams(split_mode="none"))
    assert not missing, missing
