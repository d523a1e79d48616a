"""Ops of recurrent layers against their definitions in float64; test_tiers.py runs this file on every tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from benchmarks.reference_attention import NativeOp
from ikpy.errors import UnsupportedError
from ikpy.graph.builder import MAX_CONV_TAPS, Graph, KeptStates
from ikpy.graph.elementwise import UNARY_KINDS
from ikpy.graph.ir import F32, Value, external
from tests.cpu.kernels.op_graphs import assert_close, run_graph, value_of
from tests.cpu.models import reference_recurrent as ref


def run(make: Callable[[Graph], Value], n_threads: int) -> np.ndarray:
    """The result, last axis first in ggml order, in memory that was NaN."""
    return run_graph(lambda graph: [make(graph)], n_threads)[0]


def some_kept(rng: np.random.Generator, n_tokens: int) -> np.ndarray:
    """Slots of copies behind two thirds of the tokens, each its own, in any order; int32 [n_tokens], -1 = none."""
    return np.where(rng.random(n_tokens) < 0.67, rng.permutation(n_tokens), -1).astype(np.int32)


def mixed_slots(rng: np.random.Generator, n_tokens: int, n_slots: int) -> np.ndarray:
    """Slots of a batch in any order, int32 [n_tokens]; the second one has no tokens."""
    return rng.choice([i for i in range(n_slots) if i != 1], n_tokens).astype(np.int32)


# softplus


def softplus(x: np.ndarray, n_threads: int = 1) -> np.ndarray:
    """The native op on rows f32 [T, n]."""
    op = NativeOp("unary")
    out = np.full_like(x, np.nan)
    op.op["dst"], op.op["src"][0, 0] = op.dense(out, F32), op.dense(x, F32)
    op.op["ip"][0, 0] = UNARY_KINDS["softplus"]
    op.run(n_threads=n_threads)
    return out


@pytest.mark.parametrize("n_threads", [1, 3])
def test_softplus(n_threads: int) -> None:
    """Relative to the value itself: far below 0 it is e^x, which a plain ln(1 + e^x) loses."""
    x = np.concatenate([np.linspace(-87, 90, 7001), np.linspace(-2, 2, 4001), [1e-30, -1e-30, 1e30, 3e38, 0.0]])
    x = np.resize(x.astype(np.float32), (5, 2205))
    expected = np.logaddexp(0, x.astype(np.float64))
    error = np.abs(softplus(x, n_threads) - expected) / expected
    worst = np.unravel_index(error.argmax(), error.shape)
    assert error[worst] < 6e-7, f"softplus({x[worst]}) is off by {error[worst]:.2e} of itself"


def test_softplus_of_what_is_no_number() -> None:
    x = np.array([[np.inf, -np.inf, np.nan, -1000, 1000]], np.float32)
    np.testing.assert_allclose(softplus(x), [[np.inf, 0, np.nan, 0, 1000]], atol=2e-38)


# causal convolution


def conv(
    x: np.ndarray,
    weight: np.ndarray,
    state: np.ndarray,
    slots: np.ndarray,
    *,
    silu: bool,
    bias: np.ndarray | None = None,
    dilation: int = 1,
    n_threads: int = 1,
    copies: tuple[np.ndarray, np.ndarray] | None = None,
) -> np.ndarray:
    """The native op; state is brought up to date. copies: of states, and where that behind each token goes."""
    values = [value_of(a) for a in (x, weight, state, slots)]
    # Plans drop single dimensions nowhere, but a [slots, C, 0] array has none of its strides.
    n_past, channels = (weight.shape[1] - 1) * dilation, weight.shape[0]
    values[2] = external(state.ctypes.data, state, F32, (n_past, channels, len(state)))
    kept = None
    if copies is not None:
        past = external(copies[0].ctypes.data, copies[0], F32, (n_past, channels, len(copies[0])))
        kept = KeptStates(past, value_of(copies[1]))
    options: dict[str, Any] = {"bias": None if bias is None else value_of(bias), "kept": kept, "dilation": dilation}
    return run(lambda g: g.causal_conv(*values, silu=silu, **options), n_threads)[0, 0]


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("taps", [1, 2, 3, 4, 7, MAX_CONV_TAPS])
def test_convolution(taps: int, silu: bool, n_threads: int) -> None:
    rng = np.random.default_rng(taps)
    for channels, n_tokens, n_slots in ((1, 1, 1), (7, 3, 2), (100, 40, 4), (192, 5, 3), (300, 1, 5), (64, 0, 2)):
        wide = rng.standard_normal((n_tokens, channels + 9)).astype(np.float32)
        x = wide[:, 4 : 4 + channels]
        weight = rng.standard_normal((channels, taps)).astype(np.float32)
        state = rng.standard_normal((n_slots, channels, taps - 1)).astype(np.float32)
        slots = mixed_slots(rng, n_tokens, n_slots)
        before = state.copy()
        expected, after = ref.causal_conv(x, weight, state, slots, silu=silu)
        found = conv(x, weight, state, slots, silu=silu, n_threads=n_threads)
        what = f"{taps} taps, {channels} channels, {n_tokens} tokens"
        if n_tokens:
            assert_close(what, found, expected, ("token", "channel"), 4e-6)
        np.testing.assert_array_equal(state, after.astype(np.float32), err_msg=what)
        unused = [i for i in range(n_slots) if i not in slots]
        np.testing.assert_array_equal(state[unused], before[unused], err_msg=what)


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize(("taps", "dilation"), [(4, 3), (4, 5), (2, 15), (3, 2), (1, 4)])
def test_dilated_convolution(taps: int, dilation: int, n_threads: int) -> None:
    """Taps some tokens apart, with copies behind some tokens, in one batch and in two."""
    rng = np.random.default_rng(taps + dilation)
    n_past = (taps - 1) * dilation
    for channels, n_tokens, n_slots in ((1, 1, 1), (100, 40, 4), (65, 7, 3)):
        x, weight = (rng.standard_normal(s).astype(np.float32) for s in ((n_tokens, channels), (channels, taps)))
        state = rng.standard_normal((n_slots, channels, n_past)).astype(np.float32)
        slots, kept = mixed_slots(rng, n_tokens, n_slots) if n_slots > 1 else np.zeros(1, np.int32), n_tokens
        start, parts = state.copy(), state.copy()
        expected, after = ref.causal_conv(x, weight, state, slots, silu=True, dilation=dilation)
        copies, kept_slots = np.full((kept, channels, n_past), np.nan, np.float32), some_kept(rng, n_tokens)
        options: dict[str, Any] = {"silu": True, "dilation": dilation, "n_threads": n_threads}
        found = conv(x, weight, state, slots, copies=(copies, kept_slots), **options)
        what = f"{taps} taps {dilation} apart, {channels} channels"
        assert_close(what, found, expected, ("token", "channel"), 4e-6)
        np.testing.assert_array_equal(state, after.astype(np.float32), err_msg=what)
        for t in np.flatnonzero(kept_slots >= 0):
            _, then = ref.causal_conv(x[: t + 1], weight, start, slots[: t + 1], silu=True, dilation=dilation)
            np.testing.assert_array_equal(copies[kept_slots[t]], then[slots[t]].astype(np.float32), err_msg=f"{t}")
        cut = n_tokens // 2
        if cut:
            pieces = [
                conv(x[p].copy(), weight, parts, slots[p].copy(), **options) for p in (slice(cut), slice(cut, None))
            ]
            np.testing.assert_array_equal(np.concatenate(pieces), found)


def test_convolution_over_too_many_tokens() -> None:
    g, rng = Graph(None), np.random.default_rng(1)  # type: ignore[arg-type]
    x, weight, state = (value_of(rng.standard_normal(s).astype(np.float32)) for s in ((1, 8), (8, 4), (1, 8, 18)))
    with pytest.raises(UnsupportedError, match="4 taps 6 tokens apart; at most 16 tokens"):
        g.causal_conv(x, weight, state, value_of(np.zeros(1, np.int32)), silu=True, dilation=6)


@pytest.mark.parametrize("silu", [False, True])
def test_bias_of_a_convolution(silu: bool) -> None:
    """Added before SiLU; past inputs lack it."""
    rng = np.random.default_rng(14)
    for n_tokens in (1, 20):
        x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((n_tokens, 100), (100, 4)))
        bias, state = rng.standard_normal(100).astype(np.float32), rng.standard_normal((3, 100, 3)).astype(np.float32)
        slots = mixed_slots(rng, n_tokens, 3)
        expected, after = ref.causal_conv(x, weight, state, slots, silu=silu, bias=bias)
        found = conv(x, weight, state, slots, silu=silu, bias=bias, n_threads=2)
        assert_close(f"{n_tokens} tokens", found, expected, ("token", "channel"), 4e-6)
        np.testing.assert_array_equal(state, after.astype(np.float32))


def test_convolution_in_parts_is_that_of_the_whole() -> None:
    """Bit by bit, wherever a sequence is divided, also into fewer tokens than there are past inputs."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((30, 70)).astype(np.float32)
    weight = rng.standard_normal((70, 5)).astype(np.float32)
    states = [np.zeros((2, 70, 4), np.float32) for _ in range(2)]
    slots = np.ones(30, np.int32)
    whole = conv(x, weight, states[0], slots, silu=True)
    bounds = [0, 1, 3, 4, 10, 29, 30]
    parts = [conv(x[a:b].copy(), weight, states[1], slots[a:b].copy(), silu=True) for a, b in pairwise(bounds)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    np.testing.assert_array_equal(states[0], states[1])


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("taps", [1, 2, 4, MAX_CONV_TAPS])
def test_copies_of_past_inputs(taps: int, n_threads: int) -> None:
    """Behind some tokens of several sequences; results and states are those without copies."""
    rng = np.random.default_rng(12)
    for n_tokens in (1, 7, 40):
        x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((n_tokens, 200), (200, taps)))
        start = rng.standard_normal((4, 200, taps - 1)).astype(np.float32)
        slots, kept = mixed_slots(rng, n_tokens, 4), some_kept(rng, n_tokens)
        copies = np.full((n_tokens, 200, taps - 1), np.nan, np.float32)
        states = start.copy(), start.copy()
        plain = conv(x, weight, states[0], slots, silu=True)
        found = conv(x, weight, states[1], slots, silu=True, n_threads=n_threads, copies=(copies, kept))
        np.testing.assert_array_equal(found, plain)
        np.testing.assert_array_equal(states[1], states[0])
        for t in range(n_tokens):
            if kept[t] >= 0:
                _, after = ref.causal_conv(x[: t + 1], weight, start, slots[: t + 1], silu=True)
                np.testing.assert_array_equal(copies[kept[t]], after[slots[t]].astype(np.float32), err_msg=f"{t}")
        unused = [i for i in range(n_tokens) if i not in kept]
        assert np.isnan(copies[unused]).all()


