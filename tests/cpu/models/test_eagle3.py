"""EAGLE-3: what a model gives its drafter, the drafter's layer, drafts, errors, programs."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.cli import main
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.engine.reading_draft import ReadingDraft
from ikpy.engine.reading_layer import reading_layer
from ikpy.engine.sampling import Sampler
from ikpy.engine.sampling_params import SamplingParams
from ikpy.engine.speculative import SpeculativeParams, Speculator
from ikpy.errors import IkpyError, UsageError
from ikpy.llm import LLM
from ikpy.tools.generation import GrowingSequence
from ikpy.tools.speculation import DraftFiles
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import eagle3_model as eagle3
from tests.cpu.models.definition_checks import LONG, TOKENS
from tests.cpu.models.reference_models import N_VOCAB, RandomModel

BOUND = 5e-5
FORMS = {"own": {"own": True}, "shared": {"own": False}, "normed": {"own": True, "norms_residual": True}}


def settings(**more: Any) -> ContextParams:
    return ContextParams(**{"n_ctx": 256, "n_threads": 1, "type_k": "f32", "type_v": "f32", **more})


@pytest.fixture(params=FORMS)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[RandomModel, RandomModel, Model, Model]:
    of, draft = eagle3.target(), eagle3.drafter(**FORMS[request.param])
    model = Model.load(of.write(tmp_path / "model.gguf"))
    return of, draft, model, reading_layer(model, draft.write(tmp_path / "draft.gguf"))


def test_definition(made: tuple[RandomModel, RandomModel, Model, Model]) -> None:
    """States that the model gives, whatever logits are wanted, and the layer that reads them, in pieces."""
    of, draft, model, head = made
    states = eagle3.inputs_of_layers(of, TOKENS) @ draft.weights["fc"].astype(np.float64).T
    plain = Context(Model.load(model.gguf.path), settings(n_ubatch=13)).decode(Batch.single(TOKENS, logits="all"))
    for logits in ("all", "last", "none"):
        context = Context(model, settings(token_states=True, n_ubatch=13))
        found = context.decode(Batch.single(TOKENS, logits=logits))
        assert context.token_states is not None
        checks.hold(f"states, logits of {logits}", context.token_states, states, BOUND)
        if logits == "all":
            np.testing.assert_array_equal(found, plain)
    truth, further = eagle3.layer(draft, of, TOKENS[1:], states[:-1])
    rows = np.ascontiguousarray(states[:-1], np.float32)
    for n_ubatch in (512, 7):
        context = Context(head, settings(embeddings=True, n_ubatch=n_ubatch))
        checks.hold("logits", context.decode(Batch.single(TOKENS[1:], logits="all"), rows), truth, BOUND)
        assert context.embeddings is not None
        checks.hold("its states", context.embeddings, further, BOUND)


def wanted(of: RandomModel, draft: RandomModel, text: list[int], n: int) -> list[int]:
    """Guesses behind a text by the definition."""
    ids = draft.weights.get("d2t", np.arange(N_VOCAB))
    fc = draft.weights["fc"].astype(np.float64)
    inputs = (eagle3.inputs_of_layers(of, np.array(text)) @ fc.T)[:-1]
    tokens, found = text[1:], list[int]()
    for _ in range(n):
        logits, further = eagle3.layer(draft, of, np.array(tokens + found), inputs)
        found.append(int(ids[logits[-1].argmax()]))
        inputs = np.concatenate([inputs, further[-1:]])
    return found


def test_drafts(made: tuple[RandomModel, RandomModel, Model, Model]) -> None:
    of, draft, model, head = made
    context = Context(head, settings(embeddings=True, n_batch=16))
    drafter = ReadingDraft(context, getattr(head.arch, "target_tokens"), p_min=0.0, n_ctx=256)  # noqa: B009
    text, reader = LONG.tolist(), Context(model, settings(token_states=True))
    start = 0
    for end in (9, 10, 38, 41):
        reader.decode(Batch.single(text[start:end], start, logits="none"))
        assert reader.token_states is not None
        drafter.observe(text[:end], reader.token_states)
        assert drafter.draft(text[: end + 1], 3) == wanted(of, draft, text[: end + 1], 3)
        start = end


def test_texts_are_those_without_drafts(made: tuple[RandomModel, RandomModel, Model, Model]) -> None:
    _, _, model, head = made
    texts = []
    for drafts in (False, True):
        drafter = ReadingDraft(
            Context(head, settings(embeddings=True)),
            head.arch.target_tokens,
            p_min=0.0,
            n_ctx=256,
        )
        speculator = Speculator([drafter], SpeculativeParams(n_max=3)) if drafts else None
        sequence = GrowingSequence(Context(model, settings(token_states=drafts)), speculator=speculator)
        sampler = Sampler(SamplingParams(temperature=0.0), N_VOCAB)
        texts.append(list(islice(sequence.generate(sampler, sequence.feed(TOKENS.tolist()), frozenset()), 40)))
    assert texts[0] == texts[1]
    assert speculator is not None and speculator.n_drafted > 60


def test_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(eagle3.target().write(tmp_path / "model.gguf"))
    draft = str(eagle3.drafter(own=True).write(tmp_path / "draft.gguf"))
    common = ["-p", "word9 word10", "-n", "8", "--temp", "0", "-t", "1", "-c", "128", "-no-cnv"]
    assert main(["cli", "-m", model, *common]) == 0
    text = capsys.readouterr().out
    for name in ("eagle3", "draft-eagle3"):
        assert main(["cli", "-m", model, "-md", draft, "--spec-type", name, "--draft-p-min", "0", *common]) == 0
        shown = capsys.readouterr()
        assert shown.out == text and "statistics eagle3" in shown.err
    small = str(tmp_path / "small.gguf")
    assert main(["quantize", draft, small, "Q8_0"]) == 0
    assert main(["cli", "-m", model, "-md", small, "--spec-type", "eagle3", "--draft-p-min", "0", *common]) == 0
    assert capsys.readouterr().out.endswith(text)
    params = SpeculativeParams(types=("eagle3",), p_min=0.0)
    llm = LLM(model, speculative=params, draft_files=DraftFiles(draft), n_ctx=128, n_threads=1)
    llm.generate("word9 word10", 8)
    assert llm.speculator is not None and llm.speculator.n_drafted > 0


def test_errors(tmp_path: Path) -> None:
    model = str(eagle3.target().write(tmp_path / "model.gguf"))
    draft = str(eagle3.drafter(own=True).write(tmp_path / "draft.gguf"))

    def run(types: tuple[str, ...], path: str | None, of: str = model) -> None:
        files = None if path is None else DraftFiles(path)
        LLM(of, speculative=SpeculativeParams(types=types), draft_files=files, n_ctx=128, n_threads=1)

    for types, path, message in (
        ((), draft, "reads what layers of a model read: --spec-type eagle3 drafts from it"),
        (("draft",), draft, "--spec-type eagle3 drafts from it"),
        (("eagle3",), None, "--spec-type eagle3 needs a drafter of that kind"),
        (("eagle3",), model, "--spec-type eagle3 needs a drafter of that kind"),
        (("mtp", "eagle3"), draft, "name one of them"),
    ):
        with pytest.raises(UsageError, match=message):
            run(types, path)
    with pytest.raises(
        UsageError, match="reads what layers of another model read; give it with -md and --spec-type eagle3"
    ):
        LLM(draft)
    for key, value, message in (
        ("target_layers", [1, 2, 5], "the drafter reads layer 5, the model has 5"),
        ("target_hidden_size", 32, "fc"),
        ("norm_before_fc", True, "norm_before_fc is not supported"),
        ("target_layers", [1, 2], "must hold 3 integers"),
        ("block_count", 2, "drafters of this kind have one"),
    ):
        changed = eagle3.drafter(own=True)
        changed.keys[key] = value
        with pytest.raises(IkpyError, match=message):
            run(("eagle3",), str(changed.write(tmp_path / "changed.gguf")))
    changed = eagle3.drafter(own=True)
    changed.weights["d2t"][3] = N_VOCAB
    with pytest.raises(IkpyError, match="names tokens outside the vocabulary of 160"):
        run(("eagle3",), str(changed.write(tmp_path / "changed.gguf")))
