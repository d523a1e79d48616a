"""ModernBERT and its kin: encoders, and rerankers with a head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ikpy.convert.config import Config
from ikpy.convert.families.base import Family, Keys, Modules
from ikpy.convert.sentence import dense_matrices, pooling_number
from ikpy.models.classifier import LABELS
from ikpy.models.hparams import POOLINGS

WINDOW_BASE = 10000.0
_MODEL = {"embeddings.tok_embeddings": "token_embd", "embeddings.norm": "token_embd_norm", "final_norm": "output_norm"}
_OUTER = {f"{prefix}{name}": target for prefix in ("", "model.") for name, target in _MODEL.items()}


class ModernBert(Family):
    """Every third layer, the first among them, has no window. What predicts masked words is left out."""

    arch = "modern-bert"
    activations = ("gelu", "silu")
    activation_names = ("hidden_activation",)
    norm_key = "attention.layer_norm_epsilon"
    has_windows = True
    has_output = False
    writes_texts = False
    outer: ClassVar[Mapping[str, str]] = _OUTER
    unused: ClassVar[frozenset[str]] = frozenset({"head.dense", "head.norm", "decoder"})
    modules: ClassVar[Modules] = {
        "attn_norm": "attn_norm",
        "attn.Wqkv": "attn_qkv",
        "attn.Wo": "attn_output",
        "mlp_norm": "ffn_norm",
        "mlp.Wi": "ffn_up",
        "mlp.Wo": "ffn_down",
    }

    @classmethod
    def chosen(cls, config: Config) -> type[Family]:
        return ModernBertRanker if "SequenceClassification" in config.class_name else ModernBert

    def __init__(self, config: Config) -> None:
        values = config.values
        named = {
            "layer_norm_eps": values.get("norm_eps", 1e-5),
            "rope_theta": values.get("global_rope_theta", 160000.0),
        }
        config.values = {**named, **values}
        super().__init__(config)
        self.pooling = pooling_number(config.path.parent)

    @property
    def period(self) -> int:
        """Every which layer has no window, the first of them."""
        config = self.config
        layers = config.sliding_layers()
        if layers is None:
            return config.integer("global_attn_every_n_layers", default=3)
        period = next((il for il in range(1, len(layers)) if not layers[il]), len(layers))
        usual = [il % max(1, period) != 0 for il in range(config.n_layer)]
        config.require("another order of window layers", layers == usual)
        return period

    def check(self) -> None:
        super().check()
        config = self.config
        config.require(f"global_attn_every_n_layers {self.period}", self.period > 0)
        for kind in ("full_attention", "sliding_attention"):
            scaling = config.rope(kind)["rope_type"]
            config.require(f"RoPE scaling '{scaling}'", scaling == "default")
        config.require("matrices behind pooling", not dense_matrices(config.path.parent))

    @property
    def window_base(self) -> float:
        """RoPE base of layers with a window; null is that of the others."""
        config = self.config
        local = config.get("rope_parameters", default={}).get("sliding_attention") or {}
        if local.get("rope_theta"):
            return float(local["rope_theta"])
        if config.values.get("local_rope_theta", WINDOW_BASE) is None:
            return float(config.rope()["rope_theta"])
        return config.number("local_rope_theta", default=WINDOW_BASE)

    def keys(self) -> Keys:
        config = self.config
        keys = super().keys() | {
            "attention.causal": False,
            "attention.sliding_window": config.integer("local_attention", default=128),
            "attention.sliding_window_pattern": self.period,
            "rope.freq_base_swa": self.window_base,
        }
        activation = config.get(*self.activation_names, default="gelu")
        if activation != "gelu":
            keys["hidden_activation"] = activation
        if self.pooling is not None:
            keys["pooling_type"] = self.pooling
        return keys


class ModernBertRanker(ModernBert):
    """With a head that scores texts."""

    outer: ClassVar[Mapping[str, str]] = {
        **_OUTER,
        "head.dense": "cls",
        "head.norm": "cls.norm",
        "classifier": "cls.output",
    }
    unused = frozenset[str]()
    biases = frozenset({"cls.output"})

    def check(self) -> None:
        super().check()
        activation = self.config.get("classifier_activation", default="gelu")
        self.config.require(f"classifier_activation '{activation}'", activation == "gelu")

    def keys(self) -> Keys:
        config = self.config
        pooling = config.get("classifier_pooling", default="cls")
        config.require(f"classifier_pooling '{pooling}'", pooling in ("cls", "mean"))
        return super().keys() | {
            "pooling_type": POOLINGS.index("rank"),
            "classifier.pooling_type": POOLINGS.index(pooling),
            LABELS: config.labels(),
        }
