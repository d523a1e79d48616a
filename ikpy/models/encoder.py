"""Encoders with norms behind the branches: what bert, nomic-bert, nomic-bert-moe, jina-bert-v2 and v3 share.

x = LN(token + token type 0 [+ position]); per layer x = LN(x + attention(x)), x = LN(x + ffn(x)), where every token
sees its whole text. The states of the last layer are the result; there are no logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph, GraphParams
from ikpy.models.blocks import DenseFFN, Experts
from ikpy.models.classifier import Classifier
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.transformer import Attention, Transformer
from ikpy.models.weights import Presence, WeightSource


@dataclass
class EncoderLayer:
    """Attention, feed-forward network and the norms behind both."""

    attn: Attention
    attn_norm: Value
    attn_norm_bias: Value | None
    network: DenseFFN | Experts
    out_norm: Value
    out_norm_bias: Value | None


class Encoder(Transformer):
    """Subclasses say whether positions are embedded or rotated, and which feed-forward network there is."""

    layer_norm = True
    bias: ClassVar[Presence] = "optional"
    qkv_bias = "optional"
    fused_qkv = "optional"
    out_bias = "optional"
    activation: ClassVar[str] = "gelu_erf"
    gated: ClassVar[bool] = False

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.causal = keys.boolean("attention.causal", False)
        return hp

    @property
    def is_encoder(self) -> bool:
        return True

    @property
    def classifier(self) -> Classifier | None:
        return self._classifier

    def shift_part(self, layer: int, params: GraphParams) -> tuple[str, int, int] | None:
        return None

    # tensors

    def load(self, weights: WeightSource) -> None:
        hp = self.hp
        d = (hp.n_embd,)
        self.rope_freqs = None
        self.norm_biases = {}
        self.token_embd = weights.take("token_embd.weight", (hp.n_embd, hp.n_vocab))
        self.token_type = None
        if weights.has("token_types.weight"):
            self.token_type = weights.row("token_types.weight", hp.n_embd, 0)
        if self.embeds_positions:
            self.position_embd = weights.take("position_embd.weight", (hp.n_embd, hp.n_ctx_train))
        self.embd_norm = weights.take("token_embd_norm.weight", d)
        self.embd_norm_bias = weights.take_if(self.bias, "token_embd_norm.bias", d)
        self.encoder_layers = [self._load_layer(weights, il, f"blk.{il}") for il in range(hp.n_layer)]
        self._classifier = Classifier.take(weights, hp.n_embd, hp.norm_eps)

    def _load_layer(self, weights: WeightSource, il: int, prefix: str) -> EncoderLayer:
        d = (self.hp.n_embd,)
        return EncoderLayer(
            attn=self.load_attention(weights, il, prefix),
            attn_norm=weights.take(f"{prefix}.attn_output_norm.weight", d),
            attn_norm_bias=weights.take_if(self.bias, f"{prefix}.attn_output_norm.bias", d),
            network=self.load_network(weights, il, prefix),
            out_norm=weights.take(f"{prefix}.layer_output_norm.weight", d),
            out_norm_bias=weights.take_if(self.bias, f"{prefix}.layer_output_norm.bias", d),
        )

    def load_network(self, weights: WeightSource, il: int, prefix: str) -> DenseFFN | Experts:
        """The feed-forward network of a layer."""
        n, f = self.hp.n_embd, self.hp.n_ff[il]
        return DenseFFN(
            gate=weights.take(f"{prefix}.ffn_gate.weight", (n, f)) if self.gated else None,
            up=weights.take(f"{prefix}.ffn_up.weight", (n, f)),
            down=weights.take(f"{prefix}.ffn_down.weight", (f, n)),
            up_bias=weights.take_if(self.bias, f"{prefix}.ffn_up.bias", (f,)),
            down_bias=weights.take_if(self.bias, f"{prefix}.ffn_down.bias", (n,)),
        )

    # graph

    def embed(self, b: BatchGraph) -> Value:
        g = b.graph
        x = g.get_rows(self.token_embd, b.inputs["tokens"])
        if self.token_type is not None:
            x = g.add(x, self.token_type)
        if self.embeds_positions:
            x = g.add(x, g.get_rows(self.position_embd, b.inputs["pos"]))
        return g.layer_norm(x, self.embd_norm, self.embd_norm_bias, self.hp.norm_eps)

    def between(self, b: BatchGraph, il: int, before: Value, x: Value) -> Value:
        """What the network reads: x, the normed sum of the layer's input and what it attended to."""
        return x

    def layer(self, b: BatchGraph, il: int, x: Value) -> Value:
        g, layer = b.graph, self.encoder_layers[il]
        attended, before = b.keep_outputs(il, self.hp.n_layer, self.attention(b, il, layer.attn, x), x)
        x = g.add(before, self.attention_output(b, layer.attn, attended))
        x = g.layer_norm(x, layer.attn_norm, layer.attn_norm_bias, self.hp.norm_eps)
        x = self.between(b, il, before, x)
        x = g.add(x, self.ffn(b, layer.network, x))
        return g.layer_norm(x, layer.out_norm, layer.out_norm_bias, self.hp.norm_eps)

    def build(self, b: BatchGraph) -> Value | None:
        x = self.embed(b)
        for il in range(self.hp.n_layer):
            x = b.steer(il, self.layer(b, il, x))
        if b.n_outputs:
            b.embeddings = x
        return None
