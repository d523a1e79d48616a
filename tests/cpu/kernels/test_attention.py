"""Native attention against the float64 reference."""

import itertools

import numpy as np
import pytest

from benchmarks import reference_attention as ref
from benchmarks.reference_attention import (
    ALL_TYPES,
    BF16,
    CODED,
    F16,
    F32,
    IQ4_NL,
    Q4_1,
    Q5_0,
    Q5_1,
    Q6_0,
    Q8_0,
    Q8_KV,
)
from tests.cpu.kernels.attention_cases import run_case, sequences_apart, tolerance_of


@pytest.mark.parametrize("flash", [True, False], ids=["flash", "full"])
@pytest.mark.parametrize("n_tokens", [1, 2, 5, 17, 64, 200])
@pytest.mark.parametrize("shape", [(8, 2, 64, 64), (6, 6, 96, 96), (7, 1, 80, 80), (16, 2, 128, 128)])
def test_shapes_and_batches(n_tokens, shape, flash):
    run_case(n_tokens, 512, *shape, threads=(1, 2, 3), flash=flash)


@pytest.mark.parametrize("n_kv", [1, 7, 31, 64, 97, 256, 1000])
@pytest.mark.parametrize("flash", [True, False], ids=["flash", "full"])
def test_cache_lengths(n_kv, flash):
    run_case(1, n_kv, 8, 2, 64, 64, threads=(1, 3), flash=flash)
    run_case(min(n_kv, 40), n_kv, 8, 2, 64, 64, threads=(1, 3), flash=flash)


@pytest.mark.parametrize("v_type", ALL_TYPES, ids=ref.TYPE_NAMES.get)
@pytest.mark.parametrize("k_type", ALL_TYPES, ids=ref.TYPE_NAMES.get)
def test_cache_types(k_type, v_type):
    for n_tokens in (1, 3, 20, 24):
        tolerance = tolerance_of(k_type, v_type, n_tokens=n_tokens, floats=3e-5)
        run_case(n_tokens, 150, 8, 4, 64, 96, k_type=k_type, v_type=v_type, threads=(2,), tolerance=tolerance)


@pytest.mark.parametrize("dims", [(1, 1), (3, 5), (20, 24), (33, 17), (40, 72), (256, 256), (192, 128)])
@pytest.mark.parametrize("n_tokens", [1, 3, 20])
def test_head_sizes(dims, n_tokens):
    run_case(n_tokens, 130, 4, 2, *dims)
    run_case(n_tokens, 130, 4, 2, *dims, flash=False, softcap=3.0)


@pytest.mark.parametrize("n_tokens", [1, 2, 5, 17, 64, 200])
@pytest.mark.parametrize("k_type", [F16, Q8_0, BF16, Q6_0, Q5_1, Q5_0, Q4_1], ids=ref.TYPE_NAMES.get)
def test_absorbed_latent(n_tokens, k_type):
    """All heads share one 576-wide key; the value is a view of its last 512 columns."""
    run_case(n_tokens, 300, 16, 1, 576, 512, k_type=k_type, v_type=k_type, view=64, threads=(1, 2, 3))


@pytest.mark.parametrize("n_heads", [4, 128])
def test_absorbed_latent_other_head_counts(n_heads):
    run_case(1, 300, n_heads, 1, 576, 512, view=64, threads=(1, 3))
    run_case(2, 200, n_heads, 1, 96, 64, view=32, threads=(1, 3), flash=False)


@pytest.mark.parametrize("n_tokens", [1, 5, 64, 200])
@pytest.mark.parametrize("k1_heads", [1, 16])
def test_two_key_segments(n_tokens, k1_heads):
    run_case(n_tokens, 300, 16, 16, 192, 128, segment=64, k1_heads=k1_heads, threads=(1, 2))
    run_case(n_tokens, 300, 16, 16, 192, 128, segment=64, k1_heads=k1_heads, flash=False)


