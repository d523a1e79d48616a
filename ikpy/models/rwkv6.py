"""rwkv6: RWKV-6 "Finch" (arXiv:2404.05892). rwkv6qwen2: QRWKV6, a time mix like it in layers of Qwen2
(arXiv:2505.03005).
"""

from __future__ import annotations

import math

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph
from ikpy.models.blocks import split_heads
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.rwkv_layers import ChannelMix, MixesChannels, RwkvLayers, TimeMix, shifted
from ikpy.models.weights import WeightSource

MIXED = ("w", "k", "v", "r", "g")
"""What each of the shares of the token before is for, in the order of files."""


class Rwkv6Layers(RwkvLayers):
    """How much of the token before a token reads is its own choice, made through matrices of low rank."""

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        self.mix_rank, self.decay_rank = keys.u32("time_mix_extra_dim"), keys.u32("time_decay_extra_dim")
        return hp

    def take_time_mix(self, weights: WeightSource, il: int, prefix: str) -> dict[str, Value]:
        d, rank = self.hp.n_embd, self.mix_rank
        shapes: dict[str, tuple[int, ...]] = {name: (d, d) for name in ("receptance", "gate", "output")}
        shapes |= {"w1": (d, 5 * rank), "w2": (rank, d, 5), "lerp_x": (d,), "decay": (d,)}
        shapes |= {"decay_w1": (d, self.decay_rank), "decay_w2": (self.decay_rank, d)}
        return self.take_named(weights, prefix, shapes) | {"lerp_fused": self.take_shares(weights, prefix)}

    def take_shares(self, weights: WeightSource, prefix: str) -> Value:
        """Shares of the token before [D, 1, 5]; the first files have them apart."""
        d, name = self.hp.n_embd, f"{prefix}.time_mix_lerp_fused.weight"
        if weights.has(name) or not weights.has(f"{prefix}.time_mix_lerp_w.weight"):
            return weights.take(name, (d, 1, 1, 5)).reshape(d, 1, 5)
        parts = self.take_named(weights, prefix, {f"lerp_{each}": (d,) for each in MIXED})
        return weights.join([parts[f"lerp_{each}"] for each in MIXED], (d, 1, 5), name)

    def inputs(self, b: BatchGraph, il: int, net: TimeMix, h: Value) -> dict[str, Value]:
        """What decay, keys, values, receptance and gate are made of, each [D, T]."""
        g, d, rank = b.graph, self.hp.n_embd, self.mix_rank
        change = self.difference(b, il, "attn", net.shift, h)
        (x,) = shifted(b, h, change, net["lerp_x"].reshape(d, 1, 1))
        low = g.unary(g.mul_mat(net["w1"], x), "tanh")
        item, row = low.strides[:2]
        shares = g.mul_mat(net["w2"], low.view((rank, b.n_tokens, 5), (row, rank * item)))
        return dict(zip(MIXED, shifted(b, h, change, g.add(shares, net["lerp_fused"])), strict=True))

    def decay(self, b: BatchGraph, net: TimeMix, x: Value) -> Value:
        """What a token leaves of a state [n, H, T]: exp(-exp(decay + low-rank))."""
        g = b.graph
        low = g.unary(g.mul_mat(net["decay_w1"], x), "tanh")
        rate = g.exponential(g.mul_mat(net["decay_w2"], low, net["decay"]))
        return self.heads(g.exponential(g.scale(rate, -1.0)))


class Rwkv6(Rwkv6Layers, MixesChannels):
    """RWKV-6 World. A token sees itself through weights of its own (`time_mix_first`)."""

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        self.rescale_every = keys.u32("rescale_every_n_layers", 0)
        return hp

    def channel_shapes(self, n_ff: int) -> dict[str, tuple[int, ...]]:
        d = self.hp.n_embd
        return super().channel_shapes(n_ff) | {"lerp_r": (d,), "receptance": (d, d)}

    def take_time_mix(self, weights: WeightSource, il: int, prefix: str) -> dict[str, Value]:
        d = self.hp.n_embd
        shapes: dict[str, tuple[int, ...]] = {"key": (d, d), "value": (d, d), "ln": (d,), "ln.bias": (d,)}
        shapes["first"] = (self.head_size, self.n_heads)
        return super().take_time_mix(weights, il, prefix) | self.take_named(weights, prefix, shapes)

    def time_mix(self, b: BatchGraph, il: int, net: TimeMix, h: Value) -> Value:
        g, x = b.graph, self.inputs(b, il, net, h)
        r, k, v = (self.heads(g.mul_mat(net[name], x[name[0]])) for name in ("receptance", "key", "value"))
        state, kept = b.recurrent[il, "wkv"]
        decay, first = self.decay(b, net, x["w"]), net["first"]
        y = g.wkv(r, k, v, decay, state, b.inputs["seq"], first=first, kept=b.kept(kept))
        return g.gated(g.mul_mat(net["gate"], x["g"]), self.norm_heads(b, y, net), "silu")

    def channel_mix(self, b: BatchGraph, net: ChannelMix, h: Value, change: Value) -> Value:
        g = b.graph
        (x,) = shifted(b, h, change, net.tensors["lerp_r"].reshape(self.hp.n_embd, 1, 1))
        gate = g.mul_mat(net.tensors["receptance"], x)
        return g.gated(gate, super().channel_mix(b, net, h, change), "sigmoid")


class Rwkv6Qwen2(Rwkv6Layers):
    """Norms, networks, biases and grouped heads are those of Qwen2; keys are weighed by what a token forgets."""

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        self.n_key_heads = keys.u32("attention.head_count_kv", 0) or self.n_heads
        if self.n_heads % self.n_key_heads:
            raise FileFormatError(f"{keys.gguf.path}: {self.n_heads} heads and {self.n_key_heads} KV heads")
        return hp

    def take_time_mix(self, weights: WeightSource, il: int, prefix: str) -> dict[str, Value]:
        d, n = self.hp.n_embd, self.n_key_heads * self.head_size
        biases = {"receptance.bias": (d,), "key.bias": (n,), "value.bias": (n,)}
        return {
            **super().take_time_mix(weights, il, prefix),
            **self.take_named(weights, prefix, {"key": (d, n), "value": (d, n)}),
            **self.take_named(weights, prefix, biases, required=False),
        }

    def time_mix(self, b: BatchGraph, il: int, net: TimeMix, h: Value) -> Value:
        g, x = b.graph, self.inputs(b, il, net, h)
        r, k, v = (
            split_heads(g.mul_mat(net[name], x[name[0]], net.get(f"{name}.bias")), self.head_size)
            for name in ("receptance", "key", "value")
        )
        decay = self.decay(b, net, x["w"])
        state, kept = b.recurrent[il, "wkv"]
        y = g.wkv(
            g.scale(r, 1 / math.sqrt(self.head_size)),
            self.weighed(b, k, decay),
            v,
            decay,
            state,
            b.inputs["seq"],
            kept=b.kept(kept),
        )
        return g.gated(g.mul_mat(net["gate"], x["g"]), y.reshape(self.hp.n_embd, b.n_tokens), "sigmoid")

    def weighed(self, b: BatchGraph, k: Value, decay: Value) -> Value:
        """Keys k [n, Hk, T] of every head, times 1 - decay [n, H, T]."""
        g, n, per_key = b.graph, self.head_size, self.n_heads // self.n_key_heads
        share = g.scale(decay, -1.0, 1.0).reshape(n, per_key, self.n_key_heads, b.n_tokens)
        return g.mul(share, k.reshape(n, 1, self.n_key_heads, b.n_tokens)).reshape(n, self.n_heads, b.n_tokens)
