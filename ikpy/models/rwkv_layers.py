"""Layers of RWKV: tokens are mixed with the one before them, and through matrix states (arXiv:2404.05892)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ikpy.errors import FileFormatError
from ikpy.graph.ir import F32, Value, external
from ikpy.models.batch import BatchGraph, StateSpec
from ikpy.models.blocks import split_heads
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.recurrent_layers import RecurrentLayers
from ikpy.models.transformer import Transformer
from ikpy.models.weights import WeightSource

GROUP_EPS = 64e-5
"""Of the norms of heads, whatever their size, as in llama.cpp: 1e-5 times the usual 64 elements."""


@dataclass
class TimeMix:
    """What mixes the tokens of a layer, by the names of the file without `time_mix_`; "NAME.bias" are biases.

    shift: taps f32 [2, D] of the difference to the token before.
    """

    tensors: Mapping[str, Value]
    shift: Value

    def __getitem__(self, name: str) -> Value:
        return self.tensors[name]

    def get(self, name: str) -> Value | None:
        """An optional tensor."""
        return self.tensors.get(name)


class RwkvLayers(RecurrentLayers, Transformer):
    """Every layer is recurrent: files count no heads, or those of keys alone. Behind the time mix a network follows as
    in a transformer.
    """

    may_lack_heads = True
    has_rope = False
    output_weight = "required"
    n_shifts: ClassVar[int] = 1
    """Inputs of a layer that are mixed with those of the token before."""

    def read_hparams(self, keys: Keys) -> HParams:
        none = {f"{keys.arch}.attention.{name}": 0 for name in ("head_count", "head_count_kv")}
        hp = super().read_hparams(Keys(keys.gguf, {**keys.overrides, **none}))
        where, size = keys.gguf.path, keys.u32("wkv.head_size")
        if not size or hp.n_embd % size:
            raise FileFormatError(f"{where}: impossible heads: wkv.head_size {size}, embedding {hp.n_embd}")
        if (n := keys.u32("token_shift_count", self.n_shifts)) != self.n_shifts:
            raise FileFormatError(f"{where}: {keys.arch}.token_shift_count is {n}, not {self.n_shifts}")
        self.head_size, self.n_heads = size, hp.n_embd // size
        return hp

    def layer_states(self) -> list[StateSpec]:
        d, size = self.hp.n_embd, self.head_size
        shifts = [StateSpec(f"conv_{name}", (1, d)) for name in ("attn", "ffn")[: self.n_shifts]]
        return [*shifts, StateSpec("wkv", (size, size, self.n_heads))]

    # tensors

    def take_time_mix(self, weights: WeightSource, il: int, prefix: str) -> dict[str, Value]:
        """The tensors of a layer's time mix."""
        raise NotImplementedError

    def load_attention(self, weights: WeightSource, il: int, prefix: str) -> TimeMix:  # type: ignore[override]
        taps = np.tile(np.array([1, -1], np.float32), (self.hp.n_embd, 1))
        shift = external(taps.ctypes.data, taps, F32, taps.shape[::-1], f"{prefix}.time_mix_shift", "weight")
        return TimeMix(self.take_time_mix(weights, il, prefix), shift)

    def take_named(
        self, weights: WeightSource, prefix: str, shapes: Mapping[str, tuple[int, ...]], *, required: bool = True
    ) -> dict[str, Value]:
        """Tensors `prefix.time_mix_NAME.weight`, or with ".bias" where the name ends so."""
        found = {}
        for name, shape in shapes.items():
            full = f"{prefix}.time_mix_{name}" + ("" if name.endswith(".bias") else ".weight")
            value = weights.take(full, shape, required=required)
            if value is not None:
                found[name] = value
        return found

    # graph

    def time_mix(self, b: BatchGraph, il: int, net: TimeMix, h: Value) -> Value:
        """The time mix of the normed input h [D, T]; [D, T] before the output matrix."""
        raise NotImplementedError

    def attention(self, b: BatchGraph, il: int, attn: TimeMix, h: Value) -> Value:  # type: ignore[override]
        return self.time_mix(b, il, attn, h)

    def attention_output(self, b: BatchGraph, attn: TimeMix, attended: Value) -> Value:  # type: ignore[override]
        return b.graph.mul_mat(attn["output"], attended)

    def difference(self, b: BatchGraph, il: int, name: str, taps: Value, h: Value) -> Value:
        """The rows of the tokens before those of h [D, T], 0 before the first one, less these."""
        past, kept = b.recurrent[il, f"conv_{name}"]
        return b.graph.causal_conv(h, taps, past, b.inputs["seq"], silu=False, kept=b.kept(kept))

    def heads(self, x: Value) -> Value:
        """[D, T] as heads [n, H, T]."""
        return split_heads(x, self.head_size)

    def norm_heads(self, b: BatchGraph, x: Value, net: TimeMix) -> Value:
        """Heads x [n, H, T], each normed, as [D, T]."""
        weight, bias = (net[name].reshape(self.head_size, self.n_heads) for name in ("ln", "ln.bias"))
        return b.graph.layer_norm(x, weight, bias, GROUP_EPS).reshape(self.hp.n_embd, b.n_tokens)

    def low_rank(self, b: BatchGraph, net: TimeMix, name: str, x: Value, inner: str = "") -> Value:
        """x [D, T] through the matrices NAME1 and NAME2, an activation between them, plus NAME0 if there is one."""
        low = b.graph.mul_mat(net[f"{name}1"], x)
        low = b.graph.unary(low, inner) if inner else low
        return b.graph.mul_mat(net[f"{name}2"], low, net.get(f"{name}0"))


