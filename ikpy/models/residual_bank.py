"""Attention residuals: layers read a mixture of their residual stream and those of some earlier layers (Kimi K3).

In shapes: D elements, n streams of earlier layers, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ikpy.graph.ir import I32, Value, external
from ikpy.models.batch import BatchGraph

MAX_BANKED = 64


@dataclass
class Bank:
    """Streams [D, n, T] as they were, and divided by their root mean squares."""

    raw: Value
    normed: Value


def slots(prefix: str, n: int) -> Value:
    """The numbers 0 to n - 1, i32 [n], on the device of a layer."""
    values = np.arange(n, dtype=np.int32)
    return external(values.ctypes.data, values, I32, (n,), f"{prefix}.residual_slots", "weight")


def banked(b: BatchGraph, bank: Bank | None, x: Value, eps: float) -> Bank:
    """The bank with a further stream x [D, T]."""
    g = b.graph

    def longer(old: Value | None, new: Value) -> Value:
        d, n_tokens = new.shape[:2]
        n = 0 if old is None else old.shape[1]
        whole = g.new(d, n + 1, n_tokens)
        if old is not None:
            g.copy(old, whole.slice(1, 0, n))
        g.copy(new.reshape(d, 1, n_tokens), whole.slice(1, n, 1))
        return whole

    return Bank(
        longer(bank.raw if bank else None, x),
        longer(bank.normed if bank else None, g.rms_norm(x, None, eps)),
    )


def mixed(b: BatchGraph, bank: Bank, x: Value, score: Value, slots: Value, eps: float) -> Value:
    """Sum [D, T] of the streams of a bank and of x [D, T], weighted by the softmax of score . stream / rms(stream).

    score: [D]; slots: of the function of that name, n + 1 or more.
    """
    g = b.graph
    d, n, n_tokens = bank.raw.shape[:3]
    query = score.reshape(d, 1)
    query.name = ""  # no matrix that statistics count
    logits = g.new(n + 1, n_tokens)
    g.copy(g.mul_mat(query, bank.normed.reshape(d, n * n_tokens)).reshape(n, n_tokens), logits.slice0(0, n))
    g.copy(g.mul_mat(query, g.rms_norm(x, None, eps)), logits.slice0(n, 1))
    # All of the streams in their order, whatever the token: their routing weights are the softmax.
    table = slots.view((n + 1, 1 << 30), (0,))
    tokens = b.inputs["tokens"].slice0(0, n_tokens)
    _, weights = g.moe_route(logits, n + 1, gating="softmax", fixed=(table, tokens))
    return g.add(g.hyper_collapse(bank.raw, weights), g.mul(x, weights.slice0(n, 1)))


def kept_bank(b: BatchGraph, bank: Bank) -> Bank:
    """The bank of the output rows alone."""

    def rows(streams: Value) -> Value:
        d, n, n_tokens = streams.shape[:3]
        kept = b.graph.get_rows(streams.reshape(d * n, n_tokens), b.inputs["outputs"])
        return kept.reshape(d, n, kept.shape[1])

    return Bank(rows(bank.raw), rows(bank.normed))
