"""Layers of RWKV-6 and RWKV-7 in random models, and their float64 definitions, token after token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.cpu.models import reference_models as ref
from tests.cpu.models.reference_models import RandomModel, Weights, sigmoid, silu

GROUP_EPS = 64e-5


def wkv(
    r: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    decay: np.ndarray,
    state: np.ndarray,
    slots: np.ndarray,
    *,
    first: np.ndarray | None = None,
    removal: np.ndarray | None = None,
    written: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Results [T, H, dv] and the states after them: of RWKV-6 (arXiv:2404.05892, equations 19 and 20) with `first`
    [H, dk], of RWKV-7 (arXiv:2503.14456, equations 16 and 17) with removal and written keys.

    r, k, decay, removal, written [T, H, dk]; v [T, Hv, dv]; state [slots, H, dk, dv], as the papers' transposed.
    """
    r, k, v, decay, state = (a.astype(np.float64) for a in (r, k, v, decay, state))
    out = np.zeros((*r.shape[:2], v.shape[2]))
    for t, slot in enumerate(slots):
        for h in range(r.shape[1]):
            s, value = state[slot, h], v[t, h // (r.shape[1] // v.shape[1])]
            added = np.outer(k[t, h], value)
            if first is not None:
                out[t, h] = (s + first[h].astype(np.float64)[:, None] * added).T @ r[t, h]
            transition = np.diag(decay[t, h])
            if removal is not None and written is not None:
                transition = transition - np.outer(written[t, h], removal[t, h].astype(np.float64))
            s[...] = transition @ s + added
            if first is None:
                out[t, h] = s.T @ r[t, h]
    return out, state


def before(x: np.ndarray) -> np.ndarray:
    """Rows [T, D] of the tokens before."""
    return np.concatenate([np.zeros_like(x[:1]), x[:-1]])


def empty(heads: int, size: int) -> np.ndarray:
    """A state of one slot before the first token."""
    return np.zeros((1, heads, size, size))


@dataclass(frozen=True)
class Sizes:
    """Width, elements of a head, ranks of the low-rank matrices (w, a, v, g; of RWKV-6 of mix and decay)."""

    d: int
    size: int
    ranks: tuple[int, ...]
    kv: int = 0
    gate: bool = True

    @property
    def heads(self) -> int:
        return self.d // self.size

    # RWKV-7

    def add7(self, m: RandomModel, p: str, il: int, *, normed: bool = True) -> None:
        """The tensors of a time mix."""
        d = self.d
        n = 6 if self.gate else 5
        m.weights[f"{p}.time_mix_lerp_fused"] = m.random.uniform(0, 1, (n, 1, 1, d)).astype(np.float32)
        # Those of the first layer are there in name only, of the size of another.
        ranks = (*self.ranks[:2], self.ranks[1] if il == 0 else self.ranks[2], *self.ranks[3:])
        for name, rank in zip("wavg" if self.gate else "wav", ranks, strict=False):
            m.matrix(f"{p}.time_mix_{name}1", rank, d)
            m.matrix(f"{p}.time_mix_{name}2", d, rank)
            if name != "g":
                m.vector(f"{p}.time_mix_{name}0", d)
        for name in ("receptance", "key", "value", "output"):
            m.matrix(f"{p}.time_mix_{name}", d, d)
        for name in ("k_k", "k_a", "r_k"):
            m.vector(f"{p}.time_mix_{name}", d)
        if normed:
            m.norm(f"{p}.time_mix_ln", d)
            m.vector(f"{p}.time_mix_ln.bias", d)

    def branch7(self, w: Weights, h: np.ndarray, first: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Branch of a layer for a normed input h [T, D], and its values; first: those of the first layer."""
        n_tokens, shape = len(h), (len(h), self.heads, self.size)
        mixed = [h + (before(h) - h) * share for share in w["time_mix_lerp_fused"].reshape(-1, self.d)]
        r, xw, k, xv, xa = mixed[:5]
        r, k, v = r @ w["time_mix_receptance"].T, k @ w["time_mix_key"].T, xv @ w["time_mix_value"].T
        decay = np.exp(
            -np.exp(-0.5) * sigmoid(np.tanh(xw @ w["time_mix_w1"].T) @ w["time_mix_w2"].T + w["time_mix_w0"])
        )
        own = v
        if first is not None:
            own = v + (first - v) * sigmoid(xv @ w["time_mix_v1"].T @ w["time_mix_v2"].T + w["time_mix_v0"])
        rate = sigmoid(xa @ w["time_mix_a1"].T @ w["time_mix_a2"].T + w["time_mix_a0"])
        removal = (k * w["time_mix_k_k"]).reshape(shape)
        removal = removal / np.maximum(np.linalg.norm(removal, axis=-1, keepdims=True), 1e-12)
        k = k * (1 + (rate - 1) * w["time_mix_k_a"])
        r, k, decay, values, rate = (a.reshape(shape) for a in (r, k, decay, own, rate))
        state, slots = empty(self.heads, self.size), np.zeros(n_tokens, int)
        y, _ = wkv(r, k, values, decay, state, slots, removal=removal, written=removal * rate)
        if "time_mix_ln" in w:
            y = ref.layer_norm(y, np.ones(self.size), GROUP_EPS).reshape(n_tokens, -1)
            y = (y * w["time_mix_ln"] + w["time_mix_ln.bias"]).reshape(shape)
        y = y + (r * k * w["time_mix_r_k"].reshape(self.heads, -1)).sum(-1, keepdims=True) * values
        y = y.reshape(n_tokens, -1)
        if self.gate:
            y = y * (sigmoid(mixed[5] @ w["time_mix_g1"].T) @ w["time_mix_g2"].T)
        return y @ w["time_mix_output"].T, own

    # RWKV-6

    def add6(self, m: RandomModel, p: str, *, qwen: bool, fused: bool = True) -> None:
        """The tensors of a time mix; qwen: as of QRWKV6."""
        d, (mix, decay) = self.d, self.ranks
        n = self.kv * self.size if self.kv else d
        m.matrix(f"{p}.time_mix_w1", 5 * mix, d)
        m.matrix(f"{p}.time_mix_w2", 5, d, mix)
        m.weights[f"{p}.time_mix_lerp_x"] = m.random.uniform(0, 1, d).astype(np.float32)
        shares = m.random.uniform(0, 1, (5, 1, 1, d)).astype(np.float32)
        if fused:
            m.weights[f"{p}.time_mix_lerp_fused"] = shares
        else:
            for name, share in zip("wkvrg", shares, strict=True):
                m.weights[f"{p}.time_mix_lerp_{name}"] = share.reshape(-1)
        m.weights[f"{p}.time_mix_decay"] = m.random.uniform(-4, 1, d).astype(np.float32)
        m.matrix(f"{p}.time_mix_decay_w1", decay, d)
        m.matrix(f"{p}.time_mix_decay_w2", d, decay)
        for name, rows in (("receptance", d), ("key", n), ("value", n), ("gate", d), ("output", d)):
            m.matrix(f"{p}.time_mix_{name}", rows, d)
        if qwen:
            for name, rows in (("receptance", d), ("key", n), ("value", n)):
                m.vector(f"{p}.time_mix_{name}.bias", rows)
        else:
            m.vector(f"{p}.time_mix_first", self.heads, self.size)
            m.norm(f"{p}.time_mix_ln", d)
            m.vector(f"{p}.time_mix_ln.bias", d)

    def branch6(self, w: Weights, h: np.ndarray, *, qwen: bool) -> np.ndarray:
        """Branch of a layer for a normed input h [T, D]."""
        n_tokens, change = len(h), before(h) - h
        x = h + change * w["time_mix_lerp_x"]
        low = np.tanh(x @ w["time_mix_w1"].T).reshape(n_tokens, 5, -1)
        shares = w.get("time_mix_lerp_fused")
        if shares is None:
            shares = np.stack([w[f"time_mix_lerp_{name}"] for name in "wkvrg"])
        chosen = np.einsum("tne,nde->ntd", low, w["time_mix_w2"]) + shares.reshape(5, 1, -1)
        xw, xk, xv, xr, xg = h + change * chosen
        r, k, v = (
            (x @ w[f"time_mix_{name}"].T + w.get(f"time_mix_{name}.bias", 0.0)).reshape(n_tokens, -1, self.size)
            for name, x in (("receptance", xr), ("key", xk), ("value", xv))
        )
        low = np.tanh(xw @ w["time_mix_decay_w1"].T) @ w["time_mix_decay_w2"].T
        decay = np.exp(-np.exp(w["time_mix_decay"] + low)).reshape(n_tokens, self.heads, -1)
        gate, state, slots = xg @ w["time_mix_gate"].T, empty(self.heads, self.size), np.zeros(n_tokens, int)
        if qwen:
            k, v = (np.repeat(a, self.heads // a.shape[1], axis=1) for a in (k, v))
            y, _ = wkv(r / np.sqrt(self.size), k * (1 - decay), v, decay, state, slots)
            return (y.reshape(n_tokens, -1) * sigmoid(gate)) @ w["time_mix_output"].T
        y, _ = wkv(r, k, v, decay, state, slots, first=w["time_mix_first"])
        y = ref.layer_norm(y, np.ones(self.size), GROUP_EPS).reshape(n_tokens, -1)
        return ((y * w["time_mix_ln"] + w["time_mix_ln.bias"]) * silu(gate)) @ w["time_mix_output"].T


def channel_mix(w: Weights, h: np.ndarray) -> np.ndarray:
    """Branch of a network for a normed input h [T, D]."""
    change = before(h) - h
    hidden = np.maximum((h + change * w["channel_mix_lerp_k"]) @ w["channel_mix_key"].T, 0) ** 2
    y = hidden @ w["channel_mix_value"].T
    if "channel_mix_receptance" in w:
        y = y * sigmoid((h + change * w["channel_mix_lerp_r"]) @ w["channel_mix_receptance"].T)
    return y
