"""Samplers against direct formulas, and the state of the chain."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ikpy.engine import candidates as shape
from ikpy.engine.candidates import Candidates
from ikpy.engine.sampling import (
    DEFAULT_SAMPLERS,
    GrammarDeadEndError,
    NotANumberError,
    Sampler,
    SamplingParams,
    sampler_sequence,
    sampler_sequence_from_letters,
)
from ikpy.errors import UsageError

N = 200
GREEDY = SamplingParams(temperature=0)


def logits_of(seed: int = 0, n: int = N, scale: float = 2.5) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, n).astype(np.float32)


def start(seed: int = 0, n: int = N) -> Candidates:
    return Candidates(np.arange(n, dtype=np.int32), logits_of(seed, n))


def probabilities(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits.astype(np.float64) - logits.max())
    return e / e.sum()


def descending(seed: int = 0, n: int = N) -> tuple[np.ndarray, np.ndarray]:
    logits = logits_of(seed, n)
    order = np.argsort(-logits, kind="stable")
    return order, probabilities(logits)[order]


SEEDS = range(6)


@pytest.mark.parametrize("k", [0, 1, 7, 199, 200, 500])
def test_top_k(k: int) -> None:
    order, _ = descending()
    kept = shape.top_k(start(), k)
    assert list(kept.ids) == list(order[: k or N])
    assert len(shape.top_k(start(), 3, min_keep=9)) == 9


def test_top_k_breaks_ties_by_id() -> None:
    c = Candidates(np.arange(8, dtype=np.int32), np.array([1, 3, 3, 3, 2, 3, 0, 3], np.float32))
    assert list(shape.top_k(c, 3).ids) == [1, 2, 3]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.95, 1.0])
def test_top_p(seed: int, p: float) -> None:
    order, probability = descending(seed)
    total, count = 0.0, 0
    while count < N and total < p:
        total += probability[count]
        count += 1
    kept = shape.top_p(start(seed), p)
    assert sorted(kept.ids) == sorted(order[: N if p >= 1 else count])
    assert len(shape.top_p(start(seed), 0.01, min_keep=5)) == 5


@pytest.mark.parametrize("seed", SEEDS)
def test_min_p(seed: int) -> None:
    probability = probabilities(logits_of(seed))
    for p in (0.01, 0.2, 0.999):
        assert set(shape.min_p(start(seed), p).ids) == set(np.flatnonzero(probability >= p * probability.max()))
    assert len(shape.min_p(start(seed), 0.999, min_keep=4)) == 4
    assert len(shape.min_p(start(seed), 0.0)) == N


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("z", [0.3, 0.9, 0.99])
def test_tail_free(seed: int, z: float) -> None:
    order, p = descending(seed)
    first = [p[i] - p[i + 1] for i in range(N - 1)]
    second = [abs(first[i] - first[i + 1]) for i in range(N - 2)]
    total, count = 0.0, N
    for i, value in enumerate(second):
        total += value / sum(second)
        if total > z and i >= 1:
            count = i
            break
    assert list(shape.tail_free(start(seed), z).ids) == list(order[:count])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("p", [0.2, 0.7, 0.95])
def test_typical(seed: int, p: float) -> None:
    probability = probabilities(logits_of(seed))
    entropy = -sum(x * math.log(x) for x in probability)
    order = sorted(range(N), key=lambda i: abs(-math.log(probability[i]) - entropy))
    total, kept = 0.0, []
    for i in order:
        kept.append(i)
        total += probability[i]
        if total > p:
            break
    assert list(shape.typical(start(seed), p).ids) == kept


def test_temperature_and_dynamic_temperature() -> None:
    logits = logits_of()
    np.testing.assert_allclose(shape.temperature(start(), 0.5).logits, logits / 0.5, rtol=1e-6)
    p = probabilities(logits)
    entropy = -sum(x * math.log(x) for x in p) / math.log(N)
    wanted = 0.3 + 1.0 * entropy**2
    np.testing.assert_allclose(shape.temperature(start(), 0.8, 0.5, 2.0).logits, logits / wanted, rtol=1e-5)
    one = Candidates(np.array([5], np.int32), np.array([2.0], np.float32))
    assert shape.temperature(one, 0.5, 0.4).logits[0] == 2.0


def test_xtc() -> None:
    p = np.array([0.4, 0.3, 0.2, 0.1])
    c = Candidates(np.arange(4, dtype=np.int32), np.log(p).astype(np.float32))
    assert list(shape.xtc(c, 0.15).ids) == [2, 3]
    assert list(shape.xtc(c, 0.35).ids) == [0, 1, 2, 3]
    assert list(shape.xtc(c, 0.15, min_keep=3).ids) == [0, 1, 2, 3]
    assert list(shape.xtc(c, 0.6).ids) == [0, 1, 2, 3]


def test_top_n_sigma() -> None:
    logits = logits_of()
    limit = logits.max() - 1.5 * logits.std()
    assert set(shape.top_n_sigma(start(), 1.5).ids) == set(np.flatnonzero(logits >= limit))
    masked = start()
    masked.logits[::2] = -np.inf
    odd = logits[1::2]
    wanted = {2 * i + 1 for i in np.flatnonzero(odd >= odd.max() - odd.std())}
    assert set(shape.top_n_sigma(masked, 1.0).ids) == wanted


def test_mirostat_2_keeps_surprises_below_mu_and_learns() -> None:
    params = SamplingParams(mirostat=2, mirostat_tau=2.0, mirostat_eta=0.2, temperature=1.0, seed=5)
    sampler = Sampler(params, N)
    logits = logits_of()
    mu = 4.0
    for _ in range(20):
        token = sampler.sample(logits)
        sampler.accept(token)
        surprise = -np.log2(descending()[1])
        kept = max(1, int((surprise <= mu).sum()))
        assert set(sampler.last_ids) == set(descending()[0][:kept])
        p = float(sampler.last_probabilities[list(sampler.last_ids).index(token)])
        mu -= 0.2 * (-math.log2(p) - 2.0)
    np.testing.assert_allclose(sampler.last_probabilities.sum(), 1.0)


def test_mirostat_1_formula() -> None:
    _, p = descending()
    t = [math.log((i + 2) / (i + 1)) for i in range(99)]
    b = [math.log(p[i] / p[i + 1]) for i in range(99)]
    s = sum(x * y for x, y in zip(t, b, strict=True)) / sum(x * x for x in t)
    eps = s - 1
    k = ((eps * 2**5.0) / (1 - N**-eps)) ** (1 / s)
    assert shape.mirostat_k(p, 5.0, N) == int(max(1, min(k, N)))
    sampler = Sampler(SamplingParams(mirostat=1, mirostat_tau=2.5, temperature=1.0, seed=3), N)
    assert 0 <= sampler.sample(logits_of()) < N
    assert len(sampler.last_ids) == int(max(1, min(k, N)))


def test_mirostat_1_learns_from_the_surprise_of_the_whole_distribution() -> None:
    """As in its paper (arXiv:2007.14966): among the candidates it keeps, the only one would surprise nobody."""
    params = SamplingParams(mirostat=1, mirostat_tau=1.0, mirostat_eta=0.3, temperature=1.0, seed=5)
    sampler = Sampler(params, N)
    ids, p = descending()
    mu = 2.0
    for _ in range(20):
        token = sampler.sample(logits_of())
        sampler.accept(token)
        assert list(sampler.last_ids) == list(ids[: shape.mirostat_k(p, mu, N)])
        mu -= 0.3 * (-math.log2(p[list(ids).index(token)]) - 1.0)


def test_mirostat_1_keeps_all_when_its_formula_leaves_the_range_of_floats() -> None:
    flat = np.arange(1, N + 1) ** -0.01
    assert shape.mirostat_k(flat / flat.sum(), 40.0, 32_000) == N
    assert shape.mirostat_k(descending()[1], 2000.0, N) == N
    sampler = Sampler(SamplingParams(mirostat=1, mirostat_tau=50.0, mirostat_eta=1.0, seed=3), N)
    for _ in range(100):  # every token is less surprising than wanted, so that mu grows without end
        token = sampler.sample(logits_of(scale=0.1))
        sampler.accept(token)
        assert 0 <= token < N


def test_adaptive_p_prefers_probabilities_near_the_target() -> None:
    p = np.array([0.6, 0.3, 0.1, 0.0])
    logits = shape.adaptive_logits(p, 0.3)
    for i, value in enumerate(p[:3]):
        d = abs(value - 0.3) / 0.3
        assert logits[i] == pytest.approx(5 - 10 * d * d / (1 + d))
    assert logits.argmax() == 1 and logits[3] == -np.inf
    params = SamplingParams(adaptive_target=0.3, adaptive_decay=0.5, temperature=1.0, samplers=("adaptive_p",), seed=1)
    sampler = Sampler(params, 4)
    with np.errstate(divide="ignore"):
        row = np.log(p).astype(np.float32)
    token = sampler.sample(row)
    sampler.accept(token)
    total, weight = 0.5 * (0.3 * 2) + p[token], 0.5 * 2 + 1
    sampler.sample(row)
    wanted = shape.adaptive_logits(p, min(1, max(0, 0.6 - total / weight)))
    np.testing.assert_allclose(sampler.last_probabilities, probabilities(wanted), atol=1e-6)


@pytest.mark.parametrize(
    "more", [{"mirostat": 1}, {"mirostat": 2, "mirostat_tau": 2.0}, {"adaptive_target": 0.3}], ids=str
)
def test_nothing_is_learned_from_tokens_that_are_taken_back(more: dict[str, Any]) -> None:
    def probabilities_behind(detours: int) -> np.ndarray:
        sampler = Sampler(SamplingParams(seed=1, top_k=0, top_p=1, min_p=0, **more), N)

        def draw(unit: float) -> None:
            sampler._draws.next = lambda: unit  # type: ignore[method-assign]
            sampler.accept(sampler.sample(logits_of()))

        for unit in (0.1, 0.9, 0.5):
            draw(unit)
            for _ in range(detours):
                draw(0.999)
            sampler.take_back(detours, [])
        draw(0.2)
        return sampler.last_probabilities

    np.testing.assert_array_equal(probabilities_behind(2), probabilities_behind(0))


def test_draws_follow_the_classic_generator() -> None:
    # mt19937 seeded with 42 starts with 1608637542, 3421126067, 4083286876.
    logits = logits_of(n=50)
    sampler = Sampler(SamplingParams(seed=42, samplers=(), temperature=1.0), 50)
    cumulative = np.cumsum(probabilities(logits))
    for word in (1608637542, 3421126067, 4083286876):
        token = sampler.sample(logits)
        sampler.accept(token)
        assert token == int(np.flatnonzero(cumulative > cumulative[-1] * word / 4294967295.0)[0])


def test_same_seed_same_tokens_after_reset() -> None:
    params = SamplingParams(seed=7, xtc_probability=0.5, xtc_threshold=0.05, temperature=1.2)
    sampler = Sampler(params, N)

    def run() -> list[int]:
        tokens = []
        for i in range(30):
            tokens.append(sampler.sample(logits_of(i)))
            sampler.accept(tokens[-1])
        return tokens

    first = run()
    sampler.reset()
    assert run() == first and len(set(first)) > 10
    assert Sampler(SamplingParams(), N).seed != Sampler(SamplingParams(), N).seed


def test_distribution_of_the_default_chain() -> None:
    logits = logits_of(n=30)
    sampler = Sampler(SamplingParams(seed=1), 30)
    counts = np.bincount([sampler.sample(logits) for _ in range(4000)], minlength=30)
    order = np.argsort(-logits)
    p = probabilities(logits)[order]
    kept = order[: int((np.cumsum(p) < 0.95).sum()) + 1]
    kept = kept[logits[kept] >= logits.max() + math.log(0.05)]
    wanted = np.zeros(30)
    wanted[kept] = probabilities(logits[kept] / np.float32(0.8))
    assert np.abs(counts / 4000 - wanted).max() < 0.03
    assert set(np.flatnonzero(counts)) <= set(kept)


@pytest.mark.parametrize("probability", [0.5, 0.9])
def test_distribution_with_xtc(probability: float) -> None:
    """Whether XTC cuts at a token has nothing to do with the number that the token is drawn with."""
    p = np.array([0.4, 0.3, 0.2, 0.1])
    params = SamplingParams(
        seed=3, samplers=("xtc", "temperature"), temperature=1.0, xtc_probability=probability, xtc_threshold=0.15
    )
    sampler = Sampler(params, 4)
    logits = np.log(p).astype(np.float32)
    counts = np.bincount([sampler.sample(logits) for _ in range(8000)], minlength=4)
    cut = np.array([0, 0, 0.2, 0.1]) / 0.3
    wanted = probability * cut + (1 - probability) * p
    chi_square = ((counts - 8000 * wanted) ** 2 / (8000 * wanted)).sum()
    assert chi_square < 16.3, f"{counts / 8000} instead of {wanted}"  # 1 in 1,000 of 3 degrees of freedom


def odd_logits(rng: np.random.Generator, n: int) -> np.ndarray:
    """Random logits, now and then with many equal ones, impossible tokens or huge values."""
    logits = (rng.standard_normal(n) * rng.choice([0.01, 2, 30])).astype(np.float32)
    kind = int(rng.integers(6))
    if kind == 0:
        logits = np.round(logits)
    elif kind == 1:
        logits[rng.random(n) < 0.97] = -np.inf
    elif kind == 2:
        logits = np.clip(logits.astype(np.float64) * 1e37, -3e38, 3e38).astype(np.float32)
    return logits


@pytest.mark.parametrize("seed", range(8))
def test_the_usual_chain_is_that_of_the_samplers(seed: int) -> None:
    """The native way draws the same tokens from the same candidates as one sampler after the other."""
    rng = np.random.default_rng(seed)
    n = int(rng.choice([50, 1000, 40000]))
    names = [name for name in DEFAULT_SAMPLERS if name not in {"top_p", "min_p", "temperature"} or rng.random() < 0.8]
    params = SamplingParams(
        seed=seed,
        samplers=tuple(names),
        top_k=int(rng.choice([1, 3, 40, 49])),
        top_p=float(rng.choice([0.3, 0.95, 1.0])),
        min_p=float(rng.choice([0.0, 0.05, 0.4, 1.5])),
        temperature=float(rng.choice([0.05, 0.8, 1.0, 3.0])),
        repeat_penalty=float(rng.choice([1.0, 1.3])),
    )
    usual, plain = Sampler(params, n, n_ctx=64), Sampler(params, n, n_ctx=64)
    assert usual._usual is not None
    plain._usual = None
    for _ in range(60):
        logits = odd_logits(rng, n)
        with np.errstate(over="ignore"):
            token = usual.sample(logits)
            assert plain.sample(logits) == token
        usual.accept(token)
        plain.accept(token)
        np.testing.assert_array_equal(usual.last_ids, plain.last_ids)
        np.testing.assert_allclose(usual.last_probabilities, plain.last_probabilities, rtol=1e-9, atol=1e-300)


@pytest.mark.parametrize(
    "change",
    [
        {"top_k": 0},
        {"top_k": N},
        {"samplers": ("temperature", "top_k")},
        {"samplers": ("top_p", "top_k")},
        {"samplers": ("min_p", "temperature")},
        {"tfs_z": 0.9},
        {"typical_p": 0.9},
        {"xtc_probability": 0.5, "xtc_threshold": 0.1},
        {"top_n_sigma": 1.0},
        {"adaptive_target": 0.5},
        {"dry_multiplier": 1.0},
        {"dynatemp_range": 0.5},
        {"mirostat": 2},
        {"min_keep": 2},
        {"temperature": 0.0},
    ],
    ids=str,
)
def test_unusual_chains_are_left_to_the_samplers(change: dict[str, Any]) -> None:
    assert Sampler(SamplingParams(**change), N)._usual is None


@pytest.mark.parametrize("change", [{}, {"temperature": 0.0}, {"mirostat": 2}, {"top_k": 0}, {"min_keep": 2}], ids=str)
def test_models_without_numbers_are_named(change: dict[str, Any]) -> None:
    sampler = Sampler(SamplingParams(seed=1, **change), N)
    with pytest.raises(NotANumberError, match="logits are not numbers"):
        sampler.sample(np.full(N, np.nan, np.float32))


def test_logits_that_are_no_numbers() -> None:
    """They are never drawn; without any other there is nothing to draw."""
    sampler = Sampler(SamplingParams(seed=1, top_k=3), N)
    logits = np.full(N, np.nan, np.float32)
    logits[[5, 150]] = 1.0
    assert {sampler.sample(logits) for _ in range(40)} == {5, 150}


def test_order_of_samplers_matters() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05])).astype(np.float32)
    hot = {"temperature": 5.0, "min_p": 0.5, "top_k": 0, "top_p": 1.0, "seed": 1}
    first = Sampler(SamplingParams(samplers=("min_p", "temperature"), **hot), 4)
    last = Sampler(SamplingParams(samplers=("temperature", "min_p"), **hot), 4)
    first.sample(logits)
    last.sample(logits)
    assert len(first.last_ids) == 2 and len(last.last_ids) == 4


def test_logit_bias_and_ignored_end() -> None:
    logits = logits_of()
    params = SamplingParams(temperature=0, logit_bias=((11, 50.0), (3, -np.inf), (11, 10.0)), ignore_eos=True)
    assert Sampler(params, N, eos_ids=[11]).sample(logits) != 11
    assert Sampler(SamplingParams(temperature=0, logit_bias=((11, 50.0),)), N).sample(logits) == 11
    before = logits.copy()
    Sampler(params, N).sample(logits)
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize("samplers", [(), ("top_k",), ("temperature",), ("top_k", "temperature"), ("typical_p",)])
@pytest.mark.parametrize(("logits", "drawn"), [
    ([0.0, np.inf, 3.0, np.inf, -np.inf], {1, 3}),
    ([-np.inf] * 3, {0, 1, 2}),
])  # fmt: skip
def test_infinite_logits(samplers: tuple[str, ...], logits: list[float], drawn: set[int]) -> None:
    """Those of infinity share all probability; without any other logits all tokens do."""
    params = SamplingParams(seed=3, samplers=samplers, temperature=0.7, top_k=2, typical_p=0.99)
    sampler = Sampler(params, len(logits))
    found = {sampler.sample(np.array(logits, np.float32)) for _ in range(50)}
    assert found == (drawn & {0, 1} if "top_k" in samplers and len(drawn) == 3 else drawn)


class Only:
    """Grammar that allows a fixed set of tokens."""

    def __init__(self, *allowed: int) -> None:
        self.allowed = allowed
        self.accepted: list[int] = []

    def allows(self, token: int) -> bool:
        return token in self.allowed

    def mask(self) -> np.ndarray:
        return np.isin(np.arange(N), self.allowed)

    def accept(self, token: int) -> None:
        self.accepted.append(token)

    def reset(self) -> None:
        self.accepted.clear()


@pytest.mark.parametrize("temperature", [0.0, -1.0, 0.8])
def test_grammar_masks_after_the_draw(temperature: float) -> None:
    logits = logits_of()
    worst = [int(i) for i in np.argsort(logits)[:3]]
    grammar = Only(*worst)
    sampler = Sampler(SamplingParams(temperature=temperature, seed=2), N, grammar=grammar)
    token = sampler.sample(logits)
    assert token in worst and (temperature > 0 or token == worst[2])
    sampler.accept(token)
    sampler.accept(5, grammar=False)
    assert grammar.accepted == [token] and list(sampler.history) == [token, 5]
    with pytest.raises(GrammarDeadEndError):
        Sampler(GREEDY, N, grammar=Only()).sample(logits)


def test_mirostat_learns_nothing_from_tokens_that_the_grammar_refused() -> None:
    logits = logits_of()
    ids, p = descending()
    params = SamplingParams(mirostat=2, mirostat_tau=2.0, mirostat_eta=0.5, temperature=1.0, seed=1)
    grammar = Only(int(ids[-1]))  # is never among those that are drawn freely
    sampler = Sampler(params, N, grammar=grammar)
    for _ in range(2):
        sampler.accept(sampler.sample(logits))  # as the only one that is left it surprises nobody
    grammar.allowed = tuple(range(N))
    sampler.sample(logits)
    mu = 2 * 2.0 + 2 * 0.5 * 2.0
    assert list(sampler.last_ids) == list(ids[: int((-np.log2(p) <= mu).sum())])


def test_parameters_are_checked() -> None:
    for bad in ({"repeat_last_n": -2}, {"dry_penalty_last_n": -5}, {"mirostat": 3}, {"repeat_penalty": 0.0}):
        with pytest.raises(UsageError):
            Sampler(SamplingParams(**bad), N)
    with pytest.raises(UsageError, match="logit bias for token 200"):
        Sampler(SamplingParams(logit_bias=((200, 1.0),)), N)
    with pytest.raises(ValueError, match="199 logits"):
        Sampler(GREEDY, N).sample(logits_of(n=199))


def test_names() -> None:
    assert sampler_sequence_from_letters("dkfypmxntw") == DEFAULT_SAMPLERS
    assert sampler_sequence(["temp", "nucleus", "what", "tfs", "top-k"]) == ("temperature", "top_p", "tfs_z", "top_k")
    assert sampler_sequence_from_letters("kzt") == ("top_k", "temperature")


def test_description_is_the_recorded_one() -> None:
    wanted = (
        "sampling: \n"
        "\trepeat_last_n = 64, repeat_penalty = 1.100, frequency_penalty = 0.000, presence_penalty = 0.000\n"
        "\ttop_k = 50, tfs_z = 1.000, top_p = 0.950, min_p = 0.010, typical_p = 1.000, temp = 0.800\n"
        "\tmirostat = 0, mirostat_lr = 0.100, mirostat_ent = 5.000\n"
        "\txtc_probability = 0.200, xtc_threshold = 1.000, top_n_sigma = 0.000\n"
        "\tadaptive_target = -1.00, adaptive_decay = 0.90\n"
        "sampling order: \n"
        "CFG -> Penalties -> dry -> top_k -> tfs_z -> typical_p -> top_p -> min_p -> xtc -> top_n_sigma -> "
        "temperature -> adaptive_p "
    )
    params = SamplingParams(repeat_penalty=1.1, top_k=50, min_p=0.01, xtc_probability=0.2)
    assert params.describe() == wanted
