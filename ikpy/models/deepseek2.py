"""deepseek2: DeepSeek V2/V2-Lite/V3/R1, Kimi-K2 and relatives: latent attention (MLA) and routed experts.

Model semantics 3.3 (tensors), 4.4 (RoPE), 5 (routing), 6 (MLA modes).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ikpy.errors import FileFormatError, UsageError
from ikpy.graph.ir import F16, F32, Value
from ikpy.models.base import Decoder
from ikpy.models.batch import BatchGraph, CacheSpec, GraphParams
from ikpy.models.blocks import (
    MIB,
    DenseFFN,
    Experts,
    cached_attention,
    concat_heads,
    dense_ffn,
    heads_per_step,
    moe_ffn,
    part_of_rows,
)
from ikpy.models.feed_forward import take_dense, take_experts
from ikpy.models.hparams import HParams, read_hparams
from ikpy.models.keys import REQUIRED, Keys
from ikpy.models.latent import derive_k_b_v_b, derive_kv_b
from ikpy.models.rope import RopeParams
from ikpy.models.routing import Routing, gating_func
from ikpy.models.weights import WeightSource
from ikpy.quants import registry

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Fewer tokens than this use the absorbed form in modes 2 and 3.
PROMPT_TOKENS = 128


# Files of other programs that hold attn_k_b and attn_v_b only; the first lines are those that users know.
INCOMPATIBLE = (
    "=" * 74,
    "Detected incompatible DeepSeek model.",
    "Will try to fix, but there are no guarantees",
    "",
    "attn_kv_b is computed from attn_k_b and attn_v_b and takes memory of its own;",
    "where these are quantized it is rounded to Q8_0 once more",
    "=" * 74,
)


@dataclass
class LatentAttention:
    """Projections of MLA. q or (q_a, q_a_norm, q_b); kv_b or (k_b, v_b) or all three."""

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


@dataclass
class Layer:
    """Norms, latent attention, and a dense or expert feed-forward network."""

    attn_norm: Value
    attn: LatentAttention
    ffn_norm: Value
    ffn: DenseFFN | Experts


class DeepSeek2(Decoder):
    """MLA decoder with leading dense layers and routed plus shared experts."""

    output_weight = "required"

    # --- hyper-parameters and tensors -------------------------------------------------------------------------

    def read_hparams(self, keys: Keys) -> HParams:
        hp = read_hparams(keys)
        hp.yarn_log_multiplier = keys.f32("rope.scaling.yarn_log_multiplier", 0.0)
        gating = keys.u32("expert_gating_func", 0) or (2 if hp.n_layer in (47, 48) else 1)
        if len(set(hp.n_head)) != 1:
            raise FileFormatError(f"{keys.gguf.path}: Unsupported configuration: layers differ in head count")
        hp.extra.update(
            # Models without a low-rank query ("lite") need no such key.
            q_lora_rank=keys.u32(
                "attention.q_lora_rank", 0 if "blk.0.attn_q.weight" in keys.gguf.tensors else REQUIRED
            ),
            kv_lora_rank=keys.u32("attention.kv_lora_rank"),
        )
        hp.n_dense_layers = keys.u32("leading_dense_block_count")
        hp.n_ff_exp = keys.u32("expert_feed_forward_length")
        hp.n_ff_shared = hp.n_ff_exp * keys.u32("expert_shared_count")
        hp.routing = Routing(
            hp.n_expert_used,
            gating_func(keys, gating),
            normalize=keys.boolean("expert_weights_norm", False),
            scale=keys.f32("expert_weights_scale"),
        )
        self.one_kv_head = hp.n_head_kv[0] == 1 and hp.n_head[0] != 1
        if self.one_kv_head:
            hp.n_embd_head_k = keys.u32("attention.key_length_mla", 192)
            hp.n_embd_head_v = keys.u32("attention.value_length_mla", 128)
            hp.n_head_kv = list(hp.n_head)
        if hp.n_rot >= hp.n_embd_head_k:
            raise FileFormatError(
                f"{keys.gguf.path}: rope.dimension_count {hp.n_rot} must be below the key length {hp.n_embd_head_k}"
            )
        return hp

    def load(self, weights: WeightSource) -> None:
        if self.one_kv_head:
            for line in INCOMPATIBLE:
                self.log(line)
        super().load(weights)

    @property
    def n_nope(self) -> int:
        """Elements of a query or key head that are not rotated."""
        return self.hp.n_embd_head_k - self.hp.n_rot

    def load_layer(self, weights: WeightSource, il: int, prefix: str) -> Layer:
        norm = (self.hp.n_embd,)
        return Layer(
            attn_norm=weights.take(f"{prefix}.attn_norm.weight", norm),
            attn=self._load_attention(weights, prefix),
            ffn_norm=weights.take(f"{prefix}.ffn_norm.weight", norm),
            ffn=self._load_ffn(weights, il, prefix),
        )

    def _load_ffn(self, weights: WeightSource, il: int, prefix: str) -> DenseFFN | Experts:
        hp = self.hp
        if il < hp.n_dense_layers or hp.n_expert == 0:
            return take_dense(weights, prefix, hp.n_embd, hp.n_ff[il])
        return take_experts(
            weights,
            prefix,
            hp.n_embd,
            hp.n_expert,
            hp.n_ff_exp,
            n_ff_shared=hp.n_ff_shared,
            selection_bias="optional",
        )

    def _load_attention(self, weights: WeightSource, prefix: str) -> LatentAttention:
        hp = self.hp
        d, heads, dk, dv, dn = hp.n_embd, hp.n_head[0], hp.n_embd_head_k, hp.n_embd_head_v, self.n_nope
        rkv = hp.extra["kv_lora_rank"]
        attn = LatentAttention(
            kv_a=weights.take(f"{prefix}.attn_kv_a_mqa.weight", (d, rkv + hp.n_rot)),
            kv_a_norm=weights.take(f"{prefix}.attn_kv_a_norm.weight", (rkv,)),
            out=weights.take(f"{prefix}.attn_output.weight", (heads * dv, d)),
        )
        if weights.has(f"{prefix}.attn_q.weight"):
            attn.q = weights.take(f"{prefix}.attn_q.weight", (d, heads * dk))
        else:
            rq = hp.extra["q_lora_rank"]
            attn.q_a = weights.take(f"{prefix}.attn_q_a.weight", (d, rq))
            attn.q_a_norm = weights.take(f"{prefix}.attn_q_a_norm.weight", (rq,))
            attn.q_b = weights.take(f"{prefix}.attn_q_b.weight", (rq, heads * dk))
        name = f"{prefix}.attn_kv_b.weight"
        attn.kv_b = weights.take(name, (rkv, heads * (dn + dv)), required=False, parts=(dn, dv))
        needed = attn.kv_b is None
        name = f"{prefix}.attn_k_b.weight"
        k_b = weights.take(name, (dn, rkv, heads), (dn, heads * rkv), required=needed, parts=(rkv,))
        name = f"{prefix}.attn_v_b.weight"
        v_b = weights.take(name, (rkv, dv, heads), (rkv, heads * dv), required=needed, parts=(dv,))
        if k_b is not None:
            attn.k_b = weights.values[k_b.name] = k_b.reshape(dn, rkv, heads)
        if v_b is not None:
            attn.v_b = weights.values[v_b.name] = v_b.reshape(rkv, dv, heads)
        return attn

    # --- MLA modes --------------------------------------------------------------------------------------------

    def effective_mla(self, mla: int) -> int:
        return mla

    def prepare(self, mla: int) -> None:
        """Derives attn_k_b/attn_v_b (modes above 0) or attn_kv_b (modes other than 1) where the file lacks them."""
        hp = self.hp
        sizes = (hp.extra["kv_lora_rank"], self.n_nope, hp.n_embd_head_v, hp.n_head[0])
        attentions = [(il, layer.attn) for il, layer in enumerate(self.layers)]  # type: ignore[attr-defined]
        if mla > 0:
            missing = [(il, a) for il, a in attentions if a.k_b is None or a.v_b is None]
            if missing:
                self.log(f"============ llm_prepare_mla: need to compute {len(missing)} wk_b/wv_b tensors")
            for il, a in missing:
                a.k_b, a.v_b = derive_k_b_v_b(a.kv_b, *sizes)
                self.derived_bytes += a.k_b.buffer.nbytes  # attn_v_b is a view of attn_kv_b
                self._log_derived(il, "attn_k_b", a.k_b)
                self._log_derived(il, "attn_v_b", a.v_b)
        if mla != 1:
            missing = [(il, a) for il, a in attentions if a.kv_b is None]
            if missing:
                self.log(f"============ llm_prepare_mla: need to compute {len(missing)} wkv_b tensors")
            for il, a in missing:
                a.kv_b = derive_kv_b(a.k_b, a.v_b, *sizes)
                self.derived_bytes += a.kv_b.buffer.nbytes
                self._log_derived(il, "attn_kv_b", a.kv_b)

    def _log_derived(self, il: int, name: str, value: Value) -> None:
        value.name = f"blk.{il}.{name}.weight"
        if value.buffer.name == name:  # attn_v_b may be a part of attn_kv_b
            value.buffer.name = value.name
        shape = " x ".join(str(n) for n in value.shape[: 2 if name == "attn_kv_b" else 3])
        buffer = self.buffer_of(value.buffer.name)
        self.log(f"Computed {value.name} as {shape} of type {value.type_name} and stored in buffer {buffer}")

    def adapted_parts(
        self, name: str, a: NDArray[np.float32], b: NDArray[np.float32]
    ) -> dict[str, tuple[Value, NDArray[np.float32], NDArray[np.float32]]]:
        """attn_kv_b += B A means attn_k_b += A^T B_k^T and attn_v_b += B_v A per head."""
        if not name.endswith(".attn_kv_b.weight"):
            return {}
        attn: LatentAttention = self.layers[int(name.split(".")[1])].attn  # type: ignore[attr-defined]
        if attn.k_b is None or attn.v_b is None:
            return {}
        heads = b.reshape(self.hp.n_head[0], -1, b.shape[-1])
        keys, values = heads[:, : self.n_nope], heads[:, self.n_nope :]
        shared = a.reshape(1, *a.shape[-2:])
        return {
            name.replace("attn_kv_b", "attn_k_b"): (attn.k_b, keys.transpose(0, 2, 1), shared.transpose(0, 2, 1)),
            name.replace("attn_kv_b", "attn_v_b"): (attn.v_b, shared, values),
        }

    def cache_specs(self, layer: int, params: GraphParams) -> list[CacheSpec]:
        if params.mla == 0:
            return super().cache_specs(layer, params)
        kind = registry.by_id(params.types_k[layer])
        rank, n_rot = self.hp.extra["kv_lora_rank"], self.hp.n_rot
        if rank % kind.block_elements or n_rot % kind.block_elements:
            raise UsageError(
                f"-ctk {kind.name}: rows of {n_rot} rotated and {rank} latent elements are no multiples of its block "
                f"size {kind.block_elements}"
            )
        if kind.row_extra_bytes:
            # Rows with a scale of their own cannot be split into keys and values: two caches, and finer scales.
            return [CacheSpec("kr", n_rot, 1, kind.id), CacheSpec("kv", rank, 1, kind.id)]
        return [CacheSpec("kv", rank + n_rot, 1, kind.id)]

    def latent_block(self, params: GraphParams) -> int:
        """Block of the Hadamard transform of cached latents, 0 for none (model semantics 7.7)."""
        sizes = self.hp.extra["kv_lora_rank"], self.hp.n_rot
        if not params.k_hadamard:
            return 0
        return next(n for n in (64, 32, 16, 8, 4, 2, 1) if all(size % n == 0 for size in sizes))

    def _latent_parts(self, b: BatchGraph, il: int, *, attended: bool) -> tuple[list[Value], Value, Value]:
        """The cached rows as key segments, their rotated part and their latent part."""
        find = b.attended if attended else b.cache
        cached, n_rot = find(il, "kv"), self.hp.n_rot
        if (il, "kr") in b.caches:
            rotated = find(il, "kr")
            return [rotated, cached], rotated, cached
        return [cached], part_of_rows(cached, 0, n_rot), part_of_rows(cached, n_rot, self.hp.extra["kv_lora_rank"])

    def shift_part(self, params: GraphParams) -> tuple[str, int, int] | None:
        return None

    def _scales(self, rope: RopeParams) -> tuple[float, RopeParams]:
        """Score scale with the YaRN magnitude of q and k, and the RoPE parameters that leave it out (4.4)."""
        log_scale = math.log(1.0 / rope.freq_scale)
        mscale = rope.attn_factor * (1.0 + self.hp.yarn_log_multiplier * log_scale)
        plain = RopeParams(**{**rope.__dict__, "attn_factor": 1.0 / (1.0 + 0.1 * log_scale)})
        return mscale * mscale / math.sqrt(self.hp.n_embd_head_k), plain

    # --- graph ------------------------------------------------------------------------------------------------

    def _queries(self, b: BatchGraph, attn: LatentAttention, h: Value, table: Value) -> Value:
        """[dk, H, T], non-rotated part first; the rotated part is rotated."""
        g, hp = b.graph, self.hp
        if attn.q is not None:
            q = g.mul_mat(attn.q, h)
        else:
            assert attn.q_a is not None and attn.q_b is not None and attn.q_a_norm is not None
            q = g.mul_mat(attn.q_b, self.norm(b, g.mul_mat(attn.q_a, h), attn.q_a_norm))
        q = q.reshape(hp.n_embd_head_k, hp.n_head[0], b.n_tokens)
        return g.rope(q, table, neox=False, offset=self.n_nope)

    def _latents(self, b: BatchGraph, attn: LatentAttention, h: Value, table: Value) -> tuple[Value, Value]:
        """Normed latent c [rkv, 1, T] and rotated shared key part kr [R, 1, T]."""
        g, rkv, n_rot = b.graph, self.hp.extra["kv_lora_rank"], self.hp.n_rot
        both = g.mul_mat(attn.kv_a, h)
        c = self.norm(b, both.slice0(0, rkv), attn.kv_a_norm)
        rotated = both.slice0(rkv, n_rot).view((n_rot, 1, b.n_tokens), (both.strides[1], both.strides[1]))
        return c.reshape(rkv, 1, b.n_tokens), g.rope(rotated, table, neox=False)

    def _attention(self, b: BatchGraph, il: int, attn: LatentAttention, h: Value) -> Value:
        scale, rope = self._scales(b.params.rope)
        table = b.rope_table(self.hp.n_rot, rope)
        q = self._queries(b, attn, h, table)
        c, kr = self._latents(b, attn, h, table)
        self._observe_latents(b, attn, q, c)
        if b.params.mla == 0:
            out = self._expanded(b, il, attn, q, c, kr, scale)
        else:
            if block := self.latent_block(b.params):
                for part in (q.slice0(self.n_nope, self.hp.n_rot), kr, c):
                    b.graph.hadamard(part, block)
            _, rotated, latents = self._latent_parts(b, il, attended=False)
            b.store(il, "kv", kr, rotated)
            b.store(il, "kv", c, latents)
            attend = self._expanded_from_cache if self._is_prompt(b, attn) else self._absorbed
            out = attend(b, il, attn, q, scale)
        return out.reshape(out.shape[0] * out.shape[1], b.n_tokens)

    def _is_prompt(self, b: BatchGraph, attn: LatentAttention) -> bool:
        """Whether cells are expanded. Not with adapters: their scales belong to queries, cells to any sequence."""
        weights = (attn.kv_b, attn.k_b, attn.v_b)
        if b.graph.adapters and any(b.graph.adapters.weights.of(w) for w in weights if w is not None):
            return False
        return b.n_tokens >= PROMPT_TOKENS and b.params.mla > 1 and b.params.flash_attn

    def _observe_latents(self, b: BatchGraph, attn: LatentAttention, q: Value, c: Value) -> None:
        """Statistics of the file's attn_kv_b, attn_k_b and attn_v_b where no matmul of theirs sees every token once.

        The absorbed form uses other tensors than attn_kv_b; the prompt path of modes 2 and 3 expands the latents of
        all cells at once. Every token counts once, as in mode 0.
        """
        if b.graph.collector is None or b.params.mla == 0:
            return
        heads, rkv = self.hp.n_head[0], c.shape[0]
        if attn.kv_b is not None:
            b.graph.observe(attn.kv_b, c.reshape(rkv, b.n_tokens), stored_only=True)
        if not self._is_prompt(b, attn):
            return
        if attn.k_b is not None:
            b.graph.observe(attn.k_b, q.slice0(0, self.n_nope).permute(0, 2, 1), stored_only=True)
        if attn.v_b is not None:
            per_head = c.view((rkv, b.n_tokens, heads), (c.strides[2], 0))
            b.graph.observe(attn.v_b, per_head, stored_only=True)

    def _expanded(
        self, b: BatchGraph, il: int, attn: LatentAttention, q: Value, c: Value, kr: Value, scale: float
    ) -> Value:
        """Mode 0: keys and values of every head are computed and cached."""
        g, hp, dn, dv = b.graph, self.hp, self.n_nope, self.hp.n_embd_head_v
        assert attn.kv_b is not None
        heads = hp.n_head[0]
        kv = g.mul_mat(attn.kv_b, c.reshape(c.shape[0], b.n_tokens)).reshape(dn + dv, heads, b.n_tokens)
        k = concat_heads(b, [kv.slice0(0, dn), kr], heads)
        out = cached_attention(b, il, q, k, kv.slice0(dn, dv), scale=scale)
        return out.reshape(dv, heads, b.n_tokens)

    def _absorbed(self, b: BatchGraph, il: int, attn: LatentAttention, q: Value, scale: float) -> Value:
        """Scores and values directly on the cached latents; q and the output go through attn_k_b and attn_v_b."""
        g, hp = b.graph, self.hp
        assert attn.k_b is not None and attn.v_b is not None
        heads, n_rot, rkv, dv = hp.n_head[0], hp.n_rot, hp.extra["kv_lora_rank"], hp.n_embd_head_v
        query = g.new(n_rot + rkv, heads, b.n_tokens)
        g.copy(q.slice0(self.n_nope, n_rot), query.slice0(0, n_rot))
        absorbed = query.slice0(n_rot, rkv).permute(0, 2, 1)
        g.mul_mat(attn.k_b, q.slice0(0, self.n_nope).permute(0, 2, 1), dst=absorbed)
        block = self.latent_block(b.params)
        if block:
            g.hadamard(query.slice0(n_rot, rkv), block)
        keys, _, latents = self._latent_parts(b, il, attended=True)
        latent = g.attention(
            query,
            keys,
            latents,
            b.mask(),
            scale=scale,
            flash=b.params.flash_attn and b.params.mla != 2,
            heads_per_step=heads_per_step(b, heads),
        )
        if block:
            g.hadamard(latent, block)
        out = g.new(dv, heads, b.n_tokens)
        g.mul_mat(attn.v_b, latent.permute(0, 2, 1), dst=out.permute(0, 2, 1))
        return out

    def _expanded_from_cache(self, b: BatchGraph, il: int, attn: LatentAttention, q: Value, scale: float) -> Value:
        """Prompt path of modes 2 and 3: keys and values of the cached latents, some heads at a time."""
        g, hp, dn, dv = b.graph, self.hp, self.n_nope, self.hp.n_embd_head_v
        assert attn.kv_b is not None
        n_ctx, heads, rkv = b.params.n_ctx, hp.n_head[0], hp.extra["kv_lora_rank"]
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
        if block := self.latent_block(b.params):
            g.hadamard(latents, block)
        out = g.new(dv, heads, b.n_tokens)
        step = self._heads_per_expansion(n_ctx, b.params.attn_max_batch)
        width = dn + dv
        for h0 in range(0, heads, step):
            weights = attn.kv_b.slice(1, h0 * width, step * width)
            k, v = self._expand_heads(b, weights, latents, step, rows.type_id)
            g.attention(
                q.slice(1, h0, step),
                [k, rotated],
                v,
                b.mask(),
                scale=scale,
                flash=True,
                dst=out.slice(1, h0, step),
            )
        return out

    def _expand_heads(
        self, b: BatchGraph, kv_b: Value, latents: Value, n_head: int, cache_type: int
    ) -> tuple[Value, Value]:
        """Keys [dn, n_head, n_kv] and values [dv, n_head, n_kv] of some heads, rounded to the cache type."""
        g, dn, dv = b.graph, self.n_nope, self.hp.n_embd_head_v
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

    def _heads_per_expansion(self, n_kv: int, budget: int) -> int:
        """Heads expanded at a time under the -amb budget in MiB (model semantics 6.3)."""
        heads = self.hp.n_head[0]
        need = heads * (self.n_nope + self.hp.n_embd_head_v) * n_kv * 4 // MIB
        if budget == 0 or need <= max(budget, 128):
            return heads
        for parts in range(2, heads):
            if heads % parts == 0 and need // parts <= max(budget, 128):
                return heads // parts
        return 1

    def _ffn(self, b: BatchGraph, ffn: DenseFFN | Experts, x: Value) -> Value:
        if isinstance(ffn, Experts):
            return moe_ffn(b, ffn, self.hp.routing, x)
        return dense_ffn(b, ffn, x)

    def layer(self, b: BatchGraph, il: int, x: Value) -> Value:
        g = b.graph
        layer: Layer = self.layers[il]  # type: ignore[assignment]
        attended = self._attention(b, il, layer.attn, self.norm(b, x, layer.attn_norm))
        attended, x = b.keep_outputs(il, self.hp.n_layer, attended, x)
        x = g.add(x, g.mul_mat(layer.attn.out, attended))
        return g.add(x, self._ffn(b, layer.ffn, self.norm(b, x, layer.ffn_norm)))
