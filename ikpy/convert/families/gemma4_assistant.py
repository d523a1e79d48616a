"""Drafters of Gemma 4: layers of the same kind, without keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ikpy.convert.families.base import Keys
from ikpy.convert.families.gemma4 import Gemma4

_GROUPS = "masked_embedding"
"""Module of groups of tokens by which a part of the output matrix is chosen, which files have no use for."""
_NONE = ("hidden_size_per_layer_input", "num_experts", "num_local_experts")


class Gemma4Assistant(Gemma4):
    """The output matrix is the drafter's own embedding; that of the tokens it reads is the model's."""

    arch = "gemma4-assistant"
    outer: ClassVar[Mapping[str, str]] = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "pre_projection": "nextn.pre_projection",
        "post_projection": "nextn.post_projection",
    }
    has_output = False
    writes_texts = False
    may_read_target = True
    own_tensors = frozenset({f"{_GROUPS}.centroids.weight", f"{_GROUPS}.token_ordering"})

    @property
    def n_shared(self) -> int:
        return self.config.n_layer

    def check(self) -> None:
        super().check()
        config = self.config
        n_shared = config.integer("num_kv_shared_layers", default=0) or config.n_layer
        config.require(f"num_kv_shared_layers {n_shared} of {config.n_layer} layers", n_shared == config.n_layer)
        for name in _NONE:
            config.require(f"{name} {config.get(name, default=0)}", not config.get(name, default=0))
        for name in ("enable_moe_block", "use_double_wide_mlp"):
            config.require(f"{name} true", not config.get(name, default=False))
        config.require("tie_word_embeddings false", config.get("tie_word_embeddings", default=True) is not False)

    def keys(self) -> Keys:
        return super().keys() | {
            "embedding_length_out": self.config.integer("backbone_hidden_size"),
            "nextn_predict_layers": self.config.n_layer,
        }

    def notes(self) -> list[str]:
        if not self.config.get("use_ordered_embeddings", default=False):
            return super().notes()
        return [*super().notes(), f"groups of tokens ({_GROUPS}) are left out: the whole output matrix is used"]
