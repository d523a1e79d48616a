"""Native attention, mask and cache ops against the float64 references."""

import itertools

import numpy as np
import pytest
from quant_data import golden

from benchmarks import reference_attention as ref
from benchmarks.random_weights import random_tensor
from benchmarks.reference_attention import (
    ALL_TYPES,
    BF16,
    CODED,
    F16,
    F32,
    IQ4_NL,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q6_0,
    Q8_0,
    Q8_KV,
)
from ikpy._native import core, tier
from ikpy.quants import registry


def tolerance_of(*types, n_tokens=1, floats=2e-5):
    """Products of codes meet queries and weights rounded to 1/65000 of the largest of 64 elements and more; those of
    many tokens to bf16 where test_attention_dots.py says so."""
    if ref.MULTIPLIES_BF16 and set(types) <= {BF16, *CODED} and n_tokens >= ref.DOT_TOKENS:
        return 1.2e-2
    codes = core.has_tiles() or core.has_byte_permutes() or tier in ("avxvnni", "avx2")
    return 2.5e-4 if codes and set(types) & set(CODED) else floats


def causal_case(rng, n_tokens, n_kv, n_seq=1):
    """Cells of n_seq interleaved sequences, some of them empty; the queries sit in the last cells."""
    cell_seq_id = rng.integers(0, n_seq, n_kv)
    cell_pos = np.zeros(n_kv, np.int32)
    for s in range(n_seq):
        cell_pos[cell_seq_id == s] = np.arange((cell_seq_id == s).sum())
    empty = rng.random(n_kv) < 0.05
    empty[-n_tokens:] = False
    cell_pos[empty] = -1
    cell_seq = np.where(empty, 0, 1 << cell_seq_id)
    chosen = np.arange(max(0, n_kv - n_tokens), n_kv)
    pos, seq = cell_pos[chosen], cell_seq_id[chosen]
    return cell_pos, cell_seq, pos, seq


