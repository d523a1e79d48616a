"""Penalties of repetition: over a window, DRY."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from ikpy.engine import candidates as shape
from ikpy.engine.dry import dry_breakers, dry_penalties, repetition_lengths, tokens_since_breaker
from ikpy.engine.sampling import (
    Sampler,
    SamplingParams,
)

N = 200
SEEDS = range(6)


def test_penalties() -> None:
    logits = np.array([2.0, -1.0, 3.0, 0.5, -4.0], np.float32)
    shape.penalize(logits, np.array([0, 1, 1, 4]), 2.0, 0.1, 0.01)
    wanted = [2.0 / 2 - 0.1 - 0.01, -1.0 * 2 - 0.2 - 0.01, 3.0, 0.5, -8.0 - 0.1 - 0.01]
    np.testing.assert_allclose(logits, wanted, rtol=1e-6)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("repeat", [1e30, 1e300, 1e-30, 1e-300])
@pytest.mark.parametrize("more", [{}, {"mirostat": 2}, {"temperature": 1e-40}, {"frequency_penalty": -1e38}])
def test_huge_values_stay_within_floats(repeat: float, more: dict[str, float]) -> None:
    logits = np.array([3.0, -2.0, -np.inf, 0.0, 1.0], np.float32)
    penalized = logits.copy()
    shape.penalize(penalized, np.array([0, 1, 2]), repeat, 0.0, 0.0)
    assert np.isfinite(penalized[[0, 1]]).all() and penalized[2] == -np.inf and (penalized[3:] == logits[3:]).all()
    sampler = Sampler(SamplingParams(repeat_penalty=repeat, seed=1, **more), len(logits))  # type: ignore[arg-type]
    for _ in range(6):
        token = sampler.sample(logits.copy())
        assert token != 2
        sampler.accept(token)


def test_penalty_window_and_newline() -> None:
    logits = np.zeros(10, np.float32)
    logits[:] = [5, 4.9, 4.8, 4.7, 0, 0, 0, 0, 0, 0]
    params = SamplingParams(temperature=0, repeat_penalty=2.0, repeat_last_n=2)
    sampler = Sampler(params, 10, newline_id=1)
    sampler.accept(0)
    assert sampler.sample(logits) == 1
    sampler.accept(1)
    assert sampler.sample(logits) == 1, "the newline is exempt"
    for token in (2, 3):
        sampler.accept(token)
    assert sampler.sample(logits) == 0, "token 0 has left the window"
    assert (
        Sampler(SamplingParams(temperature=0, penalize_nl=True, repeat_penalty=2.0), 10, newline_id=1).sample(logits)
        == 0
    )
    everything = Sampler(SamplingParams(temperature=0, repeat_penalty=2.0, repeat_last_n=-1), 10, n_ctx=3)
    for token in (0, 1, 2, 3):
        everything.accept(token)
    assert everything.sample(logits) == 0
    off = Sampler(SamplingParams(temperature=0, repeat_penalty=2.0, repeat_last_n=0), 10)
    off.accept(0)
    assert off.sample(logits) == 0


def brute_lengths(history: list[int], most: int) -> dict[int, int]:
    found: dict[int, int] = {}
    for end in range(len(history) - 1):
        length = 0
        while length < most and end - length >= 0 and history[end - length] == history[len(history) - 1 - length]:
            length += 1
        if length:
            token = history[end + 1]
            found[token] = max(found.get(token, 0), length)
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_repetition_lengths(seed: int) -> None:
    history = np.random.default_rng(seed).integers(0, 3, 120)
    for most in (1, 4, 119):
        assert repetition_lengths(history, most) == brute_lengths(list(history), most)


@pytest.mark.parametrize("seed", range(5))
def test_repetition_lengths_of_long_copies(seed: int) -> None:
    rng = np.random.default_rng(seed)
    history = np.tile(rng.integers(0, 2, rng.integers(1, 20)), 100)
    for most in (100, 10**6):
        assert repetition_lengths(history, most) == brute_lengths(list(history), most)


def test_a_history_of_one_token_takes_linear_time() -> None:
    history, begin = np.full(100_000, 7), time.process_time()
    assert repetition_lengths(history, 10**6) == {7: 99_999}
    assert time.process_time() - begin < 10  # 3 minutes if every length were a step


@pytest.mark.parametrize("seed", SEEDS)
def test_the_last_breaker_is_found_wherever_it_is(seed: int) -> None:
    random = np.random.default_rng(seed)
    history = random.integers(0, 50, 5000)
    breakers = {60: [(1,), (1, 2)], 61: [()]}
    for back in (0, 1, 2, 255, 256, 257, 767, 768, 769, 4999):
        text = history.copy()
        text[5000 - 1 - back] = 61
        assert tokens_since_breaker(text, breakers) == back
        text[-2:] = 60, 3  # a head without its tail
        assert tokens_since_breaker(text, breakers) == (back if back > 1 else 5000)
        text[-3:] = 60, 1, 2
        assert tokens_since_breaker(text, breakers) == 0


def test_windows_of_penalties_in_a_long_history() -> None:
    params = SamplingParams(temperature=0, repeat_penalty=2.0, repeat_last_n=3)
    sampler = Sampler(params, N)
    logits = np.full(N, 1.0, np.float32)
    logits[:4] = 1.5
    for i in range(1000):
        sampler.accept(i % 4)
    assert sampler.sample(logits) == 0, "1, 2 and 3 came last"
    sampler.take_back(2, [])
    assert len(sampler.history) == 998 and sampler.sample(logits) == 2


def test_dry() -> None:
    history = np.array([7, 1, 2, 3, 4, 9, 1, 2, 3])
    wanted = {4: 0.8 * 1.75 ** (3 - 2)}
    assert dry_penalties(history, {}, 0.8, 1.75, 2) == pytest.approx(wanted)
    assert dry_penalties(history, {1: [()]}, 0.8, 1.75, 2) == pytest.approx({4: 0.8})
    assert dry_penalties(history, {2: [()]}, 0.8, 1.75, 2) == {}
    assert dry_penalties(history, {4: [()]}, 0.8, 1.75, 2) == {}, "a breaker ends a repetition"
    assert dry_penalties(history, {4: [(8,)]}, 0.8, 1.75, 2) == pytest.approx(wanted), "the beginning of one does not"
    assert tokens_since_breaker(history, {9: [(1, 2)], 4: [()]}) == 1
    assert tokens_since_breaker(history, {9: [(1, 3)]}) == 9
    long = np.tile([1, 2], 400)
    assert dry_penalties(long, {}, 1.0, 1.75, 2)[1] == pytest.approx(1.75 ** (88.72 / math.log(1.75)))


def test_dry_breakers_inside_and_across_tokens() -> None:
    texts = [b"a", b"\n", b".\n", b"STO", b"P", b"xSTOPx", b"S", b"OPS", b""]
    spell = {b"TOP": [6, 4], b"OP": [7], b"P": [4]}
    found = dry_breakers(["\n", "STOP"], texts, lambda text: spell[text.encode()])
    assert found == {1: [()], 2: [()], 5: [()], 3: [(4,)], 6: [(6, 4)], 7: [(6, 4)]}


def test_dry_in_the_chain() -> None:
    logits = np.zeros(12, np.float32)
    logits[4], logits[5] = 3.0, 2.5
    params = SamplingParams(temperature=1.0, top_k=1, dry_multiplier=1.0, seed=1)
    sampler = Sampler(params, 12, n_ctx=100)
    for token in (1, 2, 3, 4, 9, 1, 2, 3):
        sampler.accept(token)
    assert sampler.sample(logits) == 5
    assert Sampler(params, 12, n_ctx=100).sample(logits) == 4
