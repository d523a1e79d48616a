"""deepseek4: DeepSeek V4. Compressed attention, hyper-connections, and experts that first layers choose by token."""

from __future__ import annotations

from dataclasses import dataclass

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph, CacheSpec, GraphParams, Window
from ikpy.models.blocks import Experts, moe_ffn
from ikpy.models.compressed_attention import (
    OVERLAPPING,
    CompressedAttention,
    CompressedIndexer,
    CompressedLayer,
    CompressedSizes,
    compressed_caches,
    take_compressor,
)
from ikpy.models.feed_forward import swiglu_clamps, take_experts
from ikpy.models.hparams import HParams, block_count, check_rope_base, read_hparams
from ikpy.models.hyper_connections import (
    HyperConnection,
    StreamDecoder,
    StreamSizes,
    join_streams,
    take_connection,
)
from ikpy.models.keys import MAX_LAYERS, Keys
from ikpy.models.prediction import PredictionLayers, from_layer
from ikpy.models.routing import Routing, gating_func
from ikpy.models.sparse_attention import check_sizes
from ikpy.models.weights import WeightSource

MAX_RATIO = 1024


@dataclass
class Layer:
    """The two branches of a layer, each with its norm and its hyper-connection."""

    attn_streams: HyperConnection
    attn_norm: Value
    attn: CompressedAttention
    ffn_streams: HyperConnection
    ffn_norm: Value
    ffn: Experts


