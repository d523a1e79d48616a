"""Cases of attention: cells, native attention and its float64 reference, and how far they may be apart."""

import numpy as np

from benchmarks import reference_attention as ref
from benchmarks.reference_attention import (
    BF16,
    CODED,
    F16,
)
from ikpy._native import core, tier


def tolerance_of(*types, n_tokens=1, floats=2e-5, large_scores=False):
    """Products of codes meet queries and weights rounded to 1/65000 of the largest of 64 elements and more; those of
    many tokens to bf16 where test_attention_dots.py says so, which shows more where scores are large."""
    if ref.MULTIPLIES_BF16 and set(types) <= {BF16, *CODED} and n_tokens >= ref.DOT_TOKENS:
        return 2e-2 if large_scores else 1.2e-2
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
    tolerance = tolerance or tolerance_of(*types, n_tokens=n_tokens, large_scores=softcap != 0)
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
