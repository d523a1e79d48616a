"""Writes random projector files of encoders that read squares or tiles, seeded; weights [.., n_out, n_in]."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ikpy._native import core
from ikpy.graph.ir import F32
from ikpy.quants import registry
from tests.cpu.media.projector_files import Weights, sizes, write_tensors

SIGNED = (
    "clip.minicpmv_version",
    "clip.vision.feature_layer",
    "clip.vision.wa_layer_indexes",
    "clip.vision.image_grid_pinpoints",
)
"""Integers with a sign, as files have them."""


@dataclass(frozen=True)
class TileTower:
    """Sizes and keys of a file. make: draws what is not in every encoder; special: tokens around pictures."""

    kind: str
    make: Callable[[Maker], None]
    special: tuple[str, ...] = ()
    d: int = 48
    ff: int = 80
    layers: int = 3
    heads: int = 4
    patch: int = 7
    side: int = 28
    text: int = 32
    eps: float = 1e-6
    activation: str = "gelu"
    mean: tuple[float, ...] = (0.5, 0.4, 0.45)
    std: tuple[float, ...] = (0.5, 0.6, 0.55)
    further: dict[str, Any] = field(default_factory=dict)
    outer: dict[str, Any] = field(default_factory=dict)
    token: str = ""
    """Where llama.cpp's encoder has its class token while its positions stand as in files: "behind"."""

    @property
    def grid(self) -> int:
        """Patches of a side."""
        return self.side // self.patch

    @property
    def keys(self) -> dict[str, Any]:
        """Metadata of the file."""
        own = {
            **sizes(self),
            "image_size": self.side,
            "patch_size": self.patch,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
            **self.further,
        }
        uses = {"clip.use_gelu": True} if self.activation == "gelu" else {}
        return {
            "general.architecture": "clip",
            "clip.has_vision_encoder": True,
            "clip.projector_type": self.kind,
            **uses,
            **self.outer,
            **{f"clip.vision.{name}": value for name, value in own.items()},
        }

    def weights(self, seed: int = 5) -> Weights:
        """Random float32 weights under their names."""
        maker = Maker(self, seed)
        self.make(maker)
        return maker.weights

    def peer_weights(self) -> Weights:
        """Those with which llama.cpp computes what the published model does.

        Its class token is the last one, while files, whose order of positions it takes, have it first.
        """
        weights = self.weights()
        if self.token == "behind":
            weights["v.position_embd.weight"] = np.roll(weights["v.position_embd.weight"], -1, 0)
        return weights

    def write(self, path: Path, weights: Weights | None = None, types: dict[str, str] | None = None) -> Path:
        """The projector file; types: of some tensors. Filters of every element by itself are f16 as in published files:
        llama.cpp reads them in no other type."""
        weights = self.weights() if weights is None else weights
        usual = {name: "f16" if w.shape[1:] == (1, 3, 3) else "f32" for name, w in weights.items()}
        data = {name: encoded(w, (types or {}).get(name, usual[name])) for name, w in weights.items()}
        return write_tensors(path, self.keys, weights, data, SIGNED)


def encoded(w: np.ndarray, type_name: str) -> tuple[int, np.ndarray]:
    """Number of a type and the bytes of a tensor in it."""
    kind = registry.by_name(type_name)
    if kind.id == F32:
        return kind.id, np.ascontiguousarray(w, np.float32)
    if type_name == "f16":
        return kind.id, w.astype(np.float16)
    if type_name == "bf16":
        return kind.id, (np.ascontiguousarray(w, np.float32).view(np.uint32) + 0x8000 >> 16).astype(np.uint16)
    return kind.id, core.quantize(np.ascontiguousarray(w.reshape(-1, w.shape[-1]), np.float32), kind.id, None, 1)


def decoded(w: np.ndarray, type_name: str) -> np.ndarray:
    """What a tensor holds in a type."""
    type_id, stored = encoded(w, type_name)
    if type_name == "f32":
        return w
    if type_name == "f16":
        return stored.astype(np.float32)
    if type_name == "bf16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return core.dequantize(stored.reshape(-1), type_id, w.shape[-1], w.size // w.shape[-1], True).reshape(w.shape)


class Maker:
    """Draws the weights of a tower one after the other."""

    def __init__(self, tower: TileTower, seed: int) -> None:
        self.tower = tower
        self.weights: Weights = {}
        self.random = np.random.default_rng(seed)

    def matrix(self, name: str, *shape: int) -> None:
        """Rows of products of unit variance."""
        scale = 1 / math.sqrt(np.prod(shape[1:]))
        self.weights[name] = self.random.normal(0, scale, shape).astype(np.float32)

    def filters(self, name: str, n: int) -> None:
        """Those of every element by itself, which halves of floats hold."""
        self.matrix(name, n, 1, 3, 3)
        self.weights[name] = self.weights[name].astype(np.float16).astype(np.float32)

    def linear(self, name: str, *shape: int, bias: bool = True) -> None:
        """A matrix and what is added."""
        self.matrix(f"{name}.weight", *shape)
        if bias:
            self.vector(f"{name}.bias", shape[0])

    def vector(self, name: str, *shape: int) -> None:
        """Biases, tokens, positions."""
        self.weights[name] = self.random.normal(0, 0.3, shape).astype(np.float32)

    def norm(self, name: str, n: int, *, bias: bool = True) -> None:
        """Factors around 1."""
        self.weights[f"{name}.weight"] = self.random.uniform(0.5, 1.5, n).astype(np.float32)
        if bias:
            self.vector(f"{name}.bias", n)

    def encoder(
        self,
        n_positions: int,
        *,
        token: bool = False,
        patch_bias: bool = True,
        pre: bool = False,
        post: bool = True,
        biases: bool = True,
        norm_biases: bool = True,
        fused: bool = False,
        gated: bool = False,
        scales: bool = False,
    ) -> None:
        """Patches, positions and layers."""
        t = self.tower
        self.matrix("v.patch_embd.weight", t.d, 3, t.patch, t.patch)
        if patch_bias:
            self.vector("v.patch_embd.bias", t.d)
        if token:
            self.vector("v.class_embd", t.d)
        if n_positions:
            self.vector("v.position_embd.weight", n_positions, t.d)
        for name in (["v.pre_ln"] if pre else []) + (["v.post_ln"] if post else []):
            self.norm(name, t.d, bias=norm_biases)
        for il in range(t.layers):
            p = f"v.blk.{il}"
            self.norm(f"{p}.ln1", t.d, bias=norm_biases)
            self.norm(f"{p}.ln2", t.d, bias=norm_biases)
            if fused:
                self.linear(f"{p}.attn_qkv", 3 * t.d, t.d, bias=biases)
            else:
                for part in "qkv":
                    self.linear(f"{p}.attn_{part}", t.d, t.d, bias=biases)
            self.linear(f"{p}.attn_out", t.d, t.d, bias=biases)
            if gated:
                self.linear(f"{p}.ffn_gate", t.ff, t.d, bias=biases)
            self.linear(f"{p}.ffn_up", t.ff, t.d, bias=biases)
            self.linear(f"{p}.ffn_down", t.d, t.ff, bias=biases)
            if scales:
                self.norm(f"{p}.ls1", t.d, bias=False)
                self.norm(f"{p}.ls2", t.d, bias=False)
