"""Layers of Mamba (arXiv:2312.00752): a short convolution, a selective scan with rates of every channel, a gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph, StateSpec
from ikpy.models.keys import Keys
from ikpy.models.recurrent_layers import RecurrentLayers
from ikpy.models.weights import Presence, WeightSource


@dataclass(frozen=True)
class MambaSizes:
    """Channels, rank of their steps, elements of B and C, and taps of the convolution."""

    inner: int
    rank: int
    state: int
    n_taps: int


@dataclass
class Mamba:
    """Tensors of a layer; the rows of inputs make what the convolution reads, and the gate; those of mixed the steps'
    latents, B and C. a: rates of the channels [inner, N].
    """

    inputs: Value
    conv: Value
    conv_bias: Value
    mixed: Value
    dt: Value
    dt_bias: Value
    a: Value
    d: Value
    out: Value
    dt_norm: Value | None
    b_norm: Value | None
    c_norm: Value | None
    out_bias: Value | None = None


class MambaLayers(RecurrentLayers):
    """Decoders whose recurrent layers are those of Mamba."""

    inner_norms: ClassVar[Presence] = "none"
    """Norm weights of the steps' latents, of B and of C."""
    norms_inside: bool = False
    """Whether these are normed even without weights."""

    def read_mamba(self, keys: Keys) -> None:
        """Reads the sizes of the recurrent layers. FileFormatError if they cannot be."""
        names = ("inner_size", "time_step_rank", "state_size", "conv_kernel")
        inner, rank, state, n_taps = values = [keys.u32(f"ssm.{name}") for name in names]
        if not all(values):
            raise FileFormatError(
                f"{keys.gguf.path}: impossible recurrent layers: inner_size {inner}, time_step_rank {rank}, "
                f"state_size {state}, conv_kernel {n_taps}"
            )
        self.mamba = MambaSizes(inner, rank, state, n_taps)

    def layer_states(self) -> list[StateSpec]:
        s = self.mamba
        return [StateSpec("conv", (s.n_taps - 1, s.inner)), StateSpec("ssm", (s.inner, s.state, 1))]

    def load_mamba(self, weights: WeightSource, prefix: str) -> Mamba:
        """Takes the tensors of a recurrent layer."""
        s, d = self.mamba, self.hp.n_embd
        return Mamba(
            inputs=weights.take(f"{prefix}.ssm_in.weight", (d, 2 * s.inner)),
            conv=weights.take(f"{prefix}.ssm_conv1d.weight", (s.n_taps, s.inner)),
            conv_bias=weights.take(f"{prefix}.ssm_conv1d.bias", (s.inner,)),
            mixed=weights.take(f"{prefix}.ssm_x.weight", (s.inner, s.rank + 2 * s.state)),
            dt=weights.take(f"{prefix}.ssm_dt.weight", (s.rank, s.inner)),
            dt_bias=weights.take(f"{prefix}.ssm_dt.bias", (s.inner,)),
            a=weights.transposed(f"{prefix}.ssm_a", (s.state, s.inner)),
            d=weights.take(f"{prefix}.ssm_d", (s.inner,)),
            out=weights.take(f"{prefix}.ssm_out.weight", (s.inner, d)),
            dt_norm=weights.take_if(self.inner_norms, f"{prefix}.ssm_dt_norm.weight", (s.rank,)),
            b_norm=weights.take_if(self.inner_norms, f"{prefix}.ssm_b_norm.weight", (s.state,)),
            c_norm=weights.take_if(self.inner_norms, f"{prefix}.ssm_c_norm.weight", (s.state,)),
        )

    def scan(self, b: BatchGraph, il: int, net: Mamba, h: Value) -> Value:
        """The layer on the normed input h [D, T]; [inner, T] before the output matrix.

        x = silu(convolution); (dt, B, C) = mixed x, normed where the model does; steps are softplus(dt matrix + bias);
        y by Graph.channel_scan, times silu(z).
        """
        g, s, slots = b.graph, self.mamba, b.inputs["seq"]
        (past, kept_past), (state, kept_state) = (b.recurrent[il, name] for name in ("conv", "ssm"))
        products = g.mul_mat(net.inputs, h)
        x, z = products.slice0(0, s.inner), products.slice0(s.inner, s.inner)
        x = g.causal_conv(x, net.conv, past, slots, silu=True, bias=net.conv_bias, kept=b.kept(kept_past))
        mixed = g.mul_mat(net.mixed, x)
        latents = self._normed(b, mixed.slice0(0, s.rank), net.dt_norm)
        keys = self._normed(b, mixed.slice0(s.rank, s.state), net.b_norm)
        queries = self._normed(b, mixed.slice0(s.rank + s.state, s.state), net.c_norm)
        steps = g.unary(g.mul_mat(net.dt, latents, net.dt_bias), "softplus")
        y = g.channel_scan(x, steps, net.a, keys, queries, net.d, state, slots, kept=b.kept(kept_state))
        return g.gated(z, y, "silu")

    def _normed(self, b: BatchGraph, x: Value, weight: Value | None) -> Value:
        """A part of `mixed`, normed if the layer does so."""
        if weight is None and not self.norms_inside:
            return x
        return b.graph.rms_norm(x, weight, self.hp.norm_eps)
