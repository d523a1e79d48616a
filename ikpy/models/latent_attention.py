"""Latent attention (MLA): what is cached and the graph of each mode (arXiv:2405.04434).

In shapes: T tokens; H heads with dk = dn + R elements of queries and keys, R of them rotated, and dv of values; latents
of rkv elements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ikpy.errors import UsageError
from ikpy.graph.ir import F16, F32, CellRange, Value
from ikpy.models.base import Decoder
from ikpy.models.batch import FULL, BatchGraph, CacheSpec, GraphParams
from ikpy.models.blocks import attend_cached, concat_heads, gated_heads, heads_per_step, part_of_rows, store_heads
from ikpy.models.latent_tensors import LatentSizes
from ikpy.models.rope import RopeParams
from ikpy.models.sparse_attention import (
    LISTED_ON_DEVICES,
    Indexer,
    IndexerSizes,
    Visible,
    choose_cells,
    chosen_on_devices,
    effective_top_k,
    index_cache,
    visible,
)
from ikpy.quants import registry

# Fewer tokens than this use the absorbed form in modes 2 and 3.
PROMPT_TOKENS = 128
# Prompts attend to chosen cells one token after the other, in the absorbed form, where there are more than that many
# times as many; on tile units and elsewhere. Seconds of 512 tokens at 3,072 cells with 2,048 chosen (DeepSeek-V3.2, one
# thread): 1.1 instead of 1.4 on tiles, 2.6 instead of 2.0 without; at 4,096 cells 1.2 and 1.8, 2.7 and 2.8.
LISTED_FROM_TILES, LISTED_FROM = 1, 2
# The same in mode 0, where a token's cells are large and tokens that share them are faster together.
LISTED_TOKENS = 8


@dataclass
class LatentAttention:
    """Projections of MLA. q or (q_a, q_a_norm, q_b); kv_b or (k_b, v_b) or all three. prefix: of their names.

    kr_norm: of the shared key part before its rotation. sinks: a score per head that takes part in the softmax without
    a value. gate: a row per head or per element, whose sigmoid multiplies what the head attended to.
    """

    prefix: str
    sizes: LatentSizes
    kv_a: Value
    kv_a_norm: Value
    out: Value
    q: Value | None = None
    q_a: Value | None = None
    q_a_norm: Value | None = None
    q_b: Value | None = None
    kv_b: Value | None = None
    k_b: Value | None = None
    v_b: Value | None = None
    indexer: Indexer | None = None
    kr_norm: Value | None = None
    sinks: Value | None = None
    gate: Value | None = None


class LatentDecoder(Decoder):
    """A decoder with latent attention. Its hyper-parameters have ``kv_lora_rank`` in ``extra``."""

    temperature_scale: float = 0.0
    """Queries are multiplied by 1 + temperature_scale * ln(1 + floor(pos / temperature_length))."""
    temperature_length: int = 0
    indexer_sizes: IndexerSizes | None = None

    @property
    def has_indexers(self) -> bool:
        return self.indexer_sizes is not None

    def latent_sizes(self, layer: int) -> LatentSizes:
        """Sizes of a layer."""
        hp = self.hp
        return LatentSizes(hp.n_head[0], hp.n_embd_head_k, hp.n_rot, hp.n_embd_head_v, hp.extra["kv_lora_rank"])

    def divisible_heads(self, layer: int) -> int:
        # Indexers choose cells for all heads of a token on one device.
        return 0 if self.has_indexers else self.hp.n_head[layer]

    def effective_mla(self, mla: int) -> int:
        return mla

    # cache

    def cache_specs(self, layer: int, params: GraphParams) -> list[CacheSpec]:
        specs = super().cache_specs(layer, params) if params.mla == 0 else self._latent_specs(layer, params)
        if (sizes := self.indexer_sizes) and effective_top_k(sizes.top_k, params) and self.has_indexer(layer):
            specs += self.index_specs(params)
        return specs

    def has_indexer(self, layer: int) -> bool:
        """Whether a layer has an indexer of its own."""
        attn: LatentAttention = self.layers[layer].attn  # type: ignore[attr-defined]
        return attn.indexer is not None

    def index_specs(self, params: GraphParams) -> list[CacheSpec]:
        """Cache tensors of an indexer."""
        assert self.indexer_sizes is not None
        return [index_cache(self.indexer_sizes.size, params)]

    def _latent_specs(self, layer: int, params: GraphParams) -> list[CacheSpec]:
        kind = registry.by_id(params.types_k[layer])
        sizes, window = self.latent_sizes(layer), self.window(layer)
        rank, n_rot = sizes.rank, sizes.rotated
        if rank % kind.block_elements or n_rot % kind.block_elements:
            raise UsageError(
                f"-ctk {kind.name}: rows of {n_rot} rotated and {rank} latent elements are no multiples of its block "
                f"size {kind.block_elements}"
            )
        if kind.row_extra_bytes and n_rot:
            # Rows with a scale of their own cannot be split into keys and values: two caches, and finer scales.
            return [CacheSpec("kr", n_rot, 1, kind.id, window), CacheSpec("kv", rank, 1, kind.id, window)]
        return [CacheSpec("kv", rank + n_rot, 1, kind.id, window)]

    def latent_block(self, sizes: LatentSizes, params: GraphParams) -> int:
        """Block of the Hadamard transform of cached latents, 0 for none."""
        if not params.k_hadamard:
            return 0
        return next(n for n in (64, 32, 16, 8, 4, 2, 1) if sizes.rank % n == sizes.rotated % n == 0)

    def _latent_parts(self, b: BatchGraph, il: int, *, attended: bool) -> tuple[list[Value], Value, Value]:
        """The cached rows as key segments, their rotated part (empty, if the model has none) and their latent part."""
        find = b.attended if attended else b.cache
        cached, sizes = find(il, "kv"), self.latent_sizes(il)
        n_rot = sizes.rotated
        if (il, "kr") in b.caches:
            rotated = find(il, "kr")
            return [rotated, cached], rotated, cached
        return [cached], part_of_rows(cached, 0, n_rot), part_of_rows(cached, n_rot, sizes.rank)

    def shift_part(self, layer: int, params: GraphParams) -> tuple[str, int, int] | None:
        return None

    def _scales(self, rope: RopeParams, k: int) -> tuple[float, RopeParams]:
        """Score scale of keys of k elements with the YaRN magnitude, and the RoPE parameters that leave it out."""
        log_scale = math.log(1.0 / rope.freq_scale)
        mscale = rope.attn_factor * (1.0 + self.hp.yarn_log_multiplier * log_scale)
        plain = RopeParams(**{**rope.__dict__, "attn_factor": 1.0 / (1.0 + 0.1 * log_scale)})
        return mscale * mscale / math.sqrt(k), plain

    # graph

    def _queries(self, b: BatchGraph, il: int, attn: LatentAttention, h: Value, table: Value | None) -> Value:
        """[dk, H, T], non-rotated part first; the rotated part is rotated. Indexers choose cells by their latents."""
        g, sizes = b.graph, attn.sizes
        if attn.q is not None:
            q = g.mul_mat(attn.q, h)
        else:
            assert attn.q_a is not None and attn.q_b is not None and attn.q_a_norm is not None
            latent = self.norm(b, g.mul_mat(attn.q_a, h), attn.q_a_norm)
            q = g.mul_mat(attn.q_b, latent)
            if (il, "ki") in b.caches:
                assert attn.indexer is not None
                self.choose(b, il, attn.indexer, h, latent, table)
        q = q.reshape(sizes.k, sizes.heads, b.n_tokens)
        if table is not None:
            q = g.rope(q, table, neox=self.rope_neox, offset=sizes.nope)
        if self.temperature_scale:
            q = g.mul(q, b.attention_temperature(self.temperature_scale, self.temperature_length, offset=0))
        return q

    def choose(self, b: BatchGraph, il: int, indexer: Indexer, h: Value, q_latent: Value, table: Value | None) -> None:
        """Lets the indexer of a layer choose cells for its tokens, in b.chosen."""
        assert self.indexer_sizes is not None and table is not None
        choose_cells(b, il, indexer, self.indexer_sizes, h, q_latent, table)

    def _latents(
        self, b: BatchGraph, attn: LatentAttention, h: Value, table: Value | None
    ) -> tuple[Value, Value | None]:
        """Normed latent c [rkv, 1, T] and rotated shared key part kr [R, 1, T], if the model has one."""
        g, rkv, n_rot = b.graph, attn.sizes.rank, attn.sizes.rotated
        both = g.mul_mat(attn.kv_a, h)
        c = self.norm(b, both.slice0(0, rkv), attn.kv_a_norm).reshape(rkv, 1, b.n_tokens)
        if not n_rot:
            return c, None
        kr = self.norm(b, both.slice0(rkv, n_rot), attn.kr_norm)
        kr = kr.view((n_rot, 1, b.n_tokens), (kr.strides[1], kr.strides[1]))
        return c, kr if table is None else g.rope(kr, table, neox=self.rope_neox)

    def attention(self, b: BatchGraph, il: int, attn: LatentAttention, h: Value) -> Value:
        """Attention of a layer to hidden states h [d, T], before the output projection: [H * dv, T]."""
        sizes = attn.sizes
        scale, table = 1.0 / math.sqrt(sizes.k), None
        if self.is_rotated(il):
            scale, rope = self._scales(self.rope_params(il, b.params.rope), sizes.k)
            table = b.rope_table(sizes.rotated, rope, self.rope_factors(il, b.params))
        q = self._queries(b, il, attn, h, table)
        c, kr = self._latents(b, attn, h, table)
        self._observe_latents(b, il, attn, q, c)
        if b.params.mla == 0:
            out = self._expanded(b, il, attn, q, c, kr, scale)
        else:
            self._store_latents(b, il, attn.sizes, q, c, kr)
            out = b.graph.new(sizes.v, sizes.heads, b.n_tokens)
            attend = self._prompt if self._is_prompt(b, il, attn) else self._absorbed
            attend(b, il, attn, q, scale, out)
        attended = out.reshape(sizes.v * sizes.heads, b.n_tokens)
        return attended if attn.gate is None else gated_heads(b, attn.gate, h, attended, sizes.v)

    def _store_latents(self, b: BatchGraph, il: int, sizes: LatentSizes, q: Value, c: Value, kr: Value | None) -> None:
        """Latents and shared key parts in the cache; where they are transformed, those parts of queries too."""
        block = self.latent_block(sizes, b.params)
        _, rotated, latents = self._latent_parts(b, il, attended=False)
        if kr is not None:
            if block:
                b.graph.hadamard(q.slice0(sizes.nope, sizes.rotated), block)
                b.graph.hadamard(kr, block)
            b.store(il, "kv", kr, rotated)
        b.store(il, "kv", b.graph.hadamard(c, block) if block else c, latents)

    def _is_prompt(self, b: BatchGraph, il: int, attn: LatentAttention) -> bool:
        """Whether cells are expanded. Not with adapters: their scales belong to queries, cells to any sequence. Nor
        those of windows: each is seen by few tokens.
        """
        if self.window(il) != FULL:
            return False
        weights = (attn.kv_b, attn.k_b, attn.v_b)
        if b.graph.adapters and any(b.graph.adapters.weights.of(w) for w in weights if w is not None):
            return False
        return b.n_tokens >= PROMPT_TOKENS and b.params.mla > 1 and b.params.flash_attn

    def _observe_latents(self, b: BatchGraph, il: int, attn: LatentAttention, q: Value, c: Value) -> None:
        """Statistics of the file's attn_kv_b, attn_k_b and attn_v_b where no matmul of theirs sees every token once.

        The absorbed form uses other tensors than attn_kv_b, mode 0 than the other two; the prompt path of modes 2 and 3
        expands the latents of all cells at once. Every token counts once.
        """
        if b.graph.collector is None:
            return
        heads, rkv = attn.sizes.heads, c.shape[0]
        if attn.kv_b is not None and b.params.mla > 0:
            b.graph.observe(attn.kv_b, c.reshape(rkv, b.n_tokens), stored_only=True)
        if b.params.mla > 0 and not self._is_prompt(b, il, attn):
            return
        if attn.k_b is not None:
            b.graph.observe(attn.k_b, q.slice0(0, attn.sizes.nope).permute(0, 2, 1), stored_only=True)
        if attn.v_b is not None:
            per_head = c.view((rkv, b.n_tokens, heads), (c.strides[2], 0))
            b.graph.observe(attn.v_b, per_head, stored_only=True)

    def _expanded(
        self, b: BatchGraph, il: int, attn: LatentAttention, q: Value, c: Value, kr: Value | None, scale: float
    ) -> Value:
        """Mode 0: keys and values of every head are computed and cached."""
        g, dn, dv, heads = b.graph, attn.sizes.nope, attn.sizes.v, attn.sizes.heads
        assert attn.kv_b is not None
        kv = g.mul_mat(attn.kv_b, c.reshape(c.shape[0], b.n_tokens)).reshape(dn + dv, heads, b.n_tokens)
        k = kv.slice0(0, dn) if kr is None else concat_heads(b, [kv.slice0(0, dn), kr], heads)
        store_heads(b, il, k, kv.slice0(dn, dv))
        listed = b.n_tokens <= LISTED_TOKENS and not b.params.on_devices
        seen = visible(b, listed=listed, window=self.window(il))
        attended = attend_cached(b, il, q, scale=scale, sinks=attn.sinks, seen=seen)
        return attended.reshape(dv, heads, b.n_tokens)

    def _prompt(self, b: BatchGraph, il: int, attn: LatentAttention, q: Value, scale: float, out: Value) -> None:
        """Prompt path of modes 2 and 3, into out [dv, H, T]: the faster of both forms where cells were chosen."""
        n_ctx = b.params.n_ctx
        times = LISTED_FROM_TILES if b.graph.core.has_tiles() else LISTED_FROM
        upto = n_ctx if b.chosen is None else times * (b.chosen.shape[0] - 1)
        if upto >= n_ctx or b.params.on_devices or b.graph.collector:
            return self._expanded_from_cache(b, il, attn, q, scale, out)
        with b.graph.only(CellRange(upto=upto)):
            self._expanded_from_cache(b, il, attn, q, scale, out, upto)
        with b.graph.only(CellRange(above=upto)):
            seen = visible(b, listed=True)
            for start in range(0, b.n_tokens, PROMPT_TOKENS):  # queries of all would be larger than anything else
                n = min(PROMPT_TOKENS, b.n_tokens - start)
                part = (x.slice(2, start, n) for x in (q, out))
                self._absorbed(b, il, attn, next(part), scale, next(part), seen.of_tokens(start, n))

    def _takes_lists(self, b: BatchGraph, il: int) -> bool:
        """Whether a layer attends to chosen cells by their lists.

        On devices only to its own choice, which is made there: the CPU lists no cells for tokens that see few.
        """
        if not b.params.on_devices or self.indexer_sizes is None:
            return True
        made_there = (il, "ki") in b.caches and chosen_on_devices(self.indexer_sizes.size)
        return made_there and b.n_tokens <= LISTED_ON_DEVICES

    def _absorbed(
        self,
        b: BatchGraph,
        il: int,
        attn: LatentAttention,
        q: Value,
        scale: float,
        out: Value,
        seen: Visible | None = None,
    ) -> None:
        """Scores and values directly on the cached latents, into out [dv, H, T]; seen: by these tokens.

        q goes through attn_k_b, the sums of values through attn_v_b.
        """
        g, sizes = b.graph, attn.sizes
        assert attn.k_b is not None and attn.v_b is not None
        heads, n_rot, rkv = sizes.heads, sizes.rotated, sizes.rank
        query = g.new(n_rot + rkv, heads, q.shape[2])
        if n_rot:
            g.copy(q.slice0(sizes.nope, n_rot), query.slice0(0, n_rot))
        absorbed = query.slice0(n_rot, rkv).permute(0, 2, 1)
        g.mul_mat(attn.k_b, q.slice0(0, sizes.nope).permute(0, 2, 1), dst=absorbed)
        block = self.latent_block(sizes, b.params)
        if block:
            g.hadamard(query.slice0(n_rot, rkv), block)
        keys, _, latents = self._latent_parts(b, il, attended=True)
        seen = seen or visible(b, listed=self._takes_lists(b, il), window=self.window(il))
        latent = g.attention(
            query,
            keys,
            latents,
            seen.mask,
            scale=scale,
            flash=b.params.flash_attn and b.params.mla != 2,
            heads_per_step=heads_per_step(b, heads),
            sinks=attn.sinks,
            chosen=seen.chosen,
            common=seen.common,
        )
        if block:
            g.hadamard(latent, block)
        g.mul_mat(attn.v_b, latent.permute(0, 2, 1), dst=out.permute(0, 2, 1))

    def _expanded_from_cache(
        self, b: BatchGraph, il: int, attn: LatentAttention, q: Value, scale: float, out: Value, upto: int = 0
    ) -> None:
        """Keys and values of the cached latents, some heads at a time, into out [dv, H, T].

        upto: most attended cells, 0 for all of the cache.
        """
        g, sizes = b.graph, attn.sizes
        assert attn.kv_b is not None
        n_ctx, heads, rkv = upto or b.params.n_ctx, sizes.heads, sizes.rank
        _, rotated, rows = self._latent_parts(b, il, attended=True)
        rows = Value(
            rows.buffer,
            rows.type_id,
            (rkv, n_ctx, 1, 1),
            (rows.strides[0], *rows.strides[2:], 0),
            rows.offset,
            1,
        )
        latents = g.copy(rows, g.new(rkv, n_ctx, dynamic_dim=1))
        if block := self.latent_block(sizes, b.params):
            g.hadamard(latents, block)
        seen = visible(b, listed=False, upto=upto)
        step = sizes.heads_per_expansion(n_ctx, b.params.attn_max_batch)
        width = sizes.nope + sizes.v
        for h0 in range(0, heads, step):
            weights = attn.kv_b.slice(1, h0 * width, step * width)
            k, v = self._expand_heads(b, sizes, weights, latents, step, rows.type_id)
            g.attention(
                q.slice(1, h0, step),
                [k, rotated] if sizes.rotated else [k],
                v,
                seen.mask,
                scale=scale,
                flash=True,
                sinks=None if attn.sinks is None else attn.sinks.slice0(h0, step),
                dst=out.slice(1, h0, step),
                common=seen.common,
            )

    def _expand_heads(
        self, b: BatchGraph, sizes: LatentSizes, kv_b: Value, latents: Value, n_head: int, cache_type: int
    ) -> tuple[Value, Value]:
        """Keys [dn, n_head, n_kv] and values [dv, n_head, n_kv] of some heads, rounded to the cache type."""
        g, dn, dv = b.graph, sizes.nope, sizes.v
        n_ctx = latents.shape[1]
        block = registry.by_id(cache_type).block_elements
        direct = cache_type in (F16, F32) or dn % block or dv % block
        type_id = F16 if direct and cache_type != F32 else F32
        kv = g.new(n_head * (dn + dv), n_ctx, type_id=type_id, dynamic_dim=1)
        g.mul_mat(kv_b, latents, dst=kv)
        item = kv.strides[0]
        strides = ((dn + dv) * item, kv.strides[1], 0)
        k = kv.view((dn, n_head, n_ctx), strides, 0, dynamic_dim=2)
        v = kv.view((dv, n_head, n_ctx), strides, dn * item, dynamic_dim=2)
        if direct:
            return k, v
        rounded = [g.new(part.shape[0], n_head, n_ctx, type_id=cache_type, dynamic_dim=2) for part in (k, v)]
        return g.copy(k, rounded[0]), g.copy(v, rounded[1])
