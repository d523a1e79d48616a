"""Models on devices whose prediction layers, which are on the CPU, read states of residual streams or before a norm."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.head_draft import HeadDraft
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.engine.sampling import Sampler
from ikpy.engine.sampling_params import SamplingParams
from ikpy.engine.speculative import SpeculativeParams, Speculator
from ikpy.graph.placement import PlacementParams
from ikpy.tools.generation import GrowingSequence
from tests.cpu.models.definition_checks import TOKENS
from tests.cpu.models.prediction_models import MODELS
from tests.cpu.models.reference_models import N_VOCAB
from tests.cuda.models import emulated

TOLERANCE = 3e-3  # other formats of activations and other orders of sums than the CPU's
ON_CPU = PlacementParams(n_gpu_layers=0)
PLACES = {
    "whole": PlacementParams(split_mode="none"),
    "two devices": PlacementParams(tensor_split=(1.0, 1.0)),
    "heads and networks divided": PlacementParams(split_mode="graph", tensor_split=(1.0, 1.0)),
}
NAMES = ["mimo2", "qwen4exp", "glm5-next", "nemotron_h_moe with latent experts", "deepseek4"]


def context_on(path: Path, placement: PlacementParams, **more: object) -> Context:
    settings = {"n_ctx": 256, "n_threads": 2, "n_ubatch": 16, "token_states": True, **more}
    return Context(Model.load(path, ModelParams(placement=placement)), ContextParams(**settings))  # type: ignore[arg-type]


def states_of(context: Context) -> np.ndarray:
    """Of all tokens, of which few have logits."""
    context.decode(Batch.single(TOKENS))
    assert context.token_states is not None
    return context.token_states


@pytest.mark.parametrize("name", NAMES)
def test_states_and_logits_of_heads(name: str, tmp_path: Path) -> None:
    path = MODELS[name]().model.write(tmp_path / "model.gguf")
    truth = states_of(context_on(path, ON_CPU))
    head = Context(Model.load(path).prediction_head(), ContextParams(n_ctx=256, n_threads=1))
    wanted = head.decode(Batch.single(TOKENS[1:], logits="all"), truth[:-1])
    for place, placement in PLACES.items():
        with emulated(2):
            context = context_on(path, placement)
            found = states_of(context)
            error = np.abs(found - truth).max(axis=1) / np.abs(truth).max()
            assert np.median(error) < TOLERANCE, f"{place}: token {error.argmax()} is off by {error.max():.1e}"
            on_devices = Context(context.model.prediction_head(), ContextParams(n_ctx=256, n_threads=1))
            logits = on_devices.decode(Batch.single(TOKENS[1:], logits="all"), truth[:-1])
        np.testing.assert_array_equal(logits, wanted)


@pytest.mark.parametrize("name", ["mimo2", "deepseek4"])
def test_texts_are_those_without_drafts(name: str, tmp_path: Path) -> None:
    path = MODELS[name]().model.write(tmp_path / "model.gguf")
    texts = []
    for drafts in (False, True):
        with emulated(2):
            main = context_on(path, PLACES["two devices"], token_states=drafts, n_kept_states=3 if drafts else 0)
            heads = [Context(h, ContextParams(n_ctx=256, embeddings=True)) for h in main.model.prediction_heads()]
            speculator = Speculator([HeadDraft(*heads, p_min=0.0, n_ctx=256)], SpeculativeParams(n_max=3))
            sequence = GrowingSequence(main, speculator=speculator if drafts else None)
            sampler = Sampler(SamplingParams(temperature=0.0), N_VOCAB)
            texts.append(list(islice(sequence.generate(sampler, sequence.feed(TOKENS.tolist()), frozenset()), 24)))
    assert texts[0] == texts[1] and speculator.n_drafted > 20
