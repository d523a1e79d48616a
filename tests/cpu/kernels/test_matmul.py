"""Matrix products of every fast weight type against numpy: dense, gated, batched and by expert."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.matmul_plans import FAST_TYPES, Program
from benchmarks.random_weights import random_tensor
from ikpy._native import core
from ikpy.graph.elementwise import UNARY_KINDS
from ikpy.graph.plan import OP_DTYPE, TENSOR_DTYPE
from ikpy.quants import by_name, dequantize
from tests.expected_products import assert_close, effective

FLOAT_TYPES = ("F32", "F16", "BF16")
BLOCK_TYPES = tuple(name for name in FAST_TYPES if name not in FLOAT_TYPES)
# Rows of these may end inside the 256 columns that are unpacked at a time.
SHORT_TYPES = tuple(name for name in BLOCK_TYPES if 32 <= by_name(name).block_elements < 256)
DECODED_TYPES = ("Q8_K",)

# Rounding of f32 sums relative to sum |w| |x|; integer dot products are exact.
EXACT = 1e-6
# From 128 tokens on sums of 16 columns of these are rounded to half a unit of a code (test_chained_groups.py).
CHAINED_TYPES = (
    *("NVFP4", "Q6_K", "IQ2_K", "IQ3_K", "IQ4_K", "IQ5_K", "IQ6_K", "IQ1_M", "IQ2_XS", "IQ2_S", "Q6_K_R4", "IQ2_K_R4"),
    *("IQ3_K_R4", "IQ4_K_R4", "IQ5_K_R4", "IQ1_M_R4", "IQ2_XS_R4", "IQ2_S_R4"),
)
# From 32 on sums of 16 activations of these are rounded to 16 bits (test_weighted_sums.py).
WEIGHTED_TYPES = ("Q2_K", "Q2_K_R4")


def bound_of(name: str, tokens: int) -> float:
    """What products may be off by, relative to sum |w| |x|."""
    rounded = (name in CHAINED_TYPES and tokens >= 128) or (name in WEIGHTED_TYPES and tokens >= 32)
    return 1e-4 if rounded else EXACT


def random_weight(name: str, k: int, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Packed bytes and values (float64 [n, k]) of a random matrix."""
    if name in FLOAT_TYPES:
        values = np.random.default_rng(seed).standard_normal((n, k), np.float32)
        if name == "F16":
            data = values.astype(np.float16)
            return data.view(np.uint8).reshape(-1), data.astype(np.float64)
        if name == "BF16":
            bits = (values.view(np.uint32) >> 16).astype(np.uint16)
            return bits.view(np.uint8).reshape(-1), (values.view(np.uint32) & 0xFFFF0000).view(np.float32) + 0.0
        return values.view(np.uint8).reshape(-1), values.astype(np.float64)
    data = random_tensor(by_name(name), (k, n), seed)
    return data, dequantize(data, name, (k, n), compute_scale=True).reshape(n, k).astype(np.float64)


