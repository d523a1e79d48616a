"""Attention of many heads that share one cache row whose end is V (absorbed MLA), against float64."""

import os
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import reference_attention as ref
from benchmarks.reference_attention import BF16, CODED, F16, IQ4_NL, Q5_1, Q8_0, Q8_KV
from tests.cpu.kernels.attention_cases import run_case, sequences_apart, tolerance_of

TYPES = [F16, BF16, *(kind for kind in CODED if kind != Q8_KV)]


@pytest.mark.parametrize("kind", TYPES, ids=ref.TYPE_NAMES.get)
@pytest.mark.parametrize("n_heads", [9, 16, 40, 128])
def test_heads_and_tokens(n_heads, kind):
    for n_tokens, n_kv in ((1, 300), (3, 130), (8, 200)):
        run_case(n_tokens, n_kv, n_heads, 1, 192, 128, k_type=kind, v_type=kind, view=64, threads=(1, 2, 5))


@pytest.mark.parametrize("kind", TYPES, ids=ref.TYPE_NAMES.get)
@pytest.mark.parametrize("n_kv", [1, 15, 63, 64, 65, 127, 129])
def test_any_number_of_cells(n_kv, kind):
    run_case(1, n_kv, 16, 1, 576, 512, k_type=kind, v_type=kind, view=64, threads=(1, 3))
    run_case(min(n_kv, 9), n_kv, 32, 1, 128, 64, k_type=kind, v_type=kind, view=0, threads=(1, 2))


@pytest.mark.parametrize("kind", TYPES, ids=ref.TYPE_NAMES.get)
def test_masks_sinks_and_softcap(kind):
    options = {"k_type": kind, "v_type": kind, "view": 64}
    run_case(6, 500, 16, 1, 192, 128, n_seq=4, threads=(1, 2, 3), **options)
    run_case(4, 400, 16, 1, 192, 128, kind=1, n_swa=70, sinks=True, threads=(1, 2), **options)
    run_case(2, 300, 16, 1, 192, 128, softcap=2.0, tolerance=tolerance_of(kind, floats=5e-5), **options)


@pytest.mark.parametrize("kind", [F16, Q8_0, Q5_1], ids=ref.TYPE_NAMES.get)
def test_each_sequence_of_a_batch_gets_what_it_gets_alone(kind):
    rng = np.random.default_rng(5)
    lengths, n_cells = [(70, 1), (130, 2), (0, 5), (100, 1)], 1024
    cell_pos, cell_seq, pos, seq = sequences_apart(rng, lengths, n_cells)
    mask, ranges = ref.kq_mask(cell_pos, cell_seq, pos, seq, n_cells)
    q = rng.standard_normal((len(pos), 16, 192)).astype(np.float32)
    k, _ = ref.make_cache(rng.standard_normal((n_cells, 1, 192)).astype(np.float32), kind)
    options = {"scale": 0.07, "k_type": kind, "v_type": kind, "dv": 128, "v_offset": 64}
    for n_threads in (1, 3):
        together = ref.attention(q, k, None, mask, ranges, n_threads=n_threads, **options)
        for s in range(len(lengths)):
            own = seq == s
            alone = ref.attention(q[own], k, None, mask[own], ranges[own], **options)
            assert np.abs(together[own] - alone).max() <= 2e-4 * np.abs(alone).max()


@pytest.mark.parametrize("kind", [Q8_KV, Q8_0, Q5_1, IQ4_NL], ids=ref.TYPE_NAMES.get)
@pytest.mark.parametrize("n_tokens", [1, 4])
def test_rotated_part_in_a_cache_of_its_own(n_tokens, kind):
    rng = np.random.default_rng(6)
    n_kv = 210
    q = rng.standard_normal((n_tokens, 16, 320)).astype(np.float32)
    rotated, rotated_values = ref.make_cache(3 * rng.standard_normal((n_kv, 1, 64)).astype(np.float32), kind)
    latents, values = ref.make_cache(rng.standard_normal((n_kv, 1, 256)).astype(np.float32), kind)
    ranges = np.tile(np.array([2, n_kv], np.int32), (n_tokens, 1))
    visible = np.tile(np.arange(n_kv) >= 2, (n_tokens, 1))
    keys = np.repeat(np.concatenate([rotated_values, values], 2), 16, 1)
    want = ref.attend(q, keys, np.repeat(values, 16, 1), visible, 0.04)
    options = {"scale": 0.04, "k_type": kind, "v_type": kind, "dv": 256, "k1": latents, "k1_type": kind}
    for n_threads in (1, 2):
        got = ref.attention(q, rotated, latents, None, ranges, n_threads=n_threads, **options)
        assert np.abs(got - want).max() < tolerance_of(kind) * np.abs(want).max()