@pytest.mark.parametrize("flash", [True, False], ids=["flash", "full"])
@pytest.mark.parametrize("n_tokens", [1, 2, 17, 200])
def test_sinks_softcap_and_windows(n_tokens, flash):
    run_case(n_tokens, 500, 8, 2, 64, 64, sinks=True, flash=flash, threads=(1, 2))
    run_case(n_tokens, 500, 8, 2, 64, 64, softcap=2.0, flash=flash, threads=(1, 2), tolerance=5e-5)
    run_case(n_tokens, 500, 8, 2, 64, 64, sinks=True, kind=1, n_swa=70, flash=flash)
    run_case(n_tokens, 500, 8, 2, 64, 64, kind=2, n_swa=128, flash=flash)
    run_case(n_tokens, 500, 8, 2, 64, 64, kind=3, n_swa=131, flash=flash)


@pytest.mark.parametrize("n_tokens", [1, 5, 64])
def test_several_sequences_share_the_cache(n_tokens):
    run_case(n_tokens, 700, 8, 2, 64, 64, n_seq=5, threads=(1, 2, 3))
    run_case(n_tokens, 700, 8, 2, 64, 64, n_seq=5, flash=False)


@pytest.mark.parametrize("flash", [True, False], ids=["flash", "full"])
@pytest.mark.parametrize("heads", [(4, 1), (8, 8), (32, 2)])
@pytest.mark.parametrize("lengths", [[(70, 1)] * 8, [(9, 1), (130, 1), (3, 40), (64, 2), (0, 300), (100, 1)]])
def test_sequences_in_cells_of_their_own_get_what_each_gets_alone(lengths, heads, flash):
    rng = np.random.default_rng(5)
    n_cells = 1024
    cell_pos, cell_seq, pos, seq = sequences_apart(rng, lengths, n_cells)
    mask, ranges = ref.kq_mask(cell_pos, cell_seq, pos, seq, n_cells)
    q = rng.standard_normal((len(pos), heads[0], 64)).astype(np.float32)
    k, k_values = ref.make_cache(rng.standard_normal((n_cells, heads[1], 64)).astype(np.float32), F16)
    values = np.repeat(k_values, heads[0] // heads[1], 1)
    want = ref.attend(q, values, values, ref.visible_cells(cell_pos, cell_seq, pos, seq), 0.125)
    options = {"scale": 0.125, "k_type": F16, "v_type": F16, "dv": 64, "flash": flash}
    for n_threads in (1, 2, 3, 8):
        together = ref.attention(q, k, k, mask, ranges, n_threads=n_threads, **options)
        assert np.abs(together - want).max() < 3e-5
    together = ref.attention(q, k, k, mask, ranges, **options)
    for s in range(len(lengths)):
        own = seq == s
        alone = ref.attention(q[own], k, k, mask[own], ranges[own], **options)
        np.testing.assert_array_equal(together[own], alone)


@pytest.mark.parametrize("slope", [-0.2, 0.004, 0.05, 0.2], ids=lambda slope: f"{slope} per cell")
@pytest.mark.parametrize("n_tokens", [17, 200])
def test_scores_that_rise_or_fall_along_the_cells(n_tokens, slope):
    """Maxima that grow by little or much, or not at all, from one tile of cells to the next."""
    rng = np.random.default_rng(5)
    n_kv, n_heads, d = 700, 8, 64
    q = 0.3 * rng.standard_normal((n_tokens, n_heads, d)).astype(np.float32)
    k = 0.3 * rng.standard_normal((n_kv, 2, d)).astype(np.float32)
    q[..., 0] = rng.uniform(0.5, 1.5, (n_tokens, n_heads))
    k[..., 0] = slope * np.arange(n_kv)[:, None]
    (k, k_values), (v, v_values) = ref.make_cache(k, F16), ref.make_cache(rng.standard_normal(k.shape), F16)
    mask, ranges = np.zeros((n_tokens, 704), np.float16), np.tile(np.array([0, n_kv], np.int32), (n_tokens, 1))
    want = ref.attend(
        q, np.repeat(k_values, 4, 1), np.repeat(v_values, 4, 1), np.ones((n_tokens, n_kv), bool), 1.0, sinks=None
    )
    allowed = 3e-5 + 2.0**-16 * np.abs(slope) * n_kv * 1.5  # products of bf16 halves keep 16 bits of a score
    for n_threads in (1, 3):
        got = ref.attention(q, k, v, mask, ranges, n_threads=n_threads, scale=1.0, k_type=F16, v_type=F16, dv=d)
        error = np.abs(got - want).max() / np.abs(want).max()
        assert error < allowed, f"{n_threads} threads: {error:.1e}"


@pytest.mark.parametrize("shape", [(8, 1, 128, 128), (4, 4, 64, 64), (3, 3, 80, 80)], ids=str)
@pytest.mark.parametrize("n_tokens", [150, 530])
def test_more_rows_than_a_row_tile(n_tokens, shape):
    """Causal masks over row tiles that are full, and one that is not."""
    run_case(n_tokens, n_tokens + 45, *shape, threads=(1, 2))


@pytest.mark.parametrize("flash", [True, False], ids=["flash", "full"])
@pytest.mark.parametrize("n_tokens", [1, 2, 40])
def test_query_without_visible_cell_gives_zeros(n_tokens, flash):
    rng = np.random.default_rng(3)
    n_kv = 200
    q = rng.standard_normal((n_tokens, 4, 64)).astype(np.float32)
    k, k_values = ref.make_cache(rng.standard_normal((n_kv, 2, 64)).astype(np.float32), F16)
    mask = np.zeros((n_tokens, 256), np.float16)
    ranges = np.tile(np.array([0, n_kv], np.int32), (n_tokens, 1))
    mask[0] = -np.inf
    sinks = np.ones(4, np.float32)
    for use_ranges in (ranges, np.where(np.arange(n_tokens)[:, None] == 0, 0, ranges).astype(np.int32)):
        options = {"scale": 0.125, "k_type": F16, "v_type": F16, "dv": 64, "sinks": sinks, "flash": flash}
        got = ref.attention(q, k, k, mask, use_ranges, n_threads=2, **options)
        assert (got[0] == 0).all()
        heads = np.repeat(k_values, 2, 1)
        want = ref.attend(q, heads, heads, np.isfinite(mask[:, :n_kv]), 0.125, sinks=sinks)
        assert np.abs(got - want).max() < 1e-5


@pytest.mark.parametrize("kind", CODED, ids=ref.TYPE_NAMES.get)
@pytest.mark.parametrize("group", [1, 3, 4, 5, 8, 16])
def test_codes_of_grouped_heads_and_any_number_of_cells(group, kind):
    for n_kv, size in ((1, 64), (15, 128), (63, 64), (66, 192), (129, 256)):
        run_case(1, n_kv, 2 * group, 2, size, size, k_type=kind, v_type=kind, threads=(1, 2))
    run_case(2, 200, 2 * group, 2, 64, 96, k_type=kind, v_type=kind, n_seq=3, sinks=True, softcap=3.0)
    run_case(1, 200, 2 * group, 2, 128, 64, k_type=kind, v_type=F16, flash=False)


@pytest.mark.parametrize("kind", [Q8_0, Q8_KV, Q4_1, IQ4_NL], ids=ref.TYPE_NAMES.get)
def test_codes_of_values_longer_than_keys(kind):
    """Work memory of the longer of the two is enough for both: shorter keys may need more of it."""
    for dk, dv in itertools.product((64, 128, 256), (160, 192, 320)):
        run_case(1, 70, 16, 1, dk, dv, k_type=kind, v_type=kind)
        run_case(2, 70, 16, 2, dk, dv, k_type=kind, v_type=kind, flash=False)


@pytest.mark.parametrize("flash", [True, False], ids=["flash", "full"])
@pytest.mark.parametrize("group", [4, 5, 6, 7, 8])
def test_bf16_caches_keep_the_bits_of_floats(group, flash):
    """Rows and depths that leave parts of tiles empty, V of an odd multiple of 32 columns."""
    options = {"k_type": BF16, "v_type": BF16, "flash": flash, "tolerance": 3e-6}
    for n_kv, dk, dv in ((1, 64, 32), (15, 128, 96), (33, 64, 64), (49, 192, 160), (130, 128, 128)):
        run_case(1, n_kv, 2 * group, 2, dk, dv, threads=(1, 2), **options)
    run_case(1, 200, 2 * group, 2, 64, 96, n_seq=3, sinks=True, softcap=3.0, **options)
    for k_type, v_type in ((BF16, F16), (Q8_0, BF16)):
        run_case(1, 70, 2 * group, 2, 64, 64, **(options | {"k_type": k_type, "v_type": v_type, "tolerance": None}))


@pytest.mark.parametrize("kind", CODED, ids=ref.TYPE_NAMES.get)
def test_codes_of_unlike_sizes(kind):
    """Blocks of very different scales, cells of very different weights."""
    rng = np.random.default_rng(9)
    n_kv, heads, size = 300, 8, 128
    x = rng.standard_normal((n_kv, 1, size)).astype(np.float32) * np.repeat([1e-3, 1, 30, 0], 32).astype(np.float32)
    k, k_values = ref.make_cache(x, kind)
    v, v_values = ref.make_cache(x[::-1].copy(), kind)
    q = (rng.standard_normal((1, heads, size)) * 0.3).astype(np.float32)
    ranges = np.array([[0, n_kv]], np.int32)
    got = ref.attention(q, k, v, None, ranges, scale=0.1, k_type=kind, v_type=kind, dv=size)
    values = np.repeat(v_values, heads, 1)
    want = ref.attend(q, np.repeat(k_values, heads, 1), values, np.ones((1, n_kv), bool), 0.1)
    for block in range(4):
        part = slice(32 * block, 32 * block + 32)
        error = np.abs(got - want)[..., part].max((0, 2))
        largest = np.abs(v_values[..., part]).max() + 1e-30
        head = error.argmax()
        assert error[head] <= 1e-3 * largest, f"block {block}, head {head}: {error[head] / largest:.2e} of the largest"


def test_ranges_alone_mask():
    rng = np.random.default_rng(4)
    q = rng.standard_normal((3, 4, 32)).astype(np.float32)
    k, values = ref.make_cache(rng.standard_normal((90, 4, 32)).astype(np.float32), F32)
    ranges = np.array([[0, 90], [10, 11], [33, 70]], np.int32)
    visible = (np.arange(90) >= ranges[:, :1]) & (np.arange(90) < ranges[:, 1:])
    got = ref.attention(q, k, k, None, ranges, scale=0.2, k_type=F32, v_type=F32, dv=32)
    assert np.abs(got - ref.attend(q, values, values, visible, 0.2)).max() < 1e-5


def test_large_scores_stay_finite():
    rng = np.random.default_rng(5)
    q = (1000 * rng.standard_normal((20, 4, 64))).astype(np.float32)
    k, values = ref.make_cache(rng.standard_normal((200, 4, 64)).astype(np.float32), F16)
    visible = np.ones((20, 200), bool)
    ranges = np.tile(np.array([0, 200], np.int32), (20, 1))
    got = ref.attention(q, k, k, None, ranges, scale=1.0, k_type=F16, v_type=F16, dv=64)
    assert np.abs(got - ref.attend(q, values, values, visible, 1.0)).max() < 2e-2


@pytest.mark.parametrize("flash", [True, False], ids=["flash", "full"])
@pytest.mark.parametrize("n_tokens", [1, 3, 40])
@pytest.mark.parametrize("type_id", [F16, Q8_0, Q5_1], ids=ref.TYPE_NAMES.get)
def test_broken_query_stays_visible(type_id, n_tokens, flash):
    """A NaN or an infinity in a query makes its output useless, not zero; other heads are as ever."""
    rng = np.random.default_rng(0)
    cache, _ = ref.make_cache(rng.standard_normal((100, 2, 64)).astype(np.float32), type_id)
    ranges = np.tile(np.array([0, 100], np.int32), (n_tokens, 1))
    for broken in (np.nan, np.inf):
        q = rng.standard_normal((n_tokens, 4, 64)).astype(np.float32)
        q[0, 1, 5] = broken
        options = {"scale": 0.1, "k_type": type_id, "v_type": type_id, "dv": 64, "flash": flash}
        bad = ~np.isfinite(ref.attention(q, cache, cache, None, ranges, n_threads=2, **options))
        assert bad[0, 1].all() and bad.sum() == 64
