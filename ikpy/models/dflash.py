"""dflash: DFlash drafters (arXiv:2602.06036), which guess a block of tokens at once, DSpark's with a Markov head, and
DFlash 2 with convolutions over the block and a selector of candidates.

Two graphs. Without outputs the tokens' states, which a matrix has made of inputs of layers of the model, become keys
and values. With outputs the tokens are a block: the last one of the text and masks behind it, which see the whole text
and each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ikpy.errors import FileFormatError, UnsupportedError
from ikpy.graph.ir import Value
from ikpy.models.base import Decoder
from ikpy.models.batch import BatchGraph
from ikpy.models.blocks import split_heads, store_heads
from ikpy.models.dynamic_conv import DynamicConv
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.layer_reading import LayerReading
from ikpy.models.transformer import Attention, Layer
from ikpy.models.weights import WeightSource

USUAL_BLOCK, MAX_BLOCK = 16, 1024
MASK = "tokenizer.ggml.mask_token_id"
MARKOV = "markov_w1.weight"
SELECTOR = "selector_hidden.weight"
MARKOV_MATRIX, ODDS, ODDS_BIAS = "markov_w2.weight", "conf_proj.weight", "conf_proj.bias"
BEFORE, AFTER = "selector_predecessor.weight", "selector_successor.weight"
HEAD_TENSORS = MARKOV, MARKOV_MATRIX, ODDS, ODDS_BIAS, SELECTOR, BEFORE, AFTER
"""Those with which tokens are chosen one after the other, between the logits of a block and its guesses."""


@dataclass
class Selector:
    """Scores of the n_best likeliest tokens of every place in a block, by the token chosen before: to a logit is added
    the product of a row of ``after`` [R, V] for the token, one of ``before`` [R, V] for the token before it, and what
    ``gate`` [D, R] makes of the state.
    """

    n_best: int
    before: Value
    after: Value
    gate: Value


@dataclass
class BlockLayer(Layer):
    """A layer with convolutions around its branches."""

    attn_conv: DynamicConv | None = None
    ffn_conv: DynamicConv | None = None


@dataclass
class MarkovHead:
    """What a guess adds to the logits of the next one: rows [R, V] of the guessed token times a matrix [R, n rows]. Of
    a state [D] and these rows a guess's odds of being right are made [D + R, 1], if the file can tell them.
    """

    rows: Value
    matrix: Value
    odds: Value | None
    odds_bias: Value | None


class DFlash(LayerReading):
    """Every layer has keys and values of the model's states and of the block, under the same norm and rotation."""

    drafts_as = "dflash"
    rope_neox = True
    qk_norm = "required"
    attn_sinks = "optional"
    predicts_from_normed = True
    host_tensors = (*LayerReading.host_tensors, *HEAD_TENSORS)

    # hyper-parameters and tensors

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        path = keys.gguf.path
        if keys.u32("hyper_connection.count", 0):
            what = f"layers of DeepSeek V4 ({keys.arch}.hyper_connection.count)"
            raise UnsupportedError(f"{path}: {what} are not supported")
        self.target_layers = tuple(keys.integers("target_layers"))
        self.target_size = hp.n_embd
        if not self.target_layers:
            raise FileFormatError(f"{path}: {keys.arch}.target_layers is empty")
        hp.embedding_scale = keys.f32("embedding_scale", 1.0)
        self.score_scale = keys.f32("attention.scale", 0.0)
        self.value_scale = keys.f32("attention.value_scale", 1.0)
        hp.logit_scale = keys.f32("logit_scale", 1.0) or 1.0
        hp.final_softcap = keys.f32("final_logit_softcapping", 0.0)
        self.n_taps, self.conv_group = keys.u32("conv_kernel_size", 0), keys.u32("conv_group_size", 0)
        self.n_rank, self.n_best = keys.u32("selector_rank", 0), keys.u32("selector_top_k", 0)
        hp.causal = keys.boolean("attention.causal", False)
        self.n_block = keys.u32("block_size", USUAL_BLOCK)
        if not 2 <= self.n_block <= MAX_BLOCK:
            raise FileFormatError(f"{path}: {keys.arch}.block_size {self.n_block}: blocks have 2 to {MAX_BLOCK} tokens")
        self.guesses_first = keys.boolean("sample_from_anchor", True)
        mask = keys.gguf.get(MASK)
        if not isinstance(mask, int) or not 0 <= mask < hp.n_vocab:
            raise FileFormatError(f"{path}: {MASK} is {mask}, and a drafter of blocks needs one of {hp.n_vocab} tokens")
        self.mask_token = mask
        hp.n_swa = keys.u32("attention.sliding_window", 0)
        if hp.n_swa:
            pattern = keys.per_layer("attention.sliding_window_pattern", hp.n_layer)
            self.has_window = [bool(flag) for flag in pattern]
        return hp

    def load_global(self, weights: WeightSource) -> None:
        super().load_global(weights)
        self.state_norm = self.take_norm(weights, "enc.output_norm")
        self.markov = self._take_markov(weights) if weights.has(MARKOV) else None
        self.selector = self._take_selector(weights) if weights.has(SELECTOR) else None
        if not self.selector:
            self.hp.logit_scale, self.hp.final_softcap = 1.0, 0.0
        if self.markov and self.selector:
            raise UnsupportedError(f"{weights.gguf.path}: a selector beside a Markov head is not supported")

    def _take_markov(self, weights: WeightSource) -> MarkovHead:
        rank, d = weights.gguf.tensors[MARKOV].shape[0], self.hp.n_embd
        return MarkovHead(
            weights.take(MARKOV, (rank, self.hp.n_vocab)),
            weights.take(MARKOV_MATRIX, (rank, self.n_rows)),
            weights.take(ODDS, (d + rank, 1), required=False),
            weights.take(ODDS_BIAS, (1,), required=False),
        )

    def _take_selector(self, weights: WeightSource) -> Selector:
        rank, n_vocab, path = self.n_rank, self.hp.n_vocab, weights.gguf.path
        sizes = self.n_taps, self.conv_group, self.n_best, rank
        if 0 in sizes or self.hp.n_embd % self.conv_group or self.n_best > self.n_rows:
            raise FileFormatError(f"{path}: impossible convolutions or selector: taps, group, candidates, rank {sizes}")
        before, after = (weights.take(name, (rank, n_vocab)) for name in (BEFORE, AFTER))
        return Selector(self.n_best, before, after, weights.take(SELECTOR, (self.hp.n_embd, rank)))

    def load_layer(self, weights: WeightSource, il: int, prefix: str) -> Layer:
        layer = super().load_layer(weights, il, prefix)
        if not self.selector:
            return layer
        sizes = self.hp.n_embd, self.n_taps, self.hp.n_embd // self.conv_group
        attn, ffn = (DynamicConv.take(weights, f"{prefix}.{name}_conv", *sizes) for name in ("attn", "ffn"))
        return BlockLayer(**vars(layer), attn_conv=attn, ffn_conv=ffn)

    # graph

    def attention_scale(self, layer: int) -> float:
        return self.score_scale or super().attention_scale(layer)

    def attention_output(self, b: BatchGraph, attn: Attention, attended: Value) -> Value:
        # All values have the factor, and so has what is made of them.
        rows = attended if self.value_scale == 1.0 else b.graph.scale(attended, self.value_scale)
        return super().attention_output(b, attn, rows)

    def layer(self, b: BatchGraph, il: int, x: Value) -> Value:
        layer: Layer = self.layers[il]  # type: ignore[assignment]
        if not isinstance(layer, BlockLayer):
            return super().layer(b, il, x)
        assert layer.attn_conv is not None and layer.ffn_conv is not None

        def attend(h: Value) -> Value:
            return self.attention_output(b, layer.attn, self.attention(b, il, layer.attn, h))

        x = self._convolved(b, x, layer.attn_norm, layer.attn_conv, attend)
        x = self._convolved(b, x, layer.ffn_norm, layer.ffn_conv, lambda h: self.ffn(b, layer.ffn, h))
        (kept,) = b.keep_outputs(il, self.hp.n_layer, x)
        return kept

    def _convolved(
        self, b: BatchGraph, x: Value, norm: Value | None, conv: DynamicConv, branch: Callable[[Value], Value]
    ) -> Value:
        """x [D, T] plus a branch whose input and output are convolved; the input makes the filters of both."""
        g, h = b.graph, self.norm(b, x, norm)
        filters = g.mul_mat(conv.made, h)
        return g.add(x, conv.run(g, branch(conv.run(g, h, filters, given=False)), filters, given=True))

    def build(self, b: BatchGraph) -> Value | None:
        if b.n_outputs:
            return Decoder.build(self, b)
        assert b.states is not None
        state = self.norm(b, b.states.reshape(self.hp.n_embd, b.n_tokens), self.state_norm)
        for il in range(self.hp.n_layer):
            self._store(b, il, state)
        return None

    def _store(self, b: BatchGraph, il: int, state: Value) -> None:
        """Keys and values of a layer of the normed states [D, T]."""
        layer: Layer = self.layers[il]  # type: ignore[assignment]
        attn, g, sizes = layer.attn, b.graph, self.head_sizes(il)
        assert attn.k is not None and attn.v is not None
        k, v = split_heads(g.mul_mat(attn.k, state), sizes.k), split_heads(g.mul_mat(attn.v, state), sizes.v)
        store_heads(b, il, self.rotate(b, il, self.norm_head(b, k, attn.k_norm)), v)
