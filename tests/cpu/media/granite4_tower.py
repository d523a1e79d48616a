"""A random encoder of Granite 4 Vision's kind: its file, and its definition in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from tests.cpu.media.hunyuan_tower import attention
from tests.cpu.media.projector_files import Weights
from tests.cpu.media.reference_towers import ACTIVATIONS, erf_gelu, linear, norm, normalized, patches_of
from tests.cpu.media.vision_towers import Tower
from tests.shared import DATA

GOLDEN = DATA / "towers" / "granite4.npz"
PEER = DATA / "towers" / "peer-granite4.npz"
GOLDEN_ROWS = (0, 1, 18, -2)
ENDS = ("\n",)
HEAD, QUERY_EPS = 64, 1e-12
SIDE, WINDOW, QUERY = 8, 4, 2
"""Patches of a side of a tile, of a window, and queries of a side of a window."""
SIZES = [(24, 48), (48, 24), (48, 48), (24, 72), (72, 24)]
"""Height and width of the grids of tiles."""


@dataclass(frozen=True)
class GraniteTower(Tower):
    """blocks: layers behind which states are read, and corners of squares that queries begin from, -1: means."""

    kind: str = "granite4_vision"
    d: int = 128
    heads: int = 4
    patch: int = 3
    text: int = 24
    activation: str = "tanh"
    blocks: tuple[tuple[int, int], ...] = ((2, 0), (0, -1), (2, 3), (1, -1))

    @property
    def keys(self) -> dict[str, Any]:
        """Metadata of the file."""
        own = {
            "image_size": SIDE * self.patch,
            "preproc_image_size": SIDE * self.patch,
            "feature_layer": [layer for layer, _ in self.blocks],
            "projector.spatial_offsets": [corner for _, corner in self.blocks],
            "projector.query_side": QUERY,
            "projector.window_side": WINDOW,
            "image_grid_pinpoints": [n for height, width in SIZES for n in (width, height)],
        }
        return super().keys | {f"clip.vision.{name}": value for name, value in own.items()}

    def weights(self, seed: int = 9) -> Weights:
        """Random float32 weights."""
        random, d = np.random.default_rng(seed), self.d
        found: Weights = {}

        def matrix(name: str, *shape: int) -> None:
            found[f"{name}.weight"] = random.normal(0, 1 / math.sqrt(np.prod(shape[1:])), shape).astype(np.float32)
            found[f"{name}.bias"] = random.normal(0, 0.3, shape[0]).astype(np.float32)

        def norms(*names: str) -> None:
            for name in names:
                found[f"{name}.weight"] = random.uniform(0.5, 1.5, d).astype(np.float32)
                found[f"{name}.bias"] = random.normal(0, 0.3, d).astype(np.float32)

        matrix("v.patch_embd", d, 3, self.patch, self.patch)
        found["v.position_embd.weight"] = random.normal(0, 0.5, (SIDE**2, d)).astype(np.float32)
        for il in range(self.layers):
            p = f"v.blk.{il}"
            norms(f"{p}.ln1", f"{p}.ln2")
            for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
                matrix(f"{p}.{name}", d, d)
            matrix(f"{p}.ffn_up", self.ff, d)
            matrix(f"{p}.ffn_down", d, self.ff)
        norms("v.post_ln")
        for i in range(len(self.blocks)):
            p = f"v.proj_blk.{i}"
            found[f"{p}.query"] = random.normal(0, 1, (QUERY**2, d)).astype(np.float32)
            found[f"{p}.img_pos"] = random.normal(0, 1, (WINDOW**2, d)).astype(np.float32)
            norms(f"{p}.norm", f"{p}.post_norm", f"{p}.self_attn_norm", f"{p}.cross_attn_norm", f"{p}.ffn_norm")
            for kind, part in product(("self", "cross"), ("q", "k", "v", "out")):
                matrix(f"{p}.{kind}_attn_{part}", d, d)
            matrix(f"{p}.ffn_up", 40, d)
            matrix(f"{p}.ffn_down", d, 40)
            matrix(f"{p}.linear", self.text, d)
        found["v.image_newline"] = random.normal(0, 1, self.text).astype(np.float32)
        return found


TOWER = GraniteTower()


def pictures() -> list[np.ndarray]:
    """As it is, small, tall and wide with bars."""
    sizes, random = [(48, 48), (10, 13), (70, 22), (25, 61)], np.random.default_rng(7)
    return [random.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]


def attended(w: Weights, p: str, x: np.ndarray, of: np.ndarray) -> np.ndarray:
    """Normed sum of x [T, d] and what it attends to of others."""
    q, k, v = (linear(y, w, f"{p}_{name}").reshape(len(y), -1, HEAD) for name, y in (("q", x), ("k", of), ("v", of)))
    scores = np.einsum("ahn,bhn->hab", q, k) / math.sqrt(HEAD)
    share = np.exp(scores - scores.max(-1, keepdims=True))
    share /= share.sum(-1, keepdims=True)
    out = linear(np.einsum("hab,bhn->ahn", share, v).reshape(len(x), -1), w, f"{p}_out")
    return norm(out + x, w, f"{p}_norm", QUERY_EPS)


def part(w: Weights, i: int, corner: int, states: np.ndarray, eps: float) -> np.ndarray:
    """One part of the rows [4, 4, text] of states [8, 8, d]."""
    p = f"v.proj_blk.{i}"
    x = norm(states, w, f"{p}.norm", eps)
    small = x.reshape(SIDE // 2, 2, SIDE // 2, 2, -1)
    small = small.mean((1, 3)) if corner < 0 else small[:, corner // 2, :, corner % 2]
    out = np.zeros((SIDE // 2, SIDE // 2, w[f"{p}.linear.weight"].shape[0]))
    for y, c in product(range(SIDE // WINDOW), repeat=2):
        mine = slice(y * QUERY, (y + 1) * QUERY), slice(c * QUERY, (c + 1) * QUERY)
        theirs = slice(y * WINDOW, (y + 1) * WINDOW), slice(c * WINDOW, (c + 1) * WINDOW)
        queries = norm(small[mine].reshape(QUERY**2, -1) + w[f"{p}.query"], w, f"{p}.post_norm", QUERY_EPS)
        patches = x[theirs].reshape(WINDOW**2, -1) + w[f"{p}.img_pos"]
        h = attended(w, f"{p}.self_attn", queries, queries)
        h = attended(w, f"{p}.cross_attn", h, patches)
        inner = linear(erf_gelu(linear(h, w, f"{p}.ffn_up")), w, f"{p}.ffn_down")
        out[mine] = linear(norm(h + inner, w, f"{p}.ffn_norm", QUERY_EPS), w, f"{p}.linear").reshape(QUERY, QUERY, -1)
    return out


def rows(tower: GraniteTower, w: Weights, tile: np.ndarray) -> np.ndarray:
    """Rows [16, parts * text] of a tile."""
    x = patches_of(normalized(tower, tile), w["v.patch_embd.weight"]) + w["v.patch_embd.bias"]
    x = x.reshape(-1, tower.d) + w["v.position_embd.weight"]
    behind = []
    for il in range(tower.layers):
        p = f"v.blk.{il}"
        x = x + attention(tower, w, p, norm(x, w, f"{p}.ln1", tower.eps))
        inner = ACTIVATIONS["tanh"](linear(norm(x, w, f"{p}.ln2", tower.eps), w, f"{p}.ffn_up"))
        x = x + linear(inner, w, f"{p}.ffn_down")
        behind.append(x.reshape(SIDE, SIDE, -1))
    parts = [part(w, i, corner, behind[layer], tower.eps) for i, (layer, corner) in enumerate(tower.blocks)]
    return np.concatenate(parts, -1).reshape((SIDE // 2) ** 2, -1)


def picture_rows(
    tower: GraniteTower, w: Weights, tiles: list[np.ndarray], lines: int, size: tuple[int, int]
) -> np.ndarray:
    """Rows of a picture of a size (height, width), which was made the whole and tiles in so many lines."""
    whole, *others = (rows(tower, w, tile) for tile in tiles)
    small, columns = SIDE // 2, len(others) // lines
    height, width = lines * small, columns * small
    grid = np.zeros((height, width, whole.shape[-1]))
    for i, each in enumerate(others):
        y, x = (n * small for n in divmod(i, columns))
        grid[y : y + small, x : x + small] = each.reshape(small, small, -1)
    scale = min(height / size[0], width / size[1])
    top, left = ((n - int(round(each * scale, 7))) // 2 for n, each in zip((height, width), size, strict=True))
    kept = grid[top : height - top, left : width - left]
    ends = np.broadcast_to(np.tile(w["v.image_newline"], len(tower.blocks)), (len(kept), 1, whole.shape[-1]))
    return np.concatenate([whole, np.concatenate([kept, ends], 1).reshape(-1, whole.shape[-1])])
