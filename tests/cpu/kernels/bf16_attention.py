"""Attention by dot products of bf16 numbers, step by step in float64 with every documented rounding."""

from __future__ import annotations

import numpy as np

TILE_CELLS = 96
"""Cells between which references of weights may be raised."""
RAISED_ABOVE = 8.0
NO_REFERENCE = -1e20
LOG2_E = float(np.float32(np.log2(np.e)))
STEPS = ("queries", "keys", "weights", "values")
"""What is rounded."""


def to_bf16(x: np.ndarray) -> np.ndarray:
    """The nearest bf16 numbers of float32 values, ties away from zero, as float64."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64) + 0x8000
    return (bits & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(np.float64)


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    visible: np.ndarray,
    scale: float,
    *,
    softcap: float = 0.0,
    sinks: np.ndarray | None = None,
    first: int = 0,
    steps: tuple[str, ...] = STEPS,
) -> np.ndarray:
    """q f32 [T, H, dk], k [n, H, dk], v [n, H, dv], visible bool [T, n] -> float64 [T, H, dv].

    first: the first cell that any token sees, where tiles begin. Weights are powers of two relative to a reference that
    follows the largest score when that lies far above, and are summed as rounded.
    """
    factor = np.float32(scale / softcap if softcap else scale * LOG2_E)
    queries = (q * factor).astype(np.float64)
    queries = to_bf16(queries) if "queries" in steps else queries
    scores = np.einsum("thd,chd->thc", queries, to_bf16(k) if "keys" in steps else k)
    if softcap:
        scores = softcap * LOG2_E * np.tanh(scores)
    scores = np.where(visible[:, None], scores, -np.inf)
    v = to_bf16(v) if "values" in steps else v
    reference = np.full(q.shape[:2], NO_REFERENCE)
    total, out = np.zeros(q.shape[:2]), np.zeros((*q.shape[:2], v.shape[2]))
    for at in range(first, len(k), TILE_CELLS):
        tile = scores[..., at : at + TILE_CELLS]
        top = np.maximum(reference, tile.max(-1))
        raised = np.where(top > reference + RAISED_ABOVE, top, reference)
        p = np.exp2(tile - raised[..., None])
        p = to_bf16(p) if "weights" in steps else p
        kept = np.exp2(reference - raised)
        total = total * kept + p.sum(-1)
        out = out * kept[..., None] + np.einsum("thc,chd->thd", p, v[at : at + TILE_CELLS])
        reference = raised
    if sinks is not None:
        total = total + np.exp2(sinks * LOG2_E - reference)
    return out / total[..., None]
