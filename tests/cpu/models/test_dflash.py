"""DFlash and DSpark: blocks by the definition, drafts, errors, programs."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.cli import main
from ikpy.engine.batch import Batch
from ikpy.engine.block_draft import BlockDraft
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.engine.reading_layer import reading_layer
from ikpy.engine.sampling import Sampler
from ikpy.engine.sampling_params import SamplingParams
from ikpy.engine.speculative import SpeculativeParams, Speculator
from ikpy.errors import IkpyError, UsageError
from ikpy.llm import LLM
from ikpy.tools.generation import GrowingSequence
from ikpy.tools.speculation import DraftFiles
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import dflash_model as dflash
from tests.cpu.models import eagle3_model as eagle3
from tests.cpu.models.definition_checks import LONG, TOKENS
from tests.cpu.models.reference_models import N_VOCAB, RandomModel

BOUND = 5e-5
FORMS: dict[str, dict[str, Any]] = {
    "shared": {},
    "windows": {"windows": True},
    "own": {"own": True},
    "markov": {"markov": "anchor"},
    "markov-behind": {"markov": "bonus", "own": True},
    "selector": {"selector": True},
    "selector-capped": {"selector": True, "own": True, "windows": True, "capped": True},
}


def settings(**more: Any) -> ContextParams:
    values = {"n_ctx": 256, "n_threads": 1, "n_batch": 64, "n_ubatch": 64, "type_k": "f32", "type_v": "f32"}
    return ContextParams(**{**values, **more})


@pytest.fixture(params=FORMS)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[RandomModel, RandomModel, Model, Model]:
    of, draft = eagle3.target(), dflash.drafter(**FORMS[request.param])
    model = Model.load(of.write(tmp_path / "model.gguf"))
    return of, draft, model, reading_layer(model, draft.write(tmp_path / "draft.gguf"))


@pytest.mark.parametrize("flash", [False, True], ids=["plain", "flash"])
def test_definition(flash: bool, made: tuple[RandomModel, RandomModel, Model, Model]) -> None:
    """A block behind a text that was read in pieces; another sequence lies beside it."""
    of, draft, model, layers = made
    reader = Context(model, settings(token_states=True))
    reader.decode(Batch.single(TOKENS, logits="none"))
    states = reader.token_states
    assert states is not None
    context = Context(layers, settings(flash_attn=flash, embeddings=True, n_seq_max=2, swa_full=True))
    context.decode(Batch.single(LONG[:20], 0, 1, logits="none"), np.ascontiguousarray(states[::-1][:20]))
    for start, end in ((0, 23), (23, 40)):
        context.decode(Batch.single(TOKENS[start:end], start, logits="none"), np.ascontiguousarray(states[start:end]))
    tokens = [9, *[dflash.MASK] * 5]
    logits = context.decode(Batch.single(tokens, 40, logits="all"), np.zeros((6, dflash.D), np.float32))
    truth, rows = dflash.block(draft, of, eagle3.inputs_of_layers(of, TOKENS), tokens)
    checks.hold("logits", logits, truth, BOUND)
    assert context.embeddings is not None
    checks.hold("its states", context.embeddings, rows, BOUND)


def drafter_for(layers: Model, **more: Any) -> BlockDraft:
    context = Context(layers, settings(embeddings=True, swa_full=True, **more))
    return BlockDraft(context, p_min=0.0, n_ctx=256)


def test_drafts(made: tuple[RandomModel, RandomModel, Model, Model]) -> None:
    """Of any length up to that of a block, cut where a guess is less likely than asked for."""
    of, draft, model, layers = made
    drafters = [drafter_for(layers, n_batch=32, n_ubatch=32) for _ in range(4)]
    text, reader, start = LONG.tolist(), Context(model, settings(token_states=True)), 0
    most = dflash.BLOCK - (draft.keys.get("sample_from_anchor") is not True)
    for end in (9, 10, 60, 74, 77):
        reader.decode(Batch.single(text[start:end], start, logits="none"))
        assert reader.token_states is not None
        for drafter in drafters:
            drafter.observe(text[:end], reader.token_states)
        start = end
        for n, drafter in zip((1, 3, 20), drafters, strict=False):
            wanted, odds = dflash.guesses(draft, of, text[: end + 1], min(n, most))
            assert drafter.draft(text[: end + 1], n) == wanted
        limit = float(np.mean(odds))
        n_likely = next((i for i, p in enumerate(odds) if p < limit), len(odds))
        assert drafters[3].draft(text[: end + 1], 20, p_min=limit) == wanted[:n_likely]


def test_texts_are_those_without_drafts(made: tuple[RandomModel, RandomModel, Model, Model]) -> None:
    """Behind a text that outgrows the context as well, where the caches move."""
    _, _, model, layers = made
    texts = []
    for drafts in (False, True):
        speculator = Speculator([drafter_for(layers)], SpeculativeParams(n_max=4)) if drafts else None
        sequence = GrowingSequence(Context(model, settings(token_states=drafts)), speculator=speculator)
        sampler = Sampler(SamplingParams(temperature=0.0), N_VOCAB)
        texts.append(list(islice(sequence.generate(sampler, sequence.feed(TOKENS.tolist()), frozenset()), 300)))
    assert texts[0] == texts[1]
    assert speculator is not None and speculator.n_drafted > 500


def test_states_of_a_text(made: tuple[RandomModel, RandomModel, Model, Model], tmp_path: Path) -> None:
    """A drafter that takes over what another one has of a text drafts the same."""
    _, _, model, layers = made
    reader = Context(model, settings(token_states=True))
    reader.decode(Batch.single(TOKENS, logits="none"))
    assert reader.token_states is not None
    first, second, third = (drafter_for(layers) for _ in range(3))
    first.observe(TOKENS.tolist(), reader.token_states)
    first.write_state(tmp_path / "state")
    state = first.take_state()
    assert state is not None
    second.put_state(state)
    third.read_state(tmp_path / "state")
    reader.decode(Batch.single([9, 5], len(TOKENS), logits="none"))
    text, found = [*TOKENS.tolist(), 9, 5], []
    for drafter in (second, third):
        drafter.observe(text, reader.token_states)
        found.append(drafter.draft([*text, 11], 4))
    assert found[0] == found[1] and len(found[0]) == 4


def test_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(eagle3.target().write(tmp_path / "model.gguf"))
    common = ["-p", "word9 word10", "-n", "8", "--temp", "0", "-t", "1", "-c", "128", "-no-cnv"]
    assert main(["cli", "-m", model, *common]) == 0
    text = capsys.readouterr().out
    for kind, form in (("dflash", {"selector": True}), ("dflash", {}), ("dspark", {"markov": "anchor"})):
        draft, small = (str(tmp_path / f"{kind}{end}.gguf") for end in ("", "-small"))
        dflash.drafter(**form).write(Path(draft))
        assert main(["quantize", draft, small, "Q8_0"]) == 0
        capsys.readouterr()
        for name, file in ((kind, draft), (f"draft-{kind}", small)):
            assert main(["cli", "-m", model, "-md", file, "--spec-type", name, "--draft-p-min", "0", *common]) == 0
            shown = capsys.readouterr()
            assert shown.out == text and f"statistics {kind}" in shown.err
    params = SpeculativeParams(types=("dspark",), p_min=0.0)
    llm = LLM(model, speculative=params, draft_files=DraftFiles(draft), n_ctx=128, n_threads=1)
    llm.generate("word9 word10", 8)
    assert llm.speculator is not None and llm.speculator.n_drafted > 0


def test_errors(tmp_path: Path) -> None:
    model = str(eagle3.target().write(tmp_path / "model.gguf"))
    draft = str(dflash.drafter().write(tmp_path / "draft.gguf"))

    def run(types: tuple[str, ...], path: str | None, of: str = model) -> None:
        files = None if path is None else DraftFiles(path)
        LLM(of, speculative=SpeculativeParams(types=types), draft_files=files, n_ctx=128, n_threads=1)

    for types, path, message in (
        ((), draft, "reads what layers of a model read: --spec-type dflash drafts from it"),
        (("dspark",), draft, "--spec-type dflash drafts from it"),
        (("dflash",), None, "--spec-type dflash needs a drafter of that kind"),
        (("dflash",), model, "--spec-type dflash needs a drafter of that kind"),
        (("mtp", "dflash"), draft, "name one of them"),
    ):
        with pytest.raises(UsageError, match=message):
            run(types, path)
    with pytest.raises(UsageError, match="layers of another model read; give it with -md and --spec-type dflash"):
        LLM(draft)
    for key, value, message in (
        ("target_layers", [1, 2, 5], "the drafter reads layer 5, the model has 5"),
        ("target_layers", [1, 2], "tensor 'fc.weight' has wrong shape"),
        ("block_size", 1, "block_size 1: blocks have 2 to 1024 tokens"),
        ("hyper_connection.count", 4, r"layers of DeepSeek V4 \(dflash.hyper_connection.count\) are not supported"),
        ("mask", N_VOCAB, "mask_token_id is 160, and a drafter of blocks needs one of 160 tokens"),
    ):
        changed = dflash.drafter()
        if key == "mask":
            changed.outer_keys["tokenizer.ggml.mask_token_id"] = value
        else:
            changed.keys[key] = value
        with pytest.raises(IkpyError, match=message):
            run(("dflash",), str(changed.write(tmp_path / "changed.gguf")))
