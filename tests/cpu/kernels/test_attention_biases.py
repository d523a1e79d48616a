"""Native attention with biases by positions, linear (ALiBi) or by differences (T5), against the float64 reference."""

import numpy as np
import pytest

from benchmarks import reference_attention as ref
from benchmarks.reference_attention import ALL_TYPES, BF16, F16, F32, Q8_0
from tests.cpu.kernels.attention_cases import causal_case, tolerance_of


def run_biased(
    n_tokens,
    n_kv,
    n_heads,
    n_kv_heads,
    dk,
    *,
    types=(F16, F16),
    n_seq=1,
    max_bias=8.0,
    start=0,
    causal=True,
    part=None,
    farthest=0,
    threads=(1, 3),
    tolerance=None,
    **options,
):
    """Compares every thread count with the reference. start: position of the first cells; part: first head and number
    of heads of the model that these are a part of; farthest: of biases by differences instead of linear ones."""
    rng = np.random.default_rng(n_tokens + n_kv)
    q = rng.standard_normal((n_tokens, n_heads, dk)).astype(np.float32)
    (k, keys), (v, values) = (
        ref.make_cache(rng.standard_normal((n_kv, n_kv_heads, dk)).astype(np.float32), kind) for kind in types
    )
    cell_pos, cell_seq, pos, seq = causal_case(rng, n_tokens, n_kv, n_seq)
    cell_pos, pos = np.where(cell_pos < 0, -1, cell_pos + start).astype(np.int32), (pos + start).astype(np.int32)
    if not causal:
        pos = rng.permutation(pos)
    seen = {"kind": options.pop("kind", 0), "n_swa": options.pop("n_swa", 0), "causal": causal}
    mask, ranges = ref.kq_mask(cell_pos, cell_seq, pos, seq, n_kv, **seen)
    visible = ref.visible_cells(cell_pos, cell_seq, pos, seq, **seen)
    first, of_all = part or (0, n_heads)
    difference = cell_pos[None, :].astype(np.int64) - pos[:, None]
    table = None
    if farthest:
        max_bias, table = 0.0, rng.normal(0, 2, (of_all, 2 * farthest + 1)).astype(np.float32)
        own = table[first : first + n_heads].astype(np.float64)
        bias = own[:, np.clip(difference, -farthest, farthest) + farthest].swapaxes(0, 1)
    else:
        slopes = ref.slopes(of_all, max_bias)[first : first + n_heads]
        bias = -slopes[None, :, None] * np.abs(difference.astype(np.float64))[:, None, :]
    scale, group = 1 / np.sqrt(dk), n_heads // n_kv_heads
    shared = {"softcap": options.get("softcap", 0.0), "sinks": options.get("sinks")}
    want = ref.attend(q, np.repeat(keys, group, 1), np.repeat(values, group, 1), visible, scale, bias=bias, **shared)
    for n_threads in threads:
        got = ref.attention(
            q,
            k,
            v,
            mask,
            ranges,
            scale=scale,
            k_type=types[0],
            v_type=types[1],
            dv=dk,
            n_threads=n_threads,
            distances=(max_bias, cell_pos, pos, first, of_all),
            biases=table,
            **options,
        )
        error = np.abs(got - want).max(-1) / np.abs(want).max()
        assert np.isfinite(got).all()
        t, h = np.unravel_index(np.argmax(error), error.shape)
        bound = tolerance or tolerance_of(*types, n_tokens=n_tokens, floats=3e-5)
        assert error[t, h] < bound, f"{n_threads} threads: error {error[t, h]:.2e} at token {t}, head {h}"


@pytest.mark.parametrize("flash", [True, False], ids=["flash", "full"])
@pytest.mark.parametrize("n_tokens", [1, 2, 5, 17, 64, 200])
@pytest.mark.parametrize("heads", [(8, 8), (12, 3), (7, 1), (20, 20)])
def test_heads_and_batches(heads, n_tokens, flash):
    run_biased(n_tokens, 300, *heads, 64, flash=flash)


@pytest.mark.parametrize("kind", ALL_TYPES, ids=ref.TYPE_NAMES.get)
@pytest.mark.parametrize("flash", [True, False], ids=["flash", "full"])
def test_cache_types(kind, flash):
    for n_tokens in (1, 3, 20, 40):
        run_biased(n_tokens, 170, 6, 6, 128, types=(kind, F16 if kind == F32 else kind), flash=flash)


@pytest.mark.parametrize("n_kv", [1, 7, 31, 97, 1000])
@pytest.mark.parametrize("n_tokens", [1, 30])
def test_numbers_of_cells_and_odd_heads(n_kv, n_tokens):
    for flash in (True, False):
        run_biased(min(n_tokens, n_kv), n_kv, 5, 5, 80, flash=flash)
        run_biased(min(n_tokens, n_kv), n_kv, 3, 3, 20, flash=flash)


@pytest.mark.parametrize("n_tokens", [1, 4, 50])
def test_far_positions_several_sequences_and_windows(n_tokens):
    """Biases are those of distances: of positions beyond what halves tell apart, too."""
    for flash in (True, False):
        run_biased(n_tokens, 400, 12, 12, 64, n_seq=3, start=1 << 20, flash=flash)
        run_biased(n_tokens, 400, 12, 12, 64, kind=1, n_swa=37, start=5000, flash=flash)
        run_biased(n_tokens, 400, 12, 12, 64, types=(BF16, Q8_0), max_bias=3.5, flash=flash)


@pytest.mark.parametrize("n_tokens", [1, 4, 50])
def test_cells_on_both_sides(n_tokens):
    for flash in (True, False):
        run_biased(n_tokens, 200, 6, 6, 64, causal=False, flash=flash)
        run_biased(n_tokens, 200, 6, 6, 64, causal=False, kind=3, n_swa=30, flash=flash)


@pytest.mark.parametrize("n_tokens", [1, 40])
def test_parts_of_heads_sinks_and_soft_caps(n_tokens):
    sinks = np.linspace(-2, 2, 5).astype(np.float32)
    for flash in (True, False):
        run_biased(n_tokens, 200, 5, 5, 64, part=(5, 20), sinks=sinks, flash=flash)
        run_biased(n_tokens, 200, 5, 5, 64, part=(15, 20), softcap=3.0, flash=flash)


@pytest.mark.parametrize("flash", [True, False], ids=["flash", "full"])
@pytest.mark.parametrize("n_tokens", [1, 2, 5, 17, 64, 200])
@pytest.mark.parametrize("heads", [(8, 8), (12, 3), (7, 1)])
def test_biases_by_differences(heads, n_tokens, flash):
    """Farther and nearer than the table reaches, on both sides, of some of the heads, behind a soft cap."""
    for farthest in (5, 128):
        run_biased(n_tokens, 300, *heads, 64, farthest=farthest, flash=flash)
        run_biased(n_tokens, 300, *heads, 64, farthest=farthest, causal=False, n_seq=3, start=1 << 20, flash=flash)
    run_biased(n_tokens, 230, *heads, 40, farthest=31, part=(3, 20), softcap=3.0, flash=flash)


@pytest.mark.parametrize("kind", ALL_TYPES, ids=ref.TYPE_NAMES.get)
@pytest.mark.parametrize("flash", [True, False], ids=["flash", "full"])
def test_cache_types_with_biases_by_differences(kind, flash):
    for n_tokens in (1, 3, 20, 40):
        types = kind, F16 if kind == F32 else kind
        run_biased(n_tokens, 170, 6, 6, 64, types=types, farthest=128, causal=False, flash=flash)
