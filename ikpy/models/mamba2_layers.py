"""Layers of Mamba-2 (arXiv:2405.21060): a short convolution, a selective scan, a gated norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph, StateSpec
from ikpy.models.keys import Keys
from ikpy.models.recurrent_layers import RecurrentLayers, rows_as_heads
from ikpy.models.weights import WeightSource


@dataclass(frozen=True)
class Mamba2Sizes:
    """Elements of all heads together, number of heads and of the groups that share B and C, elements of these, and taps
    of the convolution.
    """

    inner: int
    heads: int
    groups: int
    state: int
    n_taps: int

    @property
    def head(self) -> int:
        """Elements of a head."""
        return self.inner // self.heads

    @property
    def n_channels(self) -> int:
        """What the convolution reads: the heads' inputs, B and C."""
        return self.inner + 2 * self.groups * self.state


@dataclass
class Mamba2:
    """Tensors of a layer; the rows of inputs make the gate, what the convolution reads, and a step per head."""

    inputs: Value
    conv: Value
    conv_bias: Value | None
    dt: Value
    a: Value
    d: Value
    norm: Value | None
    out: Value
    out_bias: Value | None


class Mamba2Layers(RecurrentLayers):
    """Decoders whose recurrent layers are those of Mamba-2."""

    has_norm: ClassVar[bool] = True
    """Whether each of them must have a norm."""

    def read_mamba2(self, keys: Keys) -> None:
        """Reads the sizes of the recurrent layers. FileFormatError if they cannot be."""
        names = ("inner_size", "time_step_rank", "group_count", "state_size", "conv_kernel")
        inner, heads, groups, state, n_taps = values = [keys.u32(f"ssm.{name}") for name in names]
        if not all(values) or inner % heads or heads % groups:
            raise FileFormatError(
                f"{keys.gguf.path}: impossible recurrent layers: inner_size {inner}, {heads} heads in {groups} groups, "
                f"state_size {state}, conv_kernel {n_taps}"
            )
        self.mamba2 = Mamba2Sizes(inner, heads, groups, state, n_taps)

    def layer_states(self) -> list[StateSpec]:
        s = self.mamba2
        return [StateSpec("conv", (s.n_taps - 1, s.n_channels)), StateSpec("ssm", (s.head, s.state, s.heads))]

    def load_mamba2(self, weights: WeightSource, prefix: str) -> Mamba2:
        """Takes the tensors of a recurrent layer."""
        s, d = self.mamba2, self.hp.n_embd
        return Mamba2(
            inputs=weights.take(f"{prefix}.ssm_in.weight", (d, s.inner + s.n_channels + s.heads)),
            conv=weights.take(f"{prefix}.ssm_conv1d.weight", (s.n_taps, s.n_channels)),
            conv_bias=weights.take(f"{prefix}.ssm_conv1d.bias", (s.n_channels,), required=False),
            dt=weights.take(f"{prefix}.ssm_dt.bias", (s.heads,)),
            a=weights.take(f"{prefix}.ssm_a", (1, s.heads)),
            d=weights.take(f"{prefix}.ssm_d", (1, s.heads)),
            norm=weights.take(f"{prefix}.ssm_norm.weight", (s.inner // s.groups, s.groups), required=self.has_norm),
            out=weights.take(f"{prefix}.ssm_out.weight", (s.inner, d)),
            out_bias=weights.take(f"{prefix}.ssm_out.bias", (d,), required=False),
        )

    def scan(self, b: BatchGraph, il: int, net: Mamba2, h: Value) -> Value:
        """The layer on the normed input h [D, T]; [inner, T] before the output matrix.

        dt = softplus(dt + bias), (x, B, C) = silu(convolution), y by Graph.ssm_scan; y silu(z) is normed in groups if
        the layer has a norm.
        """
        g, s, slots = b.graph, self.mamba2, b.inputs["seq"]
        (past, kept_past), (state, kept_state) = (b.recurrent[il, name] for name in ("conv", "ssm"))
        products = g.mul_mat(net.inputs, h)
        z = products.slice0(0, s.inner)
        steps = g.unary(g.add(products.slice0(s.inner + s.n_channels, s.heads), net.dt), "softplus")
        mixed = products.slice0(s.inner, s.n_channels)
        mixed = g.causal_conv(mixed, net.conv, past, slots, silu=True, bias=net.conv_bias, kept=b.kept(kept_past))
        x, keys, queries = (
            rows_as_heads(mixed, start, size, n)
            for start, size, n in (
                (0, s.head, s.heads),
                (s.inner, s.state, s.groups),
                (s.inner + s.groups * s.state, s.state, s.groups),
            )
        )
        y = g.ssm_scan(x, steps, net.a, keys, queries, net.d, state, slots, kept=b.kept(kept_state))
        gated = g.gated(z, y.reshape(s.inner, b.n_tokens), "silu")
        if net.norm is None:
            return gated
        grouped = gated.reshape(s.inner // s.groups, s.groups, b.n_tokens)
        return g.rms_norm(grouped, net.norm, self.hp.norm_eps).reshape(s.inner, b.n_tokens)
