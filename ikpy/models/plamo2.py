"""plamo2: PLaMo 2 and 2.1, layers of Mamba between few that attend (arXiv:2509.04897)."""

from __future__ import annotations

from dataclasses import dataclass

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph, StateSpec
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.plamo import take_post_norms
from ikpy.models.recurrent_layers import RecurrentLayers
from ikpy.models.transformer import Attention, Layer, Transformer
from ikpy.models.weights import WeightSource

LEAST_RANK, WIDTH_PER_RANK = 64, 16


@dataclass
class HeadMamba:
    """Tensors of a layer. The rows of inputs make for every head its gate and what the convolution reads; those of
    mixed B, C and the latents of the steps; a and d: a rate and a factor of every head [1, H].
    """

    inputs: Value
    conv: Value
    mixed: Value
    dt: Value
    dt_bias: Value
    a: Value
    d: Value
    out: Value
    dt_norm: Value
    b_norm: Value
    c_norm: Value
    out_bias: Value | None = None


class Plamo2(RecurrentLayers, Transformer):
    """Layers without KV heads are recurrent; norms before and behind both branches, and of every head of q and k."""

    may_lack_heads = True
    fused_qkv = "required"
    fused_ffn = True
    qk_norm = "required"
    norms_heads_apart = True
    rope_neox = True

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        names = ("inner_size", "time_step_rank", "state_size", "conv_kernel")
        inner, heads, state, n_taps = values = [keys.u32(f"ssm.{name}") for name in names]
        if not all(values) or inner % heads:
            raise FileFormatError(
                f"{keys.gguf.path}: impossible recurrent layers: inner_size {inner}, {heads} heads, "
                f"state_size {state}, conv_kernel {n_taps}"
            )
        self.inner, self.scan_heads, self.state, self.n_taps = values
        self.rank = max(LEAST_RANK, hp.n_embd // WIDTH_PER_RANK)
        return hp

    def layer_states(self) -> list[StateSpec]:
        size = self.inner // self.scan_heads
        return [StateSpec("conv", (self.n_taps - 1, self.inner)), StateSpec("ssm", (size, self.state, self.scan_heads))]

    # tensors

    def load_layer(self, weights: WeightSource, il: int, prefix: str) -> Layer:
        layer = super().load_layer(weights, il, prefix)
        take_post_norms(layer, weights, self.hp.n_embd, prefix)
        return layer

    def load_attention(self, weights: WeightSource, il: int, prefix: str) -> Attention | HeadMamba:  # type: ignore[override]
        if not self.has_state(il):
            return super().load_attention(weights, il, prefix)
        d, inner, heads, state, rank = self.hp.n_embd, self.inner, self.scan_heads, self.state, self.rank
        norms = (
            weights.take(weights.written(f"{prefix}.ssm_{name}_norm"), (n,))
            for name, n in (("dt", rank), ("b", state), ("c", state))
        )
        dt_norm, b_norm, c_norm = norms
        return HeadMamba(
            inputs=weights.take(f"{prefix}.ssm_in.weight", (d, 2 * inner)),
            conv=weights.take(f"{prefix}.ssm_conv1d.weight", (self.n_taps, inner)),
            mixed=weights.take(f"{prefix}.ssm_x.weight", (inner, 2 * state + rank)),
            dt=weights.take(f"{prefix}.ssm_dt.weight", (rank, heads)),
            dt_bias=weights.take(f"{prefix}.ssm_dt.bias", (heads,)),
            a=weights.take(f"{prefix}.ssm_a", (heads,)).reshape(1, heads),
            d=weights.take(f"{prefix}.ssm_d", (heads,)).reshape(1, heads),
            out=weights.take(f"{prefix}.ssm_out.weight", (inner, d)),
            dt_norm=dt_norm,
            b_norm=b_norm,
            c_norm=c_norm,
        )

    # graph

    def attention(self, b: BatchGraph, il: int, attn: Attention | HeadMamba, h: Value) -> Value:
        if isinstance(attn, HeadMamba):
            return self.scan(b, il, attn, h)
        return super().attention(b, il, attn, h)

    def scan(self, b: BatchGraph, il: int, net: HeadMamba, h: Value) -> Value:
        """The layer on the normed input h [D, T]; [inner, T] before the output matrix.

        x = silu(convolution); (B, C, dt) = mixed x, each normed; steps are softplus(dt matrix + bias); y by
        Graph.ssm_scan with one B and C for all heads, times silu(z).
        """
        g, slots, n_state, eps = b.graph, b.inputs["seq"], self.state, self.hp.norm_eps
        (past, kept_past), (state, kept_state) = (b.recurrent[il, name] for name in ("conv", "ssm"))
        size, heads, n = self.inner // self.scan_heads, self.scan_heads, b.n_tokens
        both = g.mul_mat(net.inputs, h).reshape(2 * size, heads, n)
        z, x = (g.copy(both.slice0(start, size), g.new(size, heads, n)) for start in (0, size))
        x = x.reshape(self.inner, n)
        x = g.causal_conv(x, net.conv, past, slots, silu=True, kept=b.kept(kept_past))
        mixed = g.mul_mat(net.mixed, x)
        keys = g.rms_norm(mixed.slice0(0, n_state), net.b_norm, eps)
        queries = g.rms_norm(mixed.slice0(n_state, n_state), net.c_norm, eps)
        latents = g.rms_norm(mixed.slice0(2 * n_state, self.rank), net.dt_norm, eps)
        steps = g.unary(g.mul_mat(net.dt, latents, net.dt_bias), "softplus")
        keys, queries = (row.reshape(n_state, 1, n) for row in (keys, queries))
        y = g.ssm_scan(
            x.reshape(size, heads, n), steps, net.a, keys, queries, net.d, state, slots, kept=b.kept(kept_state)
        )
        return g.gated(z, y, "silu").reshape(self.inner, n)
