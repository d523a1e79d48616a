"""A random Gemma 4 and a drafter that reads its caches, by their definitions in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.cpu.models import reference_models as ref
from tests.cpu.models.reference_models import N_VOCAB, RandomModel

D, HEADS, FF, WINDOW, EPS = 96, 4, 80, 9, 1e-6
IS_WINDOW = [1, 1, 0, 1, 0, 1, 0]
KV_HEADS = [2, 2, 1, 2, 1, 2, 1]
N, N_SHARED = len(IS_WINDOW), 2
FULL_HEAD, WINDOW_HEAD = 64, 32
OWN, OWN_HEADS, OWN_FF = 64, 6, 96
OWN_WINDOWS = [1, 1, 0]
FACTORS = np.array([1.0] * 8 + [1e30] * 24, np.float32)
NORMS = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")


def keys(windows: list[int], d: int, heads: int, ff: int) -> dict[str, Any]:
    """What both files say."""
    return {
        "block_count": len(windows),
        "embedding_length": d,
        "attention.head_count": heads,
        "attention.key_length": FULL_HEAD,
        "attention.value_length": FULL_HEAD,
        "attention.key_length_swa": WINDOW_HEAD,
        "attention.value_length_swa": WINDOW_HEAD,
        "rope.dimension_count": FULL_HEAD,
        "rope.dimension_count_swa": WINDOW_HEAD,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "feed_forward_length": ff,
        "attention.sliding_window": WINDOW,
        "attention.sliding_window_pattern": windows,
        "attention.layer_norm_rms_epsilon": EPS,
    }


def head_size(is_window: int) -> int:
    return WINDOW_HEAD if is_window else FULL_HEAD


def target() -> RandomModel:
    """The model: dense, the last layers attend to caches of others, keys are values in full layers."""
    m = RandomModel("gemma4", 81, **keys(IS_WINDOW, D, HEADS, FF))
    m.keys |= {"attention.head_count_kv": KV_HEADS, "attention.shared_kv_layers": N_SHARED}
    m.keys |= {"final_logit_softcapping": 30.0, "embedding_length_per_layer_input": 0}
    m.numbered_words = True
    m.matrix("token_embd", N_VOCAB, D)
    m.norm("output_norm", D)
    m.weights["rope_freqs"] = FACTORS
    for il, is_window in enumerate(IS_WINDOW):
        p, head = f"blk.{il}", head_size(is_window)
        layer(m, p, D, HEADS, FF, head)
        for name in "kv" if is_window else "k":
            m.matrix(f"{p}.attn_{name}", KV_HEADS[il] * head, D)
        m.norm(f"{p}.attn_k_norm", head)
    return m


def layer(m: RandomModel, p: str, d: int, heads: int, ff: int, head: int) -> None:
    """What layers of both files have."""
    for name in NORMS:
        m.norm(f"{p}.{name}", d)
    m.matrix(f"{p}.attn_q", heads * head, d)
    m.matrix(f"{p}.attn_output", d, heads * head)
    # Nothing else divides the scores, and a steep softmax would hide errors behind those of rounding.
    m.weights[f"{p}.attn_q_norm"] = m.random.uniform(0.1, 0.3, head).astype(np.float32)
    m.ffn(p, d, ff)
    m.norm(f"{p}.layer_output_scale", 1)


def drafter(*, clusters: bool = False) -> RandomModel:
    """clusters: whether it has groups of tokens, which are not used."""
    m = RandomModel("gemma4-assistant", 82, **keys(OWN_WINDOWS, OWN, OWN_HEADS, OWN_FF))
    n = len(OWN_WINDOWS)
    m.keys |= {"embedding_length_out": D, "nextn_predict_layers": n, "attention.shared_kv_layers": n}
    m.keys["attention.head_count_kv"] = [2, 2, 1]
    m.numbered_words = True
    m.matrix("token_embd", N_VOCAB, OWN)
    m.norm("output_norm", OWN)
    m.weights["rope_freqs"] = FACTORS
    m.matrix("nextn.pre_projection", OWN, 2 * D)
    m.matrix("nextn.post_projection", D, OWN)
    for il, is_window in enumerate(OWN_WINDOWS):
        layer(m, f"blk.{il}", OWN, OWN_HEADS, OWN_FF, head_size(is_window))
    if clusters:
        m.matrix("masked_embd_centroids", 8, OWN)
        m.weights["masked_embd_ordering"] = np.arange(N_VOCAB, dtype=np.float32)
        m.bare = ("masked_embd_ordering",)
    return m


@dataclass
class Evaluated:
    """What the model makes of a text: states [T, D] behind the output norm, and by kind of layer the keys and values
    [T, heads, size] that the last layer with a cache stores.
    """

    states: np.ndarray
    caches: dict[int, tuple[np.ndarray, np.ndarray]]


def angles(is_window: int, pos: np.ndarray) -> np.ndarray:
    if is_window:
        return ref.plain_angles(WINDOW_HEAD, 1e4, pos)
    return ref.plain_angles(FULL_HEAD, 1e6, pos, FACTORS.astype(np.float64))


def queries(w: ref.Weights, p: str, h: np.ndarray, is_window: int, pos: np.ndarray) -> np.ndarray:
    q = (h @ w[f"{p}.attn_q"].T).reshape(len(h), -1, head_size(is_window))
    return ref.rotate(ref.rms_norm(q, w[f"{p}.attn_q_norm"], EPS), angles(is_window, pos), neox=True)


def behind(w: ref.Weights, p: str, x: np.ndarray, attended: np.ndarray) -> np.ndarray:
    """The rest of a layer."""
    x = x + ref.rms_norm(attended @ w[f"{p}.attn_output"].T, w[f"{p}.post_attention_norm"], EPS)
    h = ref.rms_norm(x, w[f"{p}.ffn_norm"], EPS)
    y = (ref.gelu(h @ w[f"{p}.ffn_gate"].T) * (h @ w[f"{p}.ffn_up"].T)) @ w[f"{p}.ffn_down"].T
    return (x + ref.rms_norm(y, w[f"{p}.post_ffw_norm"], EPS)) * w[f"{p}.layer_output_scale"]


def evaluate(m: RandomModel, tokens: np.ndarray, rows: dict[int, np.ndarray] | None = None) -> Evaluated:
    """rows: embeddings [n, D] of a picture from a token on."""
    w = {name: each.astype(np.float64) for name, each in m.weights.items()}
    pos = np.arange(len(tokens), dtype=np.float64)
    x = w["token_embd"][tokens] * math.sqrt(D)
    for start, values in (rows or {}).items():
        x[start : start + len(values)] = values
    caches: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for il, is_window in enumerate(IS_WINDOW):
        p, head = f"blk.{il}", head_size(is_window)
        h = ref.rms_norm(x, w[f"{p}.attn_norm"], EPS)
        if il < N - N_SHARED:
            k = (h @ w[f"{p}.attn_k"].T).reshape(len(tokens), -1, head)
            v = (h @ w[f"{p}.attn_v"].T).reshape(len(tokens), -1, head) if is_window else k
            k = ref.rotate(ref.rms_norm(k, w[f"{p}.attn_k_norm"], EPS), angles(is_window, pos), neox=True)
            caches[is_window] = k, ref.rms_norm(v, 1.0, EPS)
        near = (lambda i, j: i - j < WINDOW) if is_window else None
        attended = ref.attend(queries(w, p, h, is_window, pos), *caches[is_window], 1.0, visible=near)
        x = behind(w, p, x, attended)
    return Evaluated(ref.rms_norm(x, w["output_norm"], EPS), caches)


def guess(
    m: RandomModel, of: RandomModel, read: Evaluated, token: int, pos: int, state: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Logits [V] and state [D] of one token at a position behind what the model has read, given the state before."""
    w = {name: each.astype(np.float64) for name, each in m.weights.items()}
    embedding = of.weights["token_embd"][token].astype(np.float64) * math.sqrt(D)
    x = w["nextn.pre_projection"] @ np.concatenate([embedding, state])
    for il, is_window in enumerate(OWN_WINDOWS):
        p, (k, v) = f"blk.{il}", read.caches[is_window]
        h = ref.rms_norm(x, w[f"{p}.attn_norm"], EPS)
        q = queries(w, p, h[None], is_window, np.array([float(pos)]))[0]
        first = max(0, pos - WINDOW + 1) if is_window else 0
        group, parts = OWN_HEADS // k.shape[1], []
        for head in range(OWN_HEADS):
            odds = ref.softmax(k[first:pos, head // group] @ q[head])
            parts.append(odds @ v[first:pos, head // group])
        x = behind(w, p, x[None], np.concatenate(parts)[None])[0]
    y = ref.rms_norm(x, w["output_norm"], EPS)
    return w["token_embd"] @ y, w["nextn.post_projection"] @ y


def guesses(
    m: RandomModel, of: RandomModel, text: list[int], n: int, rows: dict[int, np.ndarray] | None = None
) -> list[int]:
    """A draft behind a text whose last token the model has not read; rows: as of `evaluate`."""
    pos, found = len(text) - 1, [text[-1]]
    read = evaluate(of, np.array(text[:-1]), rows)
    state = read.states[-1]
    for _ in range(n):
        logits, state = guess(m, of, read, found[-1], pos, state)
        found.append(int(logits.argmax()))
    return found[1:]