def test_broken_inputs_of_a_sequence_spoil_no_other() -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((12, 80)).astype(np.float32)
    weight = rng.standard_normal((80, 4)).astype(np.float32)
    slots = np.arange(12, dtype=np.int32) % 3
    found, states = [], []
    for broken in (False, True):
        x[4, 5] = np.nan if broken else 1.0
        states.append(np.zeros((3, 80, 3), np.float32))
        found.append(conv(x, weight, states[-1], slots, silu=True))
    spoilt = np.isnan(found[1])
    assert spoilt[[4, 7, 10], 5].all() and spoilt.sum() == 3
    np.testing.assert_array_equal(found[1][~spoilt], found[0][~spoilt])
    np.testing.assert_array_equal(states[1][[0, 2]], states[0][[0, 2]])


# gated delta rule


@dataclass
class Rule:
    """Operands of a gated delta rule, arrays as those of the reference."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    beta: np.ndarray
    state: np.ndarray
    slots: np.ndarray
    l2_eps: float = 1e-6
    scale: float = 0.125
    interleaved: bool = False

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """Results and states after them, by the definition."""
        return ref.gated_delta_rule(**{f.name: getattr(self, f.name) for f in fields(self)})

    def run(
        self, n_threads: int = 1, copies: tuple[np.ndarray, np.ndarray] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Results and states after them, by the native op. copies: of states, and where that behind each token goes."""
        state = self.state.copy()
        values = [value_of(a) for a in (self.q, self.k, self.v, self.g, self.beta, state, self.slots)]
        options: dict[str, Any] = {"l2_eps": self.l2_eps, "scale": self.scale, "interleaved": self.interleaved}
        if copies is not None:
            options["kept"] = KeptStates(*(value_of(a) for a in copies))
        return run(lambda graph: graph.gated_delta_rule(*values, **options), n_threads)[0], state

    def tokens(self, chosen: slice) -> Rule:
        """The op on some of the tokens."""
        names = ("q", "k", "v", "g", "beta", "slots")
        return replace(self, **{name: getattr(self, name)[chosen].copy() for name in names})

    def check(self, what: str, n_threads: int = 1, bound: float = 1e-5) -> None:
        """Results, states, and that slots without tokens keep theirs."""
        (found, state), (out, after) = self.run(n_threads), self.expected()
        if len(self.slots):
            assert_close(what, found, out, ("token", "head", "column"), bound)
        assert_close(f"states, {what}", state, after, ("slot", "head", "row", "column"), 4 * bound)
        unused = [i for i in range(len(state)) if i not in self.slots]
        np.testing.assert_array_equal(state[unused], self.state[unused], err_msg=what)