def rows_of(name: str, n: int) -> int:
    """n rounded up to whole groups of interleaved rows."""
    return -(-n // by_name(name).interleave) * by_name(name).interleave


def activations(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random activations with outliers, a shifted mean and one zero group."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).astype(np.float32) + np.float32(0.3)
    x[..., ::37] *= 8
    x[..., :32] *= 0
    return x


def dense(name: str, data: np.ndarray, k: int, n: int, x: np.ndarray, dtype: type = np.float32, **kw) -> np.ndarray:
    """mul_mat of one matrix; result [T, N]."""
    program = Program()
    out = np.full((x.shape[0], n), 7, dtype)
    act, fmt = program.prepared(x, name)
    src = [program.weight(data, name, (k, n)), act]
    if "bias" in kw:
        src.append(program.array(kw["bias"]))
    program.op("mul_mat", program.array(out), src, {0: fmt, 1: kw.get("tokens", x.shape[0])})
    program.run(kw.get("threads", 2))
    return out


@pytest.mark.parametrize("name", FAST_TYPES)
def test_product_is_exact_for_all_token_counts(name: str) -> None:
    k, n = 768, rows_of(name, 77)
    data, w = random_weight(name, k, n, 1)
    for tokens in (*range(1, 14), 20, 32, 64, 100):
        x = activations((tokens, k), tokens)
        y, bound = dense(name, data, k, n, x), bound_of(name, tokens)
        assert_close(y, w, effective(x, name), bound, f"{name}, {tokens} tokens")


@pytest.mark.parametrize("name", ("F32", "Q8_0", "Q4_K", "IQ2_K", "IQ4_KS", "Q4_K_R4", "Q8_0_R8"))
@pytest.mark.parametrize("n", (1, 15, 16, 17, 31, 33, 200))
def test_row_counts(name: str, n: int) -> None:
    n = rows_of(name, n)
    data, w = random_weight(name, 256, n, n)
    for tokens in (1, 11):
        x = activations((tokens, 256), n)
        for threads in (1, 2, 5):
            y = dense(name, data, 256, n, x, threads=threads)
            assert_close(y, w, effective(x, name), EXACT, f"{name}, {n} rows, {threads} threads")


@pytest.mark.parametrize("name", SHORT_TYPES)
@pytest.mark.parametrize("columns", (32, 96, 224, 288, 1120, 4128))
def test_rows_that_end_inside_a_chunk(name: str, columns: int) -> None:
    k, n = columns // 32 * by_name(name).block_elements, rows_of(name, 37)
    data, w = random_weight(name, k, n, k)
    for tokens in (1, 9, 40):
        x = activations((tokens, k), k)
        assert_close(dense(name, data, k, n, x), w, effective(x, name), EXACT, f"{name}, K {k}, {tokens} tokens")


@pytest.mark.parametrize("name", FLOAT_TYPES)
@pytest.mark.parametrize("k", (1, 3, 17, 33, 255, 257, 1000))
def test_float_rows_of_any_length(name: str, k: int) -> None:
    data, w = random_weight(name, k, 37, k)
    for tokens in (1, 2, 9, 40):
        x = activations((tokens, k), k) + np.float32(0.1)
        assert_close(dense(name, data, k, 37, x), w, effective(x, name), EXACT, f"{name}, K {k}, {tokens} tokens")


@pytest.mark.parametrize("name", FAST_TYPES)
def test_long_rows_and_many_tokens(name: str) -> None:
    k, n = 4864, 48
    data, w = random_weight(name, k, n, 3)
    for tokens in (2, 20, 600):
        x = activations((tokens, k), tokens)
        y, bound = dense(name, data, k, n, x), bound_of(name, tokens)
        assert_close(y, w, effective(x, name), bound, f"{name}, {tokens} tokens")


@pytest.mark.parametrize("name", DECODED_TYPES)
def test_types_that_are_decoded_first(name: str) -> None:
    k, n = 768, 72
    data, w = random_weight(name, k, n, 3)
    for tokens in (1, 2, 20):
        x = activations((tokens, k), tokens)
        assert_close(dense(name, data, k, n, x), w, effective(x, name), EXACT, f"{name}, {tokens} tokens")


@pytest.mark.parametrize("name", ("F16", "Q4_0", "Q6_K"))
def test_activation_quantization_error_is_small(name: str) -> None:
    data, w = random_weight(name, 1024, 64, 5)
    x = activations((9, 1024), 5)
    expected = x.astype(np.float64) @ w.T
    error = np.linalg.norm(dense(name, data, 1024, 64, x) - expected) / np.linalg.norm(expected)
    assert error < 0.02, f"{name}: {error}"


def test_largest_codes_do_not_saturate() -> None:
    k, n = 512, 32
    blocks = np.zeros((n, k // 32, 34), np.uint8)
    blocks[..., 0:2] = np.float16(1).view(np.uint16).reshape(1).view(np.uint8)
    blocks[: n // 2, :, 2:] = 0x80
    blocks[n // 2 :, :, 2:] = 0x7F
    w = np.where(np.arange(n) < n // 2, -128.0, 127.0)[:, None] * np.ones((1, k))
    for tokens in (1, 2, 8):
        for sign in (1, -1):
            x = np.full((tokens, k), sign, np.float32)
            y = dense("Q8_0", blocks.reshape(-1), k, n, x)
            assert_close(y, w, effective(x, "Q8_0"), EXACT, f"{tokens} tokens, sign {sign}")


def extreme_blocks(name: str) -> np.ndarray:
    """One block each with all codes at the upper and at the lower end, scales of 1."""
    one = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    blocks = np.zeros((2, by_name(name).block_bytes), np.uint8)
    if name == "Q8_0":
        blocks[:, :2], blocks[:, 2:] = one, np.array([[127], [128]])
    elif name == "Q4_1":
        blocks[:, :2], blocks[:, 2:4], blocks[0, 4:] = one, one, 255
    else:
        assert name == "Q6_K"
        blocks[0, :192], blocks[:, 192:208], blocks[:, 208:] = 255, 1, one
    return blocks


@pytest.mark.parametrize("name", ("Q8_0", "Q4_1", "Q6_K"))
def test_sums_at_their_bounds_are_exact(name: str) -> None:
    """Largest codes times activations of +-127 with a scale of 1: no sum is rounded, so every bit is known."""
    k, n = 256, 48
    blocks = extreme_blocks(name)
    kinds = np.array([0, 1, 0])[np.arange(n) // 16][:, None] + np.zeros(k // by_name(name).block_elements, int)
    kinds[32:, ::2] = 1
    data = blocks[kinds].reshape(-1)
    w = dequantize(data, name, (k, n), compute_scale=True).reshape(n, k).astype(np.float64)
    signs = np.random.default_rng(0).choice([-127.0, 127.0], (25, k))
    x = np.concatenate([np.full((1, k), 127.0), np.full((1, k), -127.0), signs]).astype(np.float32)
    for tokens in (1, 2, 3, 9, 27):
        assert np.array_equal(dense(name, data, k, n, x[:tokens]), x[:tokens] @ w.T), f"{name}, {tokens} tokens"


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_sums_of_extreme_codes_stay_in_range(name: str) -> None:
    """Nearly all weights of a group at one end of its range, all activations at one end of theirs."""
    k, n = 512, 32
    values = np.ones((n, k), np.float32)
    values[:, ::16] = -1
    values[n // 2 :] *= -1
    if not core.can_quantize(by_name(name).id):
        pytest.skip(f"{name} has no encoder")
    data = core.quantize(values, by_name(name).id, np.ones(k, np.float32))
    w = dequantize(data, name, (k, n), compute_scale=True).reshape(n, k).astype(np.float64)
    for tokens in (1, 2, 3, 4, 5, 6, 8, 9, 128):
        for sign in (1, -1):
            x = np.full((tokens, k), sign, np.float32)
            y, bound = dense(name, data, k, n, x, threads=1), bound_of(name, tokens)
            assert_close(y, w, effective(x, name), bound, f"{name}, {tokens} tokens, {sign}")


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_extreme_activations_that_follow_the_codes(name: str) -> None:
    """Activations at the ends of their range, with signs that drive the sums of one row as far as they go.

    Tiers without a wider product add products of some codes in 16 bits.
    """
    k, n = 512, 32
    data, w = random_weight(name, k, n, 3)
    signs = np.where(w >= np.median(w, axis=1, keepdims=True), 1, -1).astype(np.float32)
    ones = np.ones((1, k), np.float32)
    x = np.concatenate([ones, -ones, signs, -signs] * 2)
    for tokens in (1, 2, 4, 6, 66, 132):
        y, bound = dense(name, data, k, n, x[:tokens], threads=1), bound_of(name, tokens)
        assert_close(y, w, effective(x[:tokens], name), bound, f"{name}, {tokens} tokens")


@pytest.mark.parametrize("name", ("F32", "BF16", "Q4_0", "Q4_K_R4"))
def test_no_tokens(name: str) -> None:
    data, _ = random_weight(name, 256, 32, 1)
    assert dense(name, data, 256, 32, np.zeros((0, 256), np.float32)).shape == (0, 32)


def test_work_memory_must_be_large_enough() -> None:
    program = Program()
    x = np.ones((1, 256), np.float32)
    data, _ = random_weight("Q4_K", 256, 32, 1)
    act, fmt = program.prepared(x, "Q4_K")
    out = program.array(np.zeros((1, 32), np.float32))
    program.op("mul_mat", out, [program.weight(data, "Q4_K", (256, 32)), act], {0: fmt, 1: 1})
    plan = core.Plan(np.array(program.tensors, TENSOR_DTYPE), np.array(program.ops, OP_DTYPE), np.zeros((0, 2)))
    needed = plan.work_bytes(1)
    assert needed > 0
    with pytest.raises(ValueError, match="too small"):
        plan.run(0, 1, core.WorkMemory(needed - 1))
    plan.run(0, 1, core.WorkMemory(needed))


def test_zero_activations_give_zeros() -> None:
    for name in ("F32", "Q4_K", "Q8_0"):
        data, _ = random_weight(name, 256, 20, 2)
        for tokens in (1, 5):
            y = dense(name, data, 256, 20, np.zeros((tokens, 256), np.float32))
            assert not y.any(), name


@pytest.mark.parametrize("name", FAST_TYPES)
def test_broken_activations_stay_visible(name: str) -> None:
    """A NaN or an infinity anywhere in a row makes all products of that row useless, and only those."""
    k, n = 768, rows_of(name, 32)
    data, _ = random_weight(name, k, n, 1)
    for tokens in (2, 40):
        for broken in (np.nan, np.inf, -np.inf):
            x = activations((tokens, k), 1)
            x[1, 301] = broken
            y = dense(name, data, k, n, x)
            bad = ~np.isfinite(y).any(axis=1)
            assert bad.tolist() == [False, True] + [False] * (tokens - 2), f"{name}, {tokens} tokens, {broken}"


def test_bias_half_output_and_dynamic_tokens() -> None:
    data, w = random_weight("Q8_0", 256, 45, 2)
    bias = np.arange(45, dtype=np.float32)
    for tokens in (1, 2, 12):
        x = activations((tokens, 256), 2)
        y = dense("Q8_0", data, 256, 45, x, bias=bias, tokens=0)
        assert_close(y - bias, w, effective(x, "Q8_0"), 1e-5, "bias")
        half = dense("Q8_0", data, 256, 45, x, dtype=np.float16)
        assert_close(half.astype(np.float64), w, effective(x, "Q8_0"), 1e-3, "f16 output")


@pytest.mark.parametrize("name", ("F16", "BF16", "Q8_0", "Q4_0"))
@pytest.mark.parametrize("tokens", (1, 5, 70))
def test_one_matrix_per_batch(name: str, tokens: int) -> None:
    k, n, heads = 128, 80, 6
    parts = [random_weight(name, k, n, h) for h in range(heads)]
    x = activations((heads, tokens, k), 4)
    program = Program()
    # Heads lie next to each other in a token's row, as absorbed attention projections store them.
    out = np.zeros((tokens, heads, n), np.float32)
    dst = program.raw(out, 0, (n, tokens, heads), (4, heads * n * 4, n * 4))
    act, fmt = program.prepared(x, name)
    weight = program.weight(np.concatenate([p[0] for p in parts]), name, (k, n, heads))
    program.op("mul_mat", dst, [weight, act], {0: fmt, 1: tokens})
    program.run(3)
    for h in range(heads):
        assert_close(out[:, h], parts[h][1], effective(x[h], name), EXACT, f"{name}, head {h}")


def gated(kind: str, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """activation(gate) * up in float64."""
    sigmoid = 1 / (1 + np.exp(-gate))
    if kind == "swiglu_oai":
        g = np.minimum(gate, 7)
        return g / (1 + np.exp(-1.702 * g)) * (np.clip(up, -7, 7) + 1)
    inner = 0.7978845608 * gate * (1 + 0.044715 * gate**2)
    value = {
        "silu": gate * sigmoid,
        "gelu": 0.5 * gate * (1 + np.tanh(inner)),
        "relu": np.maximum(gate, 0),
        "relu_squared": np.maximum(gate, 0) ** 2,
        "sigmoid": sigmoid,
        "tanh": np.tanh(gate),
        "gelu_erf": 0.5 * gate * (1 + np.vectorize(math.erf)(gate / math.sqrt(2))),
        "softplus": np.logaddexp(0, gate),
    }[kind]
    return value * up


def assert_gated(actual: np.ndarray, expected: np.ndarray, what: str, bound: float = 2e-5) -> None:
    """Error relative to the largest value of the row."""
    error = np.abs(actual - expected) / (np.abs(expected).max(axis=-1, keepdims=True) + 1e-3)
    worst = np.unravel_index(np.argmax(np.nan_to_num(error, nan=np.inf)), error.shape)
    assert error[worst] < bound, f"{what}: {actual[worst]} instead of {expected[worst]} at {worst}"


@pytest.mark.parametrize("kind", UNARY_KINDS)
@pytest.mark.parametrize("name", ("F32", "Q4_K", "IQ3_K", "Q8_0", "IQ4_KS", "IQ4_K_R4"))
def test_up_and_gate(kind: str, name: str) -> None:
    k, f = 256, rows_of(name, 53)
    (up_data, up), (gate_data, gate) = random_weight(name, k, f, 1), random_weight(name, k, f, 2)
    scale = np.float32(1 / np.abs(up).max() / 16)
    bias = [np.linspace(-1, 1, f, dtype=np.float32), np.linspace(2, -2, f, dtype=np.float32)]
    for tokens in (1, 2, 21):
        x = activations((tokens, k), 8) * scale
        for biases in ([], bias):
            program = Program()
            out = np.zeros((tokens, f), np.float32)
            act, fmt = program.prepared(x, name)
            src = [program.weight(up_data, name, (k, f)), program.weight(gate_data, name, (k, f)), act]
            src += [program.array(b) for b in biases]
            program.op("mul_mat_up_gate", program.array(out), src, {0: fmt, 1: tokens, 2: UNARY_KINDS[kind]})
            program.run()
            u, g = (effective(x, name) @ m.T + (b if biases else 0) for m, b in ((up, bias[0]), (gate, bias[1])))
            assert_gated(out, gated(kind, g, u), f"{name}, {kind}, {tokens} tokens")


EXPERTS, USED = 7, 3


def routing(tokens: int) -> np.ndarray:
    """Expert ids [T, Ku]: distinct per token, expert 2 unused, some entries -1."""
    rng = np.random.default_rng(tokens)
    ids = np.array([rng.permutation([0, 1, 3, 4, 5, 6])[:USED] for _ in range(tokens)], np.int32)
    ids[rng.random(ids.shape) < 0.1] = -1
    return ids


def grouped(program: Program, ids: np.ndarray) -> int:
    """Adds moe_group."""
    groups = np.full(EXPERTS + 1 + ids.size, -5, np.int32)
    dst = program.array(groups)
    program.op("moe_group", dst, [program.array(ids)], {0: EXPERTS})
    return dst


@pytest.mark.parametrize("name", ("F32", "BF16", "Q4_0", "Q4_K", "IQ4_XS", "IQ2_K", "IQ2_KS", "Q4_0_R8", "IQ4_KS_R4"))
@pytest.mark.parametrize("tokens", (1, 2, 9, 150))
@pytest.mark.parametrize("row_per_slot", (False, True))
def test_experts(name: str, tokens: int, row_per_slot: bool) -> None:
    k, n = 256, rows_of(name, 50)
    parts = [random_weight(name, k, n, e) for e in range(EXPERTS)]
    ids = routing(tokens)
    x = activations((tokens * USED if row_per_slot else tokens, k), 4)
    bias = np.random.default_rng(0).standard_normal((EXPERTS, n)).astype(np.float32)
    program = Program()
    out = np.full((tokens, USED, n), 99, np.float32)
    act, fmt = program.prepared(x, name)
    groups = grouped(program, ids)
    weight = program.weight(np.concatenate([p[0] for p in parts]), name, (k, n, EXPERTS))
    ip = {0: fmt, 1: tokens, 2: int(row_per_slot), 3: USED, 4: EXPERTS}
    program.op("mul_mat_id", program.array(out), [weight, act, groups, program.array(bias)], ip)
    program.run(3)
    seen = effective(x, name)
    for t in range(tokens):
        for slot, e in enumerate(ids[t]):
            if e < 0:
                assert (out[t, slot] == 99).all(), f"token {t}, slot {slot} was written"
                continue
            row = seen[[t * USED + slot if row_per_slot else t]]
            assert_close(out[t, slot][None] - bias[e], parts[e][1], row, 1e-5, f"{name}, token {t}, expert {e}")


@pytest.mark.parametrize("fused", (False, True))
@pytest.mark.parametrize("tokens", (1, 3, 60))
def test_expert_up_and_gate(fused: bool, tokens: int) -> None:
    name, k, f = "Q5_K", 256, 40
    parts = [random_weight(name, k, 2 * f, e) for e in range(EXPERTS)]
    scale = np.float32(1 / max(np.abs(p[1]).max() for p in parts) / 16)
    ids, x = routing(tokens), activations((tokens, k), 4) * scale
    bias = np.random.default_rng(0).standard_normal((2, EXPERTS, f)).astype(np.float32)
    program = Program()
    out = np.full((tokens, USED, f), 99, np.float32)
    row = by_name(name).row_nbytes(k)
    whole = np.concatenate([p[0] for p in parts]).reshape(EXPERTS, 2, f * row)
    weights = []
    for half in (1, 0):  # gate first, then up
        if fused:
            view = whole.reshape(-1)[half * f * row :]
            weights.append(program.raw(view, by_name(name).id, (k, f, EXPERTS), (1, row, 2 * f * row)))
        else:
            weights.append(program.weight(np.ascontiguousarray(whole[:, half]), name, (k, f, EXPERTS)))
    act, fmt = program.prepared(x, name)
    groups = grouped(program, ids)
    src = [*weights, act, groups, program.array(bias[0]), program.array(bias[1])]
    ip = {0: fmt, 1: tokens, 2: UNARY_KINDS["silu"], 3: USED, 4: EXPERTS}
    program.op("mul_mat_id_up_gate", program.array(out), src, ip)
    program.run(2)
    seen = effective(x, name)
    for t in range(tokens):
        for slot, e in enumerate(ids[t]):
            if e < 0:
                assert (out[t, slot] == 99).all()
                continue
            both = parts[e][1] @ seen[t]
            u, g = both[f:] + bias[0, e], both[:f] + bias[1, e]
            assert_gated(out[t, slot][None], gated("silu", g, u)[None], f"token {t}, expert {e}")


def run_with(code: str, **variables: str) -> None:
    """Runs code in a process of its own: what is chosen for the CPU is chosen once per process."""
    root, env = Path(__file__).parents[3], {**os.environ, **variables}
    run = subprocess.run([sys.executable, "-c", code], check=False, cwd=root, env=env, capture_output=True, text=True)
    assert run.returncode == 0, f"{variables}: {run.stderr}"


def test_types_without_byte_permutes() -> None:
    """CPUs without VBMI and GFNI take another kernel."""
    grids = ("IQ1_", "IQ2_", "IQ3_")
    short = ["Q5_0", "Q5_1", "Q6_0", "IQ4_NL", "MXFP4"]
    names = [n for n in FAST_TYPES if n.startswith(grids)]
    names += ["Q4_0_R8", "Q4_0_4x4", "Q4_0_4x8", "Q4_0_8x8", "MXFP4_R8", "IQ4_NL_R4", "Q5_0_R4", "Q6_0_R4"]
    names += ["TQ1_0", "Q1_0_G128"]
    names += [*short, "Q2_K", "Q3_K", "Q4_K", "Q5_K", "IQ4_XS", "IQ4_K", "IQ4_KS", "IQ4_KSS", "IQ5_K", "IQ6_K"]
    code = (
        "from ikpy._native import core; from tests.cpu.kernels import test_matmul as t\n"
        "assert not core.has_byte_permutes()\n"
        f"for name in {names}: t.test_product_is_exact_for_all_token_counts(name)\n"
        f"for name in {short}: t.test_rows_that_end_inside_a_chunk(name, 1120)"
    )
    run_with(code, IKPY_VBMI="0")


@pytest.mark.parametrize(("maker", "gathers"), [("amd", "slow"), ("intel", "fast"), ("intel", "slow")])
def test_types_whose_kernels_depend_on_the_maker_of_the_cpu(maker: str, gathers: str) -> None:
    """Points, trits and trellis values are found by gathers, permutations, or computed; rows meet more tokens."""
    rows = ["Q4_0", "Q5_1", "Q8_0", "Q2_K", "Q4_K", "Q6_K", "IQ3_K", "IQ4_K", "IQ2_KS", "IQ5_KS", "IQ4_XS"]
    points = [n for n in FAST_TYPES if n.startswith(("IQ1_S", "IQ1_M", "IQ2_X", "IQ2_S", "IQ3_X", "IQ3_S"))]
    names = [*points, *(n for n in FAST_TYPES if n.endswith("KT")), *rows, "TQ1_0", "IQ1_BN", "Q1_0_G128"]
    code = (
        "from ikpy._native import core; from tests.cpu.kernels import test_matmul as t\n"
        f"assert core.cpu_maker() == {maker!r} and core.has_slow_gathers() == {gathers == 'slow'}\n"
        f"for name in {names}: t.test_product_is_exact_for_all_token_counts(name)\n"
        f"for name in {points}: t.test_long_rows_and_many_tokens(name)  # up to four blocks at a time\n"
        f"for name in {rows[:3]}: t.test_rows_that_end_inside_a_chunk(name, 1120)"
    )
    run_with(code, IKPY_MAKER=maker, IKPY_GATHERS=gathers)


@pytest.mark.parametrize("fetch", ["lines", "pages"])
def test_weights_are_fetched_either_way(fetch: str) -> None:
    """Lines that are asked for may lie beyond the weights and the pages that the process has."""
    names = ["Q4_K", "Q8_0", "F16", "BF16_R16", "IQ2_XXS", "IQ1_S_R4", "Q4_K_R4", "Q4_0_R8", "IQ2_KT", "IQ1_BN"]
    code = (
        "from ikpy._native import core; from tests.cpu.kernels import test_matmul as t\n"
        f"assert core.fetches_from_pages() == {fetch == 'pages'}\n"
        f"for name in {names}: t.test_product_is_exact_for_all_token_counts(name)"
    )
    run_with(code, IKPY_FETCH=fetch)