@pytest.mark.parametrize("kind", CODED, ids=ref.TYPE_NAMES.get)
def test_values_of_unlike_sizes(kind):
    """Blocks of V of very different scales keep their precision, cells of V of very different scales theirs."""
    rng = np.random.default_rng(9)
    n_kv, heads, size = 300, 16, 128
    x = rng.standard_normal((n_kv, 1, size)).astype(np.float32) * np.repeat([1e-3, 1, 30, 0], 32).astype(np.float32)
    x *= np.exp(rng.standard_normal((n_kv, 1, 1))).astype(np.float32)
    k, values = ref.make_cache(x, kind)
    q = (rng.standard_normal((1, heads, size)) * 0.05).astype(np.float32)
    ranges = np.array([[0, n_kv]], np.int32)
    got = ref.attention(q, k, k, None, ranges, scale=0.1, k_type=kind, v_type=kind, dv=size)
    repeated = np.repeat(values, heads, 1)
    want = ref.attend(q, repeated, repeated, np.ones((1, n_kv), bool), 0.1)
    for block in range(4):
        part = slice(32 * block, 32 * block + 32)
        error = np.abs(got - want)[..., part].max()
        largest = np.abs(values[..., part]).max() + 1e-30
        assert error <= 1e-3 * largest, f"block {block}: {error / largest:.2e} of the largest"


@pytest.mark.parametrize("kind", TYPES, ids=ref.TYPE_NAMES.get)
def test_rising_scores(kind):
    """Every step of cells has a larger maximum than the one before, by little and by much."""
    rng = np.random.default_rng(3)
    n_kv, heads = 520, 16
    for growth in (0.02, 0.3):
        x = rng.standard_normal((n_kv, 1, 192)).astype(np.float32)
        x[:, 0, 0] = growth * np.arange(n_kv)
        k, values = ref.make_cache(x, kind)
        q = (0.3 * rng.standard_normal((1, heads, 192))).astype(np.float32)
        q[..., 0] = 1
        ranges = np.array([[0, n_kv]], np.int32)
        options = {"scale": 0.5, "k_type": kind, "v_type": kind, "dv": 128, "v_offset": 64}
        repeated = np.repeat(values, heads, 1)
        want = ref.attend(q, repeated, repeated[..., 64:], np.ones((1, n_kv), bool), 0.5)
        got = ref.attention(q, k, None, None, ranges, **options)
        # Scores of up to 80 move by their share of 1/65000 of the largest products.
        assert np.abs(got - want).max() < (4e-3 if kind in CODED else 4e-4) * np.abs(want).max()


@pytest.mark.parametrize("kind", [F16, BF16, Q8_0, Q5_1], ids=ref.TYPE_NAMES.get)
def test_broken_query_stays_visible(kind):
    rng = np.random.default_rng(0)
    cache, _ = ref.make_cache(rng.standard_normal((100, 1, 192)).astype(np.float32), kind)
    ranges = np.tile(np.array([0, 100], np.int32), (2, 1))
    for broken in (np.nan, np.inf):
        q = rng.standard_normal((2, 16, 192)).astype(np.float32)
        q[0, 1, 5] = broken
        options = {"scale": 0.1, "k_type": kind, "v_type": kind, "dv": 128, "v_offset": 64}
        bad = ~np.isfinite(ref.attention(q, cache, None, None, ranges, n_threads=2, **options))
        assert bad[0, 1].all() and bad.sum() == 128


def test_without_a_tile_unit():
    """Scores run along the elements of up to 16 rows, and along the rows of more."""
    code = (
        "import test_latent_attention as t\n"
        "assert not t.ref.core.has_tiles()\n"
        "for kind in t.TYPES:\n"
        "    t.test_any_number_of_cells(65, kind)\n"
        "    t.test_masks_sinks_and_softcap(kind)\n"
        "    t.test_rising_scores(kind)\n"
        "for kind in (t.F16, t.BF16, t.Q8_0, t.Q5_1):\n"
        "    for n_heads in (9, 40, 72):\n"
        "        t.test_heads_and_tokens(n_heads, kind)\n"
        "    t.test_broken_query_stays_visible(kind)\n"
        "for kind in t.CODED:\n"
        "    t.test_rotated_part_in_a_cache_of_its_own(4, kind)\n"
        "    t.test_values_of_unlike_sizes(kind)\n"
        "for kind in (t.Q8_0, t.Q5_1):\n"
        "    t.test_each_sequence_of_a_batch_gets_what_it_gets_alone(kind)\n"
    )
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "IKPY_AMX": "0", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
