"""bitnet, bitnet-25 and bitnet-b1.58: norms before the output and down projections."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import ClassVar

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph
from ikpy.models.blocks import DenseFFN, Experts
from ikpy.models.feed_forward import take_dense
from ikpy.models.transformer import Attention, Transformer
from ikpy.models.weights import Presence, WeightSource

SCALE_TOLERANCE = 1e-4  # scales this close to 1 are skipped


@dataclass
class SubNormAttention(Attention):
    """Attention with a norm before the output projection and scales of the projections."""

    sub_norm: Value | None = None
    q_scale: float = 1.0
    k_scale: float = 1.0
    v_scale: float = 1.0
    out_scale: float = 1.0


@dataclass
class SubNormFFN(DenseFFN):
    """Feed-forward network with a norm before the down projection and scales of the projections."""

    sub_norm: Value | None = None
    gate_scale: float = 1.0
    up_scale: float = 1.0
    down_scale: float = 1.0


class BitNetB158(Transformer):
    """ReLU^2, no scales; q/k/v biases in a file are not used."""

    rope_freqs_weight: ClassVar[Presence] = "optional"
    rope_neox = True
    activation = "relu_squared"

    def divisible_heads(self, layer: int) -> int:
        return 0  # the norm before the output projection needs all heads

    def load_attention(self, weights: WeightSource, il: int, prefix: str) -> Attention:
        attn = super().load_attention(weights, il, prefix)
        weights.skip(*(f"{prefix}.attn_{name}.bias" for name in ("q", "k", "v")))
        norm = weights.take(f"{prefix}.attn_sub_norm.weight", (attn.out.shape[0],))
        return SubNormAttention(**{f.name: getattr(attn, f.name) for f in fields(attn)}, sub_norm=norm)

    def load_ffn(self, weights: WeightSource, il: int, prefix: str) -> DenseFFN | Experts:
        ffn = take_dense(weights, prefix, self.hp.n_embd, self.hp.n_ff[il])
        norm = weights.take(f"{prefix}.ffn_sub_norm.weight", (self.hp.n_ff[il],))
        return SubNormFFN(ffn.gate, ffn.up, ffn.down, sub_norm=norm)

    def project_heads(self, b: BatchGraph, il: int, attn: Attention, h: Value) -> tuple[Value, Value, Value]:
        assert isinstance(attn, SubNormAttention)
        q, k, v = super().project_heads(b, il, attn, h)
        return _scaled(b, q, attn.q_scale), _scaled(b, k, attn.k_scale), v

    def attention_output(self, b: BatchGraph, attn: Attention, attended: Value) -> Value:
        assert isinstance(attn, SubNormAttention)
        normed = b.graph.rms_norm(attended, attn.sub_norm, self._folded_eps(attn.v_scale))
        return _scaled(b, super().attention_output(b, attn, normed), attn.out_scale)

    def ffn(self, b: BatchGraph, ffn: DenseFFN | Experts, x: Value) -> Value:
        assert isinstance(ffn, SubNormFFN) and ffn.gate is not None
        g = b.graph
        if _is_one(ffn.gate_scale):
            hidden = g.mul_mat_up_gate(ffn.up, ffn.gate, x, self.activation)
        else:
            gate = g.scale(g.mul_mat(ffn.gate, x), ffn.gate_scale)
            hidden = g.gated(gate, g.mul_mat(ffn.up, x), self.activation)
        normed = g.rms_norm(hidden, ffn.sub_norm, self._folded_eps(ffn.up_scale))
        return _scaled(b, g.mul_mat(ffn.down, normed), ffn.down_scale)

    def _folded_eps(self, scale: float) -> float:
        """rms_norm(c x, eps) = rms_norm(x, eps / c^2): the scales of v and up need no pass of their own."""
        return self.hp.norm_eps / (scale * scale)


class BitNet(BitNetB158):
    """SiLU and a scale per ternary matrix."""

    output_weight = "none"
    rope_freqs_weight = "none"
    rotates_whole_head = False
    activation = "silu"

    def load_attention(self, weights: WeightSource, il: int, prefix: str) -> Attention:
        attn = super().load_attention(weights, il, prefix)
        assert isinstance(attn, SubNormAttention)
        attn.q_scale = _matrix_scale(weights, f"{prefix}.attn_q.scale")
        attn.k_scale = _matrix_scale(weights, f"{prefix}.attn_k.scale")
        attn.v_scale = _matrix_scale(weights, f"{prefix}.attn_v.scale")
        attn.out_scale = _matrix_scale(weights, f"{prefix}.attn_output.scale")
        return attn

    def load_ffn(self, weights: WeightSource, il: int, prefix: str) -> DenseFFN | Experts:
        ffn = super().load_ffn(weights, il, prefix)
        assert isinstance(ffn, SubNormFFN)
        ffn.gate_scale = _matrix_scale(weights, f"{prefix}.ffn_gate.scale")
        ffn.up_scale = _matrix_scale(weights, f"{prefix}.ffn_up.scale")
        ffn.down_scale = _matrix_scale(weights, f"{prefix}.ffn_down.scale")
        return ffn


def _matrix_scale(weights: WeightSource, name: str) -> float:
    """The factor of a ternary matrix. FileFormatError unless it is finite and above 0, as magnitudes are."""
    weights.own_factor(name.removesuffix(".scale"))
    scale = weights.scalar(name, 1.0)
    if not 0 < scale < math.inf:
        raise FileFormatError(f"{weights.gguf.path}: tensor '{name}' is {scale:g}; it must be above 0")
    return scale


def _is_one(scale: float) -> bool:
    return abs(scale - 1.0) <= SCALE_TOLERANCE


def _scaled(b: BatchGraph, x: Value, scale: float) -> Value:
    return x if _is_one(scale) else b.graph.scale(x, scale)
