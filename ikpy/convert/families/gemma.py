"""Gemma 1 to 3, the text part."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from ikpy.convert.config import Config
from ikpy.convert.families.base import ATTENTION, DENSE, HEAD_NORMS, Family, Keys, Modules
from ikpy.convert.sentence import dense_matrices, pooling_number
from ikpy.models.hparams import POOLINGS


class Gemma(Family):
    """Norm weights are stored less 1."""

    arch = "gemma"
    norm_offset = 1.0
    has_output = False
    # transformers takes "gelu" of the first files for the other.
    activations: ClassVar[tuple[str, ...]] = ("gelu_pytorch_tanh", "gelu")

    def check(self) -> None:
        super().check()
        scalar = self.config.number("query_pre_attn_scalar", default=self.head_scalar)
        fits = math.isclose(scalar, self.head_scalar)
        self.config.require(f"query_pre_attn_scalar {scalar:g} instead of {self.head_scalar:g}", fits)

    @property
    def head_scalar(self) -> float:
        """Square of the divisor of the attention scores."""
        return float(self.config.head_dim)

    def check_window_layers(self, is_window: list[bool]) -> None:
        """Refuse other layers with a window than the architecture has."""
        layers = self.config.sliding_layers()
        self.config.require("another order of window layers", layers is None or layers == is_window)


class Gemma2(Gemma):
    """Norms after both branches, soft caps, a window in every other layer."""

    arch = "gemma2"
    activations = ("gelu_pytorch_tanh",)
    activation_names = ("hidden_activation",)
    has_windows = True
    modules: ClassVar[Modules] = {
        **ATTENTION,
        **DENSE,
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }
    layers_27b = 46

    @property
    def head_scalar(self) -> float:
        config = self.config
        if config.n_layer != self.layers_27b:
            return super().head_scalar
        return config.integer("hidden_size") / self.n_head

    def check(self) -> None:
        super().check()
        self.check_window_layers([il % 2 == 0 for il in range(self.config.n_layer)])

    def keys(self) -> Keys:
        return super().keys() | {
            "attention.sliding_window": self.config.integer("sliding_window"),
            "attn_logit_softcapping": self.config.number("attn_logit_softcapping"),
            "final_logit_softcapping": self.config.number("final_logit_softcapping"),
        }


class Gemma3(Gemma2):
    """Norms of q and k; five window layers with RoPE base 10000 for every full one."""

    arch = "gemma3"
    has_output = True
    defaults: ClassVar[Mapping[str, int | float]] = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    }
    attends_both_ways: ClassVar[bool] = False
    modules: ClassVar[Modules] = {**Gemma2.modules, **HEAD_NORMS}
    layers_27b = 62

    @classmethod
    def chosen(cls, config: Config) -> type[Family]:
        is_text_model = config.class_name == "Gemma3TextModel"
        both_ways = config.get("use_bidirectional_attention", default=False)
        return GemmaEmbedding if is_text_model and both_ways else Gemma3

    def check(self) -> None:
        Gemma.check(self)
        config = self.config
        both_ways = bool(config.get("use_bidirectional_attention", default=False))
        config.require("use_bidirectional_attention true", self.attends_both_ways or not both_ways)
        self.check_window_layers([(il + 1) % 6 != 0 for il in range(config.n_layer)])
        pattern = config.integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
        config.require(f"sliding_window_pattern {pattern}", pattern == 6)
        base = config.number("rope_local_base_freq", default=10000.0)
        base = float((config.get("rope_parameters", default={}).get("sliding_attention") or {}).get("rope_theta", base))
        config.require(f"RoPE base {base:g} of the window layers instead of 10000", base == 10000)
        kind = config.rope("sliding_attention")["rope_type"] if self._has_own_rope else "default"
        config.require(f"RoPE scaling '{kind}' of the window layers", kind == "default")
        for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
            config.require(f"{cap} is set", config.get(cap, default=None) is None)

    @property
    def _has_own_rope(self) -> bool:
        """Whether the configuration describes the rotation of window layers apart."""
        return "sliding_attention" in self.config.get("rope_parameters", default={})

    def keys(self) -> Keys:
        return Gemma.keys(self) | {"attention.sliding_window": self.config.integer("sliding_window")}


class GemmaEmbedding(Gemma3):
    """EmbeddingGemma: every token sees those around it; two matrices behind pooling."""

    arch = "gemma-embedding"
    attends_both_ways = True
    has_output = False
    writes_texts = False
    outer: ClassVar[Mapping[str, str]] = {
        **{f"{model}embed_tokens": "token_embd" for model in ("", "model.")},
        **{f"{model}norm": "output_norm" for model in ("", "model.")},
        "lm_head": "output",
    }

    @property
    def head_scalar(self) -> float:
        return float(self.config.head_dim)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        folder = config.path.parent
        self.pooling = pooling_number(folder)
        self.matrices = dense_matrices(folder)

    def check(self) -> None:
        super().check()
        shapes = [matrix.shape for matrix in self.matrices]
        n = self.config.integer("hidden_size")
        fits = not shapes or (len(shapes) == 2 and shapes[0][1:] == (n,) and shapes[1] == (n, shapes[0][0]))
        self.config.require(f"matrices of shapes {shapes} behind pooling", fits)

    def keys(self) -> Keys:
        keys = super().keys()
        keys["pooling_type"] = POOLINGS.index("mean") if self.pooling is None else self.pooling
        for name, matrix in self.named_matrices().items():
            keys |= {f"{name}_feat_in": matrix.shape[1], f"{name}_feat_out": matrix.shape[0]}
        return keys

    def named_matrices(self) -> dict[str, np.ndarray]:
        """The matrices by their names in GGUF files."""
        return dict(zip(("dense_2", "dense_3"), self.matrices, strict=False))

    def extra_tensors(self) -> dict[str, np.ndarray]:
        return super().extra_tensors() | {f"{name}.weight": m for name, m in self.named_matrices().items()}
