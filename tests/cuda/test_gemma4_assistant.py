"""Drafters of Gemma 4, which are on the CPU, beside models on devices whose caches they read."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from ikpy.backends.cuda.emulated import EmulatedStream
from ikpy.engine.assistant_draft import AssistantDraft
from ikpy.engine.batch import Batch
from ikpy.engine.cache_reader import CacheReader
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.engine.reading_layer import cache_reading_layers
from ikpy.engine.sampling import Sampler
from ikpy.engine.sampling_params import SamplingParams
from ikpy.engine.speculative import SpeculativeParams, Speculator
from ikpy.graph.placement import PlacementParams
from ikpy.models import silent
from ikpy.tools.generation import GrowingSequence
from tests.cpu.models import gemma4_assistant_model as assistant
from tests.cpu.models.definition_checks import TOKENS
from tests.cpu.models.reference_models import N_VOCAB
from tests.cuda.models import emulated

TOLERANCE = 1e-2  # other formats of activations and other orders of sums than the CPU's
ON_CPU = PlacementParams(n_gpu_layers=0)
PLACES = {
    "whole": PlacementParams(split_mode="none"),
    "some layers": PlacementParams(n_gpu_layers=4, split_mode="none"),
    "caches in host memory": PlacementParams(split_mode="none", kv_offload=False),
    "two devices": PlacementParams(tensor_split=(1.0, 1.0)),
    "heads and networks divided": PlacementParams(split_mode="graph", tensor_split=(1.0, 1.0)),
}


def pair(tmp_path: Path, placement: PlacementParams) -> tuple[Model, Model]:
    """The model and its drafter."""
    paths = tmp_path / "model.gguf", tmp_path / "draft.gguf"
    if not paths[0].exists():
        assistant.target().write(paths[0])
        assistant.drafter().write(paths[1])
    model = Model.load(paths[0], ModelParams(placement=placement))
    return model, cache_reading_layers(model, paths[1])


def settings(**more: object) -> ContextParams:
    values = {"n_ctx": 256, "n_threads": 2, "n_ubatch": 16, "token_states": True}
    return ContextParams(**{**values, **more})  # type: ignore[arg-type]


def guessed(tmp_path: Path, placement: PlacementParams) -> np.ndarray:
    """Logits of two tokens of a draft."""
    model, layers = pair(tmp_path, placement)
    context = Context(model, settings())
    context.decode(Batch.single(TOKENS, logits="none"))
    assert context.token_states is not None
    reader, state, found = CacheReader(layers, context, 1, silent), context.token_states[-1], []
    reader.refresh(0)
    for token in (9, 77):
        logits, state = reader.evaluate(token, len(TOKENS), 0, state)
        found.append(logits)
    return np.stack(found)


@pytest.mark.parametrize("place", PLACES)
def test_guesses(place: str, tmp_path: Path) -> None:
    truth = guessed(tmp_path, ON_CPU)
    with emulated(2):
        found = guessed(tmp_path, PLACES[place])
    error = np.abs(found - truth).max(axis=1) / np.abs(truth).max()
    assert error.max() < TOLERANCE, f"token {error.argmax()} is off by {error.max():.1e}"


@pytest.mark.parametrize("place", ["whole", "two devices", "heads and networks divided"])
def test_what_is_copied(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the caches that are read the cells of the sequence, and nothing else of the context's."""
    copied: list[int] = []
    download = EmulatedStream.download

    def counted(stream: EmulatedStream, target: np.ndarray, source: int) -> None:
        copied.append(target.nbytes)
        download(stream, target, source)

    with emulated(2):
        model, layers = pair(tmp_path, PLACES[place])
        context = Context(model, settings(n_seq_max=2))
        for seq_id, n in ((0, 20), (1, 9)):
            context.decode(Batch.single(TOKENS[:n], 0, seq_id, "none"))
        reader = CacheReader(layers, context, 1, silent)
        read = [(key, value) for key, value in context.kv.tensors.items() if key[0] in set(layers.arch.cache_layers)]
        monkeypatch.setattr(EmulatedStream, "download", counted)
        for seq_id in (0, 1):
            copied.clear()
            reader.refresh(seq_id)
            wanted = 0
            for key, value in read:
                cells = context.kv.cells[context.kv.window_of[key]]
                wanted += int(cells.matching(seq_id, -1, -1).sum()) * value.strides[2]
            assert sum(copied) == wanted > 0, f"sequence {seq_id}: {sum(copied)} bytes instead of {wanted}"


@pytest.mark.parametrize("place", ["some layers", "two devices", "heads and networks divided"])
def test_texts_are_those_without_drafts(place: str, tmp_path: Path) -> None:
    texts = []
    for drafts in (False, True):
        with emulated(2):
            model, layers = pair(tmp_path, PLACES[place])
            main = Context(model, settings(token_states=drafts))
            drafter = AssistantDraft(CacheReader(layers, main, 1, silent), p_min=0.0)
            speculator = Speculator([drafter], SpeculativeParams(n_max=3))
            sequence = GrowingSequence(main, speculator=speculator if drafts else None)
            sampler = Sampler(SamplingParams(temperature=0.0), N_VOCAB)
            texts.append(list(islice(sequence.generate(sampler, sequence.feed(TOKENS.tolist()), frozenset()), 24)))
    assert texts[0] == texts[1] and speculator.n_drafted > 20
