"""A random encoder of DeepSeek-OCR 2's kind: its file, and its definition in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.cpu.media.deepseek_ocr_tower import EPS, Drawn, OcrTower, linear, sam
from tests.cpu.media.projector_files import Weights
from tests.shared import DATA

GOLDEN = DATA / "towers" / "deepseek-ocr2.npz"
PEER = DATA / "towers" / "peer-deepseek-ocr2.npz"
GOLDEN_ROWS = (0, 1, -1)
TILE, WHOLE = 80, 192
"""Pixels of a tile and of a whole picture in tests: 4 and 9 states."""


@dataclass(frozen=True)
class Ocr2Tower(OcrTower):
    """Further sizes: heads of keys and values, states of a tile and of a whole picture."""

    d: int = 96
    heads: int = 4
    kv: int = 2
    ff: int = 80
    side: int = 12
    states: tuple[int, int] = (4, 9)
    deep: tuple[int, ...] = ()

    @property
    def keys(self) -> dict[str, Any]:
        """Metadata of the file."""
        found = super().keys | {"clip.projector_type": "deepseekocr2"}
        found |= {"clip.vision.image_size": 1024, "clip.vision.patch_size": 16}
        return found | {"clip.vision.attention.head_count_kv": self.kv}

    def weights(self, seed: int = 6) -> Weights:
        """Random float32 weights."""
        drawn, d, n_kv = Drawn(seed), self.d, self.kv * self.d // self.heads
        drawn.first_encoder(self)
        for name, count in zip((768, 1024), self.states, strict=True):
            drawn.table(f"v.resample_query_{name}.weight", count, d)
        for il in range(self.layers):
            p = f"v.blk.{il}"
            for name in ("ln1", "ln2"):
                drawn.norm(f"{p}.{name}", d, bias=False)
            for name, n in (("q", d), ("k", n_kv), ("v", n_kv)):
                drawn.linear(f"{p}.attn_{name}", n, d)
            drawn.linear(f"{p}.attn_out", d, d, bias=False)
            for name in ("gate", "up"):
                drawn.linear(f"{p}.ffn_{name}", self.ff, d, bias=False)
            drawn.linear(f"{p}.ffn_down", d, self.ff, bias=False)
        drawn.norm("v.post_ln", d, bias=False)
        drawn.linear("mm.model.fc", self.text, d)
        drawn.table("v.view_seperator", self.text)
        return drawn.w


PUBLISHED = Ocr2Tower(d=192, heads=3, kv=1, window=14, side=64, states=(144, 256))
"""With heads, windows and numbers of states as published, for pictures of published sizes."""


def peer_picture() -> np.ndarray:
    """Two tiles, and equal bars beside the whole."""
    y, x = np.mgrid[:900, :500]
    return np.stack([x * 255 // 500, y * 255 // 900, (x // 7 + y // 5) % 2 * 200], axis=-1).astype(np.uint8)


# Definition in float64


def normed(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    """RMSNorm of the last dimension."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * w[f"{name}.weight"]


def plain(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    """x W^T."""
    return x @ w[f"{name}.weight"].astype(np.float64).T


def turned(x: np.ndarray) -> np.ndarray:
    """Heads [n, H, d] rotated by their places, elements i and i + d/2 together."""
    n, _, d = x.shape
    out = np.empty_like(x)
    for place in range(n):
        for i in range(d // 2):
            angle = place * 1e6 ** (-2 * i / d)
            a, b = x[place, :, i], x[place, :, i + d // 2]
            out[place, :, i] = a * math.cos(angle) - b * math.sin(angle)
            out[place, :, i + d // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


def attended(t: Ocr2Tower, w: Weights, p: str, x: np.ndarray, n_states: int) -> np.ndarray:
    """Attention of normed x [n, D]: states see all states, queries those and the queries up to their own."""
    n, head = len(x), t.d // t.heads
    q, k, v = (linear(w, f"{p}.attn_{name}", x).reshape(n, -1, head) for name in "qkv")
    q, k = turned(q), turned(k)
    out = np.empty_like(q)
    for i in range(n):
        end = max(i + 1, n_states)
        for h in range(t.heads):
            mine = h * t.kv // t.heads
            scores = k[:end, mine] @ q[i, h] / math.sqrt(head)
            shares = np.exp(scores - scores.max())
            out[i, h] = shares / shares.sum() @ v[:end, mine]
    return plain(w, f"{p}.attn_out", out.reshape(n, -1))


def rows(t: Ocr2Tower, w: Weights, image: np.ndarray, *, is_whole: bool) -> np.ndarray:
    """Rows of a square picture uint8, a tile or the whole, which has one more."""
    seen = sam(t, w, (image / 255 - 0.5) / 0.5).reshape(-1, t.d)
    x = np.concatenate([seen, w[f"v.resample_query_{1024 if is_whole else 768}.weight"]])
    for il in range(t.layers):
        p = f"v.blk.{il}"
        x = x + attended(t, w, p, normed(w, f"{p}.ln1", x), len(seen))
        inner = normed(w, f"{p}.ln2", x)
        gate = plain(w, f"{p}.ffn_gate", inner)
        x = x + plain(w, f"{p}.ffn_down", gate / (1 + np.exp(-gate)) * plain(w, f"{p}.ffn_up", inner))
    found = linear(w, "mm.model.fc", normed(w, "v.post_ln", x[len(seen) :]))
    return np.concatenate([found, w["v.view_seperator"][None]]) if is_whole else found