def make_rule(
    rng: np.random.Generator,
    n_tokens: int,
    shape: tuple[int, int, int, int],
    n_slots: int = 4,
    *,
    per_row: bool = False,
    decay: Sequence[float] = (),
) -> Rule:
    """Random operands; q, k and v are parts of the rows of one array. shape: dk, dv, Hk, Hv; decay: to choose from."""
    dk, dv, key_heads, heads = shape
    widths = (dk * key_heads, dk * key_heads, dv * heads)
    rows = rng.standard_normal((n_tokens, 3 + sum(widths))).astype(np.float32)
    q, k, v = np.split(rows[:, 3:], np.cumsum(widths[:2]), axis=1)
    parts = (q.reshape(-1, key_heads, dk), k.reshape(-1, key_heads, dk), v.reshape(-1, heads, dv))
    size = (n_tokens, heads, dk) if per_row else (n_tokens, heads)
    g = rng.choice(decay, size) if len(decay) else -rng.exponential(0.3, size)
    beta = rng.random((n_tokens, heads), np.float32)
    state = rng.standard_normal((n_slots, heads, dk, dv)).astype(np.float32)
    return Rule(*parts, g.astype(np.float32), beta, state, mixed_slots(rng, n_tokens, n_slots))


SHAPES = [
    (128, 128, 2, 4),
    (64, 40, 1, 3),
    (20, 33, 2, 2),
    (1, 1, 1, 1),
    (48, 100, 3, 6),
    (7, 17, 2, 8),
    (96, 31, 1, 1),
]


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rule(shape: tuple[int, int, int, int], per_row: bool, n_threads: int) -> None:
    """Several sequences in a batch, few and many tokens of each, heads that meet both ways."""
    rng = np.random.default_rng(5)
    for n_tokens in (0, 1, 2, 9, 33, 140):
        rule = make_rule(rng, n_tokens, shape, per_row=per_row)
        for interleaved in (False, True):
            replace(rule, interleaved=interleaved).check(f"{n_tokens} tokens, {interleaved}", n_threads)
        one = replace(rule, slots=np.full(n_tokens, 2, np.int32), l2_eps=0.0, k=0.1 * rule.k)
        one.check(f"{n_tokens} tokens of one sequence, keys as they are", n_threads)


