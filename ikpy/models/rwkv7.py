"""rwkv7: RWKV-7 "Goose" (arXiv:2503.14456). arwkv7: its time mix in layers of Qwen2 (ARWKV, arXiv:2501.15570)."""

from __future__ import annotations

import math

import numpy as np

from ikpy.graph.builder import Removal
from ikpy.graph.ir import F32, Value, external
from ikpy.models.batch import BatchGraph
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.rwkv_layers import MixesChannels, RwkvLayers, TimeMix, shifted
from ikpy.models.weights import WeightSource

SLOWEST_DECAY = -math.exp(-0.5)
"""Least logarithm of what a token leaves of a state."""
LEAST_LENGTH = 1e-12
"""Of removal keys, before they are divided by it."""


class Rwkv7Layers(RwkvLayers):
    """Tokens take off what their removal key finds in a state. Values are mixed with those of the first layer."""

    may_lack_gate = False
    """Whether files may have no gate, or no norm of heads."""

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        names = {"w": "decay", "a": "iclr", "v": "value_residual_mix"}
        self.ranks = {name: keys.u32(f"attention.{key}_lora_rank") for name, key in names.items()}
        self.ranks["g"] = keys.u32("attention.gate_lora_rank", 0)
        return hp

    def take_time_mix(self, weights: WeightSource, il: int, prefix: str) -> dict[str, Value]:
        d, has_gate = self.hp.n_embd, not self.may_lack_gate or weights.has(f"{prefix}.time_mix_g1.weight")
        shapes: dict[str, tuple[int, ...]] = {name: (d, d) for name in ("receptance", "key", "value", "output")}
        shapes |= {name: (d,) for name in ("k_k", "k_a", "r_k")}
        shapes["lerp_fused"] = (d, 1, 1, 6 if has_gate else 5)
        if il == 0:  # its values are the first ones: what other layers mix them with is there in name only
            weights.skip(*(f"{prefix}.time_mix_v{i}.weight" for i in range(3)))
        for name in ("w", "a") if il == 0 else ("w", "a", "v"):
            shapes |= {f"{name}0": (d,), f"{name}1": (d, self.ranks[name]), f"{name}2": (self.ranks[name], d)}
        if has_gate:
            shapes |= {"g1": (d, self.ranks["g"]), "g2": (self.ranks["g"], d)}
        if not self.may_lack_gate or any(weights.has(f"{prefix}.time_mix_ln.{end}") for end in ("weight", "bias")):
            shapes |= {"ln": (d,), "ln.bias": (d,)}
        ones = np.ones(self.head_size, np.float32)
        return {
            **self.take_named(weights, prefix, shapes),
            "ones": external(ones.ctypes.data, ones, F32, (len(ones), 1), f"{prefix}.time_mix_ones", "weight"),
        }

    def time_mix(self, b: BatchGraph, il: int, net: TimeMix, h: Value) -> Value:
        g, d, fused = b.graph, self.hp.n_embd, net["lerp_fused"]
        change = self.difference(b, il, "attn", net.shift, h)
        x_r, x_w, x_k, x_v, x_a, *x_g = shifted(b, h, change, fused.reshape(d, 1, fused.shape[3]))
        r, k = (g.mul_mat(net[name], x) for name, x in (("receptance", x_r), ("key", x_k)))
        v = self.values(b, il, net, x_v)
        rate = g.unary(self.low_rank(b, net, "w", x_w, "tanh"), "sigmoid")
        learned = g.unary(self.low_rank(b, net, "a", x_a), "sigmoid")
        n = self.head_size
        removal = g.rms_norm(self.heads(g.mul(k, net["k_k"])), None, LEAST_LENGTH**2 / n)
        removal = g.scale(removal, 1 / math.sqrt(n))
        k = g.add(k, g.mul(g.mul(k, net["k_a"]), g.scale(learned, 1.0, -1.0)))
        state, kept = b.recurrent[il, "wkv"]
        y = g.wkv(
            self.heads(r),
            self.heads(k),
            self.heads(v),
            self.heads(g.exponential(g.scale(rate, SLOWEST_DECAY))),
            state,
            b.inputs["seq"],
            removal=Removal(removal, g.mul(removal, self.heads(learned))),
            kept=b.kept(kept),
        )
        y = y.reshape(d, b.n_tokens) if net.get("ln") is None else self.norm_heads(b, y, net)
        y = g.add(y, self.own_values(b, net, r, k, v))
        return g.mul(y, self.low_rank(b, net, "g", x_g[0], "sigmoid")) if x_g else y

    def values(self, b: BatchGraph, il: int, net: TimeMix, x: Value) -> Value:
        """Values [D, T] of a layer, in part those of the first one."""
        g = b.graph
        v = g.mul_mat(net["value"], x)
        if il == 0 or b.first_values is None:
            b.first_values = v
            return v
        share = g.unary(self.low_rank(b, net, "v", x), "sigmoid")
        return g.add(v, g.mul(g.add(b.first_values, g.scale(v, -1.0)), share))

    def own_values(self, b: BatchGraph, net: TimeMix, r: Value, k: Value, v: Value) -> Value:
        """Values [D, T] times the product of r and k of their head and token, its elements weighted."""
        g, n = b.graph, self.head_size
        ones = net["ones"].reshape(n, 1)
        ones.name = ""  # no matrix that statistics count
        products = g.mul(g.mul(k, r), net["r_k"]).reshape(n, self.n_heads * b.n_tokens)
        sums = g.mul_mat(ones, products).reshape(1, self.n_heads, b.n_tokens)
        return g.mul(self.heads(v), sums).reshape(self.hp.n_embd, b.n_tokens)


class Rwkv7(Rwkv7Layers, MixesChannels):
    """RWKV-7 World."""


class Arwkv7(Rwkv7Layers):
    """Norms and networks are those of Qwen2."""

    may_lack_gate = True
