"""A random encoder of HunyuanVL's kind: its file, and its definition in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tests.cpu.media.projector_files import Weights
from tests.cpu.media.reference_towers import erf_gelu, linear, norm, normalized, patches_of
from tests.cpu.media.vision_towers import Tower
from tests.shared import DATA

GOLDEN = DATA / "towers" / "hunyuan.npz"
PEER = DATA / "towers" / "peer-hunyuan.npz"
GOLDEN_ROWS = (0, 1, 8, -1)
MARKS = "<｜hy_place▁holder▁no▁100｜>", "<｜hy_place▁holder▁no▁101｜>"


@dataclass(frozen=True)
class HunyuanTower(Tower):
    """side: of the table of positions."""

    kind: str = "hunyuanvl"
    eps: float = 1e-5
    side: int = 9
    activation: str = "tanh"  # what files say, which means GELU itself

    def weights(self, seed: int = 6) -> Weights:
        """Random float32 weights."""
        random, d, text = np.random.default_rng(seed), self.d, self.text
        found: Weights = {}

        def linear(name: str, *shape: int) -> None:
            found[f"{name}.weight"] = random.normal(0, 1 / math.sqrt(np.prod(shape[1:])), shape).astype(np.float32)
            found[f"{name}.bias"] = random.normal(0, 0.3, shape[0]).astype(np.float32)

        def norms(name: str, n: int, *, bias: bool) -> None:
            found[f"{name}.weight"] = random.uniform(0.5, 1.5, n).astype(np.float32)
            if bias:
                found[f"{name}.bias"] = random.normal(0, 0.3, n).astype(np.float32)

        linear("v.patch_embd", d, 3, self.patch, self.patch)
        found["v.position_embd.weight"] = random.normal(0, 0.5, (self.side**2, d)).astype(np.float32)
        for il in range(self.layers):
            p = f"v.blk.{il}"
            for name in ("ln1", "ln2"):
                norms(f"{p}.{name}", d, bias=True)
            for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
                linear(f"{p}.{name}", d, d)
            linear(f"{p}.ffn_up", self.ff, d)
            linear(f"{p}.ffn_down", d, self.ff)
        norms("mm.pre_norm", d, bias=False)
        linear("mm.0", 2 * d, d, self.merge, self.merge)
        linear("mm.2", 4 * d, 2 * d, 1, 1)
        linear("mm.model.fc", text, 4 * d)
        norms("mm.post_norm", text, bias=False)
        for name, n in (("v.image_newline", 4 * d), ("mm.image_begin", text), ("mm.image_end", text)):
            found[name] = random.normal(0, 1, n).astype(np.float32)
        return found


TOWER = HunyuanTower(
    further={"spatial_merge_size": 2, "image_min_pixels": 12 * 144, "image_max_pixels": 400 * 144, "image_size": 54}
)


def peer_pictures() -> list[np.ndarray]:
    """As it is, enlarged, with bars, narrow."""
    sizes, random = [(48, 60), (12, 18), (57, 98), (114, 19)], np.random.default_rng(7)
    return [random.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]


def shares(n: int, side: int, more: float) -> np.ndarray:
    """Linear interpolation at the middles of n cells, of which n + more fill the table; the edges go on."""
    found = np.zeros((n, side))
    for i in range(n):
        at = min(max((i + 0.5) * side / (n + more) - 0.5, 0), side - 1)
        low = min(int(at), side - 1)
        found[i, low] += 1 - (at - low)
        found[i, min(low + 1, side - 1)] += at - low
    return found


def attention(tower: Tower, w: Weights, p: str, x: np.ndarray) -> np.ndarray:
    """Every patch [T, d] sees all."""
    q, k, v = (linear(x, w, f"{p}.attn_{name}").reshape(len(x), tower.heads, -1) for name in "qkv")
    scores = np.einsum("ahn,bhn->hab", q, k) / math.sqrt(q.shape[-1])
    share = np.exp(scores - scores.max(-1, keepdims=True))
    share /= share.sum(-1, keepdims=True)
    return linear(np.einsum("hab,bhn->ahn", share, v).reshape(len(x), -1), w, f"{p}.attn_out")


def rows(tower: HunyuanTower, w: Weights, picture: np.ndarray, more: float = 0.1) -> np.ndarray:
    """Rows [n, text] of a picture of whole squares: the first one, lines with their ends, the last one. more: how much
    larger the grid is for its positions; 0 in transformers."""
    x = patches_of(normalized(tower, picture), w["v.patch_embd.weight"]) + w["v.patch_embd.bias"]
    height, width, d = x.shape
    table = w["v.position_embd.weight"].reshape(tower.side, tower.side, d).astype(np.float64)
    table = np.einsum("ry,cx,yxd->rcd", shares(height, tower.side, more), shares(width, tower.side, more), table)
    x = (x + table).reshape(-1, d)
    for il in range(tower.layers):
        p = f"v.blk.{il}"
        x = x + attention(tower, w, p, norm(x, w, f"{p}.ln1", tower.eps))
        inner = erf_gelu(linear(norm(x, w, f"{p}.ln2", tower.eps), w, f"{p}.ffn_up"))
        x = x + linear(inner, w, f"{p}.ffn_down")
    x, m = norm(x, w, "mm.pre_norm", tower.eps, rms=True), tower.merge
    squares = x.reshape(height // m, m, width // m, m, d)
    x = np.einsum("rycxd,odyx->rco", squares, w["mm.0.weight"].astype(np.float64)) + w["mm.0.bias"]
    x = erf_gelu(x) @ w["mm.2.weight"][:, :, 0, 0].astype(np.float64).T + w["mm.2.bias"]
    ends = np.broadcast_to(w["v.image_newline"].astype(np.float64), (len(x), 1, x.shape[-1]))
    x = linear(np.concatenate([x, ends], 1).reshape(-1, x.shape[-1]), w, "mm.model.fc")
    x = np.concatenate([w["mm.image_begin"][None], x, w["mm.image_end"][None]])
    return norm(x, w, "mm.post_norm", tower.eps, rms=True)
