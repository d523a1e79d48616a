"""DFlash and DSpark drafters, which are on the CPU, beside models on devices."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from ikpy.engine.block_draft import BlockDraft
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.engine.reading_layer import reading_layer
from ikpy.engine.sampling import Sampler
from ikpy.engine.sampling_params import SamplingParams
from ikpy.engine.speculative import SpeculativeParams, Speculator
from ikpy.graph.placement import PlacementParams
from ikpy.tools.generation import GrowingSequence
from tests.cpu.models import dflash_model as dflash
from tests.cpu.models import eagle3_model as eagle3
from tests.cpu.models.definition_checks import TOKENS
from tests.cpu.models.reference_models import N_VOCAB
from tests.cuda.models import emulated

PLACES = {
    "some layers": PlacementParams(n_gpu_layers=3, split_mode="none"),
    "two devices": PlacementParams(tensor_split=(1.0, 1.0)),
    "heads and networks divided": PlacementParams(split_mode="graph", tensor_split=(1.0, 1.0)),
}
SIZES = {"n_ctx": 256, "n_threads": 2}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("markov", ["", "anchor"], ids=["dflash", "dspark"])
def test_texts_are_those_without_drafts(markov: str, place: str, tmp_path: Path) -> None:
    eagle3.target().write(tmp_path / "model.gguf")
    dflash.drafter(markov=markov).write(tmp_path / "draft.gguf")
    texts = []
    for drafts in (False, True):
        with emulated(2):
            model = Model.load(tmp_path / "model.gguf", ModelParams(placement=PLACES[place]))
            layers = reading_layer(model, tmp_path / "draft.gguf")
            own = ContextParams(**SIZES, n_batch=64, n_ubatch=64, embeddings=True, swa_full=True)
            drafter = BlockDraft(Context(layers, own), p_min=0.0, n_ctx=256)
            speculator = Speculator([drafter], SpeculativeParams(n_max=3))
            main = Context(model, ContextParams(**SIZES, n_ubatch=16, token_states=drafts))
            sequence = GrowingSequence(main, speculator=speculator if drafts else None)
            sampler = Sampler(SamplingParams(temperature=0.0), N_VOCAB)
            texts.append(list(islice(sequence.generate(sampler, sequence.feed(TOKENS.tolist()), frozenset()), 24)))
    assert texts[0] == texts[1] and speculator.n_drafted > 20