def shifted(b: BatchGraph, h: Value, change: Value, shares: Value) -> list[Value]:
    """h + change * share, all [D, T], for every row of shares [D, 1, n], or those of every token [D, T, n]."""
    g, (d, n_tokens), n = b.graph, h.shape[:2], shares.shape[2]
    if shares.shape[1] == n_tokens:
        parts = g.mul(shares, change)
    else:
        parts = g.mul(change.view((d, n_tokens, n), (change.strides[1], 0)), shares)
    mixed = g.add(parts, h)
    return [mixed.slice(2, i, 1).reshape(d, n_tokens) for i in range(n)]


@dataclass
class ChannelMix:
    """The network of a layer, by the names of the file without `channel_mix_`."""

    tensors: Mapping[str, Value]
    shift: Value


@dataclass
class MixedLayer:
    """Norms and both mixes of a layer."""

    attn_norm: Value | None
    time: TimeMix
    ffn_norm: Value | None
    channels: ChannelMix


class MixesChannels(RwkvLayers):
    """The network of every layer reads the token before, too; LayerNorm, also of the embeddings."""

    layer_norm = True
    norm_bias = "required"
    n_shifts = 2
    rescale_every: int = 0
    """Behind every so many layers the residual stream is halved; 0: never."""

    def load_global(self, weights: WeightSource) -> None:
        self.embd_norm = self.take_norm(weights, "token_embd_norm")

    def channel_shapes(self, n_ff: int) -> dict[str, tuple[int, ...]]:
        """Tensors `channel_mix_NAME.weight`."""
        d = self.hp.n_embd
        return {"lerp_k": (d,), "key": (d, n_ff), "value": (n_ff, d)}

    def load_layer(self, weights: WeightSource, il: int, prefix: str) -> MixedLayer:  # type: ignore[override]
        time = self.load_attention(weights, il, prefix)
        shapes = self.channel_shapes(self.hp.n_ff[il])
        channels = {name: weights.take(f"{prefix}.channel_mix_{name}.weight", n) for name, n in shapes.items()}
        return MixedLayer(
            attn_norm=self.take_norm(weights, f"{prefix}.attn_norm"),
            time=time,
            ffn_norm=self.take_norm(weights, f"{prefix}.attn_norm_2"),
            channels=ChannelMix(channels, time.shift),
        )

    def embed(self, b: BatchGraph) -> Value:
        return self.norm(b, super().embed(b), self.embd_norm)

    def layer(self, b: BatchGraph, il: int, x: Value) -> Value:
        layer: MixedLayer = self.layers[il]  # type: ignore[assignment]
        mixed = self.time_mix(b, il, layer.time, self.norm(b, x, layer.attn_norm))
        x = b.graph.add(x, self.attention_output(b, layer.time, mixed))
        h = self.norm(b, x, layer.ffn_norm)
        rows = (x, h, self.difference(b, il, "ffn", layer.channels.shift, h))
        kept = b.keep_outputs(il, self.hp.n_layer, *rows)
        if b.keeps_states and kept[0] is not x:
            # Apart from the output rows: those must round as they do in a context that keeps no states.
            b.unreduced = self.behind_time_mix(b, il, layer.channels, *rows)
        return self.behind_time_mix(b, il, layer.channels, *kept)

    def behind_time_mix(self, b: BatchGraph, il: int, net: ChannelMix, x: Value, h: Value, change: Value) -> Value:
        """The rest of a layer on rows x [D, n]; h: their norms, change: what the tokens before had less these."""
        x = b.graph.add(x, self.channel_mix(b, net, h, change))
        return b.graph.scale(x, 0.5) if self.rescale_every and (il + 1) % self.rescale_every == 0 else x

    def channel_mix(self, b: BatchGraph, net: ChannelMix, h: Value, change: Value) -> Value:
        """value relu(key x)^2, x being h with a share of the token before."""
        g = b.graph
        (x,) = shifted(b, h, change, net.tensors["lerp_k"].reshape(self.hp.n_embd, 1, 1))
        return g.mul_mat(net.tensors["value"], g.unary(g.mul_mat(net.tensors["key"], x), "relu_squared"))
