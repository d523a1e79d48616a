"""Speculative decoding: the text is that of plain decoding, for every drafter, greedy and sampled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

import ikpy
from ikpy._native import core
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.model_draft import ModelDraft
from ikpy.engine.ngram_cache import CacheDraft, EarlierTexts, NgramCache
from ikpy.engine.ngram_draft import NgramMapKey, NgramMapValues, NgramMod, NgramPool, NgramSimple
from ikpy.engine.params import ContextParams
from ikpy.engine.sampling import Sampler, SamplingParams
from ikpy.engine.speculative import Drafter, SpeculativeParams, Speculator, probable_tokens
from ikpy.engine.suffix_draft import SuffixAutomaton, SuffixDraft
from ikpy.errors import FileFormatError, UsageError
from ikpy.tools.generation import GrowingSequence
from ikpy.tools.speculation import DraftFiles, common_vocabulary, make_speculation
from ikpy.vocab import Vocab
from tests.cpu.models.bigram_model import BigramContext, random_table
from tests.shared import DATA

BUNDLED = Path(ikpy.default_model_path())
MODELS = [BUNDLED, *(DATA / "zoo" / f"{n}.gguf" for n in ("llama-ropefreqs", "qwen3moe", "deepseek2-v3-mla"))]
N = 48
PARAMS = SpeculativeParams(size_n=2, size_m=12, n_max=8, p_min=0.3, pattern_len=2)


class Oracle(Drafter):
    """Knows the text in advance; every ``wrong``-th guess is another token."""

    name = "oracle"

    def __init__(self, text: Sequence[int], wrong: int = 0) -> None:
        self.text, self.wrong = list(text), wrong

    def draft(self, tokens: Sequence[int], n_max: int, p_min: float | None = None) -> list[int]:
        guess = self.text[len(tokens) : len(tokens) + n_max]
        return [t if not self.wrong or (len(tokens) + i) % self.wrong else (t + 1) % 150 for i, t in enumerate(guess)]


def context(path: Path, **params: object) -> Context:
    return Context(Model.load(path), ContextParams(**{"n_ctx": 256, "n_threads": 2, **params}))  # type: ignore[arg-type]


def prompts(path: Path) -> list[list[int]]:
    """A repetitive and a random prompt."""
    n_vocab = Model.load(path).hparams.n_vocab
    random = np.random.default_rng(3)
    piece = random.integers(3, min(n_vocab, 1000), 9).tolist()
    return [piece * 3, random.integers(3, min(n_vocab, 1000), 21).tolist()]


def generate(
    ctx: Context, prompt: list[int], speculator: Speculator | None, n: int = N, **sampling: object
) -> tuple[list[int], GrowingSequence]:
    """n tokens behind the prompt."""
    ctx.kv.clear()
    sampler = Sampler(SamplingParams(**{"temperature": 0.0, "seed": 5, **sampling}), ctx.model.hparams.n_vocab)  # type: ignore[arg-type]
    for token in prompt:
        sampler.accept(token)
    sequence = GrowingSequence(ctx, speculator=speculator)
    found: list[int] = []
    for token in sequence.generate(sampler, sequence.feed(prompt), frozenset()):
        found.append(token)
        if len(found) == n:
            break
    return found, sequence


def drafters(ctx: Context, text: list[int]) -> list[Drafter]:
    """One of each kind, and those that know the text."""
    draft = Context(ctx.model, ContextParams(n_ctx=256, n_threads=2, n_seq_max=2))
    return [
        NgramSimple(PARAMS),
        NgramMapKey(PARAMS),
        NgramMapValues(PARAMS),
        NgramMod(NgramPool(2)),
        CacheDraft(),
        SuffixDraft(PARAMS),
        ModelDraft(draft, p_min=0.0, n_vocab=ctx.model.hparams.n_vocab, n_ctx=256),
        ModelDraft(draft, p_min=0.0, n_vocab=ctx.model.hparams.n_vocab, n_ctx=40, seq_id=1),
        Oracle(text),
        Oracle(text, wrong=3),
        Oracle(text, wrong=1),
    ]


@pytest.mark.parametrize("path", MODELS, ids=lambda p: p.stem)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_k": 4}], ids=["greedy", "sampled"])
def test_the_text_is_that_of_plain_decoding(path: Path, sampling: dict) -> None:
    """The same tokens, the same cache behind them, and drafts that were really used."""
    ctx = context(path, type_k="f32", type_v="f32")
    accepted: Counter[str] = Counter()
    for prompt in prompts(path):
        plain, _ = generate(ctx, prompt, None, **sampling)
        for drafter in drafters(ctx, prompt + plain):
            speculator = Speculator([drafter], PARAMS)
            found, sequence = generate(ctx, prompt, speculator, **sampling)
            differs = next((i for i in range(N) if found[i] != plain[i]), None)
            assert differs is None, f"{drafter.name}: token {differs} is {found[differs]}, not {plain[differs]}"  # type: ignore[index]
            assert sequence.tokens == prompt + plain[:-1]
            assert ctx.kv.seq_pos_max(0) == len(sequence.tokens) - 1
            assert ctx.kv.used_cells == len(sequence.tokens), "rejected tokens left the cache"
            accepted[drafter.name] += speculator.n_accepted
            if isinstance(drafter, Oracle) and drafter.wrong != 3:
                wanted = speculator.n_drafted if drafter.wrong == 0 else 0
                assert speculator.n_accepted in (wanted, wanted - (N - 1) % 9) or drafter.wrong == 0
    assert accepted["oracle"] > 60 and accepted["draft"] > (60 if not sampling else 0)


def test_sampling_draws_the_very_same_tokens() -> None:
    """With logits that do not depend on the shape of the batch: every sampler, penalties, the whole vocabulary."""
    ctx = BigramContext(random_table(), n_ctx=512)
    n_vocab = len(ctx.table)
    for sampling in ({"top_k": 0}, {"repeat_penalty": 1.3}, {"mirostat": 2}, {"xtc_probability": 0.5, "top_k": 0}):
        texts = []
        for wrong in (None, 0, 1, 2, 5):
            sampler = Sampler(SamplingParams(seed=9, temperature=1.0, **sampling), n_vocab)  # type: ignore[arg-type]
            ctx.kv.clear()
            drafter = None if wrong is None else Oracle([1, 2, 3, *texts[0]], wrong)
            speculator = None if drafter is None else Speculator([drafter], PARAMS)
            sequence = GrowingSequence(ctx, speculator=speculator)
            tokens = sequence.generate(sampler, sequence.feed([1, 2, 3]), frozenset())
            texts.append(list(islice(tokens, 200)))
            assert texts[-1] == texts[0], f"{sampling}, every {wrong}-th guess wrong"


def test_greedy_drafts_save_decode_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """On text that repeats, the number of evaluations falls by more than half."""
    ctx = context(BUNDLED)
    vocab = Vocab.from_metadata(ctx.model.gguf.metadata)
    prompt = vocab.tokenize("one two, and the powers of the powers of the powers of the", add_special=True)
    calls: list[int] = []
    decode = Context.decode

    def counted(self: Context, batch: ikpy.Batch, *, copy: bool) -> np.ndarray:
        calls.append(len(batch))
        return decode(self, batch, copy=copy)

    monkeypatch.setattr(Context, "decode", counted)
    plain, _ = generate(ctx, prompt, None, 150)
    n_plain = len(calls)
    for drafter in (NgramSimple(PARAMS), NgramMod(NgramPool(2)), SuffixDraft(PARAMS)):
        calls.clear()
        found, _ = generate(ctx, prompt, Speculator([drafter], PARAMS), 150)
        assert found == plain
        assert len(calls) < 0.5 * n_plain, f"{drafter.name}: {len(calls)} of {n_plain} calls"


def test_sampled_tokens_follow_the_distribution() -> None:
    """Third tokens of 400 seeds with a drafter that is often wrong: the counts are those of plain sampling."""
    ctx = context(DATA / "zoo" / "qwen3moe.gguf")
    prompt = prompts(MODELS[2])[1]
    known = generate(ctx, prompt, None, 4)[0]
    counts: list[Counter[int]] = []
    for drafted in (False, True):
        counter: Counter[int] = Counter()
        for seed in range(400):
            speculator = Speculator([Oracle(prompt + known)], PARAMS) if drafted else None
            counter[
                generate(ctx, prompt, speculator, 3, seed=seed + 1000 * drafted, temperature=0.7, top_k=4)[0][2]
            ] += 1
        counts.append(counter)
    common = [t for t, _ in counts[0].most_common(6)]
    for token in common:
        a, b = counts[0][token], counts[1][token]
        assert abs(a - b) < 4.5 * np.sqrt(max(a + b, 10)), f"token {token}: {a} and {b} of 400"


def test_long_drafts_stay_within_what_rounds_alike() -> None:
    """Where larger batches use other activations (tiles of bf16), drafts are cut short of them."""
    ctx = context(DATA / "zoo" / "qwen3moe.gguf", type_k="f32", type_v="f32")
    params = SpeculativeParams(n_max=200)
    prompt = prompts(MODELS[2])[1]
    plain, _ = generate(ctx, prompt, None, 150)
    speculator = Speculator([Oracle(prompt + plain)], params)
    assert generate(ctx, prompt, speculator, 150)[0] == plain
    types = {value.type_id for value in ctx.model.weights.values() if value.shape[1] > 1}
    limit = ctx.max_uniform_tokens
    assert all(core.activation_format(t, limit) == core.activation_format(t, 1) for t in types)
    assert speculator.n_drafted / speculator.statistics[0].n_drafts <= limit - 1


def test_stopping_inside_a_draft_leaves_the_sequence_whole() -> None:
    ctx = context(DATA / "zoo" / "llama-ropefreqs.gguf")
    prompt = prompts(MODELS[1])[0]
    plain, _ = generate(ctx, prompt, None, 40)
    for stop in range(1, 12):
        found, sequence = generate(ctx, prompt, Speculator([Oracle(prompt + plain)], PARAMS), stop)
        assert found == plain[:stop] and sequence.tokens == prompt + plain[: stop - 1]
        logits = sequence.feed([found[-1]])
        assert int(logits.argmax()) == plain[stop]


def test_end_tokens_and_full_contexts() -> None:
    """A draft may run over an end token or the end of the context; neither shows."""
    ctx = context(DATA / "zoo" / "llama-ropefreqs.gguf", n_ctx=64)
    assert ctx.n_ctx == 256
    prompt = prompts(MODELS[1])[1]
    plain, _ = generate(ctx, prompt, None, 20)
    sampler = Sampler(SamplingParams(temperature=0.0), ctx.model.hparams.n_vocab)
    ctx.kv.clear()
    sequence = GrowingSequence(ctx, speculator=Speculator([Oracle(prompt + plain)], PARAMS))
    end = plain[7]
    found = list(sequence.generate(sampler, sequence.feed(prompt), frozenset([end])))
    assert found == plain[: plain.index(end) + 1]
    long_plain, _ = generate(ctx, prompt, None, 300)
    speculator = Speculator([SuffixDraft(PARAMS), NgramSimple(PARAMS)], PARAMS)
    assert generate(ctx, prompt, speculator, 300)[0] == long_plain, "context shifts happen at the same tokens"


def test_states_reach_prediction_heads() -> None:
    """A drafter that wants hidden states gets one row per token, equal to those of plain evaluation."""

    class Head(Oracle):
        name, needs_states = "head", True

        def __init__(self, text: Sequence[int], wrong: int) -> None:
            super().__init__(text, wrong)
            self.states: list[np.ndarray] = []

        def observe(self, text: Sequence[int], states: np.ndarray) -> None:
            assert list(text) == self.text[: len(text)] and len(text) == len(self.states) + len(states)
            self.states += list(states)

    path = DATA / "zoo" / "qwen3moe.gguf"
    ctx = context(path, embeddings=True, token_states=True, n_ubatch=16, type_k="f32", type_v="f32")
    prompt = prompts(MODELS[2])[1]
    plain, _ = generate(ctx, prompt, None, 20)
    head = Head(prompt + plain, 4)
    generate(ctx, prompt, Speculator([head], PARAMS), 20)
    ctx.kv.clear()
    ctx.decode(ikpy.Batch.single(prompt + plain, logits="all"))
    assert ctx.embeddings is not None
    assert np.array_equal(ctx.embeddings, ctx.token_states)  # type: ignore[arg-type]
    n = len(head.states)
    assert n >= len(prompt) + 18
    error = np.abs(np.array(head.states) - ctx.embeddings[:n]).max(axis=1)
    bound = 3e-3 if core.rounds_f16_activations() else 1e-3  # batches of F16 weights round activations to 11 bits then
    assert error.max() < bound, f"state {error.argmax()} differs by {error.max()}"


def test_a_draft_model_with_fewer_tokens_stays_silent_about_others() -> None:
    ctx = context(BUNDLED)
    drafter = ModelDraft(ctx, p_min=0.0, n_vocab=200, n_ctx=256)
    assert len(drafter.draft([5, 6, 7], 4)) == 4
    assert drafter.draft([5, 6, 200], 4) == []
    assert drafter.draft([5, 6, 200, 8], 4) == []
    assert len(drafter.draft([5, 6, 8], 4)) == 4


def test_suffix_automaton_finds_what_a_search_finds() -> None:
    random = np.random.default_rng(0)
    for alphabet in (2, 5):
        text = random.integers(0, alphabet, 120).tolist()
        automaton = SuffixAutomaton()
        for i, token in enumerate(text):
            automaton.extend(token)
            seen = text[: i + 1]
            longest = next(
                (n for n in range(i, 0, -1) if any(seen[j : j + n] == seen[-n:] for j in range(i + 1 - n))), 0
            )
            state = automaton.repeated_suffix(10**6)
            assert automaton.length[state] == longest, f"position {i}"
            if longest:
                pairs = (seen[j : j + longest + 1] for j in range(i + 1 - longest))
                following = {p[-1] for p in pairs if p[:-1] == seen[-longest:]}
                assert set(automaton.next[state]) == following


def test_a_corpus_that_drafters_share_serves_as_one_text_with_their_own() -> None:
    """Drafts are those of the corpus with the text behind it, whatever other drafters have seen."""
    random = np.random.default_rng(2)
    n_found = 0
    for alphabet in (2, 3, 5):
        texts = [random.integers(0, alphabet, 90).tolist() for _ in range(2)]
        shared = SuffixAutomaton.of_texts(texts)
        joined = [*texts[0], -1, *texts[1], -2]
        for depth in (3, 64):
            params = SpeculativeParams(pattern_len=2, max_depth=depth, p_min=0.05)
            for drafter in (SuffixDraft(params, shared), SuffixDraft(params, shared)):
                text = random.integers(0, alphabet, 60).tolist()
                for n in range(1, 61):
                    found = drafter.draft(text[:n], 12)
                    assert found == SuffixDraft(params).draft([*joined, *text[:n]], 12), text[:n]
                    n_found += len(found)
    assert n_found > 500


def test_a_corpus_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither slots nor the texts that they begin one after the other index it again."""
    path = tmp_path / "corpus.txt"
    path.write_text("The old man looked at the sea. " * 40)
    vocab = Vocab.from_metadata(Model.load(BUNDLED).gguf.metadata)
    n_corpus = len(vocab.tokenize(path.read_text(), add_special=False)) + 1
    read: list[int] = []
    extend = SuffixAutomaton.extend
    monkeypatch.setattr(SuffixAutomaton, "extend", lambda self, token: read.append(token) or extend(self, token))
    params = SpeculativeParams(types=("suffix",), p_min=0.1)
    made = make_speculation(params, vocab, DraftFiles(suffix_corpus=str(path)))
    assert made is not None
    text = vocab.tokenize("And the old man looked at", add_special=False)
    for speculator in [made.speculator(i) for i in range(3)]:
        for _ in range(2):
            speculator.begin(text)
            assert vocab.detokenize(speculator.draft(text, 3)).startswith(" the sea")
    assert len(read) == n_corpus + 6 * len(text)


