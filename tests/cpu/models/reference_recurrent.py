"""Float64 definitions of the ops of recurrent layers, one token after the other; last axis first in ggml order."""

from __future__ import annotations

import numpy as np


def causal_conv(
    x: np.ndarray,
    weight: np.ndarray,
    state: np.ndarray,
    slots: np.ndarray,
    *,
    silu: bool,
    bias: np.ndarray | float = 0.0,
    dilation: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """Results [T, C] and the states after them. x [T, C], weight [C, n], state [slots, C, (n - 1) * dilation], bias
    [C].
    """
    x, weight, state = (a.astype(np.float64) for a in (x, weight, state))
    y = np.zeros(x.shape)
    for t, slot in enumerate(slots):
        inputs = np.concatenate([state[slot], x[t][:, None]], axis=1)
        y[t] = (weight * inputs[:, ::dilation]).sum(axis=1)
        state[slot] = inputs[:, 1:]
    y += bias
    return y / (1 + np.exp(-y)) if silu else y, state


def gated_delta_rule(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    state: np.ndarray,
    slots: np.ndarray,
    *,
    l2_eps: float,
    scale: float,
    interleaved: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Results [T, Hv, dv] and the states after them (arXiv:2412.06464, equation 10; per row arXiv:2510.26692).

    q, k [T, Hk, dk]; v [T, Hv, dv]; g [T, Hv] or [T, Hv, dk]; beta [T, Hv]; state [slots, Hv, dk, dv].
    """
    q, k, v, g, beta, state = (a.astype(np.float64) for a in (q, k, v, g, beta, state))
    if l2_eps:
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + l2_eps) for x in (q, k))
    heads = np.arange(v.shape[1])
    key_heads = heads // (len(heads) // k.shape[1]) if interleaved else heads % k.shape[1]
    out = np.zeros(v.shape)
    for t, slot in enumerate(slots):
        for h, kh in zip(heads, key_heads, strict=True):
            s = state[slot, h]
            s *= np.exp(g[t, h])[..., None]
            s += np.outer(k[t, kh], beta[t, h] * (v[t, h] - s.T @ k[t, kh]))
            out[t, h] = scale * s.T @ q[t, kh]
    return out, state


def ssm_scan(
    x: np.ndarray,
    dt: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    d: np.ndarray,
    state: np.ndarray,
    slots: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Results [T, H, P] and the states after them (arXiv:2405.21060, equations 1 and 2 with a scalar A per head).

    x [T, H, P]; dt [T, H], behind softplus; a, d [H, 1]; b, c [T, G, N]; state [slots, H, N, P].
    """
    x, dt, a, b, c, d, state = (v.astype(np.float64) for v in (x, dt, a, b, c, d, state))
    per_group = x.shape[1] // b.shape[1]
    out = np.zeros(x.shape)
    for t, slot in enumerate(slots):
        for h in range(x.shape[1]):
            s, group = state[slot, h], h // per_group
            s *= np.exp(dt[t, h] * a[h])
            s += np.outer(b[t, group], dt[t, h] * x[t, h])
            out[t, h] = s.T @ c[t, group] + d[h] * x[t, h]
    return out, state


def channel_scan(
    x: np.ndarray,
    dt: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    d: np.ndarray,
    state: np.ndarray,
    slots: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Results [T, P] and the states after them (arXiv:2312.00752, equations 2 and 4 with the simplified B).

    x, dt [T, P], dt behind softplus; a [N, P]; b, c [T, N]; d [P]; state [slots, 1, N, P].
    """
    x, dt, a, b, c, d, state = (v.astype(np.float64) for v in (x, dt, a, b, c, d, state))
    out = np.zeros(x.shape)
    for t, slot in enumerate(slots):
        s = state[slot, 0]
        for channel in range(x.shape[1]):
            s[:, channel] *= np.exp(dt[t, channel] * a[:, channel])
            s[:, channel] += dt[t, channel] * x[t, channel] * b[t]
            out[t, channel] = c[t] @ s[:, channel] + d[channel] * x[t, channel]
    return out, state
