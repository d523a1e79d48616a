"""Random vision towers of projector files, whose rows transformers recorded (scripts/make_vision_golden.py).

Weights are numpy arrays under the names of the file, [.., n_out, n_in].
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.cpu.media.projector_files import Weights, sizes, write_in_type

GOLDENS = Path(__file__).parents[2] / "data" / "vision"
GOLDEN_ROWS = (0, 3, 11, -1)
PEER_COLUMNS = 32


@dataclass(frozen=True)
class Tower:
    """Sizes of a tower; side: of the table of positions; deep: layers whose states become parts of rows; further: keys
    of its kind."""

    kind: str
    d: int = 60
    heads: int = 3
    ff: int = 76
    layers: int = 3
    patch: int = 6
    merge: int = 2
    text: int = 64
    eps: float = 1e-6
    side: int = 0
    rms: bool = False
    gated: bool = False
    biases: bool = True
    activation: str = "quick"
    head: int = 0
    """Elements of a head, 0: as many as make up d."""
    kv: int = 0
    """Heads of keys and values, 0: as many as of queries."""
    windows: int = 0
    """Every so many layers one sees the whole picture, the others windows of 112 pixels; 0: all do."""
    deep: tuple[int, ...] = ()
    mean: tuple[float, ...] = (0.48, 0.46, 0.41)
    std: tuple[float, ...] = (0.27, 0.26, 0.28)
    further: dict[str, Any] = field(default_factory=dict)

    @property
    def head_size(self) -> int:
        """Elements of a head."""
        return self.head or self.d // self.heads

    @property
    def keys(self) -> dict[str, Any]:
        """Metadata of the file."""
        own = {
            **sizes(self),
            "image_size": 12 * self.patch,
            "patch_size": self.patch,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
            **self.further,
        }
        if self.kv:
            own["attention.head_count_kv"] = self.kv
        if self.windows:
            own["n_wa_pattern"] = self.windows
        uses = {"clip.use_gelu": True} if self.activation == "tanh" else {}
        uses |= {"clip.use_silu": True} if self.activation == "silu" else {}
        return {
            "general.architecture": "clip",
            "clip.has_vision_encoder": True,
            "clip.projector_type": self.kind,
            **uses,
            **{f"clip.vision.{name}": value for name, value in own.items()},
        }

    def picture(self, rows: int = 10, columns: int = 14, seed: int = 3) -> np.ndarray:
        """A random picture uint8 of so many patches."""
        size = rows * self.patch, columns * self.patch, 3
        return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)

    def weights(self, seed: int = 5) -> Weights:
        """Random float32 weights."""
        return _Maker(self, seed).weights

    def write(self, path: Path, weights: Weights, type_name: str = "f32") -> Path:
        """The projector file, matrices in a type; the weights become what that type holds."""
        return write_in_type(path, self.keys, weights, type_name)


class _Maker:
    """Draws the weights of a tower one after the other."""

    def __init__(self, tower: Tower, seed: int) -> None:
        self.tower, self.weights = tower, {}
        self.random = np.random.default_rng(seed)
        getattr(self, f"make_{tower.kind.replace('.', '')}")()

    def matrix(self, name: str, *shape: int) -> None:
        scale = 1 / math.sqrt(np.prod(shape[1:]))
        self.weights[f"{name}.weight"] = self.random.normal(0, scale, shape).astype(np.float32)

    def linear(self, name: str, *shape: int, bias: bool = True) -> None:
        self.matrix(name, *shape)
        if bias:
            self.weights[f"{name}.bias"] = self.random.normal(0, 0.3, shape[0]).astype(np.float32)

    def norm(self, name: str, n: int, *, bias: bool) -> None:
        self.weights[f"{name}.weight"] = self.random.uniform(0.5, 1.5, n).astype(np.float32)
        if bias:
            self.weights[f"{name}.bias"] = self.random.normal(0, 0.3, n).astype(np.float32)

    def patches(self, *, frames: int, bias: bool) -> None:
        t = self.tower
        for name in ("v.patch_embd.weight", "v.patch_embd.weight.1")[:frames]:
            scale = 1 / math.sqrt(3 * t.patch**2 * frames)
            self.weights[name] = self.random.normal(0, scale, (t.d, 3, t.patch, t.patch)).astype(np.float32)
        if bias:
            self.weights["v.patch_embd.bias"] = self.random.normal(0, 0.3, t.d).astype(np.float32)

    def blocks(self, *, fused: bool) -> None:
        t = self.tower
        for il in range(t.layers):
            p = f"v.blk.{il}"
            self.norm(f"{p}.ln1", t.d, bias=not t.rms)
            self.norm(f"{p}.ln2", t.d, bias=not t.rms)
            if fused:
                n_heads = t.heads + 2 * (t.kv or t.heads)
                self.linear(f"{p}.attn_qkv", t.head_size * n_heads, t.d, bias=t.biases)
            else:
                for part in "qkv":
                    self.linear(f"{p}.attn_{part}", t.d, t.d, bias=t.biases)
            self.linear(f"{p}.attn_out", t.d, t.head_size * t.heads, bias=t.biases)
            if t.gated:
                self.linear(f"{p}.ffn_gate", t.ff, t.d, bias=t.biases)
            self.linear(f"{p}.ffn_up", t.ff, t.d, bias=t.biases)
            self.linear(f"{p}.ffn_down", t.d, t.ff, bias=t.biases)

    def table(self, *shape: int) -> None:
        self.weights["v.position_embd.weight"] = self.random.normal(0, 0.5, shape).astype(np.float32)

    def make_qwen2vl_merger(self) -> None:
        t = self.tower
        merged = t.d * t.merge**2
        self.patches(frames=2, bias=False)
        self.blocks(fused=False)
        self.norm("v.post_ln", t.d, bias=not t.rms)
        self.linear("mm.0", merged, merged)
        self.linear("mm.2", t.text, merged)

    make_qwen25vl_merger = make_qwen2vl_merger

    def make_exaone4_5(self) -> None:
        t = self.tower
        merged = t.d * t.merge**2
        self.patches(frames=2, bias=False)
        self.blocks(fused=True)
        self.norm("v.post_ln", t.d, bias=False)
        self.linear("mm.0", merged, merged)
        self.linear("mm.2", t.text, merged)

    def make_ling3vl(self) -> None:
        t = self.tower
        merged = t.d * t.merge**2
        self.patches(frames=2, bias=True)
        self.table(t.side**2, t.d)
        self.blocks(fused=True)
        self.norm("mm.input_norm", t.d, bias=True)
        self.linear("mm.0", merged, merged)
        self.linear("mm.2", t.text, merged)

    def make_dots_ocr(self) -> None:
        t = self.tower
        merged = t.d * t.merge**2
        self.patches(frames=1, bias=True)
        self.norm("v.pre_ln", t.d, bias=False)
        self.blocks(fused=True)
        self.norm("mm.post_norm", t.d, bias=False)
        self.norm("mm.input_norm", t.d, bias=True)
        self.linear("mm.0", merged, merged)
        self.linear("mm.2", t.text, merged)

    def make_dots3note_v(self) -> None:
        t, n = self.tower, 4
        self.make_dots_ocr()
        for il in range(t.layers):
            for part in "qk":
                self.norm(f"v.blk.{il}.attn_{part}_norm", t.head_size, bias=False)
        p, inner = "v.blk.1", t.ff // 2
        for part, shape in (("gate", (inner, t.d)), ("up", (inner, t.d)), ("down", (t.d, inner))):
            del self.weights[f"{p}.ffn_{part}.weight"]
            scale = 1 / math.sqrt(shape[1])
            self.weights[f"{p}.ffn_{part}_exps.weight"] = self.random.normal(0, scale, (n, *shape)).astype(np.float32)
        self.matrix(f"{p}.ffn_gate_inp", n, t.d)
        self.weights[f"{p}.exp_probs_b.weight"] = self.random.normal(0, 0.3, n).astype(np.float32)

    def make_mimovl(self) -> None:
        t = self.tower
        merged = t.d * t.merge**2
        self.patches(frames=2, bias=False)
        self.blocks(fused=True)
        for il in range(t.layers):
            if t.further["wa_pattern_mode"][il] >= 0:
                self.weights[f"v.blk.{il}.attn_sinks"] = self.random.normal(0, 1, t.heads).astype(np.float32)
        self.norm("v.post_ln", t.d, bias=True)
        self.matrix("mm.0", merged, merged)
        self.matrix("mm.2", t.text, merged)

    def make_youtuvl(self) -> None:
        t = self.tower
        merged = t.d * t.merge**2
        self.matrix("v.patch_embd", t.d, 3 * t.patch**2)
        self.weights["v.patch_embd.bias"] = self.random.normal(0, 0.3, t.d).astype(np.float32)
        self.blocks(fused=False)
        self.norm("v.post_ln", t.d, bias=True)
        self.norm("mm.input_norm", t.d, bias=False)
        self.linear("mm.0", merged, merged)
        self.linear("mm.2", t.text, merged)

    def make_minimax_m3(self) -> None:
        t = self.tower
        self.patches(frames=2, bias=False)
        self.norm("v.pre_ln", t.d, bias=True)
        self.blocks(fused=False)
        self.linear("mm.1", t.ff, t.d)
        self.linear("mm.2", t.text, t.ff)
        self.linear("mm.merger.fc1", t.ff, t.text * t.merge**2)
        self.linear("mm.merger.fc2", t.text, t.ff)

    def make_qwen3vl_merger(self) -> None:
        t = self.tower
        merged = t.d * t.merge**2
        self.patches(frames=2, bias=True)
        self.table(t.side**2, t.d)
        self.blocks(fused=True)
        self.norm("v.post_ln", t.d, bias=True)
        self.linear("mm.0", merged, merged)
        self.linear("mm.2", t.text, merged)
        for il in t.deep:
            self.norm(f"v.deepstack.{il}.norm", merged, bias=True)
            self.linear(f"v.deepstack.{il}.fc1", merged, merged)
            self.linear(f"v.deepstack.{il}.fc2", t.text, merged)

    def make_pixtral(self) -> None:
        t = self.tower
        self.patches(frames=1, bias=False)
        self.norm("v.pre_ln", t.d, bias=False)
        self.blocks(fused=False)
        self.linear("mm.1", t.text, t.d)
        self.linear("mm.2", t.text, t.text)
        if t.kind == "pixtral":
            self.weights["v.token_embd.img_break"] = self.random.normal(0, 1, t.text).astype(np.float32)
        if t.merge > 1:
            self.norm("mm.input_norm", t.d, bias=False)
            self.matrix("mm.patch_merger", t.d, t.d * t.merge**2)

    make_lightonocr = make_pixtral

    def make_kimivl(self) -> None:
        t = self.tower
        merged = t.d * t.merge**2
        self.patches(frames=1, bias=True)
        self.table(*((t.side, t.side) if t.kind == "kimik25" else (t.side**2,)), t.d)
        self.blocks(fused=False)
        self.norm("v.post_ln", t.d, bias=True)
        self.norm("mm.input_norm", t.d, bias=True)
        self.linear("mm.1", merged, merged)
        self.linear("mm.2", t.text, merged)

    make_kimik25 = make_paddleocr = make_kimivl

    def make_glm4v(self) -> None:
        t = self.tower
        self.patches(frames=2, bias=True)
        if t.side:
            self.norm("v.norm_embd", t.d, bias=False)
            self.table(t.side**2, t.d)
        self.blocks(fused=True)
        for il in range(0 if t.side else t.layers):
            for part in "qk":
                self.norm(f"v.blk.{il}.attn_{part}_norm", t.d // t.heads, bias=False)
        self.norm("v.post_ln", t.d, bias=False)
        self.linear("mm.patch_merger", t.text, t.d, t.merge, t.merge)
        self.matrix("mm.model.fc", t.text, t.text)
        self.norm("mm.post_norm", t.text, bias=True)
        for name in ("gate", "up"):
            self.matrix(f"mm.{name}", t.ff + 3, t.text)
        self.matrix("mm.down", t.text, t.ff + 3)

    make_glm5v = make_glm4v

    def make_step3vl(self) -> None:
        t = self.tower
        self.patches(frames=1, bias=False)
        self.table(t.side**2, t.d)
        self.norm("v.pre_ln", t.d, bias=True)
        self.blocks(fused=True)
        for il in range(t.layers):
            for part in ("ls1", "ls2"):
                self.norm(f"v.blk.{il}.{part}", t.d, bias=False)
        self.linear("mm.0", 2 * t.d, t.d, 3, 3)
        self.linear("mm.1", 4 * t.d, 2 * t.d, 3, 3)
        self.matrix("mm.model.fc", t.text, 4 * t.d)