def test_ngram_drafts() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]
    params = SpeculativeParams(size_n=3, size_m=4, n_max=8)
    assert NgramSimple(params).draft(text, 8) == [4, 5, 6, 7]
    assert NgramSimple(params).draft(text, 2) == [4, 5]
    assert NgramSimple(params).draft(text[:-1], 8) == []
    key = NgramMapKey(params)
    assert key.draft(text, 8) == [4, 5, 6, 7]
    key.accept(1)
    assert key.draft(text, 8) == [4, 5, 6], "a draft that failed early makes the next one of its key shorter"
    assert NgramMapKey(SpeculativeParams(size_n=3, min_hits=2)).draft(text, 8) == []
    votes = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2]
    assert NgramMapValues(SpeculativeParams(size_n=2, size_m=1)).draft(votes, 1) == [3]
    even = [1, 2, 3, 1, 2, 4, 1, 2]
    assert NgramMapValues(SpeculativeParams(size_n=2, size_m=1)).draft(even, 1) == [], "no continuation stands out"
    pool = NgramPool(3)
    assert NgramMod(pool).draft(text, 6) == [4, 5, 6, 7, 1, 2]
    assert NgramMod(pool).draft([9, 1, 2, 3], 2) == [4, 5], "another sequence learned it"
    corpus = SuffixAutomaton.of_texts([[7, 8, 9, 10]])
    assert SuffixDraft(SpeculativeParams(pattern_len=2, p_min=0.5), corpus).draft([1, 7, 8], 5) == [9, 10]


