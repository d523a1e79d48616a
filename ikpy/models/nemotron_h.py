"""nemotron_h and nemotron_h_moe: Nemotron-H, Nemotron Nano 2, Nemotron 3. Every layer is one of Mamba-2, attention
without positions, or a network by squared ReLU, dense or with experts (arXiv:2504.03624).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph, CacheSpec, GraphParams
from ikpy.models.blocks import DenseFFN, Experts
from ikpy.models.feed_forward import take_experts
from ikpy.models.hparams import HParams, check_experts
from ikpy.models.keys import Keys
from ikpy.models.latent_experts import LatentExperts, latent_moe
from ikpy.models.mamba2_layers import Mamba2, Mamba2Layers
from ikpy.models.prediction import PredictionLayers
from ikpy.models.routing import SIGMOID, Routing, gating_func
from ikpy.models.transformer import Attention, Transformer
from ikpy.models.weights import Presence, WeightSource


@dataclass
class Block:
    """The norm and the one network of a layer."""

    norm: Value
    net: Mamba2 | Attention | DenseFFN | Experts


@dataclass
class PredictingBlock(Block):
    """The layer that predicts further tokens has attention and a network."""

    ffn_norm: Value
    ffn: DenseFFN | Experts


class NemotronH(Mamba2Layers, PredictionLayers, Transformer):
    """Layers with a network have feed_forward_length, the others KV heads if they attend; the rest is recurrent."""

    may_lack_heads = True
    has_rope = False
    rotates_whole_head = False
    activation = "relu_squared"
    gated_ffn = False
    runs_prediction_layers = False
    out_bias: ClassVar[Presence] = "optional"
    ffn_bias: ClassVar[Presence] = "optional"

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        self.read_mamba2(keys)
        self.take_off_prediction_layers(keys, hp)
        return hp

    def has_state(self, layer: int) -> bool:
        return self.hp.n_head_kv[layer] == 0 and self.hp.n_ff[layer] == 0

    def attends(self, layer: int) -> bool:
        """Whether a layer attends."""
        return self.hp.n_head_kv[layer] > 0 and self.hp.n_ff[layer] == 0

    def cache_specs(self, layer: int, params: GraphParams) -> list[CacheSpec]:
        return super().cache_specs(layer, params) if self.attends(layer) else []

    def divisible_heads(self, layer: int) -> int:
        return super().divisible_heads(layer) if self.attends(layer) else 0

    # tensors

    def load_layer(self, weights: WeightSource, il: int, prefix: str) -> Block:  # type: ignore[override]
        norm = weights.take(f"{prefix}.attn_norm.weight", (self.hp.n_embd,))
        if self.has_state(il):
            return Block(norm, self.load_mamba2(weights, prefix))
        if self.attends(il):
            return Block(norm, self.load_attention(weights, il, prefix))
        return Block(norm, self.load_ffn(weights, il, prefix))

    # graph

    def layer(self, b: BatchGraph, il: int, x: Value) -> Value:
        block: Block = self.layers[il]  # type: ignore[assignment]
        rows: tuple[Value, ...] = (x,)
        if isinstance(block.net, Mamba2):
            rows = (x, self.scan(b, il, block.net, self.norm(b, x, block.norm)))
        elif isinstance(block.net, Attention):
            rows = (x, self.attention(b, il, block.net, self.norm(b, x, block.norm)))
        kept = b.keep_outputs(il, self.hp.n_layer, *rows)
        if b.keeps_states and kept[0] is not x:
            # Apart from the output rows: those must round as they do in a context that keeps no states.
            b.unreduced = self.behind_mixing(b, block, *rows)
        return self.behind_mixing(b, block, *kept)

    def behind_mixing(self, b: BatchGraph, block: Block, x: Value, *mixed: Value) -> Value:
        """The rest of a layer on the rows x [D, n] of the residual stream, which does not look at other tokens.

        mixed: what a scan or attention gave for these rows.
        """
        if isinstance(block.net, DenseFFN | Experts):
            branch = self.ffn(b, block.net, self.norm(b, x, block.norm))
        else:
            branch = b.graph.mul_mat(block.net.out, mixed[0], block.net.out_bias)
        x = self.add_branch(b, x, branch, None)
        if not isinstance(block, PredictingBlock):
            return x
        return self.add_branch(b, x, self.ffn(b, block.ffn, self.norm(b, x, block.ffn_norm)), None)


class NemotronHMoe(NemotronH):
    """Routed experts by sigmoid, chosen with a bias, and a shared one of its own width; latent experts of Nemotron 3
    Super.
    """

    runs_prediction_layers = True

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        check_experts(keys, hp)
        hp.n_ff_exp = keys.u32("expert_feed_forward_length")
        hp.n_ff_shared = keys.u32("expert_shared_feed_forward_length")
        self.n_latent = keys.u32("moe_latent_size", 0)
        hp.routing = Routing(
            hp.n_expert_used,
            gating_func(keys, keys.u32("expert_gating_func", 0) or SIGMOID),
            normalize=keys.boolean("expert_weights_norm", True),
            scale=keys.f32("expert_weights_scale", 0.0) or 1.0,
            epsilon=1e-20,
        )
        self.head_norm_eps = keys.f32("attention.layer_norm_epsilon", hp.norm_eps)
        return hp

    def load_prediction_layer(self, weights: WeightSource, il: int, prefix: str) -> PredictingBlock:
        norm, ffn_norm = (
            weights.take(f"{prefix}.{name}.weight", (self.hp.n_embd,)) for name in ("attn_norm", "post_attention_norm")
        )
        attention = self.load_attention(weights, il, prefix)
        return PredictingBlock(norm, attention, ffn_norm, self.load_ffn(weights, il, prefix))

    def start_at(self, layer: int) -> None:
        super().start_at(layer)
        self.hp = replace(self.hp, n_ff=[0])  # it attends, whatever the file counts

    def final_state(self, b: BatchGraph, x: Value) -> Value:
        """The norm behind the prediction layer takes the mean off."""
        if not self.reads_states:
            return super().final_state(b, x)
        assert self.output_norm is not None
        return b.graph.layer_norm(x, self.output_norm, None, self.head_norm_eps)

    def load_ffn(self, weights: WeightSource, il: int, prefix: str) -> DenseFFN | Experts:
        hp, d, n_latent = self.hp, self.hp.n_embd, self.n_latent
        experts = take_experts(
            weights,
            prefix,
            d,
            hp.n_expert,
            hp.n_ff_exp,
            n_ff_shared=hp.n_ff_shared,
            selection_bias="optional",
            gated=False,
            n_latent=n_latent,
        )
        if not n_latent:
            return experts
        return LatentExperts(
            **vars(experts),
            latent_down=weights.take(f"{prefix}.ffn_latent_down.weight", (d, n_latent)),
            latent_up=weights.take(f"{prefix}.ffn_latent_up.weight", (n_latent, d)),
        )

    def ffn(self, b: BatchGraph, ffn: DenseFFN | Experts, x: Value) -> Value:
        if not isinstance(ffn, LatentExperts):
            return super().ffn(b, ffn, x)
        return latent_moe(b, ffn, self.hp.routing, x, self.hp.norm_eps, self.activation)
