"""The vision transformer that most projector files hold (arXiv:2010.11929): patches, positions, layers, last norm.

x = patches W + b [+ positions]; per layer x += attention(norm(x)), x += ffn(norm(x)), every patch seeing all others.
Variants add a class token, norms of heads and behind the branches, scales of the branches, gated networks, rotation.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.models.blocks import split_heads
from ikpy.models.weights import split_rows
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.params import EncoderParams
from ikpy.vision.weights import Linear, Norm, ProjectorWeights

Rotate = Callable[[PictureGraph, Value], Value]
"""Rotates the heads [d, H, T] of queries or keys."""


@dataclass
class EncoderLayer:
    """Weights of a layer; norms and scales that are None are left out."""

    ln1: Norm
    q: Linear
    k: Linear
    v: Linear
    out: Linear
    ln2: Norm
    up: Linear
    gate: Linear | None
    down: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    attn_post_norm: Norm | None
    ffn_post_norm: Norm | None
    attn_scale: Value | None
    ffn_scale: Value | None
    out_scale: Value | None


class VisionTransformer:
    """Weights under v.*, or another prefix, and the graph over them.

    rms: norms are RMSNorm. n_layer: how many layers are used, None: all. Families with another patch embedding or other
    positions call `layers` alone.
    """

    def __init__(
        self,
        weights: ProjectorWeights,
        params: EncoderParams,
        *,
        rms: bool = False,
        n_layer: int | None = None,
        prefix: str = "v",
    ) -> None:
        self.params = params
        self.rms = rms
        self.head_size = self.read_head_size(weights)
        n = params.n_embd
        self.pre_norm = weights.norm_if(f"{prefix}.pre_ln", n)
        self.post_norm = weights.norm_if(f"{prefix}.post_ln", n)
        self.blocks = [
            self._load_layer(weights, f"{prefix}.blk.{il}")
            for il in range(params.n_layer if n_layer is None else n_layer)
        ]

    def read_head_size(self, weights: ProjectorWeights) -> int:
        """Elements of a head."""
        return self.params.head_size

    def _load_layer(self, weights: ProjectorWeights, prefix: str) -> EncoderLayer:
        n, head = self.params.n_embd, self.head_size
        q, k, v = self._load_qkv(weights, prefix)
        if k.n_out != v.n_out or k.n_out % head or q.n_out % k.n_out:
            raise FileFormatError(
                f"{weights.gguf.path}: {prefix} has queries, keys and values of {q.n_out}, {k.n_out} and {v.n_out} "
                f"elements, heads have {head}"
            )
        up, down = self._load_ffn(weights, prefix)
        return EncoderLayer(
            ln1=weights.norm(f"{prefix}.ln1", n),
            q=q,
            k=k,
            v=v,
            out=weights.linear(f"{prefix}.attn_out", q.n_out, n),
            ln2=weights.norm(f"{prefix}.ln2", n),
            up=up,
            gate=weights.linear_if(f"{prefix}.ffn_gate", n, up.n_out),
            down=down,
            q_norm=self._head_norm(weights, f"{prefix}.attn_q_norm", head, q.n_out),
            k_norm=self._head_norm(weights, f"{prefix}.attn_k_norm", head, k.n_out),
            attn_post_norm=weights.norm_if(f"{prefix}.attn_post_norm", n),
            ffn_post_norm=weights.norm_if(f"{prefix}.ffn_post_norm", n),
            attn_scale=weights.vector(f"{prefix}.ls1.weight", n),
            ffn_scale=weights.vector(f"{prefix}.ls2.weight", n),
            out_scale=weights.vector(f"{prefix}.out_scale.weight", n),
        )

    def _load_ffn(self, weights: ProjectorWeights, prefix: str) -> tuple[Linear, Linear]:
        """The matrices up and down; old files have them under each other's names."""
        n, names = self.params.n_embd, (f"{prefix}.ffn_up", f"{prefix}.ffn_down")
        inputs = [weights.shape(f"{name}.weight")[0] for name in names]
        up, down = names if inputs[0] == n or inputs[1] != n else names[::-1]
        first = weights.linear(up, n)
        return first, weights.linear(down, first.n_out, n)

    def _load_qkv(self, weights: ProjectorWeights, prefix: str) -> list[Linear]:
        n = self.params.n_embd
        if not weights.has(f"{prefix}.attn_qkv.weight"):
            return [weights.linear(f"{prefix}.attn_{name}", n) for name in "qkv"]
        fused = weights.linear(f"{prefix}.attn_qkv", n, 3 * n)
        parts = split_rows(fused.weight, n, n, n)
        return [
            Linear(part, None if fused.bias is None else fused.bias.slice0(i * n, n)) for i, part in enumerate(parts)
        ]

    @staticmethod
    def _head_norm(weights: ProjectorWeights, name: str, head: int, whole: int) -> Norm | None:
        """The norm of every head, or of all of them as one row."""
        if not weights.has(f"{name}.weight"):
            return None
        return weights.norm(name, head if weights.shape(f"{name}.weight")[0] == head else whole)

    # graph

    def layers(
        self,
        b: PictureGraph,
        x: Value,
        *,
        rotate: Rotate | None = None,
        ranges: Callable[[int], NDArray[np.integer] | None] | None = None,
        tap: Container[int] = (),
        taken: list[Value] | None = None,
    ) -> Value:
        """The residual stream behind the layers, with the norms before and behind all of them, for x [D, T].

        ranges: of `PictureGraph.attention` by layer. tap: layers before which the stream is appended to `taken`.
        """
        if self.pre_norm is not None:
            x = self.norm(b, self.pre_norm, x)
        for il, block in enumerate(self.blocks):
            if il in tap and taken is not None:
                taken.append(x)
            x = self.layer(b, block, x, rotate, ranges(il) if ranges else None)
        return self.behind(b, x)

    def behind(self, b: PictureGraph, x: Value) -> Value:
        """What becomes of the stream behind the layers."""
        return self.norm(b, self.post_norm, x) if self.post_norm is not None else x

    def norm(self, b: PictureGraph, norm: Norm | None, x: Value) -> Value:
        """RMSNorm or LayerNorm over dimension 0, without weights if there are none."""
        weight, bias = (norm.weight, norm.bias) if norm is not None else (None, None)
        if not self.rms:
            return b.graph.layer_norm(x, weight, bias, self.params.eps)
        x = b.graph.rms_norm(x, weight, self.params.eps)
        return x if bias is None else b.graph.add(x, bias)

    def layer(
        self, b: PictureGraph, layer: EncoderLayer, x: Value, rotate: Rotate | None, ranges: NDArray | None
    ) -> Value:
        """Both branches of a layer added to x [D, T]."""
        attended = self.attention(b, layer, self.norm(b, layer.ln1, x), rotate, ranges)
        x = b.graph.add(x, self._behind(b, attended, layer.attn_scale, layer.attn_post_norm))
        out = self.feed_forward(b, layer, self.norm(b, layer.ln2, x))
        x = b.graph.add(x, self._behind(b, out, layer.ffn_scale, layer.ffn_post_norm))
        return x if layer.out_scale is None else b.graph.mul(x, layer.out_scale)

    def _behind(self, b: PictureGraph, x: Value, scale: Value | None, norm: Norm | None) -> Value:
        if norm is not None:
            x = self.norm(b, norm, x)
        return x if scale is None else b.graph.mul(x, scale)

    def attention(
        self, b: PictureGraph, layer: EncoderLayer, x: Value, rotate: Rotate | None, ranges: NDArray | None
    ) -> Value:
        """Attention of all heads on normed x [D, T], behind its output matrix."""
        q, k = (
            self._heads(b, part, norm, x, rotate) for part, norm in ((layer.q, layer.q_norm), (layer.k, layer.k_norm))
        )
        v = self.values(b, split_heads(b.linear(layer.v, x), self.head_size))
        out = b.attention(q, k, v, scale=self.score_scale, ranges=ranges)
        return b.linear(layer.out, out)

    @property
    def score_scale(self) -> float:
        """Factor of the products of queries and keys."""
        return self.head_size**-0.5

    def values(self, b: PictureGraph, v: Value) -> Value:
        """What becomes of the value heads [d, Hk, T] before attention."""
        return v

    def _heads(self, b: PictureGraph, part: Linear, norm: Norm | None, x: Value, rotate: Rotate | None) -> Value:
        rows = b.linear(part, x)
        head = self.head_size
        if norm is not None and norm.weight.shape[0] != head:
            rows = self.norm(b, norm, rows)
        heads = split_heads(rows, head)
        if norm is not None and norm.weight.shape[0] == head:
            heads = self.norm(b, norm, heads)
        return rotate(b, heads) if rotate else heads

    def feed_forward(self, b: PictureGraph, layer: EncoderLayer, x: Value) -> Value:
        """down(act(up x)), or down(act(gate x) * up x) with a gate, on normed x [D, T]."""
        up = b.linear(layer.up, x)
        if layer.gate is None:
            return b.linear(layer.down, b.activated(up, self.params.activation))
        gate = b.activated(b.linear(layer.gate, x), self.params.activation)
        return b.linear(layer.down, b.graph.mul(gate, up))
