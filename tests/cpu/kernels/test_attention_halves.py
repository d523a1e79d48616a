"""Attention of many tokens over F16 caches where the tile unit multiplies halves (AMX-FP16)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import reference_attention as ref
from benchmarks.reference_attention import BF16, F16, Q8_0
from ikpy._native import core
from tests.cpu.kernels.attention_cases import run_case

HERE = Path(__file__).parent
needs_halves = pytest.mark.skipif(not core.has_half_tiles(), reason="the tile unit in use multiplies no halves")
# What of the other tests meets tiles of F16 caches in every way: masks, parts of tiles, segments, views, row tiles.
OTHERS = "shapes_and_batches or head_sizes or two_key or other_head or sinks or several or rise or row_tile or broken"
OTHERS += " or without_visible or large_scores or ranges_alone or (latent and f16)"


def test_in_a_process_that_tries_halves():
    """CPUs that hide the instruction use it only where IKPY_AMX=fp16 asks for it."""
    if core.has_half_tiles():
        pytest.skip("this process multiplies halves itself")
    env = os.environ | {"IKPY_AMX": "fp16", "PYTHONPATH": str(HERE.parents[2])}
    check = "from ikpy._native import core; print(core.has_half_tiles())"
    if (
        subprocess.run([sys.executable, "-c", check], env=env, capture_output=True, check=True).stdout.strip()
        != b"True"
    ):
        pytest.skip("this CPU multiplies no halves")
    files = [HERE / name for name in ("test_attention.py", "test_attention_halves.py", "test_latent_attention.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", f"halves or {OTHERS}"]
    command += map(str, files)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd=HERE.parents[2])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def attend(q, k, v, scale=1.0, **options):
    """Native attention over F16 caches [n_kv, heads, d], of which every query sees all cells; the largest error of
    every row relative to its largest element. Without v it is the second half of k's rows (latent attention)."""
    k, k_values = ref.make_cache(k.astype(np.float32), F16)
    if v is None:
        v_values = k_values[..., k_values.shape[-1] // 2 :]
        options["v_offset"] = v_values.shape[-1]
    else:
        v, v_values = ref.make_cache(v.astype(np.float32), F16)
    ranges = np.tile(np.array([0, len(k)], np.int32), (len(q), 1))
    group = q.shape[1] // k.shape[1]
    want = ref.attend(
        q, np.repeat(k_values, group, 1), np.repeat(v_values, group, 1), np.ones((len(q), len(k)), bool), scale
    )
    got = ref.attention(q, k, v, None, ranges, scale=scale, k_type=F16, v_type=F16, dv=v_values.shape[-1], **options)
    return np.abs(got - want).max(-1) / np.abs(want).max(-1)


@needs_halves
@pytest.mark.parametrize("flash", [True, False], ids=["flash", "full"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (80, 72), (33, 17), (1, 3)], ids=str)
def test_halves_keep_the_bits_of_floats(dims, flash):
    for n_tokens, n_kv in ((20, 95), (100, 300)):
        run_case(n_tokens, n_kv, 8, 2, *dims, threads=(1, 2), flash=flash, tolerance=2e-6)
    run_case(70, 200, 4, 4, *dims, segment=dims[0] // 2, flash=flash, tolerance=2e-6)


@needs_halves
@pytest.mark.parametrize("flash", [True, False], ids=["flash", "full"])
@pytest.mark.parametrize("types", [(F16, Q8_0), (Q8_0, F16), (F16, BF16), (BF16, F16)], ids=str)
def test_halves_beside_other_types(types, flash):
    run_case(60, 200, 8, 2, 64, 96, k_type=types[0], v_type=types[1], flash=flash, tolerance=3e-5)


@needs_halves
@pytest.mark.parametrize("flash", [True, False], ids=["flash", "full"])
@pytest.mark.parametrize("exponent", [-22, -14, -3, 12])
def test_halves_of_queries_and_keys_of_any_size(exponent, flash):
    """Queries far from 1 meet keys that make up for it; rows of a vector differ by much, and so do their elements."""
    rng = np.random.default_rng(4)
    sizes = 2.0 ** rng.integers(-12, 2, (40, 4, 64))
    q = (rng.standard_normal((40, 4, 64)) * sizes * 2.0 ** (exponent - rng.integers(0, 6, (40, 4, 1)))).astype(
        np.float32
    )
    k = np.clip(rng.standard_normal((150, 2, 64)) * 2.0**-exponent, -65504, 65504)
    error = attend(q, k, rng.standard_normal((150, 2, 64)), flash=flash)
    token, head = np.unravel_index(error.argmax(), error.shape)
    assert error.max() < 5e-6, f"token {token}, head {head}: {error.max():.1e}"


@needs_halves
@pytest.mark.parametrize("flash", [True, False], ids=["flash", "full"])
def test_halves_of_many_small_weights(flash):
    """One cell outweighs each of the 4,000 others by 2^18, which together outweigh it in their own element of V."""
    rng = np.random.default_rng(4)
    n_kv = 4000
    q = np.ones((20, 2, 32), np.float32)
    k = rng.uniform(-0.01, 0.01, (n_kv, 1, 32))
    k[7] += 18 / np.log2(np.e) / 32
    v = np.abs(rng.standard_normal((n_kv, 1, 32))) + 1
    v[7] = 0
    error = attend(q, k, v, flash=flash)
    token, head = np.unravel_index(error.argmax(), error.shape)
    assert error.max() < 5e-6, f"token {token}, head {head}: {error.max():.1e}"


@needs_halves
@pytest.mark.parametrize("n_tokens", [1, 5])
@pytest.mark.parametrize("exponent", [-22, -14, -3, 12])
def test_halves_of_latent_queries_of_any_size(exponent, n_tokens):
    """Rows of a vector differ by much; keys make up for the size of queries in a part that is no V."""
    rng = np.random.default_rng(4)
    shape = (n_tokens, 16, 128)
    q = rng.standard_normal(shape) * 2.0 ** (exponent - rng.integers(0, 6, (n_tokens, 16, 1)))
    q[..., 64:] *= 2.0 ** (-12 if exponent > 0 else 0)
    k = rng.standard_normal((150, 1, 128))
    k[..., :64] = np.clip(k[..., :64] * 2.0**-exponent, -65504, 65504)
    error = attend(q.astype(np.float32), k, None)
    token, head = np.unravel_index(error.argmax(), error.shape)
    assert error.max() < 5e-6, f"token {token}, head {head}: {error.max():.1e}"


@needs_halves
def test_halves_of_many_small_latent_weights():
    """One cell outweighs each of the 4,000 others by 2^18, which together outweigh it in their own element of V."""
    rng = np.random.default_rng(4)
    n_kv = 4000
    q = np.zeros((2, 16, 128), np.float32)
    q[..., :64] = 1
    k = rng.uniform(-0.01, 0.01, (n_kv, 1, 128))
    k[7, :, :64] += 18 / np.log2(np.e) / 64
    k[..., 64:] = np.abs(rng.standard_normal((n_kv, 1, 64))) + 1
    k[7, :, 64:] = 0
    error = attend(q, k, None)
    token, head = np.unravel_index(error.argmax(), error.shape)
    assert error.max() < 5e-6, f"token {token}, head {head}: {error.max():.1e}"
