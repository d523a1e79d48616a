"""Jina Embeddings v2 and Reranker v1 (BERT with linear biases), and NeoBERT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ikpy.convert.config import Config
from ikpy.convert.families.base import Family, Keys, Modules, View, half_of_rows
from ikpy.convert.families.plain import interleaved_heads
from ikpy.convert.sentence import dense_matrices, pooling_number
from ikpy.models.classifier import LABELS
from ikpy.models.hparams import POOLINGS

_NORMS = frozenset({"attn_q_norm", "attn_k_norm", "attn_output_norm", "attn_norm_2", "layer_output_norm"})
_EMBEDDINGS = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
}
# What predicts masked words, and the pooler of embeddings, which none of these models uses.
_PREDICTION = ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.decoder")
_NETWORKS: Modules = {
    # Gate first.
    "mlp.gated_layers": ("ffn_gate", "ffn_up"),
    "mlp.wo": "ffn_down",
    "mlp.layernorm": "layer_output_norm",
    # Models of code: gate last.
    "mlp.up_gated_layer": ("ffn_up", "ffn_gate"),
    "mlp.down_layer": "ffn_down",
    "layer_norm_1": "attn_norm_2",
    "layer_norm_2": "layer_output_norm",
    # Without a gate.
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}


class Encoder(Family):
    """Files give states; what predicts words is left out."""

    has_output = False
    writes_texts = False

    def check(self) -> None:
        super().check()
        self.config.require("matrices behind pooling", not dense_matrices(self.config.path.parent))

    def keys(self) -> Keys:
        keys: Keys = super().keys() | {"attention.causal": False}
        pooling = pooling_number(self.config.path.parent)
        return keys if pooling is None else keys | {"pooling_type": pooling}


class JinaBertV2(Encoder):
    """The published classes of jinaai/jina-bert-implementation and jina-bert-v2-qk-post-norm."""

    arch = "jina-bert-v2"
    activations = ("gelu",)
    norm_key = "attention.layer_norm_epsilon"
    biases = _NORMS | {f"attn_{x}" for x in ("q", "k", "v", "output")} | {"ffn_up", "ffn_down", "token_embd_norm"}
    needed_biases = biases - {"ffn_up"}
    defaults: ClassVar[Mapping[str, int | float]] = {"layer_norm_eps": 1e-12}
    outer: ClassVar[Mapping[str, str]] = {
        f"{prefix}{name}": target for prefix in ("", "bert.") for name, target in _EMBEDDINGS.items()
    }
    unused = frozenset(
        {"pooler.dense", "bert.pooler.dense", "cls.predictions", "embeddings.position_ids", *_PREDICTION}
    )
    modules: ClassVar[Modules] = {
        **{f"attention.self.{name}": f"attn_{name[0]}" for name in ("query", "key", "value")},
        **{f"attention.self.layer_norm_{x}": f"attn_{x}_norm" for x in "qk"},
        "attention.output.dense": "attn_output",
        "attention.output.LayerNorm": "attn_output_norm",
        **_NETWORKS,
    }

    @classmethod
    def chosen(cls, config: Config) -> type[Family]:
        return JinaReranker if "SequenceClassification" in config.class_name else JinaBertV2

    def check(self) -> None:
        super().check()
        config = self.config
        kind = config.get("position_embedding_type", default="absolute")
        config.require(f"position_embedding_type '{kind}'", kind == "alibi")
        kind = str(config.get("feed_forward_type", default="original"))
        config.require(f"feed_forward_type '{kind}'", kind in ("original", "geglu"))

    def view(self, target: str, source: str) -> View | None:
        return half_of_rows(self.modules.get(source, ()), target) or super().view(target, source)


class JinaReranker(JinaBertV2):
    """With a head that scores texts."""

    outer: ClassVar[Mapping[str, str]] = {**JinaBertV2.outer, "bert.pooler.dense": "cls", "classifier": "cls.output"}
    unused = JinaBertV2.unused - {"bert.pooler.dense"}
    biases = JinaBertV2.biases | {"cls", "cls.output"}

    def keys(self) -> Keys:
        labels: dict[str, Any] = {LABELS: self.config.labels()}
        return super().keys() | {"pooling_type": POOLINGS.index("rank")} | labels


_WIDTH_UNIT = 8


class NeoBert(Encoder):
    """q, k and v in turns, head by head; the first state is the text's."""

    arch = "neo-bert"
    activations = ("swiglu", "SwiGLU", "silu")
    aliases: ClassVar[Mapping[str, str]] = {"norm_eps": "rms_norm_eps", "max_length": "max_position_embeddings"}
    defaults: ClassVar[Mapping[str, int | float]] = {"rms_norm_eps": 1e-6, "max_position_embeddings": 4096}
    biases = frozenset({"cls", "cls.output"})
    outer: ClassVar[Mapping[str, str]] = {
        f"{prefix}{name}": target
        for prefix in ("", "model.")
        for name, target in {"encoder": "token_embd", "layer_norm": "enc.output_norm"}.items()
    }
    unused = frozenset({"decoder", "model.freqs_cis", "freqs_cis"})
    modules: ClassVar[Modules] = {
        "attention_norm": "attn_norm",
        "qkv": "attn_qkv",
        "wo": "attn_output",
        "ffn_norm": "ffn_norm",
        "ffn.w12": "ffn_up",
        "ffn.w3": "ffn_down",
    }

    @classmethod
    def chosen(cls, config: Config) -> type[Family]:
        return NeoBertRanker if "SequenceClassification" in config.class_name else NeoBert

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        width = 2 * config.integer("intermediate_size") // 3
        config.values["intermediate_size"] = -(-width // _WIDTH_UNIT) * _WIDTH_UNIT

    def check(self) -> None:
        super().check()
        for name, usual in (("rope", True), ("rms_norm", True), ("ngpt", False)):
            config_says = bool(self.config.get(name, default=usual))
            self.config.require(f"{name} {str(config_says).lower()}", config_says is usual)

    def keys(self) -> Keys:
        return {"pooling_type": POOLINGS.index("cls"), **super().keys()}

    def view(self, target: str, source: str) -> View | None:
        if target == "attn_qkv":
            return interleaved_heads(self.n_head, 1, self.config.head_dim)
        return super().view(target, source)


class NeoBertRanker(NeoBert):
    """With a head that scores texts."""

    outer: ClassVar[Mapping[str, str]] = {**NeoBert.outer, "dense": "cls", "classifier": "cls.output"}

    def keys(self) -> Keys:
        labels: dict[str, Any] = {LABELS: self.config.labels()}
        return super().keys() | {"pooling_type": POOLINGS.index("rank")} | labels
