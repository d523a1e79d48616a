"""Prediction layers of DeepSeek V4, GLM-5.3 Flash, MiMo-V2, Nemotron 3 and Qwen4-Exp: definition, drafts, tools."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.cli import main
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.head_draft import HeadDraft
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.engine.sampling import Sampler
from ikpy.engine.sampling_params import SamplingParams
from ikpy.engine.speculative import SpeculativeParams, Speculator
from ikpy.errors import FileFormatError, UsageError
from ikpy.graph.activations import ActivationCollector
from ikpy.tools.generation import GrowingSequence
from ikpy.tools.imatrix import Run, Settings
from ikpy.tools.imatrix_data import ImatrixData
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import prediction_models as models
from tests.cpu.models.definition_checks import LONG, TOKENS
from tests.cpu.models.prediction_models import Predicting
from tests.cpu.models.reference_models import N_VOCAB

BOUND = 1e-4
EXACT: dict[str, Any] = {"n_ctx": 256, "n_threads": 2, "type_k": "f32", "type_v": "f32", "type_indexer": "f32"}
PREFIXES = (1, 6, 7, 20, 21, 39)


def settings(**more: Any) -> ContextParams:
    return ContextParams(**{**EXACT, **more})


@pytest.fixture(params=models.MODELS)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Predicting, Model]:
    predicting = models.MODELS[request.param]()
    return predicting, Model.load(predicting.model.write(tmp_path / "model.gguf"))


def random_states(loaded: Model, n: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, loaded.arch.state_size)).astype(np.float32)


@pytest.mark.parametrize("flash", [True, False])
def test_definition(made: tuple[Predicting, Model], flash: bool) -> None:
    """Logits, and the states that go on, of every head: in one batch, in pieces, one by one, behind another text."""
    predicting, loaded = made
    states = random_states(loaded, len(TOKENS))
    heads = loaded.prediction_heads()
    assert len(heads) == (2 if predicting.model.arch == "mimo2" else 1)
    for number, head in enumerate(heads):
        truth, further = predicting.heads(number, TOKENS, states.astype(np.float64))
        for n_ubatch in (512, 7):
            context = Context(head, settings(flash_attn=flash, embeddings=True, n_ubatch=n_ubatch, n_seq_max=2))
            context.decode(Batch.single(TOKENS[::-1]), states[::-1].copy())
            for seq, cuts in ((1, [40]), (0, [0, 22, *range(36, 41)])):
                context.kv.seq_rm(seq, -1, -1)
                found, made_states = [], []
                for start, end in zip([0, *cuts], cuts, strict=False):
                    if start < end:
                        batch = Batch.single(TOKENS[start:end], start, seq, logits="all")
                        found.append(context.decode(batch, states[start:end]))
                        assert context.embeddings is not None
                        made_states.append(context.embeddings)
                form = f"head {number}, micro-batches of {n_ubatch}, cut at {cuts}"
                checks.hold(form, np.concatenate(found), truth, BOUND)
                checks.hold(f"states, {form}", np.concatenate(made_states), further, BOUND)


def test_rows_of_single_outputs(made: tuple[Predicting, Model]) -> None:
    """The layer goes on with the rows whose logits are wanted."""
    predicting, loaded = made
    states = random_states(loaded, len(TOKENS))
    truth, further = predicting.heads(0, TOKENS, states.astype(np.float64))
    context = Context(loaded.prediction_head(), settings(embeddings=True))
    checks.hold("logits", context.decode(Batch.single(TOKENS), states), truth[-1:], BOUND)
    assert context.embeddings is not None
    checks.hold("states", context.embeddings, further[-1:], BOUND)


def test_states_of_the_model(made: tuple[Predicting, Model]) -> None:
    """Those of all tokens, whatever logits are wanted, which are the same bit by bit as without states."""
    _, loaded = made
    expected = None
    for logits in ("all", "last", "none"):
        found = []
        for keeps in (False, True):
            context = Context(loaded, settings(token_states=keeps, n_ubatch=13))  # a single token is left over
            found.append(context.decode(Batch.single(TOKENS, logits=logits)))
        np.testing.assert_array_equal(*found)
        assert context.token_states is not None
        assert context.token_states.shape == (len(TOKENS), loaded.arch.state_size)
        expected = context.token_states if expected is None else expected
        assert np.abs(context.token_states - expected).max() < 1e-4 * np.abs(expected).max(), logits


def wanted_draft(predicting: Predicting, n_heads: int, text: list[int], states: np.ndarray, n: int) -> list[int]:
    """n guesses behind a text by the definition: heads take turns, or one goes on with its own states."""
    tokens, made, found = list(text[1:]), states[: len(text) - 1].astype(np.float64), list[int]()
    inputs = made
    for number in range(n):
        logits, further = predicting.heads(number if n_heads > 1 else 0, np.array(tokens + found), inputs)
        found.append(int(logits[-1].argmax()))
        inputs = np.concatenate([inputs, further[-1:]])
    return found


def test_drafts_are_those_of_the_definition(made: tuple[Predicting, Model]) -> None:
    """Behind texts in pieces, again and again; heads that take turns guess a token each."""
    predicting, loaded = made
    heads = [Context(head, settings(embeddings=True, n_batch=16)) for head in loaded.prediction_heads()]
    drafter = HeadDraft(*heads, p_min=0.0, n_ctx=256)
    text, states = LONG.tolist(), random_states(loaded, len(LONG))
    n = 2 if len(heads) > 1 else 3
    start = 0
    for end in (9, 10, 38, 41):
        drafter.observe(text[:end], states[start:end])
        assert drafter.draft(text[: end + 1], 3) == wanted_draft(predicting, len(heads), text[: end + 1], states, n)
        start = end
        assert all(context.kv.used_cells >= end - 1 for context in heads)
    other = [*text[:20], *text[100:130]]
    drafter.observe(other[:45], states[:45][18:])  # a text that changed
    assert drafter.draft(other[:46], 1) == wanted_draft(predicting, len(heads), other[:46], states, 1)


def greedy(loaded: Model, speculator: Speculator | None, n: int = 40) -> list[int]:
    """Tokens behind TOKENS."""
    reads = speculator is not None
    main = Context(loaded, settings(token_states=reads, n_kept_states=4 if reads else 0, n_ubatch=16))
    sequence = GrowingSequence(main, speculator=speculator)
    sampler = Sampler(SamplingParams(temperature=0.0), N_VOCAB)
    return list(islice(sequence.generate(sampler, sequence.feed(TOKENS.tolist()), frozenset()), n))


def test_texts_are_those_without_drafts(made: tuple[Predicting, Model]) -> None:
    _, loaded = made
    heads = [Context(head, settings(embeddings=True)) for head in loaded.prediction_heads()]
    drafter = HeadDraft(*heads, p_min=0.0, n_ctx=256)
    speculator = Speculator([drafter], SpeculativeParams(n_max=3))
    assert greedy(loaded, None) == greedy(loaded, speculator)
    assert speculator.n_drafted > 60


def test_states_of_drafters(made: tuple[Predicting, Model], tmp_path: Path) -> None:
    """In memory, in files, and shared between sequences, of all heads; what is damaged is refused as a whole."""
    _, loaded = made
    contexts = [Context(head, settings(embeddings=True, n_seq_max=3)) for head in loaded.prediction_heads()]
    first, second, third = (HeadDraft(*contexts, p_min=0.0, n_ctx=256, seq_id=i) for i in range(3))
    text, states = LONG.tolist(), random_states(loaded, len(LONG))
    first.observe(text[:40], states[:40])
    state = first.take_state()
    assert state is not None and state.nbytes > first.state_nbytes > 0
    second.put_state(state)
    third.adopt(first, 40)
    folder = tmp_path / "files"
    folder.mkdir()
    first.write_state(folder / "state")
    assert len(list(folder.iterdir())) == len(contexts)
    fourth = HeadDraft(*(Context(c.model, settings(embeddings=True)) for c in contexts), p_min=0.0, n_ctx=256)
    fourth.read_state(folder / "state")
    drafts = []
    for drafter in (first, second, third, fourth):
        drafter.observe(text[:45], states[38:45])
        drafts.append(drafter.draft(text[:46], 3))
    assert drafts[0] and drafts == drafts[:1] * 4
    if len(contexts) > 1:
        (folder / "state.1").write_bytes(b"something else")
        with pytest.raises(FileFormatError):
            fourth.read_state(folder / "state")
        assert not any(context.kv.used_cells for context in fourth._contexts)


def test_memory_is_what_was_planned(made: tuple[Predicting, Model], tmp_path: Path) -> None:
    _, loaded = made
    planned = Model.load(loaded.gguf.path, ModelParams(header_only=True))
    for ours, theirs in zip(loaded.prediction_heads(), planned.prediction_heads(), strict=True):
        real, plan = (Context(head, settings(embeddings=True)) for head in (ours, theirs))
        assert plan.kv.nbytes() == real.kv.nbytes() == real.allocated_bytes["cache"]
        assert plan.compute_bytes == real.compute_bytes


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_cache_types(kind: str, made: tuple[Predicting, Model]) -> None:
    """Quantized caches move logits a little; of the median token, since experts and pools may change places."""
    predicting, loaded = made
    states = random_states(loaded, len(TOKENS))
    truth, _ = predicting.heads(0, TOKENS, states.astype(np.float64))
    context = Context(loaded.prediction_head(), settings(type_k=kind, type_v=kind))
    errors = np.abs(context.decode(Batch.single(TOKENS, logits="all"), states) - truth).max(1) / np.abs(truth).max()
    assert np.median(errors) < 0.03


def test_layers_that_files_lack(tmp_path: Path) -> None:
    """Files of the other layers alone end in one line, and so do those that lack a tensor; the model runs."""
    for name, make in models.MODELS.items():
        predicting = make()
        whole = dict(predicting.model.weights)
        for lacks in ("nextn.eh_proj", "nextn.hnorm"):
            predicting.model.weights = {key: w for key, w in whole.items() if not key.endswith(lacks)}
            loaded = Model.load(predicting.model.write(tmp_path / "model.gguf"))
            assert loaded.hparams.n_layer == predicting.n_layer
            message = "no layers that predict" if lacks == "nextn.eh_proj" else r"nextn\.hnorm\.weight' not found"
            with pytest.raises((UsageError, FileFormatError), match=message) as error:
                loaded.prediction_heads()
            assert "\n" not in str(error.value), name


def test_heads_that_files_have_in_part(tmp_path: Path) -> None:
    """Of several layers those count that are there."""
    predicting = models.mimo2(3)
    for key in [key for key in predicting.model.weights if key.startswith("blk.5.")]:
        del predicting.model.weights[key]
    loaded = Model.load(predicting.model.write(tmp_path / "model.gguf"))
    assert len(loaded.prediction_heads()) == 2
    with pytest.raises(UsageError, match="no layers that predict"):
        loaded.prediction_head(2)


def test_norms_behind_a_layer(tmp_path: Path) -> None:
    """nextn.shared_head_norm before layer_output_norm before the model's own."""
    predicting = models.mimo2(1)
    weights, states = predicting.model.weights, np.zeros((len(TOKENS), 64), np.float32)
    found = []
    for names in ([], ["layer_output_norm"], ["layer_output_norm", "nextn.shared_head_norm"]):
        for key in [
            key
            for key in weights
            if key.startswith("blk.3.") and "norm" in key and ("head" in key or "output_n" in key)
        ]:
            del weights[key]
        for i, name in enumerate(names):
            weights[f"blk.3.{name}"] = np.full(64, 1.0 + i, np.float32)
        head = Model.load(predicting.model.write(tmp_path / "model.gguf")).prediction_head()
        found.append(Context(head, settings()).decode(Batch.single(TOKENS), states))
    assert np.abs(found[1] - found[0]).max() > 0.01
    np.testing.assert_allclose(found[2], 2 * found[1], rtol=1e-5)


