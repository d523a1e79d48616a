"""Random encoders of sound in projector files, whose rows transformers and llama.cpp recorded.

Weights are numpy arrays under the names of the file, [.., n_out, n_in].
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.cpu.media.conformer_weights import CONFORMERS
from tests.cpu.media.projector_files import Weights, sizes, write_in_type

CHANNELS = 6
"""Of convolutions over pitches and time."""


def t_pitches(n: int) -> int:
    """Pitches behind three convolutions that take every second."""
    for _ in range(3):
        n = (n + 1) // 2
    return n


def t_inner(tower: SoundTower) -> int:
    """Elements between the two matrices behind the layers of Gemma 4."""
    return tower.d + 32


@dataclass(frozen=True)
class SoundTower:
    """Sizes of an encoder; stack: rows that are joined; further: keys of its kind."""

    kind: str
    d: int = 64
    heads: int = 2
    ff: int = 96
    layers: int = 2
    mel: int = 80
    text: int = 64
    stack: int = 1
    eps: float = 1e-5
    further: dict[str, Any] = field(default_factory=dict)

    @property
    def keys(self) -> dict[str, Any]:
        """Metadata of the file."""
        own = {
            **sizes(self),
            "num_mel_bins": self.mel,
        }
        if self.stack > 1 or self.kind == "meralion":
            own["projector.stack_factor"] = self.stack
        return {
            "general.architecture": "clip",
            "clip.has_audio_encoder": True,
            "clip.projector_type": self.kind,
            **({"clip.use_silu": True} if self.kind == "dots3note_a" else {}),
            **{f"clip.audio.{name}": value for name, value in {**own, **self.further}.items()},
        }

    def weights(self, seed: int = 5) -> Weights:
        """Random float32 weights."""
        return Maker(self, seed).weights

    def write(self, path: Path, weights: Weights, type_name: str = "f32") -> Path:
        """The projector file, matrices in a type; the weights become what that type holds."""
        return write_in_type(path, self.keys, weights, type_name)


def merged_projector(path: Path, pictures: Path, tower: SoundTower) -> Path:
    """The projector file of pictures with an encoder of sound beside its own."""
    from ikpy.gguf.reader import GGUFFile

    gguf = GGUFFile.open(str(pictures))
    keys = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in gguf.metadata.items()}
    keys["clip.vision.projector_type"] = keys.pop("clip.projector_type")
    own = tower.keys
    own["clip.audio.projector_type"] = own.pop("clip.projector_type")
    weights = {
        name: np.frombuffer(gguf.data(info), np.float32).reshape(info.shape[::-1])
        for name, info in gguf.tensors.items()
    }
    return write_in_type(path, keys | own, weights | tower.weights())


class Maker:
    """Draws the weights of an encoder one after the other."""

    def __init__(self, tower: SoundTower, seed: int) -> None:
        self.tower, self.weights = tower, Weights()
        self.random = np.random.default_rng(seed)
        if tower.kind in CONFORMERS:
            CONFORMERS[tower.kind](self)
            return
        if not tower.kind.startswith("gemma4"):
            self.front()
            self.layers()
        getattr(self, f"make_{tower.kind.replace('.', '')}")()

    def linear(self, name: str, *shape: int, bias: bool = True) -> None:
        scale = 1 / math.sqrt(np.prod(shape[1:]))
        self.weights[f"{name}.weight"] = self.random.normal(0, scale, shape).astype(np.float32)
        if bias:
            self.weights[f"{name}.bias"] = self.random.normal(0, 0.3, shape[0]).astype(np.float32)

    def norm(self, name: str, n: int, *, bias: bool = True) -> None:
        self.weights[f"{name}.weight"] = self.random.uniform(0.5, 1.5, n).astype(np.float32)
        if bias:
            self.weights[f"{name}.bias"] = self.random.normal(0, 0.3, n).astype(np.float32)

    def front(self) -> None:
        t = self.tower
        if t.kind == "qwen3a":
            return self.pictures()
        self.linear("a.conv1d.1", t.d, t.mel, 3)
        self.linear("a.conv1d.2", t.d, t.d, 3)
        for name in ("a.conv1d.1.bias", "a.conv1d.2.bias"):
            self.weights[name] = self.weights[name][:, None]
        self.weights["a.position_embd.weight"] = self.random.normal(0, 0.5, (1500, t.d)).astype(np.float32)
        return None

    def pictures(self) -> None:
        """Three convolutions over pitches and time."""
        t, n, pitches = self.tower, 1, t_pitches(self.tower.mel)
        for i in (1, 2, 3):
            self.linear(f"a.conv2d.{i}", CHANNELS, n, 3, 3)
            self.weights[f"a.conv2d.{i}.bias"] = self.weights[f"a.conv2d.{i}.bias"][:, None, None]
            n = CHANNELS
        self.linear("a.conv_out", t.d, n * pitches, bias=False)
        self.weights["a.position_embd.weight"] = self.random.normal(0, 0.5, (13, t.d)).astype(np.float32)

    def layers(self) -> None:
        t = self.tower
        for il in range(t.layers):
            p = f"a.blk.{il}"
            self.norm(f"{p}.ln1", t.d)
            self.norm(f"{p}.ln2", t.d)
            for part in ("q", "k", "v", "out"):
                self.linear(f"{p}.attn_{part}", t.d, t.d, bias=part != "k" or t.kind == "qwen3a")
            self.linear(f"{p}.ffn_up", t.ff, t.d)
            self.linear(f"{p}.ffn_down", t.d, t.ff)
        if t.kind != "glma":
            self.norm("a.post_ln", t.d)

    def make_ultravox(self) -> None:
        t = self.tower
        self.norm("mm.a.norm_pre", t.d * t.stack, bias=False)
        self.linear("mm.a.mlp.1", 2 * t.ff, t.d * t.stack, bias=False)
        self.norm("mm.a.norm_mid", t.ff, bias=False)
        self.linear("mm.a.mlp.2", t.text, t.ff, bias=False)

    def make_qwen2a(self) -> None:
        self.linear("mm.a.fc", self.tower.text, self.tower.d)

    make_qwen25o = make_qwen2a

    def make_qwen3a(self) -> None:
        t = self.tower
        self.linear("mm.a.mlp.1", t.d, t.d)
        self.linear("mm.a.mlp.2", t.text, t.d)

    def make_gemma4a(self) -> None:
        t, inner = self.tower, t_inner(self.tower)
        for i, (n_in, n_out) in enumerate(((1, t.mel), (t.mel, 4))):
            self.linear(f"a.conv1d.{i}", n_out, n_in, 3, 3, bias=False)
            self.norm(f"a.conv1d.{i}.norm", n_out, bias=False)
        self.linear("a.input_projection", t.d, 4 * t.mel // 4, bias=False)
        for il in range(t.layers):
            p = f"a.blk.{il}"
            for end in ("", "_1"):
                self.linear(f"{p}.ffn_up{end}", 4 * t.d, t.d, bias=False)
                self.linear(f"{p}.ffn_down{end}", t.d, 4 * t.d, bias=False)
            for name in (
                "ffn_norm",
                "ffn_norm_1",
                "ffn_post_norm",
                "ffn_post_norm_1",
                "attn_pre_norm",
                "attn_post_norm",
            ):
                self.norm(f"{p}.{name}", t.d, bias=False)
            for name in ("conv_norm", "norm_conv", "ln2"):
                self.norm(f"{p}.{name}", t.d, bias=False)
            for name in ("attn_q", "attn_k", "attn_v", "attn_out", "attn_k_rel", "conv_pw2"):
                self.linear(f"{p}.{name}", t.d, t.d, bias=False)
            self.linear(f"{p}.conv_pw1", 2 * t.d, t.d, bias=False)
            self.weights[f"{p}.conv_dw.weight"] = self.random.normal(0, 0.5, (t.d, 5)).astype(np.float32)
            self.norm(f"{p}.per_dim_scale", t.d // t.heads, bias=False)
        low, high = -1.5, 1.75
        for name, bound in (("input_min", low), ("input_max", high), ("output_min", low), ("output_max", high)):
            self.weights[f"a.blk.0.attn_q.{name}"] = np.array([bound], np.float32)
        self.linear("a.pre_encode.out", inner, t.d)
        self.linear("mm.a.input_projection", t.text, inner, bias=False)

    def make_gemma4ua(self) -> None:
        self.linear("mm.a.input_projection", self.tower.text, self.tower.d, bias=False)

    def make_glma(self) -> None:
        t = self.tower
        self.norm("mm.a.norm_pre", t.d)
        self.linear("mm.a.mlp.1", 2 * t.text, t.d * t.stack)
        self.linear("mm.a.mlp.2", t.text, 2 * t.text)
        for name in ("v.boi", "v.eoi"):
            self.weights[name] = self.random.normal(0, 1, t.text).astype(np.float32)

    def make_meralion(self) -> None:
        t = self.tower
        self.norm("mm.a.norm_pre", t.d)
        self.linear("mm.a.mlp.0", t.d, t.d * t.stack)
        self.linear("mm.a.mlp.1", t.ff, t.d)
        self.linear("mm.a.mlp.2", t.ff, t.d)
        self.linear("mm.a.mlp.3", t.text, t.ff)

    def make_voxtral(self) -> None:
        t = self.tower
        self.linear("mm.a.mlp.1", t.text, t.d * t.stack, bias=False)
        self.linear("mm.a.mlp.2", t.text, t.text, bias=False)

    def make_musicflamingo(self) -> None:
        t = self.tower
        self.linear("mm.a.mlp.1", t.text, t.d)
        self.linear("mm.a.mlp.2", t.text, t.text)
