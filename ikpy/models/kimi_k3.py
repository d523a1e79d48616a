"""kimi-k3: Kimi K3, delta attention (KDA) and gated latent attention as Kimi Linear's, with attention residuals, latent
experts and gates whose factors are bounded by tanh (SiTU).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ikpy.errors import FileFormatError, UnsupportedError
from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph
from ikpy.models.blocks import DenseFFN, Experts
from ikpy.models.deepseek2 import Layer
from ikpy.models.feed_forward import take_dense, take_experts
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.kimi_linear import DeltaAttention, KimiLinear
from ikpy.models.latent_attention import LatentAttention
from ikpy.models.latent_experts import LatentExperts, latent_moe
from ikpy.models.residual_bank import MAX_BANKED, Bank, banked, kept_bank, mixed, slots
from ikpy.models.weights import WeightSource


@dataclass
class MixedLayer(Layer):
    """What a layer mixes residual streams by, in front of attention and of its network."""

    attn_score: Value
    ffn_score: Value
    slots: Value


class KimiK3(KimiLinear):
    """Every block_size-th layer banks the residual stream it reads, and starts one of its own."""

    default_weights_norm = False

    def read_hparams(self, keys: Keys) -> HParams:
        hp, where = super().read_hparams(keys), keys.gguf.path
        self.read_lower_bound(keys, None)
        self.block_size = keys.u32("attn_res.block_size")
        if not self.block_size:
            raise FileFormatError(f"{where}: {keys.arch}.attn_res.block_size is 0")
        # Streams that the last layers mix with their own.
        self.n_banked = -(-hp.n_layer // self.block_size)
        if self.n_banked > MAX_BANKED:
            raise UnsupportedError(f"{where}: {self.n_banked} residual streams; at most {MAX_BANKED} are supported")
        self.caps = keys.f32("activation.situ_beta"), keys.f32("activation.situ_linear_beta")
        if self.caps[0] <= 0:
            raise FileFormatError(f"{where}: {keys.arch}.activation.situ_beta is {self.caps[0]:g}, not above 0")
        self.n_latent = keys.u32("expert_latent_length", 0)
        return hp

    # tensors

    def load_global(self, weights: WeightSource) -> None:
        super().load_global(weights)
        self.output_score = weights.take("output_res_score.weight", (self.hp.n_embd,))

    def load_layer(self, weights: WeightSource, il: int, prefix: str) -> MixedLayer:
        score = (self.hp.n_embd,)
        return MixedLayer(
            **vars(super().load_layer(weights, il, prefix)),
            attn_score=weights.take(f"{prefix}.attn_res_score.weight", score),
            ffn_score=weights.take(f"{prefix}.ffn_res_score.weight", score),
            slots=slots(prefix, self.n_banked + 1),
        )

    def take_gate(self, weights: WeightSource, name: str) -> tuple[Value, ...]:
        if name.endswith("ssm_g"):
            return (weights.take(f"{name}.weight", (self.hp.n_embd, self.n_channels)),)
        return super().take_gate(weights, name)

    def _load_attention(  # type: ignore[override]
        self, weights: WeightSource, il: int, prefix: str
    ) -> LatentAttention | DeltaAttention:
        attn = super()._load_attention(weights, il, prefix)
        if isinstance(attn, LatentAttention):
            n_values = self.hp.n_head[0] * self.hp.n_embd_head_v
            attn.gate = weights.take(f"{prefix}.attn_gate.weight", (self.hp.n_embd, n_values), required=False)
        return attn

    def _load_ffn(self, weights: WeightSource, il: int, prefix: str) -> DenseFFN | Experts:
        hp, d, n_latent = self.hp, self.hp.n_embd, self.n_latent
        if il < hp.n_dense_layers or hp.n_expert == 0:
            return replace(take_dense(weights, prefix, d, hp.n_ff[il]), caps=self.caps)
        experts = take_experts(
            weights,
            prefix,
            d,
            hp.n_expert,
            hp.n_ff_exp,
            n_ff_shared=hp.n_ff_shared if weights.has(f"{prefix}.ffn_up_shexp.weight") else 0,
            selection_bias="optional",
            n_latent=n_latent,
        )
        experts.caps = self.caps
        if experts.shared is not None:
            experts.shared.caps = self.caps
        if not n_latent:
            return experts
        return LatentExperts(
            **vars(experts),
            latent_down=weights.take(f"{prefix}.ffn_routed_down.weight", (d, n_latent)),
            latent_up=weights.take(f"{prefix}.ffn_routed_up.weight", (n_latent, d)),
            latent_norm=weights.take(f"{prefix}.ffn_routed_norm.weight", (n_latent,), required=False),
        )

    # graph

    def mix(self, b: BatchGraph, x: Value, score: Value, slots: Value) -> Value:
        """What a layer reads instead of the residual stream x [D, T]."""
        bank: Bank | None = b.banks.get(x.shape[1])
        return x if bank is None else mixed(b, bank, x, score, slots, self.hp.norm_eps)

    def layer(self, b: BatchGraph, il: int, x: Value) -> Value:
        layer: MixedLayer = self.layers[il]  # type: ignore[assignment]
        h = self.norm(b, self.mix(b, x, layer.attn_score, layer.slots), layer.attn_norm)
        starts = il % self.block_size == 0
        if starts:
            b.banks[b.n_tokens] = banked(b, b.banks.get(b.n_tokens), x, self.hp.norm_eps)
        rows = (self.attention(b, il, layer.attn, h), *(() if starts else (x,)))
        kept = b.keep_outputs(il, self.hp.n_layer, *rows)
        if kept[0] is not rows[0]:
            b.banks[b.n_outputs] = kept_bank(b, b.banks[b.n_tokens])
            if b.keeps_states:
                # Apart from the output rows: those must round as they do in a context that keeps no states.
                b.unreduced = self.behind_mixing(b, layer, *rows)
        return self.behind_mixing(b, layer, *kept)

    def behind_mixing(self, b: BatchGraph, layer: MixedLayer, attended: Value, *x: Value) -> Value:
        """The rest of a layer on what its tokens attended to and, unless it starts one, the residual stream [D, n]."""
        stream = b.graph.mul_mat(layer.attn.out, attended)
        if x:
            stream = b.graph.add(x[0], stream)
        h = self.norm(b, self.mix(b, stream, layer.ffn_score, layer.slots), layer.ffn_norm)
        return b.graph.add(stream, self._ffn(b, layer.ffn, h))

    def _ffn(self, b: BatchGraph, ffn: DenseFFN | Experts, x: Value) -> Value:
        if isinstance(ffn, LatentExperts):
            return latent_moe(b, ffn, self.hp.routing, x, self.hp.norm_eps)
        return super()._ffn(b, ffn, x)

    def final_state(self, b: BatchGraph, x: Value) -> Value:
        last: MixedLayer = self.layers[-1]  # type: ignore[assignment]
        return super().final_state(b, self.mix(b, x, self.output_score, last.slots))