class Numbers:
    """A tokenizer of numbers."""

    bos, add_bos, add_eos = None, False, False

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        return [int(word) for word in text.split()]


def collected(loaded: Model, folder: Path, n_ubatch: int, *, predicts: bool) -> dict[str, Any]:
    """Statistics of two chunks by name."""
    stored = {name: (*info.shape, 1, 1)[2] for name, info in loaded.gguf.tensors.items()}
    collector, own = ActivationCollector(stored), ActivationCollector(stored)
    own.entries = collector.entries
    heads = loaded.prediction_heads() if predicts else []
    contexts = [Context(head, settings(n_ubatch=n_ubatch, collector=own)) for head in heads]
    main_context = Context(loaded, settings(n_ubatch=n_ubatch, collector=collector, token_states=predicts))
    data = ImatrixData()
    data.live = collector.entries
    text = " ".join(map(str, np.random.default_rng(3).integers(4, N_VOCAB, 512)))
    asked = Settings(output=str(folder / "imatrix.gguf"), output_format="gguf", n_micro_batch=n_ubatch, verbosity=0)
    Run(main_context, Numbers(), data, asked, heads=contexts, log=lambda line: None).run(text)
    return collector.entries


def test_importance_and_quantization(tmp_path: Path) -> None:
    """Every matrix of the layers has statistics of all tokens but the last, and quantized files keep them all."""
    small = models.qwen4.Sizes(rank=32, row=32)
    for make in (lambda: models.qwen4exp(n=small), models.deepseek4, models.glm5_next):
        predicting = make()
        path = predicting.model.write(tmp_path / "model.gguf")
        loaded = Model.load(path)
        prefix = f"blk.{predicting.n_layer}."
        assert not any(key.startswith(prefix) for key in collected(loaded, tmp_path, 256, predicts=False))
        found = [collected(loaded, tmp_path, n, predicts=True) for n in (256, 96)]
        known = {key for key in found[0] if key.startswith(prefix)}
        matrices = {key for key, info in loaded.gguf.tensors.items() if key.startswith(prefix) and len(info.shape) > 1}
        apart = {key for key in matrices if "_gate_exps" in key or key.endswith(("_ape.weight", "hnorm.weight"))}
        assert known >= matrices - apart, sorted(matrices - apart - known)
        name = f"{prefix}nextn.eh_proj.weight"
        n_rows = 2 * 255 * loaded.arch.state_size // loaded.hparams.n_embd
        assert found[0][name].rows == n_rows == found[1][name].rows
        np.testing.assert_allclose(found[0][name].sums, found[1][name].sums, rtol=1e-3)
        line = ["quantize", "--imatrix", str(tmp_path / "imatrix.gguf"), str(path), str(tmp_path / "q.gguf"), "Q8_0"]
        assert main(line) == 0
        quantized = Model.load(tmp_path / "q.gguf")
        assert quantized.gguf.tensors.keys() == loaded.gguf.tensors.keys()
        assert quantized.gguf.tensors[name].type_id == 8
        states = random_states(loaded, len(TOKENS))
        rows = [
            Context(model.prediction_head(), settings()).decode(Batch.single(TOKENS, logits="all"), states)
            for model in (loaded, quantized)
        ]
        assert np.median(np.abs(rows[0] - rows[1]).max(axis=1)) < 0.25 * np.abs(rows[0]).max()


