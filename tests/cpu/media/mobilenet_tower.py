"""A random encoder of Gemma 3n's kind: its file, and its definition in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.cpu.media.deepseek_ocr_tower import Drawn
from tests.cpu.media.projector_files import Stored, Weights, in_type, write_tensors
from tests.shared import DATA

GOLDEN = DATA / "towers" / "gemma3n.npz"
PEER = DATA / "towers" / "peer-gemma3n.npz"
GOLDEN_ROWS = (0, 5, 100, -1)
EPS = 1e-6
STEM = 8
F16 = 1

# As timm writes them: er and uir are convolutions, mqa is attention. r: repeats, a and k: widths of the filters before
# and between the matrices, s: step, e: factor of the inner elements, h and d: heads, v: step of keys, c: elements.
STAGES = (
    ("er_r1_k3_s2_e4_c16", "er_r1_k3_s1_e4_c16"),
    ("uir_r1_a3_k5_s2_e6_c24", "uir_r1_a5_k0_s1_e4_c24"),
    ("uir_r1_a5_k5_s2_e6_c32", "uir_r1_a0_k0_s1_e1_c32", "mqa_r1_k3_h3_v2_s1_d16_c32", "uir_r1_a0_k0_s1_e2_c32"),
    ("uir_r1_a5_k5_s2_e6_c40", "mqa_r1_k3_h2_s1_d24_c40", "uir_r1_a0_k3_s1_e2_c40"),
)


def sizes_of(block: str) -> tuple[str, dict[str, int]]:
    """The kind of a block and its numbers."""
    kind, *parts = block.split("_")
    return kind, {part[0]: int(part[1:]) for part in parts}


@dataclass(frozen=True)
class MobileTower:
    """side: pixels of a picture; fused: elements behind the stages; text: of rows."""

    side: int = 256
    fused: int = 48
    text: int = 56
    deep: tuple[int, ...] = ()

    @property
    def keys(self) -> dict[str, Any]:
        """Metadata of the file, as published ones have it."""
        own = {
            "embedding_length": self.fused,
            "attention.head_count": 8,
            "feed_forward_length": 4 * self.fused,
            "block_count": 128,
            "projection_dim": self.text,
            "attention.layer_norm_epsilon": EPS,
            "image_size": self.side,
            "patch_size": self.side // 256,
            "image_mean": [0.0, 0.0, 0.0],
            "image_std": [1.0, 1.0, 1.0],
        }
        return {
            "general.architecture": "clip",
            "clip.has_vision_encoder": True,
            "clip.vision.projector_type": "gemma3nv",
            "clip.use_gelu": True,
            **{f"clip.vision.{name}": value for name, value in own.items()},
        }

    def weights(self, seed: int = 7) -> Weights:
        """Random float32 weights; what is multiplied and added in the file has the shapes of published ones."""
        drawn = Drawn(seed)

        def filters(name: str, norm: str, *shape: int) -> None:
            drawn.linear(name, *shape, bias=False)
            if norm:
                drawn.norm(norm, shape[0], bias=False)

        filters("v.conv_stem.conv", "v.conv_stem.bn", STEM, 3, 3, 3)
        drawn.table("v.conv_stem.conv.bias", 1, STEM, 1, 1)
        n = STEM
        ends = []
        for s, stage in enumerate(STAGES):
            for i, block in enumerate(stage):
                kind, sizes = sizes_of(block)
                p, out = f"v.blk.{s}.{i}", sizes["c"]
                inner = n * sizes.get("e", 1)
                if kind == "er":
                    filters(f"{p}.conv_exp", f"{p}.bn1", inner, n, 3, 3)
                    filters(f"{p}.conv_pwl", f"{p}.bn2", out, inner, 1, 1)
                elif kind == "uir":
                    if a := sizes["a"]:
                        filters(f"{p}.dw_start.conv", f"{p}.dw_start.bn", n, 1, a, a)
                    filters(f"{p}.pw_exp.conv", f"{p}.pw_exp.bn", inner, n, 1, 1)
                    if k := sizes["k"]:
                        filters(f"{p}.dw_mid.conv", f"{p}.dw_mid.bn", inner, 1, k, k)
                    filters(f"{p}.pw_proj.conv", f"{p}.pw_proj.bn", out, inner, 1, 1)
                else:
                    drawn.norm(f"{p}.norm", n, bias=False)
                    filters(f"{p}.attn.query.proj", "", sizes["h"] * sizes["d"], n, 1, 1)
                    for part in ("key", "value"):
                        if "v" in sizes:
                            filters(f"{p}.attn.{part}.down_conv", f"{p}.attn.{part}.norm", n, 1, 3, 3)
                        filters(f"{p}.attn.{part}.proj", "", sizes["d"], n, 1, 1)
                    filters(f"{p}.attn.output.proj", "", out, sizes["h"] * sizes["d"], 1, 1)
                if kind != "er":
                    drawn.table(f"{p}.layer_scale.gamma", 1, out, 1, 1)
                n = out
            ends.append(n)
        filters("v.msfa.ffn.pw_exp.conv", "v.msfa.ffn.pw_exp.bn", 2 * sum(ends[-2:]), sum(ends[-2:]), 1, 1)
        filters("v.msfa.ffn.pw_proj.conv", "v.msfa.ffn.pw_proj.bn", self.fused, 2 * sum(ends[-2:]), 1, 1)
        drawn.norm("v.msfa.norm", self.fused, bias=False)
        drawn.norm("mm.soft_emb_norm", self.fused, bias=False)
        drawn.linear("mm.input_projection", self.text, self.fused, bias=False)
        return drawn.w

    def write(self, path: Path, weights: Weights, type_name: str = "f32") -> Path:
        """The projector file; f16: of filters and matrices, other types: of the last matrix, as the others have rows of
        one element."""
        stored: dict[str, Stored] = {name: (0, w) for name, w in weights.items()}
        for name, w in weights.items():
            if type_name == "f16" and "conv" in name and w.ndim == 4 and not name.endswith("bias"):
                stored[name] = F16, w.astype(np.float16)
                weights[name] = w.astype(np.float16).astype(np.float32)
            elif type_name != "f32" and w.ndim == 2:
                stored[name], weights[name] = in_type(w, type_name)
        return write_tensors(path, self.keys, weights, stored)


PEER_TOWER = MobileTower(text=48)
"""Rows of as many elements as the encoder has, which llama.cpp expects."""


def peer_pictures() -> list[np.ndarray]:
    """Square, lying and standing."""
    found = []
    for height, width in ((256, 256), (300, 200), (500, 900)):
        y, x = np.mgrid[:height, :width]
        colours = [x * 255 // width, y * 255 // height, (x // 7 + y // 5) % 2 * 200]
        found.append(np.stack(colours, axis=-1).astype(np.uint8))
    return found


# Definition in float64, of states [rows, columns, C]


def normed(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    """RMSNorm of the elements."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * w[f"{name}.weight"].astype(np.float64)


