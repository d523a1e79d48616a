"""qwen4exp: Qwen4-Exp (Qwen3.8 Flash Next), the text model. Gated delta rule, gated attention over pools of cells that
indexers choose, several residual streams, embeddings of hashed n-grams, and experts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from ikpy.errors import FileFormatError
from ikpy.graph.builder import MAX_HASHED_TOKEN
from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph, CacheSpec, GraphParams, StateSpec, Window
from ikpy.models.blocks import DenseFFN, Experts, attend_cached, store_heads
from ikpy.models.delta_net import DeltaNet
from ikpy.models.hparams import HParams
from ikpy.models.hyper_connections import StreamDecoder
from ikpy.models.keys import Keys
from ikpy.models.low_rank_streams import Mixer, MixerSizes, mix_streams, take_mixer
from ikpy.models.mean_pools import MeanIndexer, choose_mean_pools, read_mean_pools, take_mean_indexer
from ikpy.models.ngram_embedding import TABLE, NgramLayer, NgramSizes, add_ngrams, take_ngrams
from ikpy.models.qwen35 import Qwen35Moe
from ikpy.models.sparse_attention import LISTED_ON_DEVICES, chosen_on_devices, effective_top_k, visible
from ikpy.models.transformer import Attention
from ikpy.models.weights import WeightSource

LISTED_TOKENS = 8
"""Of batches with more, chosen cells are attended to by a mask: tokens that share cells are faster together."""


@dataclass
class ChoosingAttention(Attention):
    """Attention of a layer with an indexer."""

    indexer: MeanIndexer | None = None


@dataclass
class MixedLayer:
    """The two branches of a layer, each with what mixes its streams; ngrams are added before both."""

    attn_mixer: Mixer
    attn: Attention | DeltaNet
    ffn_mixer: Mixer
    ffn: DenseFFN | Experts
    ngrams: NgramLayer | None = None


class Qwen4Exp(StreamDecoder, Qwen35Moe):
    """The mixers norm what branches read; the last one norms what the output matrix reads."""

    has_stream_head = False
    output_norm_weight = "none"
    output_gate = "sigmoid"
    mapped_tables = frozenset({TABLE})
    stream_sizes: MixerSizes

    # hyper-parameters

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        path = keys.gguf.path
        self.recurrent = self._recurrent_layers(keys, hp.n_layer)
        self.stream_sizes = MixerSizes.read(keys)
        self.index_sizes = read_mean_pools(keys, hp.n_layer, self.n_predict_layers, hp.n_rot)
        self.ngram_sizes = NgramSizes.read(keys, hp.n_layer)
        if self.ngram_sizes and not self.recurrent[self.ngram_sizes.layer]:
            raise FileFormatError(f"{path}: n-gram embeddings in layer {self.ngram_sizes.layer}, which has no states")
        if self.ngram_sizes and hp.n_vocab >= MAX_HASHED_TOKEN:
            raise FileFormatError(f"{path}: n-grams of {hp.n_vocab} tokens; below {MAX_HASHED_TOKEN} are supported")
        return hp

    def _recurrent_layers(self, keys: Keys, n_layer: int) -> list[bool]:
        if not keys.has("attention.recurrent_layers"):
            return [(il + 1) % self.interval != 0 for il in range(n_layer)]
        n_listed = keys.n_listed("attention.recurrent_layers", n_layer)
        return [bool(flag) for flag in keys.per_layer("attention.recurrent_layers", n_listed)[:n_layer]]

    def has_state(self, layer: int) -> bool:
        return layer < self.hp.n_layer and self.recurrent[layer]

    def state_specs(self, layer: int) -> list[StateSpec]:
        specs = super().state_specs(layer)
        if self.ngram_sizes and layer == self.ngram_sizes.layer:
            specs += self.ngram_sizes.states(self.stream_sizes.n * self.hp.n_embd)
        return specs

    # tensors

    def load_global(self, weights: WeightSource) -> None:
        super().load_global(weights)
        if not self.predicts_alone:
            self.mixer = take_mixer(weights, "output_hc", self.hp.n_embd, self.stream_sizes, last=True)

    def load_attention(self, weights: WeightSource, il: int, prefix: str) -> Attention | DeltaNet:  # type: ignore[override]
        attn = super().load_attention(weights, il, prefix)
        if isinstance(attn, DeltaNet):
            return attn
        if not self._chooses(il):
            weights.skip(*(f"{prefix}.indexer.{name}.weight" for name in ("q_proj", "k_proj", "q_norm", "k_norm")))
            return attn
        assert self.index_sizes is not None
        values = {field.name: getattr(attn, field.name) for field in fields(attn)}
        return ChoosingAttention(**values, indexer=take_mean_indexer(weights, prefix, self.index_sizes, self.hp.n_embd))

    def load_layer(self, weights: WeightSource, il: int, prefix: str) -> MixedLayer:  # type: ignore[override]
        d, sizes = self.hp.n_embd, self.stream_sizes
        ngrams = self.ngram_sizes
        return MixedLayer(
            attn_mixer=take_mixer(weights, f"{prefix}.hc_attn", d, sizes),
            attn=self.load_attention(weights, il, prefix),
            ffn_mixer=take_mixer(weights, f"{prefix}.hc_ffn", d, sizes),
            ffn=self.load_ffn(weights, il, prefix),
            ngrams=take_ngrams(weights, prefix, ngrams, d, sizes.n) if ngrams and ngrams.layer == il else None,
        )

    def take_state_norm(self, weights: WeightSource, name: str) -> Value:
        d, n = self.hp.n_embd, self.stream_sizes.n
        return weights.take(name, (d, n), (d * n,)).reshape(d, n)

    def take_ends(self, weights: WeightSource, prefix: str) -> None:
        super().take_ends(weights, prefix)
        self.mixer = take_mixer(weights, f"{prefix}.nextn.hc_head", self.hp.n_embd, self.stream_sizes, last=True)

    def start_at(self, layer: int) -> None:
        super().start_at(layer)
        self.recurrent, self.ngram_sizes = [False], None
        if self.index_sizes:
            self.index_sizes = replace(self.index_sizes, full=self.index_sizes.full[layer:])

    # cache

    def _chooses(self, layer: int) -> bool:
        """Whether a layer attends to cells that an indexer chooses."""
        return self.index_sizes is not None and not self.has_state(layer) and self.index_sizes.full[layer]

    @property
    def has_indexers(self) -> bool:
        return any(self._chooses(il) for il in range(self.hp.n_layer))

    def windows(self, layer: int) -> list[Window]:
        return self.index_sizes.windows() if self.index_sizes and self._chooses(layer) else super().windows(layer)

    def stretch(self, layer: int) -> int:
        return self.index_sizes.pool if self.index_sizes and self._chooses(layer) else 0

    def cache_specs(self, layer: int, params: GraphParams) -> list[CacheSpec]:
        specs, sizes = super().cache_specs(layer, params), self.index_sizes
        if sizes and self._chooses(layer) and effective_top_k(sizes.top_k, params):
            specs += sizes.caches(params)
        return specs

    def divisible_heads(self, layer: int) -> int:
        # Indexers choose cells for all heads of a token on one device.
        return 0 if self._chooses(layer) else super().divisible_heads(layer)

    # graph

    def collapsed(self, b: BatchGraph, streams: Value) -> Value:
        return mix_streams(b, self.mixer, streams, self.hp.norm_eps)[0]

    def attention(self, b: BatchGraph, il: int, attn: Attention | DeltaNet, h: Value) -> Value:
        if not isinstance(attn, ChoosingAttention) or (il, "ki") not in b.caches:
            return super().attention(b, il, attn, h)
        assert attn.indexer is not None and self.index_sizes is not None
        hp = self.hp
        rope = self.rope_params(il, b.params.rope)
        choose_mean_pools(b, il, attn.indexer, self.index_sizes, h, n_rot=hp.n_rot, rope=rope, eps=hp.norm_eps)
        return super().attention(b, il, attn, h)

    def attend(self, b: BatchGraph, il: int, q: Value, k: Value, v: Value) -> Value:
        if (il, "ki") not in b.caches:
            return super().attend(b, il, q, k, v)
        assert self.index_sizes is not None
        # The CPU lists no cells for tokens that see few, which devices could not tell from none.
        is_listed = not b.params.on_devices or chosen_on_devices(self.index_sizes.size)
        most = LISTED_ON_DEVICES if b.params.on_devices else LISTED_TOKENS
        store_heads(b, il, k, v)
        seen = visible(b, listed=is_listed and b.n_tokens <= most)
        return attend_cached(b, il, q, scale=self.attention_scale(il), seen=seen)

    def layer(self, b: BatchGraph, il: int, x: Value) -> Value:
        """One layer on the residual streams x [D, n, T] (only the output rows in the last layer)."""
        layer: MixedLayer = self.layers[il]  # type: ignore[assignment]
        g, eps = b.graph, self.hp.norm_eps
        if layer.ngrams is not None:
            assert self.ngram_sizes is not None
            x = add_ngrams(b, layer.ngrams, self.ngram_sizes, x, eps)
        h, back = mix_streams(b, layer.attn_mixer, x, eps)
        assert back is not None
        attended = self.attention(b, il, layer.attn, h)

        def rest(x: Value, attended: Value, back: Value) -> Value:
            x = g.hyper_expand(x, g.mul_mat(layer.attn.out, attended), back)
            h, shares = mix_streams(b, layer.ffn_mixer, x, eps)
            assert shares is not None
            return g.hyper_expand(x, self.ffn(b, layer.ffn, h), shares)

        return self.with_kept_rows(b, il, rest, x, attended, back)
