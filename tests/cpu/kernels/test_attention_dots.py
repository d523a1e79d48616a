"""Attention of many tokens by dot products of bf16 numbers: caches of BF16 and of codes, on CPUs fast at them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import reference_attention as ref
from benchmarks.reference_attention import (
    BF16,
    CODED,
    DOT_TOKENS,
    F16,
    IQ4_NL,
    MULTIPLIES_BF16,
    Q5_1,
    Q6_0,
    Q8_0,
)
from ikpy._native import cpu, tier
from tests.cpu.kernels import bf16_attention
from tests.cpu.kernels.attention_cases import causal_case, run_case

HERE = Path(__file__).parent
needs_dots = pytest.mark.skipif(not MULTIPLIES_BF16, reason="no fast dot products of bf16 in use")
LOSSY = [BF16, *CODED]


def test_in_a_process_that_multiplies_bf16():
    """Intel's CPUs have the instructions without being fast at them."""
    if MULTIPLIES_BF16:
        pytest.skip("this process multiplies bf16 itself")
    if tier != "avx512" or not cpu.features()["avx512bf16"]:
        pytest.skip("this CPU has no dot products of bf16")
    env = os.environ | {"IKPY_MAKER": "amd", "IKPY_AMX": "0", "PYTHONPATH": str(HERE.parents[2])}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", str(HERE / Path(__file__).name)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd=HERE.parents[2])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout


def rms(x: np.ndarray) -> float:
    return float(np.sqrt((x.astype(np.float64) ** 2).mean()))