DECAYS = {
    "none": [0.0],
    "some or none": [0.0, -1e-8, -1.0],
    "nothing left": [-1e4, -np.inf, -100.0, -88.0],
    "anything": [0.0, -np.inf, -0.5, -30.0, -1e4, 0.5],
    "growth": [0.3, 0.0, 1.0],
}


@pytest.mark.parametrize("n_tokens", [1, 12, 100])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("name", DECAYS)
def test_decays(name: str, per_row: bool, n_tokens: int) -> None:
    rng = np.random.default_rng(6)
    rule = make_rule(rng, n_tokens, (64, 40, 1, 2), per_row=per_row, decay=DECAYS[name])
    rule.check(name)


@pytest.mark.parametrize("per_row", [False, True])
def test_growth_of_nothing_is_nothing(per_row: bool) -> None:
    """Factors of many tokens together would be infinite."""
    rule = make_rule(np.random.default_rng(6), 60, (64, 40, 1, 2), per_row=per_row, decay=[4.0, 6.0])
    rule.slots[:] = 0
    out, state = replace(rule, v=0 * rule.v, state=0 * rule.state).run()
    assert (out == 0).all() and (state == 0).all()


def test_results_do_not_depend_on_threads() -> None:
    rng = np.random.default_rng(7)
    for n_tokens in (1, 100):
        rule = make_rule(rng, n_tokens, (64, 200, 2, 2))
        found = [rule.run(n) for n in (1, 2, 3, 8)]
        for other in found[1:]:
            for a, b in zip(found[0], other, strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("per_row", [False, True])
def test_few_tokens_give_the_bits_of_one_after_the_other(per_row: bool) -> None:
    """Up to 16 of a sequence, however many sequences there are; more of them nearly."""
    rng = np.random.default_rng(8)
    for n_tokens in (16, 17):
        rule = make_rule(rng, 2 * n_tokens, (64, 40, 1, 2), per_row=per_row)
        rule.slots[:] = np.arange(2 * n_tokens) % 2
        whole, state = rule.run()
        steps = []
        for t in range(len(rule.slots)):
            out, rule.state = rule.tokens(slice(t, t + 1)).run()
            steps.append(out)
        found = np.concatenate(steps)
        if n_tokens == 16:
            np.testing.assert_array_equal(found, whole)
            np.testing.assert_array_equal(rule.state, state)
        assert_close("one by one", found, whole, ("token", "head", "column"), 2e-6)


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("n_tokens", [1, 5, 16, 17, 90])
def test_copies_of_states(n_tokens: int, per_row: bool, n_threads: int) -> None:
    """Behind some tokens; of few tokens in the bits of a run that ends there, as are results and states."""
    rng = np.random.default_rng(13)
    rule = make_rule(rng, n_tokens, (64, 100, 1, 2), per_row=per_row)
    if n_tokens > 16:
        rule.slots[:] = 2
    kept = some_kept(rng, n_tokens)
    copies = np.full((n_tokens, *rule.state.shape[1:]), np.nan, np.float32)
    out, state = rule.run(n_threads, (copies, kept))
    plain, expected = rule.run()
    few = n_tokens <= 16
    bound = 0.0 if few else 4e-5
    assert_close("results", out, plain, ("token", "head", "column"), bound)
    assert_close("states", state, expected, ("slot", "head", "row", "column"), bound)
    for t in np.flatnonzero(kept >= 0):
        behind = rule.tokens(slice(0, t + 1)).run()[1] if few else rule.tokens(slice(0, t + 1)).expected()[1]
        assert_close(f"copy behind token {t}", copies[kept[t]], behind[rule.slots[t]], ("head", "row", "column"), bound)
    assert np.isnan(copies[[i for i in range(n_tokens) if i not in kept]]).all()


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_broken_numbers_of_a_sequence_spoil_no_other(name: str) -> None:
    """NaN and infinity stay in their sequence and are seen there."""
    rng = np.random.default_rng(9)
    rule = make_rule(rng, 60, (64, 40, 1, 2), n_slots=3, per_row=True)
    rule.slots[:] = np.arange(60) % 3
    (good, state) = rule.run()
    for bad in (np.nan, np.inf):
        getattr(rule, name)[31] = bad
        found, after = rule.run()
        others = rule.slots != 1
        np.testing.assert_array_equal(found[others], good[others])
        np.testing.assert_array_equal(after[[0, 2]], state[[0, 2]])
        if np.isnan(bad):
            assert np.isnan(found[31]).all()


# what the builder refuses


def test_shapes_that_do_not_fit_are_refused() -> None:
    rng = np.random.default_rng(10)
    rule = make_rule(rng, 3, (8, 8, 2, 4))
    odd = {
        "q": rule.q[:, :1],
        "k": rule.k[:2],
        "v": rule.v[:2],
        "g": rule.g[:, :2],
        "beta": rule.beta[:, :2],
        "state": rule.state[..., :7],
        "slots": rule.slots[:2],
    }
    for name, array in odd.items():
        with pytest.raises(ValueError, match="delta rule of"):
            replace(rule, **{name: array.copy()}).run()
    for copies, kept in (((2, 4, 7, 8), 3), ((2, 4, 8, 8), 2)):
        with pytest.raises(ValueError, match="kept states"):
            rule.run(copies=(np.zeros(copies, np.float32), np.zeros(kept, np.int32)))
    x, state, slots = np.zeros((3, 8), np.float32), np.zeros((2, 8, 3), np.float32), np.zeros(3, np.int32)
    with pytest.raises(ValueError, match="convolution of"):
        conv(x, np.zeros((9, 4), np.float32), state, slots, silu=False)
    with pytest.raises(ValueError, match="convolution of"):
        conv(x, np.zeros((8, 4), np.float32), state, slots[:2].copy(), silu=False)
    with pytest.raises(UnsupportedError, match="17 taps"):
        conv(x, np.zeros((8, 17), np.float32), np.zeros((2, 8, 16), np.float32), slots, silu=False)
