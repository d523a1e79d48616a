"""MiniMax M3 (minimax-m3), its text model: experts with bounded gates, indexers that choose blocks of positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ikpy.convert.config import Config
from ikpy.convert.families.base import (
    ATTENTION,
    DENSE,
    HEAD_NORMS,
    MIXTRAL_EXPERTS,
    Family,
    Keys,
    Modules,
    feed_forward,
    routing_keys,
)

# Names in the part about sparse attention -> those of transformers.
_NESTED = {
    "sparse_num_index_heads": "index_n_heads",
    "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
}
_ALPHA, _LIMIT = 1.702, 7.0  # what files of this architecture cannot say
_SPARSE = "minimax_m3_sparse"


class MiniMaxM3(Family):
    """Norms of the checkpoint are around 0. Layers with tensors of an indexer attend to what it chooses."""

    arch = "minimax-m3"
    norm_offset = 1.0
    rotates_part = True
    activations = ("silu", "swigluoai")
    defaults: ClassVar[Mapping[str, int | float]] = {
        "index_block_size": 128,
        "index_head_dim": 128,
        "index_local_blocks": 1,
        "index_n_heads": 4,
        "index_topk_blocks": 16,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.0,
        "swiglu_alpha": _ALPHA,
        "swiglu_limit": _LIMIT,
    }
    modules: ClassVar[Modules] = {
        **ATTENTION,
        **HEAD_NORMS,
        **{f"self_attn.index_{x}_proj": f"indexer.{x}_proj" for x in "qk"},
        **{f"self_attn.index_{x}_norm": f"indexer.{x}_norm" for x in "qk"},
        **DENSE,
        **MIXTRAL_EXPERTS,
        "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
        **feed_forward("block_sparse_moe.shared_experts", "_shexp"),
    }

    def __init__(self, config: Config) -> None:
        nested: dict[str, Any] = config.get("sparse_attention_config", default={})
        config.values = {**config.values, **{new: nested[old] for old, new in _NESTED.items() if old in nested}}
        given = config.get("layer_types", default=None)
        flags = nested.get("sparse_attention_freq")
        if given is None and flags is not None:
            config.values["layer_types"] = [_SPARSE if flag else "full_attention" for flag in flags]
        flags = config.get("moe_layer_freq", default=None)
        if config.get("mlp_layer_types", default=None) is None and flags is not None:
            config.values["mlp_layer_types"] = ["sparse" if flag else "dense" for flag in flags]
        super().__init__(config)

    @property
    def n_rot(self) -> int:
        """As transformers has it, which does not read `rotary_dim`."""
        return int(self.config.head_dim * self.config.rotary_fraction())

    def notes(self) -> list[str]:
        given = self.config.integer("rotary_dim", default=self.n_rot)
        unused = f"rotary_dim {given} is not used: partial_rotary_factor says that {self.n_rot} elements are rotated"
        return [*super().notes(), *([unused] if given != self.n_rot else [])]

    @property
    def kinds(self) -> list[str]:
        """What each layer attends to."""
        return self.config.get("layer_types", default=["full_attention"] * self.config.n_layer)

    def check(self) -> None:
        super().check()
        config = self.config
        config.require(f"{len(self.kinds)} kinds of layers", len(self.kinds) == config.n_layer)
        config.require("another kind of layers", set(self.kinds) <= {_SPARSE, "full_attention"})
        for name, value in (("swiglu_alpha", _ALPHA), ("swiglu_limit", _LIMIT)):
            given = config.number(name)
            config.require(f"{name} {given:g}", given == value)
        shared, width = config.integer("shared_intermediate_size"), config.integer("intermediate_size")
        config.require(f"shared experts of {shared} beside {width}", width > 0 and shared > 0 and shared % width == 0)
        config.require("use_gemma_norm false", bool(config.get("use_gemma_norm", default=True)))
        scoring = config.get("scoring_func", default="sigmoid")
        config.require(f"scoring_func '{scoring}'", scoring == "sigmoid")

    def keys(self) -> Keys:
        config = self.config
        width = config.integer("intermediate_size")
        config.values["moe_intermediate_size"] = width
        return (
            super().keys()
            | routing_keys(config, gating=2)
            | {
                "feed_forward_length": config.integer("dense_intermediate_size"),
                "expert_shared_count": config.integer("shared_intermediate_size") // width,
                "expert_weights_norm": True,
                "attention.indexer.head_count": config.integer("index_n_heads"),
                "attention.indexer.key_length": config.integer("index_head_dim"),
                "attention.indexer.top_k": config.integer("index_topk_blocks"),
                "attention.indexer.block_size": config.integer("index_block_size"),
                "attention.indexer.local_blocks": config.integer("index_local_blocks"),
            }
        )

    def may_lack(self, target: str, layer: int) -> bool:
        return target.startswith("indexer.") and self.kinds[layer] != _SPARSE

    def must_lack(self, target: str, layer: int) -> bool:
        return self.may_lack(target, layer)