class DeepSeek4(StreamDecoder, PredictionLayers):
    """Files count prediction layers among the others or apart."""

    output_weight = "required"

    # hyper-parameters and tensors

    def read_hparams(self, keys: Keys) -> HParams:
        hp = read_hparams(keys)
        self.stream_sizes = StreamSizes.read(keys)
        self.n_predict_layers = self._n_prediction_layers(keys)
        hp.n_layer = self.n_layers(keys)
        if hp.n_layer < 1:
            raise FileFormatError(f"{keys.gguf.path}: {self.n_predict_layers} prediction layers leave none to run")
        if len(set(hp.n_head)) != 1 or hp.n_embd_head_k != hp.n_embd_head_v:
            raise FileFormatError(f"{keys.gguf.path}: Unsupported configuration: heads differ")
        hp.n_swa = keys.u32("attention.sliding_window")
        self.sizes = CompressedSizes(
            n_heads=hp.n_head[0],
            size=hp.n_embd_head_k,
            n_rot=hp.n_rot,
            window=hp.n_swa,
            index_heads=keys.u32("attention.indexer.head_count", 0),
            index_size=keys.u32("attention.indexer.key_length", 0),
            top_k=keys.u32("attention.indexer.top_k", 0),
            freq_base=keys.f32("attention.compress_rope_freq_base", hp.rope_freq_base),
        )
        check_rope_base(keys, hp, self.sizes.freq_base)
        self.ratios = self._ratios(keys, hp)
        self.q_rank = keys.u32("attention.q_lora_rank")
        self.out_rank = keys.u32("attention.output_lora_rank")
        self.out_groups = keys.u32("attention.output_group_count")
        if not self.out_groups or hp.n_head[0] % self.out_groups:
            raise FileFormatError(f"{keys.gguf.path}: {hp.n_head[0]} heads in {self.out_groups} groups")
        self.n_hash_layers = keys.u32("hash_layer_count", 0)
        self.limits, self.shared_limits = swiglu_clamps(keys, hp.n_layer)
        hp.n_ff_exp = keys.u32("expert_feed_forward_length")
        hp.n_ff_shared = hp.n_ff_exp * keys.u32("expert_shared_count")
        hp.yarn_beta_fast = keys.f32("rope.scaling.yarn_beta_fast", 32.0)
        hp.yarn_beta_slow = keys.f32("rope.scaling.yarn_beta_slow", 1.0)
        hp.routing = Routing(
            hp.n_expert_used,
            gating_func(keys, keys.u32("expert_gating_func", 4)),
            normalize=keys.boolean("expert_weights_norm", True),
            scale=keys.f32("expert_weights_scale", 1.0),
        )
        return hp

    @classmethod
    def n_layers(cls, keys: Keys) -> int:
        n, n_predict = block_count(keys), cls._n_prediction_layers(keys)
        is_counted = n_predict and any(name.startswith(f"blk.{n - 1}.nextn.") for name in keys.gguf.tensors)
        return max(0, n - n_predict) if is_counted else n

    @staticmethod
    def _n_prediction_layers(keys: Keys) -> int:
        n = int(keys.u32("nextn_predict_layers", 0))
        if n > MAX_LAYERS:
            raise FileFormatError(f"{keys.gguf.path}: {n} prediction layers, more than {MAX_LAYERS}")
        return n

    def _ratios(self, keys: Keys, hp: HParams) -> list[int]:
        """Positions per compressed cell in every layer that runs or predicts, 0: none."""
        key, n_all = f"{keys.arch}.attention.compress_ratios", hp.n_layer + self.n_predict_layers
        n = keys.n_listed("attention.compress_ratios", hp.n_layer)
        ratios = (keys.per_layer("attention.compress_ratios", n) + [0] * self.n_predict_layers)[:n_all]
        sizes = self.sizes
        if hp.n_swa < 1 or any(r == 1 or r > MAX_RATIO for r in ratios):
            raise FileFormatError(
                f"{keys.gguf.path}: a window of {hp.n_swa} and ratios from {key} that no layer can have"
            )
        if OVERLAPPING in ratios:
            check_sizes(keys.gguf.path, sizes.index_heads, sizes.index_size, sizes.top_k, sizes.n_rot)
        return ratios

    def load_global(self, weights: WeightSource) -> None:
        super().load_global(weights)
        weights.skip_layer(self.hp.n_layer)  # also where the file counts none

    def load_layer(self, weights: WeightSource, il: int, prefix: str) -> Layer:
        d = self.hp.n_embd
        return Layer(
            attn_streams=take_connection(weights, f"{prefix}.hc_attn", d, self.stream_sizes),
            attn_norm=weights.take(f"{prefix}.attn_norm.weight", (d,)),
            attn=self._load_attention(weights, il, prefix),
            ffn_streams=take_connection(weights, f"{prefix}.hc_ffn", d, self.stream_sizes),
            ffn_norm=weights.take(f"{prefix}.ffn_norm.weight", (d,)),
            ffn=self._load_experts(weights, il, prefix),
        )

    def _load_attention(self, weights: WeightSource, il: int, prefix: str) -> CompressedAttention:
        d, sizes, ratio = self.hp.n_embd, self.sizes, self.ratios[il]
        width, rank, groups = sizes.n_heads * sizes.size // self.out_groups, self.out_rank, self.out_groups
        name = f"{prefix}.attn_output_a.weight"
        out_a = weights.take(name, (width, rank, groups), (width, rank * groups), parts=(rank,))
        out_a = weights.values[name] = out_a.reshape(width, rank, groups)
        attn = CompressedAttention(
            q_a=weights.take(f"{prefix}.attn_q_a.weight", (d, self.q_rank)),
            q_a_norm=weights.take(f"{prefix}.attn_q_a_norm.weight", (self.q_rank,)),
            q_b=weights.take(f"{prefix}.attn_q_b.weight", (self.q_rank, sizes.n_heads * sizes.size)),
            kv=weights.take(f"{prefix}.attn_kv.weight", (d, sizes.size)),
            kv_norm=weights.take(f"{prefix}.attn_kv_a_norm.weight", (sizes.size,)),
            sinks=weights.take(f"{prefix}.attn_sinks.weight", (sizes.n_heads,)),
            out_a=out_a,
            out_b=weights.take(f"{prefix}.attn_output_b.weight", (rank * groups, d)),
        )
        if ratio:
            attn.compressor = take_compressor(weights, f"{prefix}.attn", d, sizes.size, ratio)
        if ratio == OVERLAPPING:
            attn.indexer = CompressedIndexer(
                q_b=weights.take(
                    f"{prefix}.indexer.attn_q_b.weight", (self.q_rank, sizes.index_heads * sizes.index_size)
                ),
                proj=weights.take(f"{prefix}.indexer.proj.weight", (d, sizes.index_heads)),
                keys=take_compressor(weights, f"{prefix}.indexer", d, sizes.index_size, ratio),
            )
        return attn

    def _load_experts(self, weights: WeightSource, il: int, prefix: str) -> Experts:
        hp = self.hp
        by_token = il < self.n_hash_layers
        experts = take_experts(
            weights,
            prefix,
            hp.n_embd,
            hp.n_expert,
            hp.n_ff_exp,
            n_ff_shared=hp.n_ff_shared,
            selection_bias="none" if by_token else "optional",
        )
        if by_token:
            name = f"{prefix}.ffn_gate_tid2eid.weight"
            experts.by_token = weights.integers(name, (hp.n_expert_used, hp.n_vocab))
        experts.input_limit = from_layer(self.limits, il)[0]
        if experts.shared:
            experts.shared.input_limit = from_layer(self.shared_limits, il)[0]
        return experts

    def start_at(self, layer: int) -> None:
        super().start_at(layer)
        self.ratios = self.ratios[layer:]

    # cache

    def window(self, layer: int) -> Window:
        return self.sizes.window_kind()

    def windows(self, layer: int) -> list[Window]:
        return [self.window(layer), self.sizes.source_window(self.ratios[layer])]

    def stretch(self, layer: int) -> int:
        return self.ratios[layer]

    @property
    def values_are_keys(self) -> bool:
        return True

    @property
    def has_indexers(self) -> bool:
        return OVERLAPPING in self.ratios[: self.hp.n_layer]

    def cache_specs(self, layer: int, params: GraphParams) -> list[CacheSpec]:
        return compressed_caches(self.sizes, self.ratios[layer], layer, params)

    def shift_part(self, layer: int, params: GraphParams) -> tuple[str, int, int] | None:
        return None

    # graph

    def layer(self, b: BatchGraph, il: int, x: Value) -> Value:
        """One layer on the residual streams x [D, n, T] (only the output rows behind the last layer)."""
        layer: Layer = self.layers[il]  # type: ignore[assignment]
        g, hp = b.graph, self.hp
        h, back = join_streams(b, layer.attn_streams, self.stream_sizes, hp.norm_eps, x)
        attention = CompressedLayer(b, il, layer.attn, self.sizes, self.ratios[il], hp.norm_eps)
        attended = attention.attend(self.norm(b, h, layer.attn_norm))

        def rest(x: Value, attended: Value, back: Value) -> Value:
            x = g.hyper_expand(x, self._attention_output(b, layer.attn, attended), back)
            h, back = join_streams(b, layer.ffn_streams, self.stream_sizes, hp.norm_eps, x)
            return g.hyper_expand(x, moe_ffn(b, layer.ffn, hp.routing, self.norm(b, h, layer.ffn_norm)), back)

        if layer.ffn.by_token is None:
            return self.with_kept_rows(b, il, rest, x, attended, back)
        # Experts that go with tokens read those of the whole batch.
        return self.with_kept_rows(b, il, lambda x: x, rest(x, attended, back))

    def _attention_output(self, b: BatchGraph, attn: CompressedAttention, attended: Value) -> Value:
        """Both output projections of attended [d H, T]: groups of heads apart, then their results together."""
        g, groups, n = b.graph, self.out_groups, attended.shape[1]
        grouped = attended.reshape(attended.shape[0] // groups, groups, n)
        low = g.new(self.out_rank, groups, n)
        g.mul_mat(attn.out_a, grouped.permute(0, 2, 1), dst=low.permute(0, 2, 1))
        return g.mul_mat(attn.out_b, low.reshape(self.out_rank * groups, n))
