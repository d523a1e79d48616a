"""Drafters of Gemma 4: their layers over the caches of the model, drafts, errors, programs."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.cli import main
from ikpy.engine.assistant_draft import AssistantDraft
from ikpy.engine.batch import Batch
from ikpy.engine.cache_reader import CacheReader
from ikpy.engine.context import Context
from ikpy.engine.media import MediaStore
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.engine.reading_layer import cache_reading_layers
from ikpy.engine.sampling import Sampler
from ikpy.engine.sampling_params import SamplingParams
from ikpy.engine.speculative import SpeculativeParams, Speculator
from ikpy.errors import IkpyError, UsageError
from ikpy.llm import LLM
from ikpy.models import silent
from ikpy.tools.generation import GrowingSequence
from ikpy.tools.speculation import DraftFiles
from ikpy.vision.rows import MediaRows
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import eagle3_model as eagle3
from tests.cpu.models import gemma4_assistant_model as assistant
from tests.cpu.models.definition_checks import LONG, TOKENS
from tests.cpu.models.reference_models import N_VOCAB, RandomModel

BOUND = 5e-5


def settings(**more: Any) -> ContextParams:
    return ContextParams(
        **{"n_ctx": 256, "n_threads": 1, "type_k": "f32", "type_v": "f32", "token_states": True, **more}
    )


@pytest.fixture
def made(tmp_path: Path) -> tuple[RandomModel, RandomModel, Model, Model]:
    of, draft = assistant.target(), assistant.drafter(clusters=True)
    model = Model.load(of.write(tmp_path / "model.gguf"))
    return of, draft, model, cache_reading_layers(model, draft.write(tmp_path / "draft.gguf"))


@pytest.mark.parametrize("flash", [False, True], ids=["plain", "flash"])
def test_definition(flash: bool, made: tuple[RandomModel, RandomModel, Model, Model]) -> None:
    """States of the model, and what the drafter makes of them and of the caches, in windows that have cells of their
    own; another sequence lies beside the text.
    """
    of, draft, model, layers = made
    for swa_full in (False, True):
        context = Context(model, settings(flash_attn=flash, n_seq_max=2, n_batch=32, swa_full=swa_full))
        context.decode(Batch.single(LONG[50:77], 0, 1, logits="none"))
        for start in (0, 32):
            context.decode(Batch.single(LONG[start : start + 32], start, logits="none"))
        read = assistant.evaluate(of, LONG[:64])
        assert context.token_states is not None
        checks.hold("states", context.token_states, read.states[32:], BOUND)
        reader = CacheReader(layers, context, 1, silent)
        state, wanted = context.token_states[-1], read.states[-1]
        for token in (9, 77):
            found, state = reader.evaluate(token, 64, 0, state)
            truth, wanted = assistant.guess(draft, of, read, token, 64, wanted)
            checks.hold("logits", found[None], truth[None], BOUND)
            checks.hold("its state", state[None], wanted[None], BOUND)


@pytest.mark.parametrize("changes", [{"type_k": "q8_0", "type_v": "q8_0", "k_hadamard": True}, {"type_k": "f16"}])
def test_cache_types(changes: dict[str, Any], made: tuple[RandomModel, RandomModel, Model, Model]) -> None:
    of, draft, model, layers = made
    context = Context(model, settings(**changes))
    context.decode(Batch.single(TOKENS, logits="none"))
    assert context.token_states is not None
    found, _ = CacheReader(layers, context, 1, silent).evaluate(9, len(TOKENS), 0, context.token_states[-1])
    read = assistant.evaluate(of, TOKENS)
    truth, _ = assistant.guess(draft, of, read, 9, len(TOKENS), read.states[-1])
    checks.hold("logits", found[None], truth[None], 0.06)


def test_drafts(made: tuple[RandomModel, RandomModel, Model, Model]) -> None:
    of, draft, model, layers = made
    context = Context(model, settings(n_batch=16))
    drafter, text, start = AssistantDraft(CacheReader(layers, context, 1, silent), p_min=0.0), LONG.tolist(), 0
    assert drafter.draft(text[:3], 4) == []
    for end in (9, 10, 26, 38):
        context.decode(Batch.single(text[start:end], start, logits="none"))
        assert context.token_states is not None
        drafter.observe(text[:end], context.token_states)
        assert drafter.draft(text[: end + 1], 4) == assistant.guesses(draft, of, text[: end + 1], 4)
        assert drafter.draft(text[: end + 1], 4, p_min=1.0) == []
        start = end


def test_texts_are_those_without_drafts(made: tuple[RandomModel, RandomModel, Model, Model]) -> None:
    """Behind a text that outgrows the context as well, where the caches move."""
    _, _, model, layers = made
    texts = []
    for drafts in (False, True):
        context = Context(model, settings(token_states=drafts))
        speculator = None
        if drafts:
            drafter = AssistantDraft(CacheReader(layers, context, 1, silent), p_min=0.0)
            speculator = Speculator([drafter], SpeculativeParams(n_max=3))
        sequence = GrowingSequence(context, speculator=speculator)
        sampler = Sampler(SamplingParams(temperature=0.0), N_VOCAB)
        texts.append(list(islice(sequence.generate(sampler, sequence.feed(TOKENS.tolist()), frozenset()), 300)))
    assert texts[0] == texts[1]
    assert speculator is not None and speculator.n_drafted > 500


def test_behind_a_picture(made: tuple[RandomModel, RandomModel, Model, Model]) -> None:
    """Guesses where a picture stands in the caches, at the end of the text or within it; nothing else is needed."""
    of, draft, model, layers = made
    values = np.random.default_rng(6).normal(0, 1, (7, assistant.D)).astype(np.float32)
    store = MediaStore(N_VOCAB, 1 << 20)
    ids = [5, 9, *store.add(b"picture", lambda: MediaRows(values, (1, 7), False)), 11, 12, 13]
    context = Context(model, settings(media=store))
    drafter, start = AssistantDraft(CacheReader(layers, context, 1, silent), p_min=0.0), 0
    for end in (9, 10, 11):
        context.decode(Batch.single(ids[start:end], start, logits="none"))
        assert context.token_states is not None
        drafter.observe(ids[:end], context.token_states)
        text = [0 if token >= N_VOCAB else token for token in ids[: end + 1]]
        assert drafter.draft(ids[: end + 1], 4) == assistant.guesses(draft, of, text, 4, {2: values})
        start = end


def test_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(assistant.target().write(tmp_path / "model.gguf"))
    draft = str(assistant.drafter().write(tmp_path / "draft.gguf"))
    common = ["-p", "word9 word10", "-n", "8", "--temp", "0", "-t", "1", "-c", "128", "-no-cnv"]
    assert main(["cli", "-m", model, *common]) == 0
    text = capsys.readouterr().out
    small = str(tmp_path / "small.gguf")
    assert main(["quantize", draft, small, "Q8_0"]) == 0
    capsys.readouterr()
    for name, file in (("mtp", draft), ("draft-mtp", small)):
        assert main(["cli", "-m", model, "-md", file, "--spec-type", name, "--draft-p-min", "0", *common]) == 0
        shown = capsys.readouterr()
        assert shown.out == text and "statistics mtp" in shown.err
    params = SpeculativeParams(types=("mtp",), p_min=0.0)
    llm = LLM(model, speculative=params, draft_files=DraftFiles(draft), n_ctx=128, n_threads=1)
    llm.generate("word9 word10", 8)
    assert llm.speculator is not None and llm.speculator.n_drafted > 0


def test_errors(tmp_path: Path) -> None:
    model = str(assistant.target().write(tmp_path / "model.gguf"))
    draft = str(assistant.drafter().write(tmp_path / "draft.gguf"))

    def run(types: tuple[str, ...], path: str | None, of: str = model) -> None:
        files = None if path is None else DraftFiles(path)
        LLM(of, speculative=SpeculativeParams(types=types), draft_files=files, n_ctx=128, n_threads=1)

    for types in ((), ("draft",)):
        with pytest.raises(UsageError, match="reads caches of a model: --spec-type mtp drafts from it"):
            run(types, draft)
    with pytest.raises(UsageError, match="reads caches of a Gemma 4 model; give it with -md and --spec-type mtp"):
        LLM(draft)
    other = str(eagle3.target().write(tmp_path / "other.gguf"))
    with pytest.raises(UsageError, match=r"reads caches of a gemma4 model; .* is one of architecture llama"):
        run(("mtp",), draft, other)
    for key, value, message in (
        ("embedding_length_out", 48, "tensor 'nextn.p.*' has wrong shape"),
        ("attention.sliding_window", 8, "layer 0 of the drafter has 6 heads of 32 and a window of 8"),
        ("expert_count", 4, "expert_count 4: drafters have none"),
        ("embedding_length_per_layer_input", 16, "embedding_length_per_layer_input 16: drafters have none"),
    ):
        changed = assistant.drafter()
        changed.keys |= {key: value} | ({"expert_used_count": 2} if key == "expert_count" else {})
        with pytest.raises(IkpyError, match=message):
            run(("mtp",), str(changed.write(tmp_path / "changed.gguf")))
