"""Emulated CUDA kernels of recurrent layers against the CPU backend, whose ops are held to their definitions."""

from __future__ import annotations

import numpy as np
import pytest

from ikpy.backends.cuda import launch
from ikpy.graph.builder import MAX_CONV_TAPS, KeptStates
from ikpy.graph.ir import F32, I32, Value, external
from tests.cpu.kernels.test_recurrent_ops import mixed_slots, some_kept
from tests.cpu.kernels.test_wkv import RULES, make_wkv
from tests.cuda.programs import Program


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


@pytest.mark.parametrize("n_tokens", [1, 8, 9, 75])
@pytest.mark.parametrize("taps", [1, 2, 4, MAX_CONV_TAPS])
def test_convolution(rng: np.random.Generator, taps: int, n_tokens: int) -> None:
    """Tokens of two of three slots in any order, more than a warp looks at at once; rows are part of wider ones."""
    for channels, silu in ((7, False), (200, True)):
        p = Program()
        x = p.array(normal(rng, n_tokens, channels + 5)).slice0(3, channels)
        weight, past = p.array(normal(rng, channels, taps)), p.array(normal(rng, 3, channels, taps - 1))
        slots = p.array(mixed_slots(rng, n_tokens, 3))
        bias = p.array(normal(rng, channels)) if silu else None
        y = p.graph.causal_conv(x, weight, past, slots, silu=silu, bias=bias)
        p.compare(*([y, past] if taps > 1 else [y]), bound=1e-6)


@pytest.mark.parametrize("n_tokens", [1, 8, 9, 40])
@pytest.mark.parametrize(("taps", "dilation"), [(4, 3), (2, 15), (3, 2), (1, 4)])
def test_dilated_convolution(rng: np.random.Generator, taps: int, dilation: int, n_tokens: int) -> None:
    p = Program()
    n_past = (taps - 1) * dilation
    x, weight = p.array(normal(rng, n_tokens, 200)), p.array(normal(rng, 200, taps))
    past, copies = p.array(normal(rng, 3, 200, n_past)), p.array(normal(rng, n_tokens, 200, n_past))
    slots, kept = p.array(mixed_slots(rng, n_tokens, 3)), KeptStates(copies, p.array(some_kept(rng, n_tokens)))
    y = p.graph.causal_conv(x, weight, past, slots, silu=True, dilation=dilation, kept=kept if n_past else None)
    p.compare(*([y, past, copies] if n_past else [y]), bound=1e-6)


@pytest.mark.parametrize("n_tokens", [1, 8, 9, 40])
def test_past_inputs_of_a_slot_with_few_tokens(rng: np.random.Generator, n_tokens: int) -> None:
    """Of one slot the batch has a single token, at its end: the inputs before it come from the past ones."""
    p = Program()
    slots = np.zeros(n_tokens, np.int32)
    slots[-1] = 2
    x, weight, past = p.array(normal(rng, n_tokens, 64)), p.array(normal(rng, 64, 4)), p.array(normal(rng, 3, 64, 3))
    p.compare(p.graph.causal_conv(x, weight, past, p.array(slots), silu=False), past, bound=1e-6)


@pytest.mark.parametrize("n_tokens", [1, 8, 9, 40])
@pytest.mark.parametrize("taps", [2, 4, MAX_CONV_TAPS])
def test_copies_of_past_inputs(rng: np.random.Generator, taps: int, n_tokens: int) -> None:
    p = Program()
    x, weight = p.array(normal(rng, n_tokens, 200)), p.array(normal(rng, 200, taps))
    past, copies = p.array(normal(rng, 3, 200, taps - 1)), p.array(normal(rng, n_tokens, 200, taps - 1))
    slots, kept = p.array(mixed_slots(rng, n_tokens, 3)), KeptStates(copies, p.array(some_kept(rng, n_tokens)))
    p.compare(p.graph.causal_conv(x, weight, past, slots, silu=True, kept=kept), past, copies, bound=1e-6)


