"""llama: LLaMA 1/2/3, Mistral, Mixtral and look-alikes (model semantics 3.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value, external
from ikpy.models.base import Decoder
from ikpy.models.batch import BatchGraph
from ikpy.models.blocks import DenseFFN, Experts, Routing, cached_attention, dense_ffn, moe_ffn, split_heads
from ikpy.models.hparams import HParams, read_hparams
from ikpy.models.keys import Keys
from ikpy.models.weights import WeightSource


@dataclass
class Attention:
    """Projections of standard attention; biases are optional."""

    q: Value
    k: Value
    v: Value
    out: Value
    q_bias: Value | None = None
    k_bias: Value | None = None
    v_bias: Value | None = None
    out_bias: Value | None = None
    q_norm: Value | None = None
    k_norm: Value | None = None


@dataclass
class Layer:
    """Norms, attention and feed-forward network of a pre-norm block."""

    attn_norm: Value
    attn: Attention
    ffn_norm: Value
    ffn: DenseFFN | Experts


class Llama(Decoder):
    """Pre-norm blocks with standard attention; the base of several architectures."""

    qkv_bias: str = "optional"  # optional, required, none
    out_bias: bool = True
    qk_norm: bool = False
    ffn_bias: bool = True
    rope_scale_from_metadata = True
    rotates_whole_head: bool = True

    def read_hparams(self, keys: Keys) -> HParams:
        hp = read_hparams(keys)
        if self.rotates_whole_head and hp.n_rot != hp.n_embd_head_k:
            raise FileFormatError(
                f"{keys.gguf.path}: invalid n_rot: {hp.n_rot}, expected {hp.n_embd_head_k} (the key head size)"
            )
        return hp

    def load_global(self, weights: WeightSource) -> None:
        self.rope_freqs = weights.take("rope_freqs.weight", (self.hp.n_rot // 2,), required=False)

    # --- tensors ----------------------------------------------------------------------------------------------

    def load_attention(self, weights: WeightSource, il: int, prefix: str) -> Attention:
        """Projections with biases and head norms as the architecture has them."""
        hp = self.hp
        dk, dv, heads, kv = hp.n_embd_head_k, hp.n_embd_head_v, hp.n_head[il], hp.n_head_kv[il]

        def bias(name: str, n: int) -> Value | None:
            if self.qkv_bias == "none":
                return None
            return weights.take(f"{prefix}.{name}.bias", (n,), required=self.qkv_bias == "required")

        attn = Attention(
            q=weights.take(f"{prefix}.attn_q.weight", (hp.n_embd, dk * heads)),
            k=weights.take(f"{prefix}.attn_k.weight", (hp.n_embd, dk * kv)),
            v=weights.take(f"{prefix}.attn_v.weight", (hp.n_embd, dv * kv)),
            out=weights.take(f"{prefix}.attn_output.weight", (dv * heads, hp.n_embd)),
            q_bias=bias("attn_q", dk * heads),
            k_bias=bias("attn_k", dk * kv),
            v_bias=bias("attn_v", dv * kv),
        )
        if self.out_bias:
            attn.out_bias = weights.take(f"{prefix}.attn_output.bias", (hp.n_embd,), required=False)
        if self.qk_norm:
            attn.q_norm = weights.take(f"{prefix}.attn_q_norm.weight", (dk,))
            attn.k_norm = weights.take(f"{prefix}.attn_k_norm.weight", (dk,))
        return attn

    def load_dense_ffn(self, weights: WeightSource, il: int, prefix: str, n_ff: int | None = None) -> DenseFFN:
        """Gate, up and down matrices of width n_ff (default: the layer's feed_forward_length)."""
        d, f = self.hp.n_embd, n_ff or self.hp.n_ff[il]
        ffn = DenseFFN(
            gate=weights.take(f"{prefix}.ffn_gate.weight", (d, f)),
            up=weights.take(f"{prefix}.ffn_up.weight", (d, f)),
            down=weights.take(f"{prefix}.ffn_down.weight", (f, d)),
        )
        if self.ffn_bias:
            ffn.gate_bias = weights.take(f"{prefix}.ffn_gate.bias", (f,), required=False)
            ffn.up_bias = weights.take(f"{prefix}.ffn_up.bias", (f,), required=False)
            ffn.down_bias = weights.take(f"{prefix}.ffn_down.bias", (d,), required=False)
        return ffn

    def load_experts(self, weights: WeightSource, prefix: str, n_ff: int) -> Experts:
        """Router and 3-D expert tensors, or the legacy tensor per expert."""
        d, n = self.hp.n_embd, self.hp.n_expert
        router = weights.take(f"{prefix}.ffn_gate_inp.weight", (d, n))
        if not weights.has(f"{prefix}.ffn_gate_exps.weight") and weights.has(f"{prefix}.ffn_gate.0.weight"):
            return Experts(
                router,
                up=_join_experts(weights, f"{prefix}.ffn_up", n, (d, n_ff)),
                gate=_join_experts(weights, f"{prefix}.ffn_gate", n, (d, n_ff)),
                down=_join_experts(weights, f"{prefix}.ffn_down", n, (n_ff, d)),
            )
        return Experts(
            router,
            up=weights.take(f"{prefix}.ffn_up_exps.weight", (d, n_ff, n)),
            gate=weights.take(f"{prefix}.ffn_gate_exps.weight", (d, n_ff, n)),
            down=weights.take(f"{prefix}.ffn_down_exps.weight", (n_ff, d, n)),
        )

    def load_ffn(self, weights: WeightSource, il: int, prefix: str) -> DenseFFN | Experts:
        """Dense or expert feed-forward network of a layer."""
        if self.hp.n_expert:
            return self.load_experts(weights, prefix, self.hp.n_ff[il])
        return self.load_dense_ffn(weights, il, prefix)

    def load_layer(self, weights: WeightSource, il: int, prefix: str) -> Layer:
        norm = (self.hp.n_embd,)
        return Layer(
            attn_norm=weights.take(f"{prefix}.attn_norm.weight", norm),
            attn=self.load_attention(weights, il, prefix),
            ffn_norm=weights.take(f"{prefix}.ffn_norm.weight", norm),
            ffn=self.load_ffn(weights, il, prefix),
        )

    # --- graph ------------------------------------------------------------------------------------------------

    def routing(self) -> Routing:
        """Softmax over all experts, renormalised."""
        return Routing(self.hp.n_expert_used, "softmax", normalize=True)

    def rope_factors(self, layer: int) -> Value | None:
        return self.rope_freqs

    def rotate(self, b: BatchGraph, il: int, x: Value) -> Value:
        """RoPE of q or k [dk, H, T]."""
        table = b.rope_table(self.hp.n_rot, self.rope_params(b.params.rope), self.rope_freqs)
        return b.graph.rope(x, table, neox=self.rope_neox)

    def attention(self, b: BatchGraph, il: int, attn: Attention, h: Value) -> Value:
        """Standard attention on the normed input; [dv*H, T] before the output projection."""
        g, hp = b.graph, self.hp
        q = split_heads(g.mul_mat(attn.q, h, attn.q_bias), hp.n_embd_head_k)
        k = split_heads(g.mul_mat(attn.k, h, attn.k_bias), hp.n_embd_head_k)
        v = split_heads(g.mul_mat(attn.v, h, attn.v_bias), hp.n_embd_head_v)
        if attn.q_norm is not None and attn.k_norm is not None:
            q = g.rms_norm(q, attn.q_norm, hp.norm_eps)
            k = g.rms_norm(k, attn.k_norm, hp.norm_eps)
        q, k = self.rotate(b, il, q), self.rotate(b, il, k)
        return cached_attention(b, il, q, k, v, scale=1.0 / math.sqrt(hp.n_embd_head_k))

    def ffn(self, b: BatchGraph, il: int, ffn: DenseFFN | Experts, x: Value) -> Value:
        """Feed-forward network on the normed input."""
        if isinstance(ffn, Experts):
            return moe_ffn(b, ffn, self.routing(), x)
        return dense_ffn(b, ffn, x)

    def layer(self, b: BatchGraph, il: int, x: Value) -> Value:
        g = b.graph
        layer: Layer = self.layers[il]  # type: ignore[assignment]
        attended = self.attention(b, il, layer.attn, self.norm(b, x, layer.attn_norm))
        attended, x = b.keep_outputs(il, self.hp.n_layer, attended, x)
        x = g.add(x, g.mul_mat(layer.attn.out, attended, layer.attn.out_bias))
        return g.add(x, self.ffn(b, il, layer.ffn, self.norm(b, x, layer.ffn_norm)))


def _join_experts(weights: WeightSource, name: str, n_expert: int, shape: tuple[int, int]) -> Value:
    """Concatenates the legacy 2-D tensors `name.X.weight` along the expert axis."""
    parts = [weights.take(f"{name}.{e}.weight", shape) for e in range(n_expert)]
    if len({p.type_id for p in parts}) != 1:
        raise FileFormatError(f"{weights.gguf.path}: the experts of {name} have different types")
    data = np.concatenate([weights.gguf.data(weights.gguf.tensors[f"{name}.{e}.weight"]) for e in range(n_expert)])
    return external(data.ctypes.data, data, parts[0].type_id, (*shape, n_expert), f"{name}_exps.weight")
