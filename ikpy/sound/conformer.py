"""Layers of conformers (arXiv:2005.08100) with LayerNorm, as those of FastConformer and Granite Speech.

A layer is x += ffn(x) / 2, x += attention(x), x += convolution(x), x += ffn(x) / 2, and a norm. A channel's convolution
sees as many states before as behind, and a norm over batches, which is a factor and an addend, follows it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.weights import Linear, Norm, ProjectorWeights, value_of

EPS = 1e-5
RESIDUAL = 0.5
MAX_TAPS = 64


@dataclass
class FeedForward:
    """Weights of x + down(silu(up norm x)) / 2."""

    norm: Norm
    up: Linear
    down: Linear


class ConformerLayer:
    """Weights of a layer but those of its distances. n_kernel: taps of the convolutions, None: as the file has them;
    n_inner: elements that are convolved."""

    def __init__(self, weights: ProjectorWeights, prefix: str, n: int, n_kernel: int | None = None) -> None:
        self.weights, self.prefix = weights, prefix
        self.first, self.last = (self._feed_forward(end, n) for end in ("", "_1"))
        self.attn_norm = weights.norm(f"{prefix}.ln1", n)
        self.q, self.k, self.v = (weights.linear(f"{prefix}.attn_{part}", n, n) for part in "qkv")
        self.out = weights.linear(f"{prefix}.attn_out", n, n)
        self.conv_norm = weights.norm(f"{prefix}.norm_conv", n)
        self.start = weights.linear(f"{prefix}.conv_pw1", n)
        if self.start.n_out % 2:
            name = f"{prefix}.conv_pw1.weight"
            raise FileFormatError(f"{weights.gguf.path}: tensor '{name}' has {self.start.n_out} rows, no two halves")
        self.n_inner = self.start.n_out // 2
        self.end = weights.linear(f"{prefix}.conv_pw2", self.n_inner, n)
        self.taps, self.tap_bias = self._convolution(n_kernel)
        self.out_norm = weights.norm(f"{prefix}.ln2", n)

    def _feed_forward(self, end: str, n: int) -> FeedForward:
        """One of both networks."""
        up = self.weights.linear(f"{self.prefix}.ffn_up{end}", n)
        down = self.weights.linear(f"{self.prefix}.ffn_down{end}", up.n_out, n)
        return FeedForward(self.weights.norm(f"{self.prefix}.ffn_norm{end}", n), up, down)

    def _convolution(self, n_kernel: int | None) -> tuple[list[Value], Value]:
        """Factors [n_inner] of neighbours, the earliest first, and what is added, with the norm behind in both."""
        weights, name, n = self.weights, f"{self.prefix}.conv_dw.weight", self.n_inner
        count = weights.shape(name)[0]
        if not 0 < count <= MAX_TAPS or count != (n_kernel or count):
            wanted = n_kernel or f"1 to {MAX_TAPS}"
            raise FileFormatError(f"{weights.gguf.path}: tensor '{name}' has {count} taps, not {wanted}")
        filters = weights.array(name, (count, n), (count, 1, n)).reshape(n, count)
        factors, addends = self._batch_norm()
        bias = f"{self.prefix}.conv_dw.bias"
        addends = addends + factors * (weights.array(bias, (n,)) if weights.has(bias) else np.float32(0))
        taps = [value_of(filters[:, i] * factors, f"{name} ({i})") for i in range(count)]
        return taps, value_of(addends, f"{self.prefix}.conv_norm")

    def _batch_norm(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Factors and addends [n_inner]; of files that hold them, the mean and the variance are in these."""
        weights, name, n = self.weights, f"{self.prefix}.conv_norm", self.n_inner
        factors, addends = (weights.array(f"{name}.{part}", (n,)) for part in ("weight", "bias"))
        if weights.has(f"{name}_mean") or weights.has(f"{name}_var"):
            mean, variance = (weights.array(f"{name}_{part}", (n,)) for part in ("mean", "var"))
            factors = (factors / np.sqrt(np.maximum(variance, 0) + EPS)).astype(np.float32)
            addends = addends - mean * factors
        return factors, addends


def half_network(b: PictureGraph, layer: FeedForward, x: Value) -> Value:
    """x and half of what a network makes of it."""
    inner = b.activated(b.linear(layer.up, b.layer_norm(layer.norm, x, EPS)), "silu")
    return b.graph.add(x, b.graph.scale(b.linear(layer.down, inner), RESIDUAL))


def convolution(b: PictureGraph, layer: ConformerLayer, x: Value, silent: int = 0) -> Value:
    """x and a convolution over the neighbours of each channel, gated before; zeros lie around the states and in the
    place of the last ones that are silent."""
    g, n, count = b.graph, layer.n_inner, x.shape[1]
    heard = count - silent
    before = len(layer.taps) // 2
    behind = len(layer.taps) - 1 - before
    start = b.linear(layer.start, b.layer_norm(layer.conv_norm, x, EPS))
    line = g.new(n, before + count + behind)
    for place, length in ((0, before), (before + heard, behind + silent)):
        if length:
            g.copy(b.floats(np.zeros((length, n))), line.slice(1, place, length))
    gated = g.gated(start.slice0(n, n), start.slice0(0, n), "sigmoid")
    g.copy(gated.slice(1, 0, heard), line.slice(1, before, heard))
    total = g.mul(line.slice(1, 0, count), layer.taps[0])
    for i, tap in enumerate(layer.taps[1:], start=1):
        total = g.add(total, g.mul(line.slice(1, i, count), tap))
    return g.add(x, b.linear(layer.end, b.activated(g.add(total, layer.tap_bias), "silu")))
