"""lfm2 and lfm2moe: Liquid LFM2, gated short convolutions between layers of attention, dense or with experts."""

from __future__ import annotations

from dataclasses import dataclass

from ikpy.errors import FileFormatError, UnsupportedError
from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph, StateSpec
from ikpy.models.hparams import HParams, check_any_heads
from ikpy.models.keys import Keys
from ikpy.models.recurrent_layers import RecurrentLayers
from ikpy.models.routing import SIGMOID, Routing, gating_func
from ikpy.models.transformer import Attention, Transformer
from ikpy.models.weights import WeightSource


@dataclass
class ShortConvolution:
    """Tensors of a convolution: its input matrix [D, 3D] makes two gates and what is convolved."""

    inputs: Value
    taps: Value
    out: Value
    out_bias: Value | None = None


class Lfm2(RecurrentLayers, Transformer):
    """Layers without KV heads are convolutions along the last tokens, whose results and inputs have gates."""

    may_lack_heads = True
    output_norm_name = "token_embd_norm"
    qk_norm = "required"
    rope_neox = True

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        check_any_heads(keys, hp)
        self.n_taps = keys.u32("shortconv.l_cache")
        if not self.n_taps:
            raise FileFormatError(f"{keys.gguf.path}: {keys.arch}.shortconv.l_cache is 0")
        if not hp.causal:
            raise UnsupportedError(f"{keys.gguf.path}: {keys.arch} models in which tokens see later ones cannot be run")
        return hp

    def layer_states(self) -> list[StateSpec]:
        return [StateSpec("conv", (self.n_taps - 1, self.hp.n_embd))]

    def load_attention(  # type: ignore[override]
        self, weights: WeightSource, il: int, prefix: str
    ) -> Attention | ShortConvolution:
        if not self.has_state(il):
            return super().load_attention(weights, il, prefix)
        d = self.hp.n_embd
        return ShortConvolution(
            inputs=weights.take(f"{prefix}.shortconv.in_proj.weight", (d, 3 * d)),
            taps=weights.take(f"{prefix}.shortconv.conv.weight", (self.n_taps, d)),
            out=weights.take(f"{prefix}.shortconv.out_proj.weight", (d, d)),
        )

    def attention(self, b: BatchGraph, il: int, attn: Attention | ShortConvolution, h: Value) -> Value:
        if isinstance(attn, ShortConvolution):
            return self.convolution(b, il, attn, h)
        return super().attention(b, il, attn, h)

    def convolution(self, b: BatchGraph, il: int, net: ShortConvolution, h: Value) -> Value:
        """The convolution of a layer on the normed input h [D, T]; [D, T] before the output matrix."""
        g, d = b.graph, self.hp.n_embd
        past, kept = b.recurrent[il, "conv"]
        products = g.mul_mat(net.inputs, h)
        before, behind, x = (products.slice0(i * d, d) for i in range(3))
        y = g.causal_conv(g.mul(before, x), net.taps, past, b.inputs["seq"], silu=False, kept=b.kept(kept))
        return g.mul(behind, y)


class Lfm2Moe(Lfm2):
    """Leading dense layers, then experts by sigmoid, chosen with a bias, whose weights are renormalised."""

    selection_bias = "optional"

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.n_dense_layers = keys.u32("leading_dense_block_count", 0)
        hp.n_ff_exp = keys.u32("expert_feed_forward_length")
        hp.routing = Routing(
            hp.n_expert_used,
            gating_func(keys, keys.u32("expert_gating_func", 0) or SIGMOID),
            normalize=keys.boolean("expert_weights_norm", True),
            scale=keys.f32("expert_weights_scale", 0.0) or 1.0,
            epsilon=1e-6,
        )
        return hp
