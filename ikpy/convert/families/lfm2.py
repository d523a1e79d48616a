"""Liquid LFM2 and LFM2-MoE: gated short convolutions between layers of attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ikpy.convert.config import Config
from ikpy.convert.families.base import Family, Keys, Modules, Targets, View, routing_keys

# Names of the published configurations -> those of others.
_NAMES = {"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
_KINDS = ("conv", "full_attention")


def _gated(prefix: str, suffix: str = "") -> dict[str, Targets]:
    """Gate, up and down as these checkpoints name them."""
    return {f"{prefix}.{w}": f"ffn_{name}{suffix}" for w, name in (("w1", "gate"), ("w3", "up"), ("w2", "down"))}


class Lfm2(Family):
    """The norm behind the layers is called token_embd_norm in files, and embedding_norm in checkpoints."""

    arch = "lfm2"
    usual_pre = "lfm2"
    defaults: ClassVar[Mapping[str, int | float]] = {"rope_theta": 1e6}
    outer: ClassVar[Mapping[str, str]] = {
        "model.embed_tokens": "token_embd",
        "model.embedding_norm": "token_embd_norm",
        "lm_head": "output",
    }
    modules: ClassVar[Modules] = {
        "operator_norm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.out_proj": "attn_output",
        "self_attn.q_layernorm": "attn_q_norm",
        "self_attn.k_layernorm": "attn_k_norm",
        "conv.in_proj": "shortconv.in_proj",
        "conv.conv": "shortconv.conv",
        "conv.out_proj": "shortconv.out_proj",
        "ffn_norm": "ffn_norm",
        **_gated("feed_forward"),
    }

    def __init__(self, config: Config) -> None:
        values = config.values
        config.values = values | {new: values[old] for old, new in _NAMES.items() if values.get(old) is not None}
        super().__init__(config)

    @property
    def attends(self) -> list[bool]:
        """Whether each layer attends."""
        n_layer, kinds = self.config.n_layer, self.config.get("layer_types", default=None)
        if kinds is None:
            numbers = self.config.get("full_attn_idxs", default=range(n_layer))
            return [il in numbers for il in range(n_layer)]
        self.config.require(f"{len(kinds)} kinds of layers", len(kinds) == n_layer)
        unknown = next((kind for kind in kinds if kind not in _KINDS), "")
        self.config.require(f"layers of kind '{unknown}'", not unknown)
        return [kind != "conv" for kind in kinds]

    @property
    def n_ff(self) -> int:
        """Width of the network: two thirds of what the configuration says, times a factor, in whole multiples."""
        config, n = self.config, self.config.integer("intermediate_size")
        if not config.get("block_auto_adjust_ff_dim", default=True):
            return n
        unit = config.integer("block_multiple_of", default=256)
        config.require(f"block_multiple_of {unit}", unit > 0)
        n = int(config.number("block_ffn_dim_multiplier", default=1.0) * int(2 * n / 3))
        return -(-n // unit) * unit

    def keys(self) -> Keys:
        return super().keys() | {
            "feed_forward_length": self.n_ff,
            "attention.head_count_kv": [self.n_head_kv if attends else 0 for attends in self.attends],
            "shortconv.l_cache": self.config.integer("conv_L_cache", default=3),
        }

    def view(self, target: str, source: str) -> View | None:
        if target == "shortconv.conv":
            return lambda taps: taps.reshape(taps.shape[0], -1)
        return super().view(target, source)


class Lfm2Moe(Lfm2):
    """Experts behind the first layers; networks have the width that the configuration says."""

    arch = "lfm2moe"
    modules: ClassVar[Modules] = {
        **Lfm2.modules,
        "feed_forward.gate": "ffn_gate_inp",
        "feed_forward.expert_bias": "exp_probs_b.bias",
        **_gated("feed_forward.experts.{e}", "_exps"),
    }

    @property
    def n_ff(self) -> int:
        return self.config.integer("intermediate_size")

    def keys(self) -> Keys:
        routing = routing_keys(self.config, gating=2)
        del routing["expert_shared_count"]
        n_dense = self.config.integer("num_dense_layers", default=2)
        return super().keys() | routing | {"leading_dense_block_count": n_dense}
