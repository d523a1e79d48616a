"""Models on devices that give what an EAGLE-3 drafter, which is on the CPU or beside them, reads of their layers."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.engine.reading_draft import ReadingDraft
from ikpy.engine.reading_layer import reading_layer
from ikpy.engine.sampling import Sampler
from ikpy.engine.sampling_params import SamplingParams
from ikpy.engine.speculative import SpeculativeParams, Speculator
from ikpy.graph.placement import PlacementParams
from ikpy.tools.generation import GrowingSequence
from tests.cpu.models import eagle3_model as eagle3
from tests.cpu.models.definition_checks import TOKENS
from tests.cpu.models.reference_models import N_VOCAB
from tests.cuda.models import emulated

TOLERANCE = 3e-3  # other formats of activations and other orders of sums than the CPU's
ON_CPU = PlacementParams(n_gpu_layers=0)
PLACES = {
    "whole": PlacementParams(split_mode="none"),
    "some layers": PlacementParams(n_gpu_layers=3, split_mode="none"),
    "two devices": PlacementParams(tensor_split=(1.0, 1.0)),
    "heads and networks divided": PlacementParams(split_mode="graph", tensor_split=(1.0, 1.0)),
}


def pair(tmp_path: Path, placement: PlacementParams) -> tuple[Model, Model]:
    """The model and its drafter."""
    paths = tmp_path / "model.gguf", tmp_path / "draft.gguf"
    if not paths[0].exists():
        eagle3.target().write(paths[0])
        eagle3.drafter(own=False).write(paths[1])
    model = Model.load(paths[0], ModelParams(placement=placement))
    return model, reading_layer(model, paths[1])


def settings(**more: object) -> ContextParams:
    return ContextParams(**{"n_ctx": 256, "n_threads": 2, "n_ubatch": 16, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("logits", ["all", "last", "none"])
def test_what_the_drafter_reads(place: str, logits: str, tmp_path: Path) -> None:
    context = Context(pair(tmp_path, ON_CPU)[0], settings(token_states=True))
    context.decode(Batch.single(TOKENS, logits=logits))
    truth = context.token_states
    with emulated(2):
        context = Context(pair(tmp_path, PLACES[place])[0], settings(token_states=True))
        context.decode(Batch.single(TOKENS, logits=logits))
        found = context.token_states
    assert found is not None and truth is not None and found.shape == truth.shape
    error = np.abs(found - truth).max(axis=1) / np.abs(truth).max()
    assert error.max() < TOLERANCE, f"token {error.argmax()} is off by {error.max():.1e}"


@pytest.mark.parametrize("place", ["some layers", "two devices", "heads and networks divided"])
def test_texts_are_those_without_drafts(place: str, tmp_path: Path) -> None:
    texts = []
    for drafts in (False, True):
        with emulated(2):
            model, head = pair(tmp_path, PLACES[place])
            context = Context(head, settings(embeddings=True))
            speculator = Speculator([ReadingDraft(context, None, p_min=0.0, n_ctx=256)], SpeculativeParams(n_max=3))
            main = Context(model, settings(token_states=drafts))
            sequence = GrowingSequence(main, speculator=speculator if drafts else None)
            sampler = Sampler(SamplingParams(temperature=0.0), N_VOCAB)
            texts.append(list(islice(sequence.generate(sampler, sequence.feed(TOKENS.tolist()), frozenset()), 24)))
    assert texts[0] == texts[1] and speculator.n_drafted > 20
