"""Layers of the Universal Speech Model (arXiv:2303.01037), a conformer (arXiv:2005.08100), as Gemma's models have them.

A layer is x += ffn(x) / 2, x += attention(x), x += conv(x), x += ffn(x) / 2, and a norm. A state sees itself and some
before it, each key with a vector for its distance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.models.blocks import split_heads
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.weights import Linear, ProjectorWeights, value_of

LONGEST_WAVE = 10000.0
EPS = 1e-6
SOFTCAP = 50.0
QUERY_SCALE = 1 / math.log(2)
RESIDUAL = 0.5
MAX_TAPS = 64


@dataclass(frozen=True)
class Layout:
    """How models differ: names of tensors, the number of states that one sees, a factor of keys, and what stored scales
    of queries become."""

    attn_norm: str
    attn_post_norm: str
    distances: str
    out_norm: str
    context: int
    key_scale: float
    query_scales: Callable[[NDArray[np.float32]], NDArray[np.float32]]


@dataclass
class FeedForward:
    """Weights of x + down(silu(up norm x)) normed / 2."""

    norm: Value
    up: Linear
    down: Linear
    post_norm: Value


class Layer:
    """Weights of a layer."""

    def __init__(self, weights: ProjectorWeights, prefix: str, n: int, head: int, layout: Layout) -> None:
        self.weights, self.prefix, self.n, self.layout = weights, prefix, n, layout
        self.first, self.last = self.feed_forward(""), self.feed_forward("_1")
        self.attn_norm, self.attn_post_norm = self.norm(layout.attn_norm), self.norm(layout.attn_post_norm)
        self.q, self.k, self.v, self.out = (self.matrix(f"attn_{part}", n, n) for part in ("q", "k", "v", "out"))
        self.distances = self.matrix(layout.distances, n, n)
        name = f"{prefix}.per_dim_scale.weight"
        scales = layout.query_scales(weights.array(name if weights.has(name) else f"{prefix}.per_dim_scale", (head,)))
        scales = (scales * np.float32(QUERY_SCALE / math.sqrt(head))).astype(np.float32)
        self.query_scales = value_of(np.tile(scales, n // head), name)
        self.conv_norm, self.conv_mid_norm = self.norm("conv_norm"), self.norm("norm_conv")
        self.start, self.end = self.matrix("conv_pw1", n, 2 * n), self.matrix("conv_pw2", n, n)
        name = f"{prefix}.conv_dw.weight"
        taps = weights.shape(name)[0]
        if not 0 < taps <= MAX_TAPS:
            raise FileFormatError(f"{weights.gguf.path}: tensor '{name}' has {taps} taps, not 1 to {MAX_TAPS}")
        filters = weights.array(name, (taps, n), (taps, 1, n)).reshape(n, taps)
        self.taps = [value_of(filters[:, i], f"{name} ({i})") for i in range(taps)]
        self.out_norm = self.norm(layout.out_norm)

    def norm(self, name: str) -> Value:
        """Factors of a norm."""
        return self.weights.table(f"{self.prefix}.{name}.weight", (self.n,))

    def matrix(self, name: str, n_in: int, n_out: int | None = None) -> Linear:
        """A matrix with its bounds."""
        return self.weights.linear(f"{self.prefix}.{name}", n_in, n_out)

    def feed_forward(self, end: str) -> FeedForward:
        """One of both networks."""
        up = self.matrix(f"ffn_up{end}", self.n)
        down = self.matrix(f"ffn_down{end}", up.n_out, self.n)
        return FeedForward(self.norm(f"ffn_norm{end}"), up, down, self.norm(f"ffn_post_norm{end}"))


def behind(b: PictureGraph, layer: Layer, x: Value, head: int) -> Value:
    """States behind a layer of x [D, T], whose heads have so many elements."""
    x = attention(b, layer, feed_forward(b, layer.first, x), head)
    x = feed_forward(b, layer.last, convolution(b, layer, x))
    return b.graph.rms_norm(x, layer.out_norm, EPS)


def feed_forward(b: PictureGraph, layer: FeedForward, x: Value) -> Value:
    """x and half of what a network makes of it."""
    g = b.graph
    inner = b.activated(b.linear(layer.up, g.rms_norm(x, layer.norm, EPS)), "silu")
    return g.add(x, g.scale(g.rms_norm(b.linear(layer.down, inner), layer.post_norm, EPS), RESIDUAL))


def attention(b: PictureGraph, layer: Layer, x: Value, head: int) -> Value:
    """x and what its states see. Keys and values are laid out once for each state that sees them."""
    g, (n, count), context = b.graph, x.shape[:2], layer.layout.context
    seen = np.arange(count)[:, None] + np.arange(1 - context, 1)
    places = b.indices(np.maximum(seen, -1).reshape(-1))
    states = g.rms_norm(x, layer.attn_norm, EPS)
    q = g.mul(b.linear(layer.q, states), layer.query_scales)
    k = g.get_rows(g.scale(b.linear(layer.k, states), layer.layout.key_scale), places).reshape(n, context, count)
    k = g.add(k, g.mul_mat(layer.distances.weight, b.floats(waves(n, context))))
    v = g.get_rows(b.linear(layer.v, states), places)
    ends = context * (1 + np.arange(count))
    ranges = np.stack([ends - np.minimum(ends // context, context), ends], axis=1)
    heads = (split_heads(part, head) for part in (q, k.reshape(n, context * count), v))
    found = b.attention(*heads, scale=1.0, ranges=ranges, softcap=SOFTCAP)
    return g.add(x, g.rms_norm(b.linear(layer.out, found), layer.attn_post_norm, EPS))


def convolution(b: PictureGraph, layer: Layer, x: Value) -> Value:
    """x and a convolution over the last states of each channel, gated before."""
    g, (n, count), past = b.graph, x.shape[:2], len(layer.taps) - 1
    start = b.linear(layer.start, g.rms_norm(x, layer.conv_norm, EPS))
    line = g.new(n, count + past)
    if past:
        g.copy(b.floats(np.zeros((past, n))), line.slice(1, 0, past))
    g.copy(g.gated(start.slice0(n, n), start.slice0(0, n), "sigmoid"), line.slice(1, past, count))
    total: Value | None = None
    for i, tap in enumerate(layer.taps):
        part = g.mul(line.slice(1, i, count), tap)
        total = part if total is None else g.add(total, part)
    assert total is not None
    inner = b.activated(g.rms_norm(total, layer.conv_mid_norm, EPS), "silu")
    return g.add(x, b.linear(layer.end, inner))


def waves(n: int, count: int) -> NDArray[np.float32]:
    """Vectors [count, n] of distances, the largest first: sines, then cosines."""
    rates = LONGEST_WAVE ** -(np.arange(n // 2) / max(n // 2 - 1, 1))
    angles = np.arange(count - 1, -1, -1)[:, None] * rates
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