def gelu(x: np.ndarray) -> np.ndarray:
    """By tanh."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))))


def convolved(x: np.ndarray, filters: np.ndarray, step: int) -> np.ndarray:
    """Filters [out, in, k, k] over every step-th place; in of 1: of every element by itself. As many results as steps
    begun, half of the missing zeros in front."""
    n_out, n_in, k, _ = filters.shape
    filters = filters.astype(np.float64)
    counts = [math.ceil(side / step) for side in x.shape[:2]]
    missing = [max((count - 1) * step + k - side, 0) for count, side in zip(counts, x.shape[:2], strict=True)]
    x = np.pad(x, [(m // 2, m - m // 2) for m in missing] + [(0, 0)])
    found = np.zeros((*counts, n_out))
    for i in range(k):
        for j in range(k):
            part = x[i : i + (counts[0] - 1) * step + 1 : step, j : j + (counts[1] - 1) * step + 1 : step]
            found += part * filters[:, 0, i, j] if n_in == 1 and n_out > 1 else part @ filters[:, :, i, j].T
    return found


def attended(w: Weights, p: str, x: np.ndarray, sizes: dict[str, int]) -> np.ndarray:
    """Attention with one head of keys and values."""
    d, inner = sizes["d"], normed(w, f"{p}.norm", x)
    q = convolved(inner, w[f"{p}.attn.query.proj.weight"], 1).reshape(-1, sizes["h"], d)
    k, v = (
        convolved(
            normed(w, f"{p}.attn.{part}.norm", convolved(inner, w[f"{p}.attn.{part}.down_conv.weight"], 2))
            if "v" in sizes
            else inner,
            w[f"{p}.attn.{part}.proj.weight"],
            1,
        ).reshape(-1, d)
        for part in ("key", "value")
    )
    scores = np.einsum("thd,sd->ths", q, k) / math.sqrt(d)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    found = (shares / shares.sum(-1, keepdims=True)) @ v
    return convolved(found.reshape(*x.shape[:2], -1), w[f"{p}.attn.output.proj.weight"], 1)


def block(w: Weights, p: str, text: str, x: np.ndarray) -> np.ndarray:
    """States behind a block."""
    kind, sizes = sizes_of(text)
    step = sizes["s"]
    if kind == "er":
        inner = gelu(normed(w, f"{p}.bn1", convolved(x, w[f"{p}.conv_exp.weight"], step)))
        out = normed(w, f"{p}.bn2", convolved(inner, w[f"{p}.conv_pwl.weight"], 1))
    elif kind == "uir":
        inner = x
        if sizes["a"]:
            inner = normed(w, f"{p}.dw_start.bn", convolved(inner, w[f"{p}.dw_start.conv.weight"], 1))
        inner = gelu(normed(w, f"{p}.pw_exp.bn", convolved(inner, w[f"{p}.pw_exp.conv.weight"], 1)))
        if sizes["k"]:
            inner = gelu(normed(w, f"{p}.dw_mid.bn", convolved(inner, w[f"{p}.dw_mid.conv.weight"], step)))
        out = normed(w, f"{p}.pw_proj.bn", convolved(inner, w[f"{p}.pw_proj.conv.weight"], 1))
    else:
        out = attended(w, p, x, sizes)
    if kind != "er":
        out = out * w[f"{p}.layer_scale.gamma"].reshape(-1)
    return out + x if out.shape == x.shape else out


def rows(t: MobileTower, w: Weights, image: np.ndarray) -> np.ndarray:
    """Rows [256, text] of a picture uint8 of t.side."""
    x = convolved(image / 255, w["v.conv_stem.conv.weight"], 2) + w["v.conv_stem.conv.bias"].reshape(-1)
    x, ends = gelu(normed(w, "v.conv_stem.bn", x)), []
    for s, stage in enumerate(STAGES):
        for i, text in enumerate(stage):
            x = block(w, f"v.blk.{s}.{i}", text, x)
        ends.append(x)
    coarse = ends[-1].repeat(2, axis=0).repeat(2, axis=1)
    x = np.concatenate([ends[-2], coarse], axis=2)
    x = gelu(normed(w, "v.msfa.ffn.pw_exp.bn", convolved(x, w["v.msfa.ffn.pw_exp.conv.weight"], 1)))
    x = normed(w, "v.msfa.ffn.pw_proj.bn", convolved(x, w["v.msfa.ffn.pw_proj.conv.weight"], 1))
    n = len(x) // 16
    x = x.reshape(16, n, 16, n, t.fused).mean(axis=(1, 3))
    x = normed(w, "v.msfa.norm", x).reshape(256, t.fused) * math.sqrt(t.fused)
    x = normed(w, "mm.soft_emb_norm", x) @ w["mm.input_projection.weight"].astype(np.float64).T
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)