def test_lookup_cache_files(tmp_path: Path) -> None:
    path = tmp_path / "dynamic.lcd"
    drafter = CacheDraft(None, EarlierTexts(NgramCache()), str(path))
    text = [5, 6, 7, 8, 9, 5, 6, 7]
    assert drafter.draft(text, 2) == [8, 9]
    drafter.save()
    again = NgramCache.load(path, 10)
    assert again.counts[5, 6] == Counter({7: 2}) and again.counts[5, 6, 7, 8] == Counter({9: 1})
    assert CacheDraft(None, EarlierTexts(again)).draft([1, 5, 6, 7], 2) == [8, 9]
    assert CacheDraft(again).draft([1, 5, 6, 7], 2) == [8, 9]
    first = np.fromfile(path, "<i4")[:7].tolist()
    assert first == [5, -1, -1, -1, 1, 6, 2], "n-gram of four places, number of pairs, pairs"
    with pytest.raises(FileFormatError, match="holds token 9, the vocabulary has 9: it is of another model"):
        NgramCache.load(path, 9)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(FileFormatError, match="damaged at byte"):
        NgramCache.load(path, 10)
    with pytest.raises(UsageError, match="cannot read lookup cache"):
        NgramCache.load(tmp_path / "none", 10)


def test_lookup_caches_of_earlier_texts_are_bounded() -> None:
    """The n-grams that occurred last stay, however many texts a server sees."""
    cache = NgramCache()
    earlier = EarlierTexts(cache, 200)
    often = [1, 2, 3, 4, 1, 2, 3, 4, 1]
    for first in range(0, 2000, 20):
        drafter = CacheDraft(None, earlier)
        drafter.draft([*range(10 + first, 30 + first), *often], 1)
        drafter.begin([])
        assert cache.n_pairs <= 200
    assert CacheDraft(None, earlier).draft([7, 2, 3], 2) == [4, 1], "in every text"
    assert CacheDraft(None, earlier).draft([1990, 1991, 1992], 2) == [1993, 1994], "in the last one"
    assert CacheDraft(None, earlier).draft([990, 991, 992], 2) == []
    large = NgramCache()
    large.learn(range(200), 0)
    EarlierTexts(large, 100).add(NgramCache())
    assert large.n_pairs == 100, "a file that holds more is shortened with the first text"


