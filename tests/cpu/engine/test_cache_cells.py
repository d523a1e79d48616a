"""Native masks, and cells of caches that are stored and rotated, against the float64 references."""

import numpy as np
import pytest

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
from ikpy._native import core
from ikpy.quants import registry
from tests.cpu.quants.quant_data import golden


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