def test_micro_batches_of_single_tokens(tmp_path: Path) -> None:
    """A layer begins every chunk anew, also where the first micro-batch has nothing for it."""
    for make in (models.mimo2, models.glm5_next):
        predicting = make()
        loaded = Model.load(predicting.model.write(tmp_path / "model.gguf"))
        whole, found = (collected(loaded, tmp_path, n, predicts=True) for n in (256, 1))
        for key in found.keys() & {f"blk.{predicting.n_layer}.ffn_down_exps.weight"}:
            np.testing.assert_array_equal(found[key].rows, whole[key].rows)
            np.testing.assert_allclose(found[key].sums, whole[key].sums, rtol=1e-3)


def test_statistics_of_layers_that_are_not_there(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["imatrix", "-p", "one two three " * 400, "--mtp", "-c", "256", "-t", "1"]) == 1
    assert "the model has no layers that predict further tokens" in capfd.readouterr().err


def test_automatic_placement_counts_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--fit plans the context that drafts need."""
    predicting, planned = models.qwen4exp(), []

    def fit(path: str, params: ModelParams, own: ContextParams, **more: Any) -> Any:
        planned.append(own)
        return params.placement

    monkeypatch.setattr("ikpy.engine.fit.fit", fit)
    path = predicting.model.write(tmp_path / "model.gguf")
    line = ["cli", "-m", str(path), "-p", "w", "-n", "2", "-c", "256", "-t", "1", "--fit", "--log-disable"]
    assert main([*line, "-mtp", "--draft-max", "3"]) == 0 == main(line)
    assert [(context.token_states, context.n_kept_states) for context in planned] == [(True, 3), (False, 0)]


def test_a_layer_that_compresses_its_cache(tmp_path: Path) -> None:
    """Of DeepSeek V4: logits do not depend on how tokens come, and drafts leave the text as it is."""
    predicting = models.deepseek4(models.V4(ratios=(0, 4, 4)))
    loaded = Model.load(predicting.model.write(tmp_path / "model.gguf"))
    head, states = loaded.prediction_head(), random_states(loaded, len(TOKENS))
    whole = Context(head, settings()).decode(Batch.single(TOKENS, logits="all"), states)
    steps = Context(head, settings(n_ubatch=7))
    found = [steps.decode(Batch.single(TOKENS[:30], logits="all"), states[:30])]
    found += [steps.decode(Batch.single(TOKENS[i : i + 1], i), states[i : i + 1]) for i in range(30, len(TOKENS))]
    checks.hold("in steps", np.concatenate(found), whole, BOUND)
    context = Context(head, settings(embeddings=True))
    assert context.kv.stretches
    speculator = Speculator([HeadDraft(context, p_min=0.0, n_ctx=256)], SpeculativeParams(n_max=3))
    assert greedy(loaded, None) == greedy(loaded, speculator)
