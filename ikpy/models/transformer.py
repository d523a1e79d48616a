"""Pre-norm blocks with standard attention: what nearly all architectures share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.models.base import Decoder
from ikpy.models.batch import FULL, BatchGraph, GraphParams, Window
from ikpy.models.blocks import (
    DenseFFN,
    Experts,
    cached_attention,
    clamped,
    dense_ffn,
    gated_heads,
    moe_ffn,
    split_heads,
)
from ikpy.models.feed_forward import take_dense, take_experts, take_fused_dense
from ikpy.models.hparams import HeadSizes, HParams, read_hparams
from ikpy.models.keys import Keys
from ikpy.models.weights import Presence, WeightSource, split_rows


@dataclass
class Attention:
    """Projections of standard attention; biases, norms and sinks are optional.

    k is None in layers that attend to the cache of another one, v also where the keys before norm and RoPE are the
    values.
    """

    q: Value
    out: Value
    k: Value | None = None
    v: Value | None = None
    q_bias: Value | None = None
    k_bias: Value | None = None
    v_bias: Value | None = None
    out_bias: Value | None = None
    q_norm: Value | None = None
    k_norm: Value | None = None
    sinks: Value | None = None
    gate: Value | None = None


@dataclass
class Layer:
    """Norms, attention and feed-forward network of a block; post norms apply to the branches."""

    attn_norm: Value | None
    attn: Attention
    ffn_norm: Value | None
    ffn: DenseFFN | Experts
    attn_post_norm: Value | None = None
    ffn_post_norm: Value | None = None


class Transformer(Decoder):
    """The plain form: no biases, whole heads rotated, SiLU. Architectures change attributes and override methods."""

    qkv_bias: ClassVar[Presence] = "none"
    out_bias: ClassVar[Presence] = "none"
    ffn_bias: ClassVar[Presence] = "none"
    qk_norm: ClassVar[Presence] = "none"
    head_norm_bias: ClassVar[Presence] = "none"
    norms_all_heads: ClassVar[bool] = False
    norms_heads_apart: ClassVar[bool] = False
    """Whether every head of q and k has norm weights of its own."""
    norms_after_rope: ClassVar[bool] = False
    attn_sinks: ClassVar[Presence] = "none"
    attn_gate: ClassVar[Presence] = "none"
    gate_activation: ClassVar[str] = "sigmoid"
    pre_norms: ClassVar[Presence] = "required"
    post_norms: ClassVar[Presence] = "none"
    selection_bias: ClassVar[Presence] = "none"
    rope_freqs_weight: ClassVar[Presence] = "none"
    ffn_norm_name: str = "ffn_norm"
    fused_qkv: ClassVar[Presence] = "none"
    fused_ffn: ClassVar[bool] = False
    gated_ffn: ClassVar[bool] = True
    activation: ClassVar[str] = "silu"
    rotates_whole_head: ClassVar[bool] = True
    parallel: bool = False
    """Whether the network reads what attention reads, under its own norm or, where that is the same, the same rows."""
    has_window: Sequence[bool] = ()
    """Layers that attend to hp.n_swa tokens, in architectures whose files say so."""

    def read_hparams(self, keys: Keys) -> HParams:
        hp = read_hparams(
            keys,
            layer_norm=self.layer_norm,
            may_lack_heads=self.may_lack_heads,
            long_rope=self.has_long_rope,
            epsilon_key=self.epsilon_key,
        )
        for sizes in (HeadSizes(hp.n_embd_head_k, hp.n_embd_head_v, hp.n_rot), hp.window_heads):
            if self.rotates_whole_head and sizes.rotated != sizes.k:
                raise FileFormatError(
                    f"{keys.gguf.path}: invalid n_rot: {sizes.rotated}, expected {sizes.k} (the key head size)"
                )
        return hp

    def window(self, layer: int) -> Window:
        return ("sliding", self.hp.n_swa) if self.has_window and self.has_window[layer] else FULL

    def shift_part(self, layer: int, params: GraphParams) -> tuple[str, int, int] | None:
        # A norm weight between the rotation and the cached keys: they cannot be rotated further.
        return None if self.norms_after_rope else super().shift_part(layer, params)

    def divisible_heads(self, layer: int) -> int:
        # A norm of all heads together needs them on one device.
        return 0 if self.norms_all_heads else self.hp.n_head_kv[layer]

    def is_moe(self, layer: int) -> bool:
        """Whether the layer has experts instead of a dense feed-forward network."""
        return self.hp.n_expert > 0 and layer >= self.hp.n_dense_layers

    def attention_scale(self, layer: int) -> float:
        """Factor of the attention scores of a layer."""
        return 1.0 / math.sqrt(self.head_sizes(layer).k)

    def rope_factors(self, layer: int, params: GraphParams) -> Value | None:
        return self.rope_freqs

    # tensors

    def load_global(self, weights: WeightSource) -> None:
        self.rope_freqs = weights.take_if(self.rope_freqs_weight, "rope_freqs.weight", (self.hp.n_rot // 2,))

    def load_attention(self, weights: WeightSource, il: int, prefix: str) -> Attention:
        """Projections with biases and head norms as the architecture has them."""
        hp, sizes = self.hp, self.head_sizes(il)
        dk, dv, heads, kv = sizes.k, sizes.v, hp.n_head[il], hp.n_head_kv[il]
        q, k, v = self.load_projections(weights, prefix, dk * heads, dk * kv, dv * kv)
        q_bias, k_bias, v_bias = self.load_biases(weights, prefix, dk * heads, dk * kv, dv * kv)
        q_norm, k_norm = self.head_norm_shape(dk, heads), self.head_norm_shape(dk, kv)
        return Attention(
            q=q,
            k=k,
            v=v,
            out=weights.take(f"{prefix}.attn_output.weight", (dv * heads, hp.n_embd)),
            q_bias=q_bias,
            k_bias=k_bias,
            v_bias=v_bias,
            out_bias=weights.take_if(self.out_bias, f"{prefix}.attn_output.bias", (hp.n_embd,)),
            q_norm=self.take_head_norm(weights, f"{prefix}.attn_q_norm", q_norm),
            k_norm=self.take_head_norm(weights, f"{prefix}.attn_k_norm", k_norm),
            sinks=weights.take_if(self.attn_sinks, f"{prefix}.attn_sinks.weight", (heads,)),
            gate=weights.take_if(
                self.attn_gate, f"{prefix}.attn_gate.weight", (hp.n_embd, heads), (hp.n_embd, dv * heads)
            ),
        )

    def head_norm_shape(self, head_size: int, heads: int) -> tuple[int, ...]:
        """Weights of a norm of q or k."""
        if self.norms_all_heads:
            return (head_size * heads,)
        return (head_size, heads) if self.norms_heads_apart else (head_size,)

    def take_head_norm(self, weights: WeightSource, name: str, shape: tuple[int, ...]) -> Value | None:
        """The weight of a norm of q or k; its bias, if it has one, is kept for `norm`."""
        weight = weights.take_if(self.qk_norm, f"{name}.weight", shape)
        bias = weights.take_if(self.head_norm_bias, f"{name}.bias", shape) if weight is not None else None
        if weight is not None and bias is not None:
            self.norm_biases[weight.name] = bias
        return weight

    def load_projections(
        self, weights: WeightSource, prefix: str, n_q: int, n_k: int, n_v: int
    ) -> tuple[Value, Value, Value]:
        """q, k and v matrices; the parts of a fused attn_qkv are views of it."""
        d = self.hp.n_embd
        if not self.is_fused(weights, prefix):
            sizes = {"q": n_q, "k": n_k, "v": n_v}
            q, k, v = (weights.take(f"{prefix}.attn_{name}.weight", (d, n)) for name, n in sizes.items())
            return q, k, v
        fused = weights.take(f"{prefix}.attn_qkv.weight", (d, n_q + n_k + n_v), parts=(n_q, n_k, n_v))
        q, k, v = split_rows(fused, n_q, n_k, n_v)
        return q, k, v

    def is_fused(self, weights: WeightSource, prefix: str) -> bool:
        """Whether q, k and v of a layer are one tensor."""
        is_there = self.fused_qkv == "optional" and weights.has(f"{prefix}.attn_qkv.weight")
        return is_there or self.fused_qkv == "required"

    def load_biases(self, weights: WeightSource, prefix: str, n_q: int, n_k: int, n_v: int) -> list[Value | None]:
        """Biases of q, k and v, if there are any; the parts of a fused one are views of it."""
        if not self.is_fused(weights, prefix):
            sizes = {"q": n_q, "k": n_k, "v": n_v}
            return [weights.take_if(self.qkv_bias, f"{prefix}.attn_{name}.bias", (n,)) for name, n in sizes.items()]
        fused = weights.take_if(self.qkv_bias, f"{prefix}.attn_qkv.bias", (n_q + n_k + n_v,))
        if fused is None:
            return [None] * 3
        return [fused.slice0(start, n) for start, n in ((0, n_q), (n_q, n_k), (n_q + n_k, n_v))]

    def load_ffn(self, weights: WeightSource, il: int, prefix: str) -> DenseFFN | Experts:
        """Dense or expert feed-forward network of a layer."""
        hp = self.hp
        if self.is_moe(il):
            return take_experts(
                weights,
                prefix,
                hp.n_embd,
                hp.n_expert,
                hp.n_ff_exp or hp.n_ff[il],
                n_ff_shared=hp.n_ff_shared,
                selection_bias=self.selection_bias,
            )
        if self.fused_ffn:
            return take_fused_dense(weights, prefix, hp.n_embd, hp.n_ff[il])
        return take_dense(weights, prefix, hp.n_embd, hp.n_ff[il], bias=self.ffn_bias, gated=self.gated_ffn)

    def load_layer(self, weights: WeightSource, il: int, prefix: str) -> Layer:
        return Layer(
            attn_norm=self.take_norm(weights, f"{prefix}.attn_norm", self.pre_norms),
            attn=self.load_attention(weights, il, prefix),
            ffn_norm=self.take_norm(weights, f"{prefix}.{self.ffn_norm_name}", self.pre_norms),
            ffn=self.load_ffn(weights, il, prefix),
            attn_post_norm=self.take_norm(weights, f"{prefix}.post_attention_norm", self.post_norms),
            ffn_post_norm=self.take_norm(weights, f"{prefix}.post_ffw_norm", self.post_norms),
        )

    # graph

    def project_heads(self, b: BatchGraph, il: int, attn: Attention, h: Value) -> tuple[Value, Value, Value]:
        """q [dk, H, T], k [dk, Hk, T] and v [dv, Hk, T] of the normed input."""
        g, sizes = b.graph, self.head_sizes(il)
        assert attn.k is not None and attn.v is not None
        q, k, v = (
            g.mul_mat(weight, h, bias)
            for weight, bias in ((attn.q, attn.q_bias), (attn.k, attn.k_bias), (attn.v, attn.v_bias))
        )
        if self.hp.qkv_clamp > 0:
            q, k, v = (clamped(b, x, self.hp.qkv_clamp) for x in (q, k, v))
        return split_heads(q, sizes.k), split_heads(k, sizes.k), split_heads(v, sizes.v)

    def norm_head(self, b: BatchGraph, x: Value, weight: Value | None) -> Value:
        """Norm of every head of q or k [dk, H, T], or of all heads together, if the layer has one."""
        if weight is None:
            return x
        rows = x.reshape(x.shape[0] * x.shape[1], x.shape[2]) if self.norms_all_heads else x
        return self.norm(b, rows, weight).reshape(*x.shape[:3])

    def rotate(self, b: BatchGraph, il: int, x: Value) -> Value:
        """RoPE of q or k [dk, H, T] on the layers that have it."""
        if not self.is_rotated(il):
            return x
        rope = self.rope_params(il, b.params.rope)
        table = b.rope_table(self.head_sizes(il).rotated, rope, self.rope_factors(il, b.params))
        return b.graph.rope(x, table, neox=self.rope_neox)

    def place_heads(self, b: BatchGraph, il: int, attn: Attention, q: Value, k: Value) -> tuple[Value, Value]:
        """q and k after head norms and RoPE."""
        if self.norms_after_rope:
            q, k = self.rotate(b, il, q), self.rotate(b, il, k)
            return self.norm_head(b, q, attn.q_norm), self.norm_head(b, k, attn.k_norm)
        q, k = self.norm_head(b, q, attn.q_norm), self.norm_head(b, k, attn.k_norm)
        return self.rotate(b, il, q), self.rotate(b, il, k)

    def attention(self, b: BatchGraph, il: int, attn: Attention, h: Value) -> Value:
        """Standard attention on the normed input; [dv*H, T] before the output projection."""
        q, k, v = self.project_heads(b, il, attn, h)
        q, k = self.place_heads(b, il, attn, q, k)
        attended = cached_attention(
            b,
            il,
            q,
            k,
            v,
            scale=self.attention_scale(il),
            window=self.window(il),
            softcap=self.hp.attn_softcap,
            sinks=attn.sinks,
            max_bias=self.hp.max_alibi_bias,
        )
        if attn.gate is None:
            return attended
        return gated_heads(b, attn.gate, h, attended, self.head_sizes(il).v, self.gate_activation)

    def attention_output(self, b: BatchGraph, attn: Attention, attended: Value) -> Value:
        """Output projection [dv*H, T] -> [D, T]."""
        return b.graph.mul_mat(attn.out, attended, attn.out_bias)

    def ffn(self, b: BatchGraph, ffn: DenseFFN | Experts, x: Value) -> Value:
        """Feed-forward network on the normed input."""
        if isinstance(ffn, Experts):
            return moe_ffn(b, ffn, self.hp.routing, x, self.activation)
        return dense_ffn(b, ffn, x, self.activation)

    def add_branch(self, b: BatchGraph, x: Value, branch: Value, post_norm: Value | None) -> Value:
        """Residual stream x plus a branch, normed and scaled where the architecture says so."""
        if post_norm is not None:
            branch = self.norm(b, branch, post_norm)
        if self.hp.residual_scale != 1.0:
            branch = b.graph.scale(branch, self.hp.residual_scale)
        return b.graph.add(x, branch)

    def token_inputs(self, b: BatchGraph, il: int, x: Value) -> Sequence[Value]:
        """What `behind_attention` of a layer reads beside its input x and the attended rows, a row for every token."""
        return ()

    def shares_norm(self, layer: Layer) -> bool:
        """Whether one norm feeds both branches of a layer."""
        norms = layer.attn_norm, layer.ffn_norm
        return self.parallel and (norms[1] is None or (norms[0] is not None and norms[0].name == norms[1].name))

    def layer(self, b: BatchGraph, il: int, x: Value) -> Value:
        layer: Layer = self.layers[il]  # type: ignore[assignment]
        h = self.norm(b, x, layer.attn_norm)
        attended = self.attention(b, il, layer.attn, h)
        rows = (attended, x, *((h,) if self.shares_norm(layer) else self.token_inputs(b, il, x)))
        kept = b.keep_outputs(il, self.hp.n_layer, *rows)
        if b.keeps_states and kept[1] is not x:
            # Apart from the output rows: those must round as they do in a context that keeps no states.
            b.unreduced = self.behind_attention(b, layer, *rows)
        return self.behind_attention(b, layer, *kept)

    def behind_attention(self, b: BatchGraph, layer: Layer, attended: Value, x: Value, *inputs: Value) -> Value:
        """The rest of a layer on the rows x [D, n] of the residual stream and what their tokens attended to.

        inputs: the same rows of `token_inputs`, or what attention has read where the network reads it, too.
        """
        before = x
        x = self.add_branch(b, x, self.attention_output(b, layer.attn, attended), layer.attn_post_norm)
        h = inputs[0] if self.shares_norm(layer) else self.norm(b, before if self.parallel else x, layer.ffn_norm)
        return self.add_branch(b, x, self.ffn(b, layer.ffn, h), layer.ffn_post_norm)
