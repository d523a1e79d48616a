"""Drafters of every kind: sampled texts have the distribution of the model, figures of acceptance are what happened,
and contexts that fill up change nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest

from ikpy.engine.assistant_draft import AssistantDraft
from ikpy.engine.batch import Batch
from ikpy.engine.block_draft import BlockDraft
from ikpy.engine.cache_reader import CacheReader
from ikpy.engine.context import Context
from ikpy.engine.head_draft import HeadDraft
from ikpy.engine.model import Model
from ikpy.engine.model_draft import ModelDraft
from ikpy.engine.ngram_cache import CacheDraft
from ikpy.engine.ngram_draft import NgramMapKey, NgramMapValues, NgramMod, NgramPool, NgramSimple
from ikpy.engine.params import ContextParams
from ikpy.engine.reading_draft import ReadingDraft
from ikpy.engine.reading_layer import cache_reading_layers, reading_layer
from ikpy.engine.sampling import Sampler
from ikpy.engine.sampling_params import SamplingParams
from ikpy.engine.speculative import Drafter, SpeculativeParams, Speculator
from ikpy.engine.suffix_draft import SuffixDraft
from ikpy.models import silent
from ikpy.tools.generation import GrowingSequence
from tests.cpu.models import dflash_model as dflash
from tests.cpu.models import eagle3_model as eagle3
from tests.cpu.models import gemma4_assistant_model as assistant
from tests.cpu.models.bigram_model import BigramContext, random_table
from tests.cpu.models.definition_checks import TOKENS
from tests.cpu.models.prediction_models import MODELS
from tests.cpu.models.reference_models import N_VOCAB

PARAMS = SpeculativeParams(size_n=2, size_m=6, n_max=5, p_min=0.0, pattern_len=2, min_hits=1)
NGRAMS: dict[str, Callable[[], Drafter]] = {
    "ngram-simple": lambda: NgramSimple(PARAMS),
    "ngram-map-k": lambda: NgramMapKey(PARAMS),
    "ngram-map-k4v": lambda: NgramMapValues(PARAMS),
    "ngram-mod": lambda: NgramMod(NgramPool(2)),
    "ngram-cache": CacheDraft,
    "suffix": lambda: SuffixDraft(PARAMS),
}
KINDS = ("draft", "mtp", "eagle3", "assistant", "dflash", "dspark", "dflash2")
TEXT = TOKENS[:20].tolist()
CRITICAL = 4.0
"""Standard deviations of the chi-square distribution above its mean that count as another distribution."""


def hold_chi_square(what: str, counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> None:
    """Counts against probabilities; rare outcomes are taken together."""
    n = sum(counts.values())
    assert set(counts) <= set(expected), f"{what}: {set(counts) - set(expected)} cannot occur"
    rare = [key for key, p in expected.items() if n * p < 5]
    cells = [(counts[key], n * p) for key, p in expected.items() if key not in rare]
    rest = sum(counts[key] for key in rare), n * sum(expected[key] for key in rare)
    cells += [rest] if rest[1] >= 5 else []
    square = sum((found - wanted) ** 2 / wanted for found, wanted in cells)
    freedom = len(cells) - 1
    assert square < freedom + CRITICAL * np.sqrt(2 * freedom), f"{what}: chi-square {square:.1f} of {freedom}"


@pytest.mark.parametrize("name", NGRAMS)
def test_transitions_have_their_probabilities(name: str) -> None:
    """6000 tokens of a chain of 8 tokens, whose probabilities are known exactly."""
    table = random_table(seed=7, n_vocab=8, scale=1.5)
    exact = np.exp(table.astype(np.float64))
    exact /= exact.sum(axis=1, keepdims=True)
    counts: Counter[tuple[int, ...]] = Counter()
    n_accepted = 0
    for seed in range(20):
        speculator = Speculator([NGRAMS[name]()], PARAMS)
        sequence = GrowingSequence(BigramContext(table, n_ctx=512), speculator=speculator)
        sampler = Sampler(SamplingParams(seed=seed, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0), 8)
        found = [1, *islice(sequence.generate(sampler, sequence.feed([0, 1]), frozenset()), 300)]
        counts.update(pairwise(found))
        n_accepted += speculator.n_accepted
    assert n_accepted > 100
    for last in range(8):
        own = Counter({key: n for key, n in counts.items() if key[0] == last})
        hold_chi_square(f"{name} behind {last}", own, {(last, t): exact[last, t] for t in range(8)})


@dataclass
class Made:
    """A model and what makes a drafter of a new sequence of a context of it."""

    model: Model
    drafter: Callable[[Context], Drafter]
    states: bool


@pytest.fixture(params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    kind = request.param
    settings = ContextParams(n_ctx=256, n_threads=1, type_k="f32", type_v="f32", embeddings=kind != "draft")
    random = {"mtp": MODELS["mimo2"]().model, "assistant": assistant.target()}.get(kind, eagle3.target())
    model = Model.load(random.write(tmp_path / "model.gguf"))
    if kind == "draft":
        context = Context(model, settings)  # its guesses are the model's likeliest tokens
        return Made(model, lambda _: ModelDraft(context, p_min=0.0, n_vocab=N_VOCAB, n_ctx=256), False)
    if kind == "mtp":
        heads = [Context(head, settings) for head in model.prediction_heads()]
        return Made(model, lambda _: HeadDraft(*_empty(heads), p_min=0.0, n_ctx=256), True)
    if kind == "assistant":
        layers = cache_reading_layers(model, assistant.drafter().write(tmp_path / "draft.gguf"))
        return Made(model, lambda of: AssistantDraft(CacheReader(layers, of, 1, silent), p_min=0.0), True)
    if kind in ("dflash", "dspark", "dflash2"):
        draft = dflash.drafter(markov="anchor" if kind == "dspark" else "", selector=kind == "dflash2")
        layers = reading_layer(model, draft.write(tmp_path / "draft.gguf"))
        own = Context(layers, replace(settings, n_batch=64, n_ubatch=64, swa_full=True))
        return Made(model, lambda _: BlockDraft(*_empty([own]), p_min=0.0, n_ctx=256), True)
    head = reading_layer(model, eagle3.drafter(own=True).write(tmp_path / "draft.gguf"))
    own = Context(head, settings)
    return Made(model, lambda _: ReadingDraft(*_empty([own]), head.arch.target_tokens, p_min=0.0, n_ctx=256), True)


def _empty(contexts: list[Context]) -> list[Context]:
    """The contexts of a drafter before, whose text is forgotten."""
    for context in contexts:
        context.kv.clear()
    return contexts


def context_of(made: Made, *, drafts: bool) -> Context:
    return Context(
        made.model,
        ContextParams(n_ctx=256, n_threads=1, type_k="f32", type_v="f32", token_states=drafts and made.states),
    )


def generated(context: Context, speculator: Speculator | None, n: int, **sampling: float) -> list[int]:
    """n tokens behind TEXT."""
    context.kv.clear()
    sampler = Sampler(SamplingParams(**{"temperature": 0.0, **sampling}), N_VOCAB)  # type: ignore[arg-type]
    sequence = GrowingSequence(context, speculator=speculator)
    return list(islice(sequence.generate(sampler, sequence.feed(TEXT), frozenset()), n))


def best(logits: np.ndarray, temperature: float) -> dict[int, float]:
    """The three likeliest tokens with their probabilities."""
    tokens = np.argsort(-logits)[:3]
    values = np.exp((logits[tokens] - logits[tokens[0]]).astype(np.float64) / temperature)
    return dict(zip(tokens.tolist(), (values / values.sum()).tolist(), strict=True))


def test_sampled_texts_have_the_distribution_of_the_model(made: Made) -> None:
    """Three tokens of 500 seeds, of 27 texts whose probabilities plain evaluations give."""
    plain, expected = context_of(made, drafts=False), dict[tuple[int, ...], float]()

    def after(more: Sequence[int]) -> dict[int, float]:
        plain.kv.clear()
        return best(plain.decode(Batch.single([*TEXT, *more], logits="last"))[-1], 1.5)

    for first, p in after([]).items():
        for second, q in after([first]).items():
            expected |= {(first, second, third): p * q * r for third, r in after([first, second]).items()}
    assert len(expected) == 27
    context, n_drafted = context_of(made, drafts=True), 0
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(500):
        speculator = Speculator([made.drafter(context)], SpeculativeParams(n_max=2, p_min=0.0))
        counts[tuple(generated(context, speculator, 3, seed=seed, temperature=1.5, top_k=3, top_p=1, min_p=0))] += 1
        n_drafted += speculator.n_drafted
    assert n_drafted > 500
    hold_chi_square("three tokens", counts, expected)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
def test_acceptance_is_what_happened(made: Made, sampling: dict[str, float]) -> None:
    """Guesses are recorded and compared with the text that came, which is that without drafts."""
    plain = generated(context_of(made, drafts=False), None, 60, **sampling)
    context = context_of(made, drafts=True)
    drafter, drafts = made.drafter(context), list[tuple[int, list[int]]]()
    draft = drafter.draft

    def recorded(tokens: Sequence[int], n_max: int, p_min: float | None = None) -> list[int]:
        guesses = draft(tokens, n_max, p_min)
        drafts.append((len(tokens), list(guesses)))
        return guesses

    drafter.draft = recorded  # type: ignore[method-assign]
    speculator = Speculator([drafter], SpeculativeParams(n_max=3, p_min=0.0))
    found = generated(context, speculator, 60, **sampling)
    assert found == plain
    text, n_right = [*TEXT, *generated(context_of(made, drafts=False), None, 70, **sampling)], 0
    for start, guesses in drafts:
        wrong = [i for i, guess in enumerate(guesses) if guess != text[start + i]]
        n_right += wrong[0] if wrong else len(guesses)
    n_drafted = sum(len(guesses) for _, guesses in drafts)
    assert speculator.n_drafted == n_drafted > 20
    # Of the last draft the text may have ended before all right guesses were taken.
    assert n_right - 3 <= speculator.n_accepted <= n_right
    rate = f"draft acceptance rate = {speculator.n_accepted / n_drafted:.5f}"
    assert speculator.lines()[0].startswith(rate)


def test_full_contexts(made: Made) -> None:
    """Texts that outgrow the context, so that both caches move, are those without drafts."""
    plain = generated(context_of(made, drafts=False), None, 300)
    context = context_of(made, drafts=True)
    speculator = Speculator([made.drafter(context)], SpeculativeParams(n_max=4, p_min=0.0))
    found = generated(context, speculator, 300)
    differs = next((i for i, (a, b) in enumerate(zip(found, plain, strict=True)) if a != b), None)
    assert differs is None, f"token {differs}"
    assert speculator.n_drafted > 250
