"""deepseek2, deepseek32 and mistral4: DeepSeek V2/V2-Lite/V3/R1/V3.2, Kimi-K2, Mistral Large 3 and Small 4, and
relatives: latent attention (MLA) and routed experts (arXiv:2412.19437).

Attention is in `ikpy.models.latent_attention`, tensors that a file lacks are made in `ikpy.models.latent_tensors`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph
from ikpy.models.blocks import DenseFFN, Experts, dense_ffn, moe_ffn
from ikpy.models.feed_forward import take_dense, take_experts
from ikpy.models.hparams import HParams, read_hparams
from ikpy.models.keys import REQUIRED, Keys
from ikpy.models.latent_attention import LatentAttention, LatentDecoder
from ikpy.models.latent_tensors import derive_k_b_v_b, derive_kv_b
from ikpy.models.prediction import PredictionLayers
from ikpy.models.routing import Routing, gating_func
from ikpy.models.sparse_attention import TENSORS, Indexer
from ikpy.models.weights import Presence, WeightSource

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

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
class Layer:
    """Norms, latent attention, and a dense or expert feed-forward network."""

    attn_norm: Value
    attn: LatentAttention
    ffn_norm: Value
    ffn: DenseFFN | Experts


class DeepSeek2(PredictionLayers, LatentDecoder):
    """MLA decoder with leading dense layers and routed plus shared experts."""

    output_weight: ClassVar[Presence] = "required"
    default_n_dense: ClassVar[Any] = REQUIRED
    default_weights_scale: ClassVar[Any] = REQUIRED
    default_weights_norm: ClassVar[bool] = False
    heads_differ: ClassVar[bool] = False
    expects_kv_b: ClassVar[bool] = True
    """Whether files that hold attn_k_b and attn_v_b only are told about."""

    # hyper-parameters and tensors

    def read_hparams(self, keys: Keys) -> HParams:
        hp = read_hparams(
            keys,
            may_lack_heads=self.may_lack_heads,
            may_lack_rope=self.may_lack_rope,
            long_rope=self.has_long_rope,
        )
        hp.yarn_log_multiplier = keys.f32("rope.scaling.yarn_log_multiplier", 0.0)
        hp.yarn_beta_fast = keys.f32("rope.scaling.yarn_beta_fast", 32.0)
        hp.yarn_beta_slow = keys.f32("rope.scaling.yarn_beta_slow", 1.0)
        self.temperature_scale = keys.f32("attention.temperature_scale", 0.0)
        self.temperature_length = keys.u32("attention.temperature_length", 0) or hp.n_ctx_orig
        if self.temperature_scale and not self.temperature_length:
            raise FileFormatError(f"{keys.gguf.path}: the attention temperature needs an original context length")
        if not self.heads_differ and len(set(hp.n_head)) != 1:
            raise FileFormatError(f"{keys.gguf.path}: Unsupported configuration: layers differ in head count")
        is_lite = any(name.endswith(".attn_q.weight") for name in keys.gguf.tensors)
        hp.extra.update(
            # Models without a low-rank query ("lite") need no such key.
            q_lora_rank=keys.u32("attention.q_lora_rank", 0 if is_lite else REQUIRED),
            kv_lora_rank=keys.u32("attention.kv_lora_rank"),
        )
        self.read_experts(keys, hp)
        self.one_kv_head = max(hp.n_head_kv) == 1 and hp.n_head[0] != 1
        if self.one_kv_head or keys.has("attention.key_length_mla"):
            hp.n_embd_head_k = keys.u32("attention.key_length_mla", 192)
            hp.n_embd_head_v = keys.u32("attention.value_length_mla", 128)
            hp.n_head_kv = [n if kv else 0 for n, kv in zip(hp.n_head, hp.n_head_kv, strict=True)]
        if hp.n_rot >= hp.n_embd_head_k:
            raise FileFormatError(
                f"{keys.gguf.path}: rope.dimension_count {hp.n_rot} must be below the key length {hp.n_embd_head_k}"
            )
        self.take_off_prediction_layers(keys, hp)
        return hp

    def read_experts(self, keys: Keys, hp: HParams) -> None:
        """Dense layers, routed and shared experts."""
        gating = keys.u32("expert_gating_func", 0) or self.default_gating(hp)
        hp.n_dense_layers = keys.u32("leading_dense_block_count", self.default_n_dense)
        hp.n_ff_exp = keys.u32("expert_feed_forward_length")
        hp.n_ff_shared = hp.n_ff_exp * keys.u32("expert_shared_count")
        hp.routing = Routing(
            hp.n_expert_used,
            gating_func(keys, gating),
            normalize=keys.boolean("expert_weights_norm", self.default_weights_norm),
            scale=keys.f32("expert_weights_scale", self.default_weights_scale),
        )

    def default_gating(self, hp: HParams) -> int:
        """expert_gating_func where the file has none: files of GLM-4.7-Flash leave out that it is the sigmoid."""
        return 2 if hp.n_layer in (47, 48) else 1

    def load(self, weights: WeightSource) -> None:
        if self.one_kv_head and self.expects_kv_b:
            for line in INCOMPATIBLE:
                self.log(line)
        super().load(weights)

    def load_layer(self, weights: WeightSource, il: int, prefix: str) -> Layer:
        norm = (self.hp.n_embd,)
        return Layer(
            attn_norm=weights.take(f"{prefix}.attn_norm.weight", norm),
            attn=self._load_attention(weights, il, prefix),
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

    def _load_indexer(self, weights: WeightSource, il: int, prefix: str) -> Indexer | None:
        weights.skip(*(f"{prefix}.indexer.{name}" for name in TENSORS))
        return None

    def _load_attention(self, weights: WeightSource, il: int, prefix: str) -> LatentAttention:
        hp, sizes = self.hp, self.latent_sizes(il)
        d, heads, dk, dv, dn, rkv = hp.n_embd, sizes.heads, sizes.k, sizes.v, sizes.nope, sizes.rank
        attn = LatentAttention(
            prefix=prefix,
            sizes=sizes,
            kv_a=weights.take(f"{prefix}.attn_kv_a_mqa.weight", (d, rkv + sizes.rotated)),
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
            attn.indexer = self._load_indexer(weights, il, prefix)
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

    # derived tensors

    def prepare(self, mla: int) -> None:
        """Derives attn_k_b/attn_v_b (modes above 0) or attn_kv_b (modes other than 1) where the file lacks them."""
        attentions: list[Any] = [layer.attn for layer in self.layers]  # type: ignore[attr-defined]
        attentions = [attn for attn in attentions if isinstance(attn, LatentAttention)]
        if mla > 0:
            missing = [a for a in attentions if a.k_b is None or a.v_b is None]
            if missing:
                self.log(f"============ llm_prepare_mla: need to compute {len(missing)} wk_b/wv_b tensors")
            for a in missing:
                a.k_b, a.v_b = derive_k_b_v_b(a.kv_b, a.sizes)
                self.derived.append(a.k_b.buffer)  # attn_v_b is a view of attn_kv_b
                self._log_derived(a, "attn_k_b", a.k_b)
                self._log_derived(a, "attn_v_b", a.v_b)
        if mla != 1:
            missing = [a for a in attentions if a.kv_b is None]
            if missing:
                self.log(f"============ llm_prepare_mla: need to compute {len(missing)} wkv_b tensors")
            for a in missing:
                a.kv_b = derive_kv_b(a.k_b, a.v_b, a.sizes)
                self.derived.append(a.kv_b.buffer)
                self._log_derived(a, "attn_kv_b", a.kv_b)

    def _log_derived(self, attn: LatentAttention, name: str, value: Value) -> None:
        value.name = f"{attn.prefix}.{name}.weight"
        if value.buffer.name == name:  # attn_v_b may be a part of attn_kv_b
            value.buffer.name = value.name
        shape = " x ".join(str(n) for n in value.shape[: 2 if name == "attn_kv_b" else 3])
        buffer = self.buffer_of(value.buffer.name)
        self.log(f"Computed {value.name} as {shape} of type {value.type_name} and stored in buffer {buffer}")

    def adapted_parts(
        self, name: str, a: NDArray[np.float32], b: NDArray[np.float32]
    ) -> dict[str, tuple[Value, NDArray[np.float32], NDArray[np.float32]]]:
        """attn_kv_b += B A means attn_k_b += A^T B_k^T and attn_v_b += B_v A per head."""
        layer = int(name.split(".")[1]) if name.endswith(".attn_kv_b.weight") else len(self.layers)
        if layer >= len(self.layers):  # of no layer that runs
            return {}
        attn = self.layers[layer].attn  # type: ignore[attr-defined]
        if not isinstance(attn, LatentAttention) or attn.k_b is None or attn.v_b is None:
            return {}
        heads, n_nope = b.reshape(attn.sizes.heads, -1, b.shape[-1]), attn.sizes.nope
        keys, values = heads[:, :n_nope], heads[:, n_nope:]
        shared = a.reshape(1, *a.shape[-2:])
        return {
            name.replace("attn_kv_b", "attn_k_b"): (attn.k_b, keys.transpose(0, 2, 1), shared.transpose(0, 2, 1)),
            name.replace("attn_kv_b", "attn_v_b"): (attn.v_b, shared, values),
        }

    # graph

    def _ffn(self, b: BatchGraph, ffn: DenseFFN | Experts, x: Value) -> Value:
        if isinstance(ffn, Experts):
            return moe_ffn(b, ffn, self.hp.routing, x)
        return dense_ffn(b, ffn, x)

    def layer(self, b: BatchGraph, il: int, x: Value) -> Value:
        layer: Layer = self.layers[il]  # type: ignore[assignment]
        attended = self.attention(b, il, layer.attn, self.norm(b, x, layer.attn_norm))
        kept, kept_x = b.keep_outputs(il, self.hp.n_layer, attended, x)
        if b.keeps_states and kept_x is not x:
            # Apart from the output rows: those must round as they do in a context that keeps no states.
            b.unreduced = self._behind_attention(b, layer, attended, x)
        return self._behind_attention(b, layer, kept, kept_x)

    def _behind_attention(self, b: BatchGraph, layer: Layer, attended: Value, x: Value) -> Value:
        """The rest of a layer on the rows x [D, n] of the residual stream and what their tokens attended to."""
        x = b.graph.add(x, b.graph.mul_mat(layer.attn.out, attended))
        return b.graph.add(x, self._ffn(b, layer.ffn, self.norm(b, x, layer.ffn_norm)))