def run_case(
    n_tokens,
    n_kv,
    n_heads,
    n_kv_heads,
    dk,
    dv,
    *,
    k_type=F16,
    v_type=F16,
    n_seq=1,
    seed=0,
    segment=0,
    k1_heads=1,
    view=None,
    threads=(1,),
    tolerance=None,
    sinks=False,
    softcap=0.0,
    flash=True,
    kind=0,
    n_swa=0,
):
    """Runs native attention for every thread count and compares with the float64 reference."""
    types = (k_type, v_type, F16) if segment else (k_type, v_type)
    tolerance = tolerance or tolerance_of(*types, n_tokens=n_tokens)
    rng = np.random.default_rng(seed)
    d0 = dk - segment
    q = rng.standard_normal((n_tokens, n_heads, dk)).astype(np.float32)
    k, k_values = ref.make_cache(rng.standard_normal((n_kv, n_kv_heads, d0)).astype(np.float32), k_type)
    k1 = None
    if segment:
        k1, k1_values = ref.make_cache(rng.standard_normal((n_kv, k1_heads, segment)).astype(np.float32), F16)
        shared = np.repeat(k1_values, n_kv_heads // k1_heads, axis=1)
        k_values = np.concatenate([k_values, shared], axis=2)
    if view is None:
        v, v_values = ref.make_cache(rng.standard_normal((n_kv, n_kv_heads, dv)).astype(np.float32), v_type)
    else:
        v, v_values = None, k_values[:, :, view : view + dv]
    group = n_heads // n_kv_heads
    cell_pos, cell_seq, pos, seq = causal_case(rng, n_tokens, n_kv, n_seq)
    mask, ranges = ref.kq_mask(cell_pos, cell_seq, pos, seq, n_kv, kind=kind, n_swa=n_swa)
    visible = ref.visible_cells(cell_pos, cell_seq, pos, seq, kind=kind, n_swa=n_swa)
    sink_values = rng.standard_normal(n_heads).astype(np.float32) * 2 if sinks else None
    scale = 1 / np.sqrt(dk) * (4.0 if softcap else 1.0)
    heads_k, heads_v = np.repeat(k_values, group, 1), np.repeat(v_values, group, 1)
    want = ref.attend(q, heads_k, heads_v, visible, scale, softcap=softcap, sinks=sink_values)
    options = {"scale": scale, "k_type": k_type, "v_type": v_type, "dv": dv, "softcap": softcap, "k1_type": F16}
    options |= {"sinks": sink_values, "k1": k1, "flash": flash, "v_offset": view}
    results = []
    for n_threads in threads:
        got = ref.attention(q, k, v, mask, ranges, n_threads=n_threads, **options)
        assert np.isfinite(got).all(), f"{n_threads} threads: not finite: {np.argwhere(~np.isfinite(got))[0]}"
        error = np.abs(got - want).max(-1) / np.abs(want).max()
        t, h = np.unravel_index(np.nanargmax(error), error.shape)
        assert np.isfinite(got).all(), f"{n_threads} threads: not finite at {np.argwhere(~np.isfinite(got))[0]}"
        assert error.max() < tolerance, f"{n_threads} threads: error {error[t, h]:.2e} at token {t}, head {h}"
        results.append(got)
    for got in results[1:]:
        assert np.abs(got - results[0]).max() < max(1e-5, tolerance / 5)
    return results[0]


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


def sequences_apart(rng, lengths, n_cells):
    """Cells, positions and sequences of len(lengths) sequences in blocks of 64, each of which ends with its queries."""
    cell_pos, cell_seq = np.full(n_cells, -1, np.int32), np.zeros(n_cells, np.int64)
    pos, seq, blocks = [], [], iter(rng.permutation(n_cells // 64))
    for s, (n_before, n_queries) in enumerate(lengths):
        n = n_before + n_queries
        cells = np.concatenate([np.arange(64) + 64 * next(blocks) for _ in range(-(-n // 64))])[:n]
        cell_pos[cells], cell_seq[cells] = np.arange(n), 1 << s
        pos += range(n_before, n)
        seq += [s] * n_queries
    return cell_pos, cell_seq, np.array(pos, np.int32), np.array(seq)


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


@pytest.mark.parametrize("kind", [0, 1, 2, 3])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("in_pictures", [False, True])
def test_mask(kind, causal, n_threads, in_pictures):
    rng = np.random.default_rng(6)
    n_ctx, n_kv, n_tokens = 512, 333, 37
    cell_pos = rng.integers(-1, 400, n_ctx).astype(np.int32)
    cell_seq = np.where(cell_pos < 0, 0, rng.integers(0, 2**62, n_ctx) & rng.integers(0, 2**62, n_ctx))
    cell_seq[5] = -(2**63)  # sequence 63
    pos = rng.integers(0, 400, n_tokens)
    pos[0] = 0
    seq = rng.integers(0, 64, n_tokens)
    until = pos + rng.integers(0, 99, n_tokens)
    until[::5] = pos[::5]
    options = {"kind": kind, "n_swa": 50, "causal": causal}
    mask, ranges = ref.kq_mask(
        cell_pos, cell_seq, pos, seq, n_kv, **options, until=until if in_pictures else None, n_threads=n_threads
    )
    see = ref.visible_cells(cell_pos, cell_seq.view(np.uint64), pos, seq, **options)[:, :n_kv]
    if in_pictures:
        carries = ref.visible_cells(cell_pos, cell_seq.view(np.uint64), pos, seq, causal=False)[:, :n_kv]
        see |= carries & (pos[:, None] < cell_pos[:n_kv]) & (cell_pos[:n_kv] <= until[:, None])
    assert np.array_equal(mask[:, :n_kv] == 0, see)
    assert np.isneginf(mask[:, :n_kv][~see]).all()
    for t in range(n_tokens):
        cells = np.flatnonzero(see[t])
        assert ranges[t].tolist() == ([cells[0], cells[-1] + 1] if len(cells) else [0, 0])


# Largest error of one element as a share of the largest of its row; block scales are rounded to f16 besides.
STEP = {F32: 0, F16: 2**-11, BF16: 2**-8, Q8_0: 0.5 / 127 + 2**-11, Q6_0: 0.55 / 32, Q4_0: 1.01 / 8, IQ4_NL: 0.14,
        Q8_KV: 0.5 / 127, Q5_0: 1.01 / 16, Q4_1: 1.01 / 15, Q5_1: 1.01 / 31}  # fmt: skip


@pytest.mark.parametrize("type_id", ALL_TYPES, ids=ref.TYPE_NAMES.get)
def test_store_rounds_to_nearest(type_id):
    rng = np.random.default_rng(7)
    x = (rng.standard_normal((9, 3, 64)) * 10.0 ** rng.integers(-1, 3, (9, 3, 1))).astype(np.float32)
    x[2, 1] = 0
    cache = np.full((40, 3, ref.row_nbytes(type_id, 64)), 0xAA, np.uint8)
    cells = rng.permutation(40)[:9]
    ref.kv_store(x, cells, cache, type_id, n_threads=2)
    got = ref.decode_rows(cache[cells], type_id, 64)
    amax = np.abs(x).max(-1, keepdims=True)
    error = np.abs(got - x) / np.where(amax == 0, 1, amax)
    t, h, _ = np.unravel_index(error.argmax(), error.shape)
    assert error.max() <= STEP[type_id] * 1.03 + 1e-6, f"cell {cells[t]}, head {h}: {error.max():.4f}"
    assert (got[2, 1] == 0).all()
    untouched = np.setdiff1d(np.arange(40), cells)
    assert (cache[untouched] == 0xAA).all()
    if type_id == Q8_KV:
        sums = np.ascontiguousarray(cache[cells][..., 4:8]).view(np.int32)[..., 0]
        assert np.array_equal(sums, cache[cells][..., 8:].view(np.int8).astype(int).sum(-1))


@pytest.mark.parametrize("type_id", CODED, ids=ref.TYPE_NAMES.get)
def test_numbers_without_a_code_spoil_no_others(type_id):
    """NaN of a damaged model, which shows in all that shares its scale, and in nothing else; and values so small that
    the inverse of their scale is infinite."""
    x = np.random.default_rng(7).standard_normal((2, 1, 64)).astype(np.float32)
    x[0, 0, 3] = np.nan
    x[1, 0] *= 1e-40
    x[1, 0, ::5] = 0
    _, got = ref.make_cache(x, type_id)
    n_shared = 64 if type_id == Q8_KV else 32
    assert not np.isfinite(got[0, 0, :n_shared]).any(), f"{got[0, 0]}"
    if n_shared < 64:
        error = np.abs(got[0, 0] - x[0, 0])[n_shared:] / np.abs(x[0, 0, n_shared:]).max()
        assert error.max() <= STEP[type_id] * 1.03, f"element {n_shared + error.argmax()}: {error.max():.4f}"
    assert np.abs(got[1]).max() < 1e-6, f"{got[1]}"


@pytest.mark.parametrize("type_id", [Q8_0, Q5_1, Q5_0, Q4_1, Q4_0], ids=ref.TYPE_NAMES.get)
def test_store_gives_the_bytes_of_the_reference(type_id):
    """The reference quantizes to these types without importances as it writes a cache."""
    x, recorded = golden("_inputs")["base"], golden(ref.TYPE_NAMES[type_id])
    cache, values = ref.make_cache(x[:, None], type_id)
    np.testing.assert_array_equal(cache[:, 0], recorded["q_plain"])
    np.testing.assert_allclose(values[:, 0], recorded["dq_plain"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("type_id", [kind for kind in CODED if kind != Q8_KV], ids=ref.TYPE_NAMES.get)
def test_cached_rows_are_rows_of_the_tensor_type(type_id):
    """Stored rows mean to the decoder of tensors what they mean here, whatever their bytes are."""
    row = registry.by_id(type_id)
    rows = random_tensor(row, (256, 9), 3).reshape(9, -1)
    decoded = core.dequantize(rows.reshape(-1), type_id, 256, 9)
    wanted = ref.decode_rows(rows, type_id, 256)
    assert np.abs(decoded.reshape(9, 256) - wanted).max() <= 1e-6 * np.abs(wanted).max()


def test_store_f16_is_exact_rounding():
    x = np.concatenate(
        [
            np.geomspace(1e-9, 7e4, 4000),
            -np.geomspace(1e-9, 7e4, 96),
            [0, np.inf, 65519.9, 65520, 5.9e-8, 2.9e-8],
        ]
    )
    x = np.resize(x, (1, 1, 4096)).astype(np.float32)
    cache, _ = ref.make_cache(x, F16)
    with np.errstate(over="ignore"):
        assert np.array_equal(cache.view(np.uint16)[0, 0], x.astype(np.float16).view(np.uint16)[0, 0])


@pytest.mark.parametrize("n", [96, 8192])
@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("type_id", [F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1], ids=ref.TYPE_NAMES.get)
def test_shift_rotates_chosen_cells(type_id, neox, n):
    rng = np.random.default_rng(8)
    n_ctx, heads, n_rot, offset = 12, 2, 32, 32
    cache, before = ref.make_cache(rng.standard_normal((n_ctx, heads, n)).astype(np.float32), type_id)
    untouched = cache.copy()
    delta = rng.integers(-3, 4, n_ctx).astype(np.int32)
    delta[3] = 0
    angle = delta[:, None] * 100.0 ** (-np.arange(n_rot // 2) / (n_rot // 2))
    table = np.stack([np.cos(angle), np.sin(angle)], -1).reshape(n_ctx, n_rot).astype(np.float32)
    op = ref.NativeOp("kv_shift")
    op.op["dst"] = op.tensor(cache, type_id, [n, heads, n_ctx], [0, *cache.strides[1::-1]])
    op.op["src"][0, :2] = op.dense(table, F32), op.dense(delta, ref.I32)
    op.op["ip"][0, :3] = n_rot, int(neox), offset
    op.run(n_threads=2)
    part = before[..., offset : offset + n_rot]
    a, b = (part[..., : n_rot // 2], part[..., n_rot // 2 :]) if neox else (part[..., ::2], part[..., 1::2])
    c, s = np.cos(angle)[:, None], np.sin(angle)[:, None]
    want = before.copy()
    rotated = want[..., offset : offset + n_rot]
    pair = (a * c - b * s, a * s + b * c)
    if neox:
        rotated[..., : n_rot // 2], rotated[..., n_rot // 2 :] = pair
    else:
        rotated[..., ::2], rotated[..., 1::2] = pair
    got = ref.decode_rows(cache, type_id, n)
    bound = np.abs(want).max(-1, keepdims=True) * (STEP[type_id] * 1.03 + 1e-6)
    assert (np.abs(got - want) <= bound).all()
    assert np.array_equal(cache[delta == 0], untouched[delta == 0])


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


@pytest.mark.parametrize(("kind", "n_swa"), [(0, 0), (1, 300), (2, 256), (3, 301)])
def test_mask_and_ranges_of_many_cells_in_any_order(kind, n_swa):
    rng = np.random.default_rng(5)
    n_cells, n_tokens = 5000, 9
    cell_seq = 1 << np.repeat(rng.integers(0, 6, -(-n_cells // 64)), 64)[:n_cells]
    cell_seq[rng.random(n_cells) < 0.1] |= 1
    cell_pos = rng.integers(0, 1200, n_cells)
    cell_seq[4000:4300], cell_pos[4000:4300] = 0, -1
    pos, seq = rng.integers(0, 1200, n_tokens), rng.integers(0, 8, n_tokens)
    mask, ranges = ref.kq_mask(cell_pos, cell_seq, pos, seq, n_cells, kind=kind, n_swa=n_swa, n_threads=2)
    sees = ref.visible_cells(cell_pos, cell_seq.astype(np.uint64), pos, seq, kind=kind, n_swa=n_swa, causal=True)
    assert np.array_equal(mask[:, :n_cells] == 0, sees)
    assert np.all(np.isneginf(mask[:, :n_cells][~sees].astype(np.float32)))
    for row, (first, last) in zip(sees, ranges, strict=True):
        cells = np.flatnonzero(row)
        assert (first, last) == ((cells[0], cells[-1] + 1) if len(cells) else (0, 0))
