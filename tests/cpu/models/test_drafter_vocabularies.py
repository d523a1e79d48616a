"""Drafters of files of their own whose vocabulary is a part of the model's, or has more tokens."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.engine.sampling import Sampler
from ikpy.engine.sampling_params import SamplingParams
from ikpy.engine.speculative import SpeculativeParams, Speculator
from ikpy.errors import UsageError
from ikpy.tools.generation import GrowingSequence
from ikpy.tools.speculation import DraftFiles, make_speculation, prepare_model
from ikpy.vocab import Vocab
from tests.cpu.models import dflash_model as dflash
from tests.cpu.models import eagle3_model as eagle3
from tests.cpu.models import gemma4_assistant_model as assistant
from tests.cpu.models import reference_models as ref
from tests.cpu.models.reference_models import RandomModel

KINDS: dict[str, tuple[Any, Any]] = {
    "eagle3": (eagle3.target, lambda: eagle3.drafter(own=True)),
    "dflash": (eagle3.target, lambda: dflash.drafter(own=True)),
    "dspark": (eagle3.target, lambda: dflash.drafter(own=True, markov="anchor")),
    "mtp": (assistant.target, assistant.drafter),
}
FEWER, MORE = 100, 200
PROMPT = list(range(9, 30))
SIZES: dict[str, Any] = {"n_ctx": 256, "n_threads": 1}


def files(kind: str, n_vocab: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """The model and a drafter of so many tokens."""
    target, drafter = KINDS[kind]
    model = target().write(folder / "model.gguf")
    for module in (ref, eagle3, dflash, assistant):
        monkeypatch.setattr(module, "N_VOCAB", n_vocab)
    made: RandomModel = drafter()
    return str(model), str(made.write(folder / "draft.gguf"))


def greedy(
    model: str, prompt: list[int], n: int, kind: str = "", draft: str = ""
) -> tuple[list[int], Speculator | None]:
    """A text behind a prompt, with or without drafts."""
    loaded, speculator = Model.load(model), None
    params = SpeculativeParams(types=(kind,), p_min=0.0, n_max=3)
    has_states = bool(kind) and prepare_model(params.types, DraftFiles(draft), loaded)
    context = Context(loaded, ContextParams(**SIZES, token_states=has_states))
    if kind:
        vocab = Vocab.from_metadata(loaded.gguf.metadata)
        own = ContextParams(**SIZES)
        made = make_speculation(params, vocab, DraftFiles(draft), draft_params=own, model=loaded, context=context)
        assert made is not None
        speculator = made.speculator()
    sequence, sampler = GrowingSequence(context, speculator=speculator), Sampler(SamplingParams(temperature=0.0), 160)
    return list(islice(sequence.generate(sampler, sequence.feed(prompt), frozenset()), n)), speculator


@pytest.mark.parametrize("kind", KINDS)
def test_fewer(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts go on behind tokens that the drafter does not know, with drafts until then."""
    model, draft = files(kind, FEWER, tmp_path, monkeypatch)
    wanted, _ = greedy(model, PROMPT, 60)
    found, _ = greedy(model, PROMPT, 60, kind, draft)
    assert found == wanted and max(wanted) >= FEWER
    for last, drafts in ((12, True), (FEWER, kind == "mtp")):
        _, speculator = greedy(model, PROMPT, 1, kind, draft)
        assert speculator is not None
        assert bool(speculator.drafters[0].draft([*PROMPT, last], 3)) == drafts


@pytest.mark.parametrize("kind", KINDS)
def test_more(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model could not read what is guessed."""
    model, draft = files(kind, MORE, tmp_path, monkeypatch)
    with pytest.raises(UsageError, match="guesses 200 tokens, the model knows 160: it needs the same vocabulary"):
        greedy(model, PROMPT, 9, kind, draft)
