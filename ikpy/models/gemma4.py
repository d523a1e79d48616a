"""gemma4: layers of two head sizes, shared caches, inputs for every layer, experts beside the dense network.

Published as E2B and E4B (inputs for every layer, the last layers attend to caches of earlier ones), 31B (dense) and
26B-A4B (experts).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.models.batch import FULL, BatchGraph, CacheSpec, GraphParams, Window
from ikpy.models.blocks import DenseFFN, Experts, attend_cached, moe_ffn, split_heads, store_heads
from ikpy.models.feed_forward import take_dense, take_experts
from ikpy.models.gemma import Gemma
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.transformer import Attention, Layer
from ikpy.models.weights import WeightSource


@dataclass
class RoutedBranch:
    """Experts beside the dense network: the router reads the residual stream, every branch has norms of its own."""

    experts: Experts
    router_norm: Value
    norm: Value
    post_norm: Value
    dense_post_norm: Value


@dataclass
class LayerInput:
    """How a layer adds its own input [P] of a token: down to P elements, times the input, up again."""

    gate: Value
    proj: Value
    post_norm: Value


@dataclass
class Gemma4Layer(Layer):
    """A block of two branches, perhaps with experts and an input of its own; output_scale multiplies all of it."""

    routed: RoutedBranch | None = None
    own_input: LayerInput | None = None
    output_scale: float = 1.0


class Gemma4(Gemma):
    """Scores are not scaled: q and k are normed, and so is v, without a weight."""

    output_weight = "optional"
    post_norms = "required"
    qk_norm = "required"

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.n_swa = keys.u32("attention.sliding_window")
        hp.n_ff_exp = keys.u32("expert_feed_forward_length", 0)
        hp.final_softcap = keys.f32("final_logit_softcapping", 0.0)
        self.is_window = self.read_windows(keys, hp.n_layer)
        self.n_layer_input = keys.u32("embedding_length_per_layer_input", 0)
        self.cache_layers = self.read_cache_layers(keys, hp)
        return hp

    def read_windows(self, keys: Keys, n_layer: int) -> list[bool]:
        """Whether each layer attends to a window."""
        return [bool(flag) for flag in keys.per_layer("attention.sliding_window_pattern", n_layer)]

    def read_cache_layers(self, keys: Keys, hp: HParams) -> list[int]:
        """The layer whose cache each layer attends to: the last one of its kind that has a cache."""
        path, n_shared = keys.gguf.path, keys.u32("attention.shared_kv_layers", 0)
        if n_shared >= hp.n_layer:
            raise FileFormatError(f"{path}: {n_shared} of {hp.n_layer} layers share the caches of others")
        n_own = hp.n_layer - n_shared
        layers = list(range(n_own))
        for il in range(n_own, hp.n_layer):
            same_kind = [i for i in range(n_own) if self.is_window[i] == self.is_window[il]]
            if not same_kind or hp.n_head_kv[same_kind[-1]] != hp.n_head_kv[il]:
                raise FileFormatError(f"{path}: layer {il} shares its cache with no earlier layer of its kind")
            layers.append(same_kind[-1])
        return layers

    def window(self, layer: int) -> tuple[str, int]:
        return ("sliding", self.hp.n_swa) if self.is_window[layer] else ("none", 0)

    def attention_scale(self, layer: int) -> float:
        return 1.0

    def rope_factors(self, layer: int, params: GraphParams) -> Value | None:
        return None if self.is_window[layer] else self.rope_freqs

    def cache_specs(self, layer: int, params: GraphParams) -> list[CacheSpec]:
        return super().cache_specs(layer, params) if self.cache_layers[layer] == layer else []

    def rows_see_each_other(self, window: Window) -> bool:
        # Full layers never look ahead, and models that have inputs for every layer do not at all.
        return window != FULL and not self.n_layer_input

    def divisible_heads(self, layer: int) -> int:
        return super().divisible_heads(layer) if self.cache_layers.count(layer) == 1 else 0

    # tensors

    def load_global(self, weights: WeightSource) -> None:
        hp = self.hp
        self.rope_freqs = None
        if not all(self.is_window):
            # Pairs of full layers that are not rotated have a factor without end.
            self.rope_freqs = weights.take("rope_freqs.weight", (hp.n_rot // 2,))
        if self.n_layer_input:
            self.load_layer_inputs(weights)

    def load_layer_inputs(self, weights: WeightSource) -> None:
        """Takes what makes the inputs of all layers."""
        hp, width = self.hp, self.n_layer_input * self.hp.n_layer
        self.layer_embd = weights.take("per_layer_token_embd.weight", (width, hp.n_vocab))
        self.layer_proj = weights.take("per_layer_model_proj.weight", (hp.n_embd, width))
        self.layer_proj_norm = weights.take("per_layer_proj_norm.weight", (self.n_layer_input,))

    def load_attention(self, weights: WeightSource, il: int, prefix: str) -> Attention:
        hp, sizes = self.hp, self.head_sizes(il)
        n_q, n_k, n_v = (
            n * size for n, size in ((hp.n_head[il], sizes.k), *((hp.n_head_kv[il], s) for s in (sizes.k, sizes.v)))
        )
        attn = Attention(
            q=weights.take(f"{prefix}.attn_q.weight", (hp.n_embd, n_q)),
            out=weights.take(f"{prefix}.attn_output.weight", (hp.n_head[il] * sizes.v, hp.n_embd)),
            q_norm=weights.take(f"{prefix}.attn_q_norm.weight", (sizes.k,)),
        )
        if self.cache_layers[il] != il:
            weights.skip(*(f"{prefix}.attn_{name}.weight" for name in ("k", "v", "k_norm")))
            return attn
        attn.k = weights.take(f"{prefix}.attn_k.weight", (hp.n_embd, n_k))
        attn.k_norm = weights.take(f"{prefix}.attn_k_norm.weight", (sizes.k,))
        attn.v = weights.take(f"{prefix}.attn_v.weight", (hp.n_embd, n_v), required=sizes.k != sizes.v)
        return attn

    def load_ffn(self, weights: WeightSource, il: int, prefix: str) -> DenseFFN | Experts:
        return take_dense(weights, prefix, self.hp.n_embd, self.hp.n_ff[il])

    def load_layer(self, weights: WeightSource, il: int, prefix: str) -> Layer:
        return Gemma4Layer(
            **vars(super().load_layer(weights, il, prefix)),
            routed=self._load_routed(weights, prefix) if self.hp.n_expert else None,
            own_input=self._load_own_input(weights, prefix) if self.n_layer_input else None,
            output_scale=weights.scalar(f"{prefix}.layer_output_scale.weight", 1.0),
        )

    def _load_routed(self, weights: WeightSource, prefix: str) -> RoutedBranch:
        hp = self.hp
        experts = take_experts(weights, prefix, hp.n_embd, hp.n_expert, hp.n_ff_exp)
        weights.own_factor(f"{prefix}.ffn_down_exps")
        scales = weights.take(f"{prefix}.ffn_down_exps.scale", (hp.n_expert,), required=False)
        experts.output_scales = scales.reshape(1, hp.n_expert) if scales is not None else None
        return RoutedBranch(
            experts,
            router_norm=weights.take(f"{prefix}.ffn_gate_inp.scale", (hp.n_embd,)),
            norm=weights.take(f"{prefix}.pre_ffw_norm_2.weight", (hp.n_embd,)),
            post_norm=weights.take(f"{prefix}.post_ffw_norm_2.weight", (hp.n_embd,)),
            dense_post_norm=weights.take(f"{prefix}.post_ffw_norm_1.weight", (hp.n_embd,)),
        )

    def _load_own_input(self, weights: WeightSource, prefix: str) -> LayerInput:
        d, n = self.hp.n_embd, self.n_layer_input
        return LayerInput(
            gate=weights.take(f"{prefix}.inp_gate.weight", (d, n)),
            proj=weights.take(f"{prefix}.proj.weight", (n, d)),
            post_norm=weights.take(f"{prefix}.post_norm.weight", (d,)),
        )

    # graph

    def embed(self, b: BatchGraph) -> Value:
        x = super().embed(b)
        if self.n_layer_input:
            b.layer_inputs = self._layer_inputs(b, x)
        return x

    def _layer_inputs(self, b: BatchGraph, x: Value) -> Value:
        """Inputs of all layers [P * L, T]: the mean of a token's own and of what its embedding x [D, T] projects to."""
        g, hp, n = b.graph, self.hp, self.n_layer_input
        own = g.get_rows(self.layer_embd, b.inputs["tokens"])
        projected = g.mul_mat(self.layer_proj, x).reshape(n, hp.n_layer, b.n_tokens)
        # The projection is divided by sqrt(D) before its norm: that is the norm with an epsilon D times as large.
        projected = g.rms_norm(projected, self.layer_proj_norm, hp.norm_eps * hp.n_embd)
        # (own * sqrt(P) + projected) / sqrt(2)
        both = g.add(projected.reshape(n * hp.n_layer, b.n_tokens), g.scale(own, math.sqrt(n)))
        return g.scale(both, math.sqrt(0.5))

    def token_inputs(self, b: BatchGraph, il: int, x: Value) -> tuple[Value, ...]:
        if b.layer_inputs is None:
            return ()
        return (b.layer_inputs.slice0(il * self.n_layer_input, self.n_layer_input),)

    def attention(self, b: BatchGraph, il: int, attn: Attention, h: Value) -> Value:
        g, sizes = b.graph, self.head_sizes(il)
        q = self.rotate(b, il, self.norm_head(b, split_heads(g.mul_mat(attn.q, h), sizes.k), attn.q_norm))
        if attn.k is not None:
            k = split_heads(g.mul_mat(attn.k, h), sizes.k)
            v = k if attn.v is None else split_heads(g.mul_mat(attn.v, h), sizes.v)
            v = g.rms_norm(v, None, self.hp.norm_eps)
            store_heads(b, il, self.rotate(b, il, self.norm_head(b, k, attn.k_norm)), v)
        return attend_cached(b, self.cache_layers[il], q, scale=self.attention_scale(il), window=self.window(il))

    def behind_attention(self, b: BatchGraph, layer: Layer, attended: Value, x: Value, *inputs: Value) -> Value:
        assert isinstance(layer, Gemma4Layer)
        g = b.graph
        x = self.add_branch(b, x, self.attention_output(b, layer.attn, attended), layer.attn_post_norm)
        branch = self.ffn(b, layer.ffn, self.norm(b, x, layer.ffn_norm))
        if layer.routed is not None:
            dense = self.norm(b, branch, layer.routed.dense_post_norm)
            branch = g.add(dense, self._routed(b, layer.routed, x))
        x = self.add_branch(b, x, branch, layer.ffn_post_norm)
        for own in inputs:
            x = self._add_own_input(b, layer, x, own)
        return x if layer.output_scale == 1.0 else g.scale(x, layer.output_scale)

    def _routed(self, b: BatchGraph, routed: RoutedBranch, x: Value) -> Value:
        """The experts' branch on the residual stream x [D, T]."""
        g, hp = b.graph, self.hp
        logits = g.mul_mat(routed.experts.gate_inp, self.norm(b, x, routed.router_norm))
        logits = g.scale(logits, 1.0 / math.sqrt(hp.n_embd))
        out = moe_ffn(b, routed.experts, hp.routing, self.norm(b, x, routed.norm), self.activation, logits)
        return self.norm(b, out, routed.post_norm)

    def _add_own_input(self, b: BatchGraph, layer: Gemma4Layer, x: Value, own: Value) -> Value:
        """x [D, T] plus the layer's own input [P, T], gated by x."""
        g = b.graph
        assert layer.own_input is not None
        gated = g.gated(g.mul_mat(layer.own_input.gate, x), own, self.activation)
        return g.add(x, self.norm(b, g.mul_mat(layer.own_input.proj, gated), layer.own_input.post_norm))
