"""Layers of T5 and its kin (arXiv:1910.10683): RMS norms before the branches, scores that are not scaled."""

from __future__ import annotations

from dataclasses import dataclass

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph
from ikpy.models.blocks import DenseFFN, dense_ffn, split_heads
from ikpy.models.feed_forward import take_dense
from ikpy.models.hparams import HParams
from ikpy.models.relative_biases import take_biases
from ikpy.models.weights import WeightSource


@dataclass
class Projections:
    """Matrices of attention, with the norm before it."""

    norm: Value
    q: Value
    k: Value
    v: Value
    out: Value


@dataclass
class T5Layer:
    """Attention and network of a layer; a decoder's attends to the encoder's text in between (cross).

    biases: f32 [differences, H] of the layer's own attention.
    """

    attn: Projections
    biases: Value
    cross: Projections | None
    ffn_norm: Value
    ffn: DenseFFN


def take_projections(weights: WeightSource, hp: HParams, prefix: str, name: str) -> Projections:
    """`prefix.name_{norm,q,k,v,o}`."""
    n, heads = hp.n_embd, hp.n_head[0]
    dk, dv = hp.n_embd_head_k * heads, hp.n_embd_head_v * heads
    return Projections(
        norm=weights.take(f"{prefix}.{name}_norm.weight", (n,)),
        q=weights.take(f"{prefix}.{name}_q.weight", (n, dk)),
        k=weights.take(f"{prefix}.{name}_k.weight", (n, dk)),
        v=weights.take(f"{prefix}.{name}_v.weight", (n, dv)),
        out=weights.take(f"{prefix}.{name}_o.weight", (dv, n)),
    )


def take_layers(weights: WeightSource, hp: HParams, stack: str, n_layer: int, n_buckets: int) -> list[T5Layer]:
    """The layers of a stack, "enc" or "dec". Those without biases of their own have the first one's (all but UMT5)."""
    layers: list[T5Layer] = []
    for il in range(n_layer):
        prefix, is_encoder = f"{stack}.blk.{il}", stack == "enc"
        attn = take_projections(weights, hp, prefix, "attn")
        name = f"{prefix}.attn_rel_b.weight"
        biases = take_biases(weights, name, hp.n_head[0], n_buckets, both_ways=is_encoder)
        if biases is None and not layers:
            raise FileFormatError(f"{weights.gguf.path}: tensor '{name}' not found")
        cross = None if is_encoder else take_projections(weights, hp, prefix, "cross_attn")
        weights.skip(f"{prefix}.cross_attn_rel_b.weight")  # attention to another text knows no positions
        gated = weights.has(f"{prefix}.ffn_gate.weight")
        layers.append(
            T5Layer(
                attn=attn,
                biases=biases or layers[0].biases,
                cross=cross,
                ffn_norm=weights.take(f"{prefix}.ffn_norm.weight", (hp.n_embd,)),
                ffn=take_dense(weights, prefix, hp.n_embd, hp.n_ff[0], gated=gated),
            )
        )
    return layers


def heads(b: BatchGraph, weight: Value, x: Value, head_size: int) -> Value:
    """Rows of q, k or v [d, H, T] of x [D, T]."""
    return split_heads(b.graph.mul_mat(weight, x), head_size)


def with_network(b: BatchGraph, layer: T5Layer, x: Value, eps: float) -> Value:
    """x [D, T] plus the network of its norm: GEGLU by tanh where there is a gate, ReLU otherwise."""
    h = b.graph.rms_norm(x, layer.ffn_norm, eps)
    return b.graph.add(x, dense_ffn(b, layer.ffn, h, "relu" if layer.ffn.gate is None else "gelu"))
