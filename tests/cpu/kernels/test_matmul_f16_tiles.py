"""F16 weights on the tile unit: one product of halves where it has such products, three of bf16 elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ikpy._native import core
from tests.cpu.kernels.test_matmul import EXACT, activations, random_weight
from tests.cpu.kernels.test_matmul_tiles import product
from tests.expected_products import assert_close, effective, round_to_bf16

if not core.has_tiles():
    pytest.skip("this CPU or build has no AMX tiles with bf16", allow_module_level=True)

HALVES = core.rounds_f16_activations()
halves_only = pytest.mark.skipif(not HALVES, reason="no tile products of halves in use (IKPY_AMX=fp16 asks for them)")
split_only = pytest.mark.skipif(HALVES, reason="tile products of halves in use (IKPY_AMX=bf16 does without)")
TOKENS = (1, 2, 3, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 129)
SHAPES = ((768, 77), (256, 130), (1024, 16), (2336, 33))  # row counts that leave parts of a block, a half, an item


def test_the_other_products_of_this_cpu() -> None:
    """What this process does not use, in one that does: IKPY_AMX is read once per process."""
    env = {**os.environ, "IKPY_AMX": "bf16" if HALVES else "fp16"}
    root = Path(__file__).parents[3]
    probe = "from ikpy._native import core; print(core.rounds_f16_activations())"
    found = subprocess.run([sys.executable, "-c", probe], env=env, cwd=root, capture_output=True, text=True, check=True)
    if found.stdout.strip() != str(not HALVES):
        pytest.skip("this CPU's tile unit does not multiply halves")
    files = ["tests/cpu/kernels/test_matmul_tiles.py", "tests/cpu/kernels/test_matmul_f16_tiles.py"]
    chosen = ["-k", "(f16 or F16 or float_weights) and not other_products"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, *chosen]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


def truncated(x: np.ndarray) -> np.ndarray:
    """float32 cut to the upper 8 of its significant bits."""
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def split_product(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    """x [T, K] @ w.T [K, N] of F16 values w as tiles compute it, float64: w_hi x_hi + w_lo x_hi + w_hi x_lo."""
    w_hi = truncated(w.astype(np.float32)).astype(np.float64)
    x_hi = round_to_bf16(x)
    x_lo = round_to_bf16(x - x_hi).astype(np.float64)
    return x_hi.astype(np.float64) @ w.T + x_lo @ w_hi.T


def assert_split_product(y: np.ndarray, w: np.ndarray, x: np.ndarray, what: str) -> None:
    scale = np.abs(x).astype(np.float64) @ np.abs(w).T + 1e-30
    split, exact = split_product(w, x), x.astype(np.float64) @ w.T
    assert np.max(np.abs(y - split) / scale) < EXACT, f"{what}: not the sum of the three products"
    assert np.max(np.abs(y - exact) / scale) < 2e-5, what


@split_only
@pytest.mark.parametrize("tokens", TOKENS)
def test_f16_weights_are_split_exactly(tokens: int) -> None:
    for k, n in SHAPES:
        data, w = random_weight("F16", k, n, tokens)
        x = activations((tokens, k), tokens)
        y = product("F16", data, k, n, x)
        if tokens >= 9:
            assert_split_product(y, w, x, f"K {k}, N {n}, {tokens} tokens")
        else:
            assert_close(y, w, x.astype(np.float64), 1e-5, f"K {k}, N {n}, {tokens} tokens")


@split_only
@pytest.mark.parametrize("tokens", (9, 16, 30, 64, 70, 81, 128))
def test_weights_that_bf16_holds_need_no_low_parts(tokens: int) -> None:
    """Row 5 alone has low parts, in all its columns or in the last ones: no other sum changes by a bit."""
    k, n = 520, 70
    rng = np.random.default_rng(tokens)
    w = truncated(rng.standard_normal((n, k)).astype(np.float32)).astype(np.float16)
    x = activations((tokens, k), tokens)
    plain = product("F16", w.view(np.uint8).reshape(-1), k, n, x)
    assert_split_product(plain, w.astype(np.float64), x, f"{tokens} tokens")
    others = np.arange(n) != 5
    for columns in (slice(None), slice(300, None)):
        mixed = w.copy()
        mixed[5, columns] += np.float16(2**-10) * mixed[5, columns]
        assert np.any(mixed[5] != truncated(mixed[5].astype(np.float32)))
        y = product("F16", mixed.view(np.uint8).reshape(-1), k, n, x)
        assert_split_product(y, mixed.astype(np.float64), x, f"{tokens} tokens, low parts in row 5")
        np.testing.assert_array_equal(y[:, others], plain[:, others])


@split_only
def test_f16_products_are_nearer_than_those_of_one_bf16_activation() -> None:
    data, w = random_weight("F16", 1024, 64, 3)
    for tokens in (8, 64):
        x = np.random.default_rng(4).standard_normal((tokens, 1024)).astype(np.float32)
        exact = x.astype(np.float64) @ w.T
        error = np.sqrt(np.mean((product("F16", data, 1024, 64, x) - exact) ** 2) / np.mean(exact**2))
        assert error < 1e-5, f"{tokens} tokens: {error:.2e}"


@pytest.mark.parametrize("k", (1, 3, 17, 31, 33, 63, 255, 257, 1000))
def test_f16_rows_of_any_length(k: int) -> None:
    data, w = random_weight("F16", k, 37, k)
    for tokens in (3, 8, 16, 40):
        x = activations((tokens, k), k) + np.float32(0.1)
        assert_close(product("F16", data, k, 37, x), w, effective(x, "F16", 512), 2e-5, f"K {k}, {tokens} tokens")


def test_f16_weights_of_every_magnitude() -> None:
    """All finite F16 numbers, subnormals among them, each alone in its row: the products are exact."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = bits.view(np.float16)[np.isfinite(bits.view(np.float16))]
    k, n = 32, values.size
    w = np.zeros((n, k), np.float16)
    w[np.arange(n), np.arange(n) % k] = values
    for tokens in (9, 20, 50, 70):
        x = np.ones((tokens, k), np.float32)
        y = product("F16", w.view(np.uint8).reshape(-1), k, n, x)
        np.testing.assert_array_equal(y, np.broadcast_to(values.astype(np.float32), (tokens, n)))


