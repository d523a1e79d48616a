"""Saved texts in the order of their tokens: found, covered and pushed out as by a look at each of them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ikpy.engine.prefix import common_prefix
from ikpy.server.prompt_cache import PromptCache, SavedText


@dataclass(frozen=True, eq=False)
class State:
    """A saved state that can be gone on from at multiples of ``step`` tokens only, and at its end."""

    tokens: list[int]
    step: int = 1

    @property
    def nbytes(self) -> int:
        return 10 + len(self.tokens)

    def reusable(self, n: int) -> int:
        return n if n == len(self.tokens) else n // self.step * self.step


def saved(tokens: list[int], step: int, scale: float) -> SavedText:
    state: Any = State(tokens, step)
    return SavedText(state, (), (scale,))


class Plain:
    """The cache as a list, the most recently used last."""

    def __init__(self, limit: int) -> None:
        self.limit, self.texts = limit, list[SavedText]()

    def alike(self, scales: tuple[float, ...]) -> list[SavedText]:
        return [text for text in self.texts if text.scales == scales]

    def store(self, new: SavedText) -> None:
        if 0 <= self.limit < new.nbytes:
            return
        alike = self.alike(new.scales)
        covered = [text for text in alike if new.tokens[: len(text.tokens)] == text.tokens]
        self.texts = [text for text in self.texts if text not in covered] + [new]
        while 0 <= self.limit < sum(text.nbytes for text in self.texts):
            del self.texts[0]


TOKENS = st.lists(st.integers(0, 2), max_size=7)
STEPS = st.lists(
    st.tuples(st.sampled_from(["store", "best", "wants"]), TOKENS, st.integers(1, 4), st.sampled_from([0.0, 1.0])),
    max_size=40,
)


@settings(max_examples=400, deadline=None)
@given(STEPS, st.sampled_from([-1, 0, 40, 90]))
def test_texts_are_found_as_by_a_look_at_each(steps: list[Any], limit: int) -> None:
    cache, plain = PromptCache(limit), Plain(limit)
    for what, tokens, step, scale in steps:
        alike = plain.alike((scale,))
        if what == "store":
            new = saved(tokens, step, scale)
            cache.store(new)
            plain.store(new)
        elif what == "wants":
            known = any(text.tokens[: len(tokens)] == tokens for text in alike)
            assert cache.wants(tokens, (scale,)) == (limit != 0 and not known)
        else:
            n, best = cache.best(tokens, (scale,))
            lengths = [text.state.reusable(common_prefix(text.tokens, tokens)) for text in alike]
            assert n == max(lengths, default=0)
            assert (best is None) == (n == 0)
            if best is not None:
                assert best in alike and best.state.reusable(common_prefix(best.tokens, tokens)) == n
                cache.use(best)
                plain.texts.append(plain.texts.pop(plain.texts.index(best)))
        assert list(cache._by_use.values()) == plain.texts
        assert (len(cache), cache.nbytes) == (len(plain.texts), sum(text.nbytes for text in plain.texts))


def test_thousands_of_texts_are_not_looked_at_one_by_one() -> None:
    cache = PromptCache(-1)
    n = 20_000
    for i in range(n):
        cache.store(saved([0, 1, i * 7919 % n, *range(20)], 1, 0.0))
    began = time.process_time()
    for i in range(100):
        prompt = [0, 1, i * 7919 % n, *range(10), 99]
        assert cache.best(prompt, (0.0,))[0] == 13 and cache.wants(prompt, (0.0,))
    assert time.process_time() - began < 0.5, "100 looks at each take 2 s and more"