@pytest.mark.parametrize(("ngram", "token"), [((5, 3), -7), ((-7, 3), 5), ((12, 3), 5), ((5, 3), 12)])
def test_lookup_caches_of_another_vocabulary(tmp_path: Path, ngram: tuple[int, ...], token: int) -> None:
    cache = NgramCache()
    cache.counts[ngram] = Counter({token: 2})
    cache.save(tmp_path / "cache")
    wrong = next(t for t in (*ngram, token) if not 0 <= t < 12)
    with pytest.raises(FileFormatError, match=f"holds token {wrong}, the vocabulary has 12"):
        NgramCache.load(tmp_path / "cache", 12)


def test_lookup_caches_keep_counts_that_grew_too_large(tmp_path: Path) -> None:
    cache = NgramCache()
    cache.counts[5,] = Counter({6: 2**31 - 1})
    cache.learn([5, 6], 0)
    cache.save(tmp_path / "cache")
    assert NgramCache.load(tmp_path / "cache", 7).counts == {(5,): Counter({6: 2**31 - 1})}


def test_set_up_and_its_errors() -> None:
    vocab = Vocab.from_metadata(Model.load(BUNDLED).gguf.metadata)
    assert make_speculation(SpeculativeParams(types=("none",)), vocab) is None
    small = ContextParams(n_ctx=256, n_threads=2)
    made = make_speculation(SpeculativeParams(types=("suffix",)), vocab, DraftFiles(model=BUNDLED), draft_params=small)
    assert made is not None and [d.name for d in made.speculator().drafters] == ["suffix", "draft"]
    for types, message in (
        (("draft",), "needs a draft model: give one with -md"),
        (("eagle",), "possible types are none, ngram-simple"),
        (("mtp",), "--spec-type mtp needs the model itself"),
    ):
        with pytest.raises(UsageError, match=message):
            make_speculation(SpeculativeParams(types=types), vocab)
    with pytest.raises(UsageError, match="n_max must be at least 0, not -1"):
        SpeculativeParams(n_max=-1).check()
    other = Vocab.from_metadata(Model.load(DATA / "zoo" / "qwen3moe.gguf").gguf.metadata)
    with pytest.raises(UsageError, match="vocabulary"):
        common_vocabulary(vocab, other)


