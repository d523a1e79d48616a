"""A random encoder of DeepSeek-OCR's kind: its file, and its definition in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.cpu.media.projector_files import Weights, write_in_type
from tests.shared import DATA

GOLDEN = DATA / "towers" / "deepseek-ocr.npz"
GOLDEN_ROWS = (0, 1, -1)
_ERF = np.vectorize(math.erf)
EPS = 1e-6


class Drawn:
    """Random float32 weights of a seed, one after the other."""

    def __init__(self, seed: int) -> None:
        self.random, self.w = np.random.default_rng(seed), Weights()

    def linear(self, name: str, *shape: int, bias: bool = True) -> None:
        """A matrix, or filters, and a bias."""
        values = self.random.normal(0, 1 / math.sqrt(np.prod(shape[1:])), shape)
        self.w[f"{name}.weight"] = values.astype(np.float32)
        if bias:
            self.w[f"{name}.bias"] = self.random.normal(0, 0.3, shape[0]).astype(np.float32)

    def norm(self, name: str, n: int, *, bias: bool = True) -> None:
        """Factors of a norm, and what LayerNorm adds."""
        self.w[f"{name}.weight"] = self.random.uniform(0.5, 1.5, n).astype(np.float32)
        if bias:
            self.w[f"{name}.bias"] = self.random.normal(0, 0.3, n).astype(np.float32)

    def table(self, name: str, *shape: int) -> None:
        """Positions and the like."""
        self.w[name] = self.random.normal(0, 0.5, shape).astype(np.float32)

    def first_encoder(self, t: OcrTower) -> None:
        """Segment Anything and the convolutions behind it."""
        n, head, linear = t.sam, t.sam // t.sam_heads, self.linear
        linear("v.sam.patch_embd", n, 3, 16, 16)
        self.table("v.sam.pos_embd.weight", t.side, t.side, n)
        for il in range(t.sam_layers):
            p, seen = f"v.sam.blk.{il}", t.side if il % 3 == 2 else t.window
            self.norm(f"{p}.pre_ln", n)
            self.norm(f"{p}.post_ln", n)
            linear(f"{p}.attn.qkv", 3 * n, n)
            linear(f"{p}.attn.out", n, n)
            for part in "hw":
                self.table(f"{p}.attn.pos_{part}.weight", 2 * seen - 1, head)
            linear(f"{p}.mlp.lin1", 2 * n, n)
            linear(f"{p}.mlp.lin2", n, 2 * n)
        linear("v.sam.neck.0", t.neck, n, 1, 1, bias=False)
        linear("v.sam.neck.2", t.neck, t.neck, 3, 3, bias=False)
        for i in (1, 3):
            self.norm(f"v.sam.neck.{i}", t.neck)
        linear("v.sam.net_2", 2 * t.neck, t.neck, 3, 3, bias=False)
        linear("v.sam.net_3", t.d, 2 * t.neck, 3, 3, bias=False)


@dataclass(frozen=True)
class OcrTower:
    """Sizes: of both encoders, of a window, of the tables of positions; layers that see all patches: every third."""

    d: int = 64
    heads: int = 2
    ff: int = 96
    layers: int = 2
    sam: int = 32
    sam_heads: int = 2
    sam_layers: int = 3
    window: int = 3
    side: int = 8
    neck: int = 24
    text: int = 48

    @property
    def keys(self) -> dict[str, Any]:
        """Metadata of the file."""
        own = {
            "embedding_length": self.d,
            "attention.head_count": self.heads,
            "feed_forward_length": self.ff,
            "block_count": self.layers,
            "projection_dim": self.text,
            "attention.layer_norm_epsilon": 1e-6,
            "image_size": 224,
            "patch_size": 14,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "sam.block_count": self.sam_layers,
            "sam.head_count": self.sam_heads,
            "sam.embedding_length": self.sam,
            "window_size": self.window,
        }
        return {
            "general.architecture": "clip",
            "clip.has_vision_encoder": True,
            "clip.projector_type": "deepseekocr",
            "clip.use_gelu": True,
            **{f"clip.vision.{name}": value for name, value in own.items()},
        }

    def weights(self, seed: int = 5) -> Weights:
        """Random float32 weights."""
        drawn = Drawn(seed)
        linear, norm, table = drawn.linear, drawn.norm, drawn.table
        drawn.first_encoder(self)
        table("v.class_embd", self.d)
        table("v.position_embd.weight", 1 + (self.side // 4) ** 2, self.d)
        norm("v.pre_ln", self.d)
        for il in range(self.layers):
            p = f"v.blk.{il}"
            norm(f"{p}.ln1", self.d)
            norm(f"{p}.ln2", self.d)
            linear(f"{p}.attn_qkv", 3 * self.d, self.d)
            linear(f"{p}.attn_out", self.d, self.d)
            linear(f"{p}.ffn_up", self.ff, self.d)
            linear(f"{p}.ffn_down", self.d, self.ff)
        linear("mm.model.fc", self.text, 2 * self.d)
        table("v.image_newline", self.text)
        table("v.view_seperator", self.text)
        return drawn.w

    def write(self, path: Path, weights: Weights, type_name: str = "f32") -> Path:
        """The projector file."""
        return write_in_type(path, self.keys, weights, type_name)


# Definition in float64


def normed(w: Weights, name: str, x: np.ndarray, eps: float) -> np.ndarray:
    """LayerNorm of the last dimension."""
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w[f"{name}.weight"] + w[f"{name}.bias"]


def linear(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    """x W^T + b."""
    return x @ w[f"{name}.weight"].astype(np.float64).T + w[f"{name}.bias"]


def attended(qkv: np.ndarray, heads: int, bias: Callable[[np.ndarray], np.ndarray] = lambda q: 0) -> np.ndarray:
    """Attention of all n rows [n, 3 d]; bias: of scores, for queries [H, n, d / H]."""
    q, k, v = (part.reshape(len(qkv), heads, -1).transpose(1, 0, 2) for part in np.split(qkv, 3, axis=1))
    scores = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1]) + bias(q)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    return (scores / scores.sum(-1, keepdims=True) @ v).transpose(1, 0, 2).reshape(len(qkv), -1)


def by_distance(rows: np.ndarray, columns: np.ndarray, side: int) -> Callable[[np.ndarray], np.ndarray]:
    """What distances between side x side places add to scores."""
    y, x = np.divmod(np.arange(side**2), side)

    def bias(q: np.ndarray) -> np.ndarray:
        down = rows[y[:, None] - y + side - 1].astype(np.float64)
        across = columns[x[:, None] - x + side - 1].astype(np.float64)
        return np.einsum("hid,ijd->hij", q, down) + np.einsum("hid,ijd->hij", q, across)

    return bias


def stretched(table: np.ndarray, n: int) -> np.ndarray:
    """Rows in another number, linear between their middles, the first and last repeated."""
    found = np.empty((n, table.shape[1]))
    for i in range(n):
        at = min(max((i + 0.5) * len(table) / n - 0.5, 0), len(table) - 1)
        low = int(at)
        high = min(low + 1, len(table) - 1)
        found[i] = table[low] * (1 - (at - low)) + table[high] * (at - low)
    return found


def smoothed(table: np.ndarray, n: int) -> np.ndarray:
    """A square table in another size: cubic filters with a = -1/2, wider where it gets smaller."""
    if len(table) == n:
        return table.astype(np.float64)
    scale = len(table) / n
    wide = max(scale, 1)
    shares = np.zeros((n, len(table)))
    for i in range(n):
        for j in range(len(table)):
            x = abs(j + 0.5 - (i + 0.5) * scale) / wide
            near, far = 1.5 * x**3 - 2.5 * x**2 + 1, -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2
            shares[i, j] = near if x < 1 else far if x < 2 else 0
    shares /= shares.sum(1, keepdims=True)
    return np.einsum("rn,cm,nmd->rcd", shares, shares, table.astype(np.float64))


def convolved(x: np.ndarray, weight: np.ndarray, step: int) -> np.ndarray:
    """A convolution over the 3 x 3 around every step-th place of x [rows, columns, n]."""
    around = np.pad(x, ((1, 1), (1, 1), (0, 0)))
    found = np.zeros((*x.shape[:2], len(weight)))
    for i in range(3):
        for j in range(3):
            part = around[i : i + x.shape[0], j : j + x.shape[1]]
            found += part @ weight[:, :, i, j].astype(np.float64).T
    return found[::step, ::step]


def sam(t: OcrTower, w: Weights, image: np.ndarray) -> np.ndarray:
    """States [side / 4, side / 4, d] of a square picture, values of colours."""
    side, n = len(image) // 16, t.sam
    cut = image.reshape(side, 16, side, 16, 3).transpose(0, 2, 4, 1, 3).reshape(side, side, -1)
    x = cut @ w["v.sam.patch_embd.weight"].reshape(n, -1).astype(np.float64).T + w["v.sam.patch_embd.bias"]
    x = x + smoothed(w["v.sam.pos_embd.weight"], side)
    for il in range(t.sam_layers):
        p = f"v.sam.blk.{il}"
        inner = normed(w, f"{p}.pre_ln", x, EPS)
        rows, columns = (w[f"{p}.attn.pos_{part}.weight"] for part in "hw")
        window = side if il % 3 == 2 else t.window
        if il % 3 == 2:
            rows, columns = (stretched(table, 2 * side - 1) for table in (rows, columns))
        whole = -(-side // window) * window
        spread = np.zeros((whole, whole, n))
        spread[:side, :side] = inner
        found = np.empty_like(spread)
        for y in range(0, whole, window):
            for z in range(0, whole, window):
                part = linear(w, f"{p}.attn.qkv", spread[y : y + window, z : z + window].reshape(-1, n))
                out = attended(part, t.sam_heads, by_distance(rows, columns, window))
                found[y : y + window, z : z + window] = out.reshape(window, window, n)
        x = x + linear(w, f"{p}.attn.out", found[:side, :side])
        inner = linear(w, f"{p}.mlp.lin1", normed(w, f"{p}.post_ln", x, EPS))
        x = x + linear(w, f"{p}.mlp.lin2", inner * 0.5 * (1 + _ERF(inner / math.sqrt(2))))
    x = x @ w["v.sam.neck.0.weight"].reshape(t.neck, n).astype(np.float64).T
    x = convolved(normed(w, "v.sam.neck.1", x, EPS), w["v.sam.neck.2.weight"], 1)
    x = convolved(normed(w, "v.sam.neck.3", x, EPS), w["v.sam.net_2.weight"], 2)
    return convolved(x, w["v.sam.net_3.weight"], 2)


def states(t: OcrTower, w: Weights, image: np.ndarray) -> np.ndarray:
    """Rows [side / 4, side / 4, text] of a square picture uint8, without those that end lines."""
    seen = sam(t, w, (image / 255 - 0.5) / 0.5)
    side, table = len(seen), w["v.position_embd.weight"]
    grid = math.isqrt(len(table) - 1)
    positions = smoothed(table[1:].reshape(grid, grid, -1), side).reshape(side**2, -1)
    x = np.concatenate([w["v.class_embd"][None] + table[:1], seen.reshape(side**2, -1) + positions])
    x = normed(w, "v.pre_ln", x, 1e-5)
    for il in range(t.layers):
        p = f"v.blk.{il}"
        x = x + linear(
            w, f"{p}.attn_out", attended(linear(w, f"{p}.attn_qkv", normed(w, f"{p}.ln1", x, 1e-5)), t.heads)
        )
        inner = linear(w, f"{p}.ffn_up", normed(w, f"{p}.ln2", x, 1e-5))
        x = x + linear(w, f"{p}.ffn_down", inner / (1 + np.exp(-1.702 * inner)))
    return linear(w, "mm.model.fc", np.concatenate([x[1:].reshape(side, side, -1), seen], axis=2))


def line(t: OcrTower, w: Weights, image: np.ndarray, *, is_whole: bool) -> np.ndarray:
    """Rows of squares beside each other: lines of all of them, each with its end."""
    side = len(image)
    parts = [states(t, w, image[:, x : x + side]) for x in range(0, image.shape[1], side)]
    rows = np.concatenate(parts, axis=1)
    ends = np.broadcast_to(w["v.image_newline"], (len(rows), 1, t.text))
    rows = np.concatenate([rows, ends], axis=1).reshape(-1, t.text)
    return np.concatenate([rows, w["v.view_seperator"][None]]) if is_whole else rows