class Rule:
    """Operands of a delta rule: heads of one token are part of a wider row, as behind the convolution."""

    def __init__(self, rng: np.random.Generator, n_tokens: int, dk: int, dv: int, *, per_row: bool = False) -> None:
        key_heads, heads, n_slots = 2, 4, 3
        self.program = p = Program()
        keys, values = key_heads * dk, heads * dv
        mixed = p.array(normal(rng, n_tokens, 2 * keys + values))

        def part(start: int, size: int, n: int) -> Value:
            return mixed.view((size, n, n_tokens), (4 * size, mixed.strides[1]), 4 * start)

        self.q, self.k, self.v = part(0, dk, key_heads), part(keys, dk, key_heads), part(2 * keys, dv, heads)
        decay = (n_tokens, heads, dk) if per_row else (n_tokens, heads)
        self.g = p.array(-2.0 * rng.random(decay, np.float32))
        self.beta = p.array(rng.random((n_tokens, heads), np.float32))
        self.state = p.array(normal(rng, n_slots, heads, dk, dv))
        self.slots = p.array(mixed_slots(rng, n_tokens, n_slots))
        self.copies = p.array(normal(rng, n_tokens, heads, dk, dv))
        self.kept = p.array(some_kept(rng, n_tokens))

    def compare(self, bound: float, *, l2_eps: float = 1e-6, interleaved: bool = True, keep: bool = False) -> None:
        """The result and the states, and copies of these behind some tokens."""
        operands = self.q, self.k, self.v, self.g, self.beta, self.state, self.slots
        options = {"l2_eps": l2_eps, "scale": 0.3, "interleaved": interleaved}
        kept = KeptStates(self.copies, self.kept) if keep else None
        out = self.program.graph.gated_delta_rule(*operands, **options, kept=kept)
        self.program.compare(out, self.state, *([self.copies] if keep else []), bound=bound)


@pytest.mark.parametrize(("n_tokens", "keep"), [(1, False), (8, True), (9, False), (30, True)])
@pytest.mark.parametrize(("dk", "dv"), [(16, 16), (32, 33), (50, 20), (64, 64), (128, 128), (200, 40), (256, 64)])
def test_delta_rule(rng: np.random.Generator, dk: int, dv: int, n_tokens: int, keep: bool) -> None:
    Rule(rng, n_tokens, dk, dv).compare(3e-6, keep=keep)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("per_row", [False, True])
def test_delta_rule_of_all_kinds(rng: np.random.Generator, per_row: bool, interleaved: bool) -> None:
    """Keys as they are are scaled down, or states of a head would grow with every token."""
    rule = Rule(rng, 21, 64, 40, per_row=per_row)
    rule.compare(3e-6, interleaved=interleaved)
    rule = Rule(rng, 21, 64, 40, per_row=per_row)
    rule.k.buffer.owner[...] *= 0.1  # type: ignore[index]
    rule.compare(3e-6, l2_eps=0.0, interleaved=interleaved)


def test_no_decay_and_full_decay(rng: np.random.Generator) -> None:
    rule = Rule(rng, 12, 128, 32)
    rule.g.buffer.owner[...] = np.where(rng.random(rule.g.buffer.owner.shape) < 0.5, 0.0, -200.0)  # type: ignore[attr-defined, index]
    rule.compare(3e-6)


def scan(rng: np.random.Generator, n_tokens: int, size: int, rows: int, *, keep: bool) -> None:
    """Heads of one token are part of a wider row, as behind the convolution; four heads in two groups."""
    heads, groups, n_slots = 4, 2, 3
    p = Program()
    inner, n = heads * size, groups * rows
    mixed = p.array(normal(rng, n_tokens, inner + 2 * n))

    def part(start: int, size: int, n: int) -> Value:
        return mixed.view((size, n, n_tokens), (4 * size, mixed.strides[1]), 4 * start)

    x, b, c = part(0, size, heads), part(inner, rows, groups), part(inner + n, rows, groups)
    dt = p.array(rng.exponential(0.5, (n_tokens, heads)).astype(np.float32))
    a, d = p.array(-2.0 * rng.random((heads, 1), np.float32)), p.array(normal(rng, heads, 1))
    state, slots = p.array(normal(rng, n_slots, heads, rows, size)), p.array(mixed_slots(rng, n_tokens, n_slots))
    copies, behind = p.array(normal(rng, n_tokens, heads, rows, size)), p.array(some_kept(rng, n_tokens))
    kept = KeptStates(copies, behind) if keep else None
    y = p.graph.ssm_scan(x, dt, a, b, c, d, state, slots, kept=kept)
    p.compare(y, state, *([copies] if keep else []), bound=3e-6)