@halves_only
@pytest.mark.parametrize("tokens", TOKENS)
def test_f16_products_of_halves(tokens: int) -> None:
    """Exact weights times activations of 11 bits."""
    for k, n in SHAPES:
        data, w = random_weight("F16", k, n, tokens)
        x = activations((tokens, k), tokens)
        y = product("F16", data, k, n, x)
        assert_close(y, w, effective(x, "F16", 512), EXACT, f"K {k}, N {n}, {tokens} tokens")


@halves_only
@pytest.mark.parametrize("tokens", (3, 20, 50, 70))
def test_f16_products_scale_with_their_tokens(tokens: int) -> None:
    """Every token has a power of two of its own, so that factors of two change exponents and nothing else."""
    k, n = 992, 70
    data, _ = random_weight("F16", k, n, 1)
    x = activations((tokens, k), tokens)
    powers = np.exp2(np.resize([0, -20, 20, -100, 100, 1, -1], tokens)).astype(np.float32)[:, None]
    plain, scaled = product("F16", data, k, n, x), product("F16", data, k, n, x * powers)
    different = np.argwhere(scaled != plain * powers)
    assert different.size == 0, f"{len(different)} products differ, the first at token and row {different[:1]}"


@halves_only
@pytest.mark.parametrize("magnitude", (0.0, 1e-42, 1e-36, 1e-6, 65520.0, 1e6, 1e30))
def test_f16_activations_of_any_magnitude(magnitude: float) -> None:
    """In one batch with tokens of magnitude 1; beyond the range of f16 and below that of normal f32 numbers."""
    k, n = 288, 45
    data, w = random_weight("F16", k, n, 1)
    for tokens in (4, 24, 80):
        x = np.random.default_rng(tokens).uniform(-1, 1, (tokens, k)).astype(np.float32)
        x[::2] *= np.float32(magnitude)
        y = product("F16", data, k, n, x)
        exact = x.astype(np.float64) @ w.T
        # 11 bits of the largest activation, f32 sums, and the smallest step of f32 for results below its range
        bound = np.abs(x).max(axis=1, keepdims=True) * np.abs(w).sum(axis=1) * 2.0**-12 * 1.01 + k * 2.0**-149
        error = np.abs(y - exact) / bound
        token, row = np.unravel_index(np.nan_to_num(error, nan=np.inf).argmax(), error.shape)
        assert error[token, row] <= 1, f"token {token}, row {row}: {y[token, row]} instead of {exact[token, row]}"


@halves_only
@pytest.mark.parametrize("broken", (np.nan, np.inf, -np.inf))
def test_f16_broken_numbers_stay_visible(broken: float) -> None:
    """A broken activation in all products of its token, a broken weight in all of its row, and nowhere else."""
    k, n = 320, 45
    data, _ = random_weight("F16", k, n, 1)
    bad = data.view(np.float16).reshape(n, k).copy()
    bad[7, 201] = broken
    for tokens in (3, 8, 40, 80):
        x = activations((tokens, k), tokens) + np.float32(0.1)
        whole = product("F16", data, k, n, x)
        broken_row = product("F16", bad.view(np.uint8).reshape(-1), k, n, x)
        x[2, 77] = broken
        broken_token = product("F16", data, k, n, x)
        assert not np.isfinite(broken_token[2]).any() and not np.isfinite(broken_row[:, 7]).any()
        np.testing.assert_array_equal(np.delete(broken_token, 2, 0), np.delete(whole, 2, 0))
        np.testing.assert_array_equal(np.delete(broken_row, 7, 1), np.delete(whole, 7, 1))


@halves_only
def test_f16_products_do_not_depend_on_the_number_of_tokens() -> None:
    k, n = 2304, 70
    data, _ = random_weight("F16", k, n, 1)
    x = activations((240, k), 2)
    many = product("F16", data, k, n, x)
    for tokens in (3, 16, 30, 60):
        error = np.abs(product("F16", data, k, n, x[:tokens]) - many[:tokens]).max() / np.abs(many).max()
        assert error < 2e-6, f"{tokens} tokens differ by {error:.1e} of the largest product"


@halves_only
@pytest.mark.parametrize("tokens", (3, 8, 64, 100))
def test_f16_products_of_halves_are_nearer_than_those_of_bf16(tokens: int) -> None:
    data, w = random_weight("F16", 1024, 64, 3)
    x = np.random.default_rng(4).standard_normal((tokens, 1024)).astype(np.float32)
    exact = x.astype(np.float64) @ w.T
    error = np.sqrt(np.mean((product("F16", data, 1024, 64, x) - exact) ** 2) / np.mean(exact**2))
    assert error < 2.5e-4, f"{tokens} tokens: {error:.2e}, which of bf16 is 1.6e-3"