@needs_dots
@pytest.mark.parametrize("flash", [True, False], ids=["flash", "full"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (80, 72), (33, 17)], ids=str)
@pytest.mark.parametrize("kind", LOSSY, ids=ref.TYPE_NAMES.get)
def test_rounding_loses_less_than_the_type_of_the_cache(kind, dims, flash):
    rng = np.random.default_rng(8)
    (dk, dv), n_tokens, n_kv, heads, group = dims, 40, 300, 2, 4
    if kind != BF16:
        dk, dv = 32 * -(-dk // 32), 32 * -(-dv // 32)
    q = rng.standard_normal((n_tokens, heads * group, dk)).astype(np.float32)
    k, v = (rng.standard_normal((n_kv, heads, d)).astype(np.float32) for d in (dk, dv))
    k_cache, k_values = ref.make_cache(k, kind)
    v_cache, v_values = ref.make_cache(v, kind)
    ranges = np.tile(np.array([0, n_kv], np.int32), (n_tokens, 1))
    scale = 1 / np.sqrt(dk)
    everything = np.ones((n_tokens, n_kv), bool)

    def exact(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        return ref.attend(q, np.repeat(keys, group, 1), np.repeat(values, group, 1), everything, scale)

    options = {"scale": scale, "k_type": kind, "v_type": kind, "dv": dv, "flash": flash}
    got = ref.attention(q, k_cache, v_cache, None, ranges, **options)
    want = exact(k_values, v_values)
    of_rounding, of_type = rms(got - want), rms(want - exact(k, v))
    assert of_rounding < of_type, f"{of_rounding:.2e} of {rms(want):.2e}; the type itself {of_type:.2e}"


@needs_dots
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("k_type", "v_type", "shape", "options"),
    [
        (Q6_0, Q5_1, (65, 75, 8, 2, 128, 96), {"softcap": 30.0}),
        (Q6_0, Q5_1, (65, 65, 4, 1, 32, 64), {"softcap": 30.0, "sinks": True}),
        (Q6_0, Q5_1, (130, 430, 4, 2, 96, 32), {}),
        (BF16, BF16, (40, 300, 4, 4, 40, 17), {"softcap": 3.0}),
        (Q8_0, IQ4_NL, (24, 500, 6, 3, 64, 64), {"sinks": True}),
    ],
    ids=["scores of 20", "scores of 20, sinks", "plain", "bf16", "several tiles"],
)
def test_nothing_else_is_rounded(k_type, v_type, shape, options, seed):
    """Where scores are large, outputs differ by more than 1 % of the largest: all of that are the four roundings.

    What the emulation lacks are sums of floats, by which few weights are rounded to the other side.
    """
    rng = np.random.default_rng(seed)
    n_tokens, n_kv, n_heads, n_kv_heads, dk, dv = shape
    softcap = options.get("softcap", 0.0)
    q = rng.standard_normal((n_tokens, n_heads, dk)).astype(np.float32)
    k, k_values = ref.make_cache(rng.standard_normal((n_kv, n_kv_heads, dk)).astype(np.float32), k_type)
    v, v_values = ref.make_cache(rng.standard_normal((n_kv, n_kv_heads, dv)).astype(np.float32), v_type)
    k_values, v_values = (np.repeat(x, n_heads // n_kv_heads, 1) for x in (k_values, v_values))
    cell_pos, cell_seq, pos, seq = causal_case(rng, n_tokens, n_kv)
    mask, ranges = ref.kq_mask(cell_pos, cell_seq, pos, seq, n_kv)
    visible = ref.visible_cells(cell_pos, cell_seq, pos, seq)
    sinks = rng.standard_normal(n_heads).astype(np.float32) * 2 if "sinks" in options else None
    scale = (4.0 if softcap else 1.0) / np.sqrt(dk)
    settings = {"scale": scale, "softcap": softcap, "sinks": sinks}
    got = ref.attention(q, k, v, mask, ranges, k_type=k_type, v_type=v_type, dv=dv, **settings)
    operands = q, k_values, v_values, visible
    want = ref.attend(*operands, **settings)
    emulated = bf16_attention.attend(*operands, **settings, first=int(ranges[:, 0].min()))
    exact = bf16_attention.attend(*operands, **settings, first=int(ranges[:, 0].min()), steps=())
    assert rms(exact - want) < 1e-6 * rms(want)
    of_rounding, unexplained = rms(got - want), rms(got - emulated)
    assert unexplained < 3e-4 * rms(want) and unexplained < of_rounding / 10, f"{unexplained:.1e} of {of_rounding:.1e}"


@needs_dots
@pytest.mark.parametrize("flash", [True, False], ids=["flash", "full"])
def test_rounded_weights_add_up_to_one(flash):
    """Most weights are the same and rounded to the same side, which must not show in the sum."""
    n_tokens, n_kv, d = 24, 1000, 64
    q = np.ones((n_tokens, 4, d), np.float32)
    k = np.zeros((n_kv, 1, d), np.float32)
    k[3] = 0.5  # 2^-0.72 of its weight for all others
    k_cache, _ = ref.make_cache(k, BF16)
    v_cache, _ = ref.make_cache(np.ones((n_kv, 1, d), np.float32), BF16)
    ranges = np.tile(np.array([0, n_kv], np.int32), (n_tokens, 1))
    options = {"scale": 1 / d, "k_type": BF16, "v_type": BF16, "dv": d, "flash": flash}
    got = ref.attention(q, k_cache, v_cache, None, ranges, **options)
    assert np.abs(got - 1).max() < 2e-6, f"{np.abs(got - 1).max():.1e}"


@needs_dots
@pytest.mark.parametrize("flash", [True, False], ids=["flash", "full"])
def test_parts_of_tiles(flash):
    """Masks, windows, sinks, soft caps, row tiles and depths that leave parts of blocks empty."""
    options = {"k_type": BF16, "v_type": BF16, "flash": flash}
    for n_tokens, n_kv in ((24, 24), (33, 95), (64, 97), (200, 512)):
        run_case(n_tokens, n_kv, 8, 2, 64, 96, threads=(1, 2, 3), n_seq=2, **options)
        run_case(n_tokens, n_kv, 6, 6, 40, 17, threads=(1, 2), sinks=True, kind=1, n_swa=30, **options)
    run_case(60, 300, 8, 2, 64, 64, softcap=3.0, **options)
    run_case(60, 300, 16, 1, 96, 64, view=32, **options)


@needs_dots
def test_what_is_not_rounded():
    """F16 caches, segments of F16 beside other types, and the few tokens of drafts."""
    for types in ((F16, F16), (BF16, F16), (F16, BF16)):
        run_case(60, 200, 8, 2, 64, 96, k_type=types[0], v_type=types[1], tolerance=2e-5)
    run_case(60, 200, 8, 8, 128, 64, k_type=BF16, v_type=BF16, segment=64, tolerance=2e-5)
    for n_tokens in (3, DOT_TOKENS - 1):
        run_case(n_tokens, 200, 8, 2, 64, 96, k_type=BF16, v_type=BF16, tolerance=2e-5)


@needs_dots
def test_memory_of_all_parts_of_a_plan():
    """Fewer tokens than a plan is made for meet more and smaller row tiles, with any number of threads."""
    for n_tokens in (DOT_TOKENS, DOT_TOKENS + 1, 60):
        run_case(n_tokens, 700, 64, 2, 64, 64, k_type=Q8_0, v_type=Q8_0, n_seq=3, threads=(1, 2, 40))