@pytest.mark.parametrize(("n_tokens", "keep"), [(1, False), (8, True), (9, False), (30, True)])
@pytest.mark.parametrize(("size", "rows"), [(16, 16), (33, 32), (20, 50), (64, 64), (64, 128), (40, 200), (80, 256)])
def test_scan(rng: np.random.Generator, size: int, rows: int, n_tokens: int, keep: bool) -> None:
    scan(rng, n_tokens, size, rows, keep=keep)


@pytest.mark.parametrize(("n_tokens", "keep"), [(1, False), (8, True), (9, False), (30, True)])
@pytest.mark.parametrize(("size", "rows"), [(128, 16), (300, 16), (33, 5), (200, 40), (64, 64)])
def test_scan_of_channels(rng: np.random.Generator, size: int, rows: int, n_tokens: int, keep: bool) -> None:
    """B and C are part of a wider row."""
    p, n_slots = Program(), 3
    mixed = p.array(normal(rng, n_tokens, 5 + 2 * rows))
    b, c = (mixed.slice0(start, rows) for start in (5, 5 + rows))
    x, dt = p.array(normal(rng, n_tokens, size)), p.array(rng.exponential(0.5, (n_tokens, size)).astype(np.float32))
    a, d = p.array(-2.0 * rng.random((rows, size), np.float32)), p.array(normal(rng, size))
    state, slots = p.array(normal(rng, n_slots, 1, rows, size)), p.array(mixed_slots(rng, n_tokens, n_slots))
    copies, behind = p.array(normal(rng, n_tokens, 1, rows, size)), p.array(some_kept(rng, n_tokens))
    kept = KeptStates(copies, behind) if keep else None
    y = p.graph.channel_scan(x, dt, a, b, c, d, state, slots, kept=kept)
    p.compare(y, state, *([copies] if keep else []), bound=3e-6)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("n_tokens", "keep"), [(1, False), (8, True), (9, False), (30, True)])
@pytest.mark.parametrize(("dk", "dv"), [(16, 16), (32, 33), (64, 64), (50, 20), (128, 40), (256, 20)])
def test_wkv(rng: np.random.Generator, dk: int, dv: int, n_tokens: int, keep: bool, rule: str) -> None:
    """Two heads share values."""
    p, operands = Program(), make_wkv(rng, n_tokens, (dk, dv, 4, 2), rule, n_slots=3)
    state = p.array(operands.state)
    copies, behind = p.array(normal(rng, n_tokens, 4, dk, dv)), p.array(some_kept(rng, n_tokens))
    out = operands.call(p.graph, p.array, state, KeptStates(copies, behind) if keep else None)
    p.compare(out, state, *([copies] if keep else []), bound=3e-6)


def test_states_that_no_kernel_takes() -> None:
    def known(type_id: int, *shape: int) -> Value:
        return external(64, None, type_id, shape)

    graph = Program().graph
    heads, slots = 2, known(I32, 3)
    keys, values, per_head = known(F32, 300, heads, 3), known(F32, 8, heads, 3), known(F32, heads, 3)
    state = known(F32, 8, 300, heads, 4)
    graph.gated_delta_rule(
        keys, keys, values, per_head, per_head, state, slots, l2_eps=0.0, scale=1.0, interleaved=True
    )
    assert "300 rows" in (launch.supports(graph.nodes[-1]) or "")
    per_head = known(F32, 1, heads)
    graph.ssm_scan(values, known(F32, heads, 3), per_head, keys, keys, per_head, state, slots)
    assert "300 rows" in (launch.supports(graph.nodes[-1]) or "")
    graph.wkv(keys, keys, values, keys, state, slots)
    assert "300 rows" in (launch.supports(graph.nodes[-1]) or "")
    x, rows = known(F32, 8, 3), known(F32, 65, 3)
    graph.channel_scan(x, x, known(F32, 8, 65), rows, rows, known(F32, 8), known(F32, 8, 65, 1, 4), slots)
    assert "65 rows" in (launch.supports(graph.nodes[-1]) or "")
