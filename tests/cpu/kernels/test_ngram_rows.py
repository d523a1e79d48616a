"""The op that hashes n-grams, and the signed root, against their definitions; test_tiers.py need not run them: neither
depends on the tier.
"""

from __future__ import annotations

import numpy as np
import pytest

from ikpy.graph.builder import Graph, KeptStates
from ikpy.graph.ir import F32, external
from tests.cpu.kernels.op_graphs import run_graph, value_of

EOS = 5


def hashed(history: list[int], n: int, constants: dict[str, list[int]], n_heads: int) -> list[int]:
    """Rows of the last token of a text in whole numbers of any size."""
    token, past = history[-1], history[:-1][-(n - 1) :]
    if EOS in past:
        past = past[len(past) - past[::-1].index(EOS) :]
    gram = [token, *past[::-1], *[EOS] * (n - 1 - len(past))]
    rows = []
    for length in range(2, n + 1):
        mixed = 0
        for each, factor in zip(gram[:length], constants["multipliers"], strict=False):
            mixed ^= each * factor
        per_length = n_heads // (n - 1)
        for head in range((length - 2) * per_length, (length - 1) * per_length):
            rows.append(mixed % constants["sizes"][head] + constants["offsets"][head])
    return rows


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize(("n", "per_length"), [(2, 1), (3, 8), (4, 3)])
def test_rows(n: int, per_length: int, n_threads: int) -> None:
    """Several texts in batches of any division, whose states are copied behind some tokens; large products."""
    rng = np.random.default_rng(n)
    n_heads, n_slots = (n - 1) * per_length, 3
    constants = {
        "multipliers": [int(m) for m in rng.integers(1 << 42, (1 << 63) // (1 << 18), n)],
        "sizes": [int(s) for s in rng.integers(20_000_000, 20_001_000, n_heads)],
        "offsets": [20_001_000 * i for i in range(n_heads)],
    }
    table = np.array([v for values in constants.values() for v in values], np.int64)
    state = np.zeros((n_slots, n - 1), np.float32)
    texts: list[list[int]] = [[] for _ in range(n_slots)]
    for n_tokens in (1, 7, 2, 40):
        tokens = rng.choice([0, EOS, 9, 248_319, 131_072], n_tokens).astype(np.int32)
        slots = rng.choice([0, 2], n_tokens).astype(np.int32)
        kept = np.where(rng.random(n_tokens) < 0.5, rng.permutation(n_tokens), -1).astype(np.int32)
        copies = np.full((n_tokens, n - 1), np.nan, np.float32)
        values = [value_of(a) for a in (tokens, table, state, slots)]
        values[2] = external(state.ctypes.data, state, F32, (n - 1, n_slots))
        copied = KeptStates(external(copies.ctypes.data, copies, F32, (n - 1, n_tokens)), value_of(kept))

        def rows(g: Graph, values: list = values, copied: KeptStates = copied) -> list:
            return [g.ngram_rows(*values, n_heads=n_heads, eos=EOS, kept=copied)]

        found = run_graph(rows, n_threads)[0][0, 0]
        for t, slot in enumerate(slots):
            texts[slot].append(int(tokens[t]))
            expected = hashed(texts[slot], n, constants, n_heads)
            assert found[t].tolist() == expected, f"token {t} of {n_tokens} in slot {slot}"
            before = [each + 1 for each in texts[slot][-(n - 1) :]]
            if kept[t] >= 0:
                assert copies[kept[t]].tolist() == [0.0] * (n - 1 - len(before)) + before
        assert np.isnan(np.delete(copies, kept[kept >= 0], axis=0)).all()
    assert not state[1].any()


def test_wrong_shapes_are_named() -> None:
    g = Graph(None)  # type: ignore[arg-type]
    tokens, state = value_of(np.zeros(3, np.int32)), value_of(np.zeros((2, 2), np.float32))
    with pytest.raises(ValueError, match="3 heads of n-grams behind 2 tokens"):
        g.ngram_rows(tokens, value_of(np.zeros(9, np.int64)), state, tokens, n_heads=3, eos=0)
    with pytest.raises(ValueError, match="n-grams of 3 tokens"):
        g.ngram_rows(tokens, value_of(np.zeros(11, np.int64)), state, tokens.slice0(0, 2), n_heads=4, eos=0)


def test_signed_root() -> None:
    x = np.array([[-4.0, 9.0, 0.0, -0.0, 1e-9, -1e-9, np.nan, np.inf, -np.inf, 2.0]], np.float32)
    found = run_graph(lambda g: [g.signed_root(value_of(x), 1e-6)], 1)[0][0, 0, 0]
    expected = [-2, 3, 0, 0, 1e-3, -1e-3, np.nan, np.inf, -np.inf, np.sqrt(2)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
