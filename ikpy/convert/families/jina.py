"""Jina Embeddings v3: an encoder with rotated positions and norms behind the branches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ikpy.convert.config import Config
from ikpy.convert.families.base import Family, Keys, Modules
from ikpy.convert.sentence import dense_matrices, pooling_number
from ikpy.models.hparams import POOLINGS


class JinaEmbeddingsV3(Family):
    """In the names of transformers or of the published checkpoint, where q, k and v are one matrix."""

    arch = "jina-bert-v3"
    activations = ("gelu",)
    norm_key = "attention.layer_norm_epsilon"
    has_output = False
    writes_texts = False
    defaults: ClassVar[Mapping[str, int | float]] = {"rope_theta": 20000.0, "layer_norm_eps": 1e-5}
    outer: ClassVar[Mapping[str, str]] = {
        "embeddings.word_embeddings": "token_embd",
        "embeddings.token_type_embeddings": "token_types",
        "embeddings.LayerNorm": "token_embd_norm",
        "emb_ln": "token_embd_norm",
    }
    unused: ClassVar[frozenset[str]] = frozenset(
        {"pooler.dense", "lm_head", "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder"}
    )
    modules: ClassVar[Modules] = {
        **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
        "mixer.Wqkv": "attn_qkv",
        **dict.fromkeys(("self_attn.o_proj", "mixer.out_proj"), "attn_output"),
        **dict.fromkeys(("post_attention_layernorm", "norm1"), "attn_output_norm"),
        "mlp.fc1": "ffn_up",
        "mlp.fc2": "ffn_down",
        **dict.fromkeys(("post_mlp_layernorm", "norm2"), "layer_output_norm"),
    }
    biases: ClassVar[frozenset[str]] = frozenset({*modules.values(), "token_embd_norm"})  # type: ignore[arg-type]
    needed_biases: ClassVar[frozenset[str]] = biases

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.pooling = pooling_number(config.path.parent)

    def check(self) -> None:
        super().check()
        self.config.require("matrices behind pooling", not dense_matrices(self.config.path.parent))

    def keys(self) -> Keys:
        pooling = POOLINGS.index("mean") if self.pooling is None else self.pooling
        return super().keys() | {"attention.causal": False, "pooling_type": pooling}
