"""t5encoder: encoders of T5, T5 v1.1, FLAN-T5, mT5 and UMT5 alone (arXiv:1910.10683), as of text-to-image models."""

from __future__ import annotations

from ikpy.graph.ir import Value
from ikpy.models.base import Decoder
from ikpy.models.batch import BatchGraph
from ikpy.models.blocks import cached_attention
from ikpy.models.hparams import HParams, read_hparams
from ikpy.models.keys import Keys
from ikpy.models.normed_states import NormedStates
from ikpy.models.relative_biases import read_buckets
from ikpy.models.t5_layers import heads, take_layers, with_network
from ikpy.models.weights import WeightSource


class T5Encoder(NormedStates, Decoder):
    """Every token sees its whole text, with biases by the difference of positions."""

    has_rope = False
    output_norm_name = "enc.output_norm"

    def read_hparams(self, keys: Keys) -> HParams:
        hp = read_hparams(keys, has_rope=False)
        hp.causal = False
        self.n_buckets = read_buckets(keys)
        return hp

    def load(self, weights: WeightSource) -> None:
        hp = self.hp
        self.norm_biases = {}
        self.token_embd = weights.take("token_embd.weight", (hp.n_embd, hp.n_vocab))
        self.stack = take_layers(weights, hp, "enc", hp.n_layer, self.n_buckets)
        self.output_norm = self.take_norm(weights, self.output_norm_name)

    def layer(self, b: BatchGraph, il: int, x: Value) -> Value:
        hp, layer, g = self.hp, self.stack[il], b.graph
        h = g.rms_norm(x, layer.attn.norm, hp.norm_eps)
        q, k = (heads(b, weight, h, hp.n_embd_head_k) for weight in (layer.attn.q, layer.attn.k))
        v = heads(b, layer.attn.v, h, hp.n_embd_head_v)
        attended = cached_attention(b, il, q, k, v, scale=1.0, biases=layer.biases)
        attended, x = b.keep_outputs(il, hp.n_layer, attended, x)
        return with_network(b, layer, g.add(x, g.mul_mat(layer.attn.out, attended)), hp.norm_eps)
