"""Layers of the gated delta rule (arXiv:2412.06464) between layers of gated attention: qwen3next and qwen35."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ikpy.errors import FileFormatError, UnsupportedError
from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph, StateSpec
from ikpy.models.blocks import cached_attention, split_heads
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.prediction import PredictionLayers
from ikpy.models.recurrent_layers import RecurrentLayers, rows_as_heads
from ikpy.models.transformer import Attention, Transformer
from ikpy.models.weights import WeightSource

L2_EPS = 1e-6  # added to the squared length of queries and keys, as published


@dataclass(frozen=True)
class DeltaSizes:
    """Elements of a key and of a value head, number of heads of either, and taps of the convolution."""

    dk: int
    dv: int
    key_heads: int
    heads: int
    n_taps: int

    @property
    def n_keys(self) -> int:
        """Elements of all keys of a token."""
        return self.dk * self.key_heads

    @property
    def n_values(self) -> int:
        """Elements of all values of a token."""
        return self.dv * self.heads

    @property
    def n_channels(self) -> int:
        """What the convolution reads: queries, keys and values."""
        return 2 * self.n_keys + self.n_values


@dataclass
class DeltaNet:
    """Tensors of a recurrent layer; projections holds those that the architecture reads its inputs with."""

    projections: dict[str, Value]
    conv: Value
    dt: Value
    a: Value
    norm: Value
    out: Value
    out_bias: Value | None = None


@dataclass
class DeltaInputs:
    """What a recurrent layer computes of its normed input: mixed [C, T] before the convolution, the gate z [dv*Hv, T],
    beta and alpha [Hv, T] before sigmoid and bias."""

    mixed: Value
    z: Value
    beta: Value
    alpha: Value


class GatedDeltaNet(RecurrentLayers, PredictionLayers, Transformer):
    """Every full_attention_interval-th layer attends, the others are recurrent.

    Attention: the rows of attn_q are a query and a gate for every head, and what was attended to is multiplied with the
    sigmoid of the gate.
    """

    qk_norm = "required"
    rope_neox = True
    rotates_whole_head = False
    ffn_norm_name = "post_attention_norm"
    interleaved_heads: ClassVar[bool] = False
    """Whether neighbouring heads of values share a head of keys, or heads that lie n_key_heads apart."""
    output_gate: ClassVar[str] = "silu"
    """Activation of the gate of what a recurrent layer gives."""

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        where = keys.gguf.path
        self.interval = keys.u32("full_attention_interval", 4)
        inner, heads, key_heads = (keys.u32(f"ssm.{n}") for n in ("inner_size", "time_step_rank", "group_count"))
        dk, n_taps = keys.u32("ssm.state_size"), keys.u32("ssm.conv_kernel")
        if not all((self.interval, inner, heads, key_heads, dk, n_taps)) or inner % heads or heads % key_heads:
            raise FileFormatError(
                f"{where}: impossible recurrent layers: inner_size {inner}, {heads} and {key_heads} heads, state_size "
                f"{dk}, conv_kernel {n_taps}, full_attention_interval {self.interval}"
            )
        if hp.n_embd_head_k != hp.n_embd_head_v:
            raise UnsupportedError(f"{where}: gated heads of keys {hp.n_embd_head_k} and values {hp.n_embd_head_v}")
        self.delta = DeltaSizes(dk, inner // heads, key_heads, heads, n_taps)
        self.take_off_prediction_layers(keys, hp)
        return hp

    def has_state(self, layer: int) -> bool:
        # Layers that predict further tokens attend.
        return self.prediction is None and layer < self.hp.n_layer and (layer + 1) % self.interval != 0

    def layer_states(self) -> list[StateSpec]:
        s = self.delta
        return [StateSpec("conv", (s.n_taps - 1, s.n_channels)), StateSpec("delta", (s.dv, s.dk, s.heads))]

    # tensors

    def take_inputs(self, weights: WeightSource, prefix: str) -> dict[str, Value]:
        """The matrices of `delta_inputs`."""
        raise NotImplementedError

    def load_attention(self, weights: WeightSource, il: int, prefix: str) -> Attention | DeltaNet:  # type: ignore[override]
        if not self.has_state(il):
            return super().load_attention(weights, il, prefix)
        s = self.delta
        return DeltaNet(
            projections=self.take_inputs(weights, prefix),
            conv=weights.take(f"{prefix}.ssm_conv1d.weight", (s.n_taps, s.n_channels)),
            dt=weights.take(f"{prefix}.ssm_dt.bias", (s.heads,)),
            a=weights.take(f"{prefix}.ssm_a", (s.heads,)),
            norm=weights.take(f"{prefix}.ssm_norm.weight", (s.dv,)),
            out=weights.take(f"{prefix}.ssm_out.weight", (s.n_values, self.hp.n_embd)),
        )

    def load_projections(
        self, weights: WeightSource, prefix: str, n_q: int, n_k: int, n_v: int
    ) -> tuple[Value, Value, Value]:
        return super().load_projections(weights, prefix, 2 * n_q, n_k, n_v)

    # graph

    def delta_inputs(self, b: BatchGraph, net: DeltaNet, h: Value) -> DeltaInputs:
        """Projections of the normed input h [D, T] of a recurrent layer."""
        raise NotImplementedError

    def attention(self, b: BatchGraph, il: int, attn: Attention | DeltaNet, h: Value) -> Value:
        if isinstance(attn, DeltaNet):
            return self.recurrence(b, il, attn, h)
        both, k, v = self.project_heads(b, il, attn, h)
        q, gate = (
            both.view((both.shape[0], both.shape[1] // 2, both.shape[2]), (2 * both.strides[1], both.strides[2]), start)
            for start in (0, both.strides[1])
        )
        q, k = self.place_heads(b, il, attn, q, k)
        attended = self.attend(b, il, q, k, v)
        heads = split_heads(attended, self.head_sizes(il).v)
        return b.graph.mul(heads, b.graph.unary(gate, "sigmoid")).reshape(*attended.shape[:2])

    def attend(self, b: BatchGraph, il: int, q: Value, k: Value, v: Value) -> Value:
        """Stores k [dk, Hk, T] and v [dv, Hk, T], and attends with q [dk, H, T]; [dv*H, T]."""
        return cached_attention(b, il, q, k, v, scale=self.attention_scale(il))

    def recurrence(self, b: BatchGraph, il: int, net: DeltaNet, h: Value) -> Value:
        """The delta rule on the normed input h [D, T]; [dv*Hv, T] before the output projection."""
        g, s, slots = b.graph, self.delta, b.inputs["seq"]
        (past, kept_past), (state, kept_state) = (b.recurrent[il, name] for name in ("conv", "delta"))
        inputs = self.delta_inputs(b, net, h)
        mixed = g.causal_conv(inputs.mixed, net.conv, past, slots, silu=True, kept=b.kept(kept_past))
        q, k = (rows_as_heads(mixed, start, s.dk, s.key_heads) for start in (0, s.n_keys))
        decay = g.mul(g.unary(g.add(inputs.alpha, net.dt), "softplus"), net.a)
        out = g.gated_delta_rule(
            q,
            k,
            rows_as_heads(mixed, 2 * s.n_keys, s.dv, s.heads),
            decay,
            g.unary(inputs.beta, "sigmoid"),
            state,
            slots,
            l2_eps=L2_EPS,
            scale=1.0 / math.sqrt(s.dk),
            interleaved=self.interleaved_heads,
            kept=b.kept(kept_state),
        )
        normed = g.rms_norm(out, net.norm, self.hp.norm_eps)
        return g.gated(inputs.z, normed.reshape(s.n_values, b.n_tokens), self.output_gate)
