"""T5, T5 v1.1, FLAN-T5, mT5, UMT5 and MADLAD (arXiv:1910.10683, 2010.11934), and their encoders alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ikpy.convert.config import Config
from ikpy.convert.families.base import Family, Keys
from ikpy.convert.sentence import dense_matrices, pooling_number
from ikpy.errors import UnsupportedError
from ikpy.models.relative_biases import FARTHEST

# config.json's names -> those of other families.
_NAMES = {"d_model": "hidden_size", "d_ff": "intermediate_size", "num_layers": "num_hidden_layers"}
_NAMES |= {"num_heads": "num_attention_heads", "d_kv": "head_dim", "layer_norm_epsilon": "rms_norm_eps"}
# Activations of networks without and with a gate that files can say: whether there is one says which it is.
_NETWORKS = ("relu", "gated-gelu", "gated-gelu_new")
_ENCODERS = ("T5EncoderModel", "MT5EncoderModel", "UMT5EncoderModel")
_WHOLE = ("ForConditionalGeneration", "WithLMHeadModel")
_EMBEDDINGS = ("shared", "encoder.embed_tokens", "decoder.embed_tokens")


def stack(name: str, n_layer: int) -> dict[str, str]:
    """Modules of the encoder or the decoder -> GGUF names."""
    short, branches = name[:3], ["SelfAttention", "EncDecAttention"][: 1 + (name == "decoder")]
    found = {f"{name}.final_layer_norm": f"{short}.output_norm"}
    for il in range(n_layer):
        source, target = f"{name}.block.{il}.layer", f"{short}.blk.{il}"
        for place, branch in enumerate(branches):
            attn = "cross_attn" if place else "attn"
            found |= {f"{source}.{place}.{branch}.{x}": f"{target}.{attn}_{x}" for x in "qkvo"}
            found[f"{source}.{place}.layer_norm"] = f"{target}.{attn}_norm"
        found[f"{source}.0.SelfAttention.relative_attention_bias"] = f"{target}.attn_rel_b"
        last = f"{source}.{len(branches)}"
        found[f"{last}.layer_norm"] = f"{target}.ffn_norm"
        names = {"wi": "up", "wi_0": "gate", "wi_1": "up", "wo": "down"}
        found |= {f"{last}.DenseReluDense.{old}": f"{target}.ffn_{new}" for old, new in names.items()}
    return found


class T5(Family):
    """Encoder and decoder. Every stack has layers of its own, so that all tensors count as lying outside of layers."""

    arch = "t5"
    modules: ClassVar[Mapping[str, str]] = {}
    defaults: ClassVar[Mapping[str, Any]] = {
        "rms_norm_eps": 1e-6,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": FARTHEST,
        "feed_forward_proj": "relu",
        "n_positions": 512,
        "decoder_start_token_id": 0,
    }
    aliases = _NAMES
    repeated: ClassVar[Mapping[str, tuple[str, ...]]] = {
        name: _EMBEDDINGS[:place] for place, name in enumerate(_EMBEDDINGS) if place
    }

    @classmethod
    def chosen(cls, config: Config) -> type[Family]:
        name = config.class_name
        if name in _ENCODERS:
            return T5Encoder
        if not name.endswith(_WHOLE):
            raise UnsupportedError(f"{config.path}: class '{name}' is not supported for T5: no text is written by it")
        return T5

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.n_decoder = config.count("num_decoder_layers", default=config.n_layer)
        self.is_scaled = self._is_scaled()
        if self.is_scaled:
            config.values["tie_word_embeddings"] = True
        else:
            self._forget_tie()
        self.needs_output = not self.is_scaled  # type: ignore[misc]
        self.outer = self.tensors()  # type: ignore[misc]

    def _is_scaled(self) -> bool:
        """Whether what the output matrix reads is divided by the root of the width; then it is the token embedding."""
        said = self.config.get("scale_decoder_outputs", "tie_word_embeddings", default=True)
        return self.config.model_type != "mt5" and bool(said)

    def _forget_tie(self) -> None:
        """Lets the tensors tell whether there is an output matrix: transformers 5 writes that there is none."""
        values = self.config.values
        if "scale_decoder_outputs" in values or values.get("tie_word_embeddings"):
            values["tie_word_embeddings"] = None

    def tensors(self) -> dict[str, str]:
        """All modules -> GGUF names."""
        outer = dict.fromkeys(_EMBEDDINGS, "token_embd") | {"lm_head": "output"}
        return outer | stack("encoder", self.config.n_layer) | stack("decoder", self.n_decoder)

    def check(self) -> None:
        config = self.config
        network = str(config.get("feed_forward_proj"))
        config.require(f"feed_forward_proj '{network}'", network in _NETWORKS)
        farthest = config.integer("relative_attention_max_distance")
        config.require(f"relative_attention_max_distance {farthest}", farthest == FARTHEST)

    def is_empty(self, layer: int) -> bool:
        return True

    def needed_outer_tensors(self) -> frozenset[str]:
        if self.config.model_type != "umt5":
            return frozenset()
        return frozenset(f"{name}.weight" for name in self.outer.values() if name.endswith("attn_rel_b"))

    def keys(self) -> Keys:
        config = self.config
        epsilon = config.epsilon("rms_norm_eps")
        return {
            "block_count": config.n_layer,
            "context_length": config.integer("n_positions"),
            "embedding_length": config.integer("hidden_size"),
            "feed_forward_length": config.integer("intermediate_size"),
            "attention.head_count": self.n_head,
            "attention.key_length": config.head_dim,
            "attention.value_length": config.head_dim,
            "attention.layer_norm_epsilon": epsilon,
            "attention.layer_norm_rms_epsilon": epsilon,
            "attention.relative_buckets_count": config.integer("relative_attention_num_buckets"),
            **self.decoder_keys(),
        }

    def decoder_keys(self) -> Keys:
        """Of the decoder."""
        return {
            "decoder_block_count": self.n_decoder,
            "decoder_start_token_id": self.config.integer("decoder_start_token_id"),
        }

    def extra_tensors(self) -> dict[str, np.ndarray]:
        return {}


class T5Encoder(T5):
    """The encoder alone."""

    arch = "t5encoder"
    has_output = False
    writes_texts = False

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.needs_output = False  # type: ignore[misc]
        left_out = {"lm_head", "decoder.embed_tokens", *stack("decoder", self.n_decoder)}
        self.unused = frozenset(left_out)  # type: ignore[misc]

    def tensors(self) -> dict[str, str]:
        return dict.fromkeys(_EMBEDDINGS[:2], "token_embd") | stack("encoder", self.config.n_layer)

    def check(self) -> None:
        super().check()
        self.config.require("matrices behind pooling", not dense_matrices(self.config.path.parent))

    def decoder_keys(self) -> Keys:
        pooling = pooling_number(self.config.path.parent)
        keys: Keys = {"attention.causal": False}  # which llama.cpp needs to see whole texts
        return keys if pooling is None else keys | {"pooling_type": pooling}