def test_statistics_lines() -> None:
    speculator = Speculator([Oracle([1, 2, 3, 4, 5, 6])], SpeculativeParams(n_max=3))
    assert speculator.draft([1]) == [2, 3, 4]
    speculator.accept(2)
    assert speculator.draft([1, 2, 3, 4, 5, 6]) == []
    rate, line = speculator.lines()
    assert rate == "draft acceptance rate = 0.66667 (    2 accepted /     3 generated)"
    assert line.startswith(
        "statistics oracle: #calls = 2, #gen drafts = 1, #acc drafts = 1, #gen tokens = 3, #acc tokens = 2, dur(b,g,a)"
    )


def test_drafts_as_long_as_allowed_are_not_too_short() -> None:
    """Batches allow fewer tokens than llama-server's n_min of 48: nothing would ever be drafted."""
    speculator = Speculator([Oracle(range(100))], SpeculativeParams(n_max=64, n_min=48))
    assert speculator.draft([0], 7) == list(range(1, 8))
    assert speculator.draft([0]) == list(range(1, 65))
    assert speculator.draft(list(range(60))) == [], "40 tokens where 64 are possible"
    assert speculator.draft([0], 0) == []
    assert Speculator([Oracle(range(100))], SpeculativeParams(n_max=16, n_min=48)).draft([0]) == []


def test_long_drafts_fit_a_small_context() -> None:
    drafter = ModelDraft(context(BUNDLED, n_ctx=32, flash_attn=False), p_min=0.0, n_vocab=4000, n_ctx=32)
    for n in (3, 20, 40):
        assert len(drafter.draft(list(range(10, 10 + n)), 30)) == 16


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_end_the_guesses(broken: float) -> None:
    """Those of a damaged draft model."""
    good = np.array([0.0, 3.0, -np.inf], np.float32)
    bad = np.full(3, broken, np.float32)
    assert probable_tokens(bad, 4, 0.0, lambda found: good) == []
    assert probable_tokens(good, 4, 0.0, lambda found: good if len(found) < 2 else bad) == [1, 1]
    assert probable_tokens(good, 2, 0.9, lambda found: good) == [1, 1]
