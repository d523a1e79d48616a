"""kimi-linear: Kimi Linear, delta attention with a decay per channel (KDA, arXiv:2510.26692) between layers of latent
attention that know no positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph, StateSpec
from ikpy.models.blocks import split_heads
from ikpy.models.deepseek2 import DeepSeek2
from ikpy.models.delta_net import L2_EPS
from ikpy.models.hparams import HParams, check_any_heads
from ikpy.models.keys import REQUIRED, Keys
from ikpy.models.latent_attention import LatentAttention
from ikpy.models.recurrent_layers import RecurrentLayers
from ikpy.models.weights import WeightSource

QKV = ("q", "k", "v")


@dataclass
class DeltaAttention:
    """Tensors of a KDA layer; projections and convolutions by the letter of what they make.

    decay, gate: what makes the decay and the gate of the output of h, one matrix behind the other.
    """

    projections: dict[str, Value]
    convolutions: dict[str, Value]
    decay: tuple[Value, ...]
    gate: tuple[Value, ...]
    dt: Value
    a: Value
    beta: Value
    norm: Value
    out: Value


class KimiLinear(RecurrentLayers, DeepSeek2):
    """Layers without KV heads are KDA layers; the others attend as DeepSeek V2 without RoPE. Sigmoid routing."""

    may_lack_heads = True
    has_rope = False
    expects_kv_b = False
    default_n_dense = 0
    default_weights_scale = 1.0
    default_weights_norm: ClassVar[bool] = True
    rates_are_negative: ClassVar[bool] = True
    """Whether ssm_a holds -rate."""
    lower_bound: float | None = None
    """Of the logarithms of decays, if there is one."""

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        check_any_heads(keys, hp)
        self.head_dim, self.n_taps = keys.u32("kda.head_dim"), keys.u32("ssm.conv_kernel")
        if not self.head_dim or not self.n_taps:
            raise FileFormatError(
                f"{keys.gguf.path}: impossible KDA layers: head_dim {self.head_dim}, conv_kernel {self.n_taps}"
            )
        return hp

    def read_lower_bound(self, keys: Keys, default: Any = REQUIRED) -> None:
        """Reads the bound of an architecture that has one. FileFormatError unless it is below 0."""
        self.lower_bound = bound = keys.f32("kda.gate_lower_bound", default)
        if bound is not None and bound >= 0:
            raise FileFormatError(f"{keys.gguf.path}: {keys.arch}.kda.gate_lower_bound is {bound:g}, not below 0")

    def default_gating(self, hp: HParams) -> int:
        return 2

    @property
    def n_channels(self) -> int:
        """Elements of the queries of a token in a KDA layer, as many as of its keys and values."""
        return self.head_dim * self.hp.n_head[0]

    def layer_states(self) -> list[StateSpec]:
        size, heads = self.head_dim, self.hp.n_head[0]
        past = [StateSpec(f"conv_{name}", (self.n_taps - 1, self.n_channels)) for name in QKV]
        return [*past, StateSpec("delta", (size, size, heads))]

    # tensors

    def _load_attention(  # type: ignore[override]
        self, weights: WeightSource, il: int, prefix: str
    ) -> LatentAttention | DeltaAttention:
        if not self.has_state(il):
            return super()._load_attention(weights, il, prefix)
        d, size, n, heads = self.hp.n_embd, self.head_dim, self.n_channels, self.hp.n_head[0]

        return DeltaAttention(
            projections={name: weights.take(f"{prefix}.attn_{name}.weight", (d, n)) for name in QKV},
            convolutions={name: self._take_taps(weights, f"{prefix}.ssm_conv1d_{name}.weight") for name in QKV},
            decay=self.take_gate(weights, f"{prefix}.ssm_f"),
            gate=self.take_gate(weights, f"{prefix}.ssm_g"),
            dt=weights.take(f"{prefix}.ssm_dt.bias", (n,)),
            a=weights.take(f"{prefix}.ssm_a", (1, heads), (heads,)).reshape(1, heads),
            beta=weights.take(f"{prefix}.ssm_beta.weight", (d, heads)),
            norm=weights.take(f"{prefix}.ssm_norm.weight", (size,)),
            out=weights.take(f"{prefix}.attn_output.weight", (n, d)),
        )

    def take_gate(self, weights: WeightSource, name: str) -> tuple[Value, ...]:
        """Two matrices, the first of which leaves as many rows as a head has elements."""
        size = self.head_dim
        first = weights.take(f"{name}_a.weight", (self.hp.n_embd, size))
        return first, weights.take(f"{name}_b.weight", (size, self.n_channels))

    def _take_taps(self, weights: WeightSource, name: str) -> Value:
        """Taps [n_taps, C]; files have a dimension of 1 between, or none."""
        taps, n = self.n_taps, self.n_channels
        found = weights.take(name, (taps, 1, n), (taps, n))
        weights.values[name] = found = found.reshape(taps, n)
        return found

    # graph

    def attention(self, b: BatchGraph, il: int, attn: LatentAttention | DeltaAttention, h: Value) -> Value:
        if isinstance(attn, DeltaAttention):
            return self.recurrence(b, il, attn, h)
        return super().attention(b, il, attn, h)

    def decay(self, b: BatchGraph, net: DeltaAttention, h: Value) -> Value:
        """Logarithms [n, H, T] of what remains of a state's channels for the normed input h [D, T]: a softplus of the
        steps times -rate or, in models with a lower bound, bound * sigmoid(rate * step).
        """
        g, steps = b.graph, product(b, net.decay, h, net.dt)
        if self.lower_bound is None:
            return g.mul(split_heads(g.unary(steps, "softplus"), self.head_dim), net.a)
        share = g.mul(split_heads(steps, self.head_dim), net.a)
        share = g.scale(share, -1.0) if self.rates_are_negative else share
        return g.scale(g.unary(share, "sigmoid"), self.lower_bound)

    def recurrence(self, b: BatchGraph, il: int, net: DeltaAttention, h: Value) -> Value:
        """KDA on the normed input h [D, T]; [C, T] before the output projection."""
        g, size, slots = b.graph, self.head_dim, b.inputs["seq"]

        def convolved(name: str) -> Value:
            past, kept = b.recurrent[il, f"conv_{name}"]
            x = g.mul_mat(net.projections[name], h)
            x = g.causal_conv(x, net.convolutions[name], past, slots, silu=True, kept=b.kept(kept))
            return split_heads(x, size)

        q, k, v = (convolved(name) for name in QKV)
        state, kept = b.recurrent[il, "delta"]
        out = g.gated_delta_rule(
            q,
            k,
            v,
            self.decay(b, net, h),
            g.unary(g.mul_mat(net.beta, h), "sigmoid"),
            state,
            slots,
            l2_eps=L2_EPS,
            scale=1.0 / math.sqrt(size),
            interleaved=False,
            kept=b.kept(kept),
        )
        normed = g.rms_norm(out, net.norm, self.hp.norm_eps)
        return g.gated(product(b, net.gate, h), normed.reshape(self.n_channels, b.n_tokens), "sigmoid")


def product(b: BatchGraph, matrices: tuple[Value, ...], h: Value, bias: Value | None = None) -> Value:
    """h [D, T] through matrices one behind the other, plus a bias."""
    for matrix in matrices[:-1]:
        h = b.graph.mul_mat(matrix, h)
    return b.graph.mul_mat(matrices[-1], h, bias)
