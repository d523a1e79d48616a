"""Qwen4-Exp (Qwen3.8 Flash Next), its text model: Qwen3.5 with residual streams, indexers and hashed n-grams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ikpy.convert.families.base import Change, Family, Keys, Modules, Targets, View
from ikpy.convert.families.prediction import columns
from ikpy.convert.families.qwen_next import Qwen35Moe

_ATTENDS = ("full_attention", "indexed_attention")
_SECTIONS = [11, 11, 10]  # of rotated pairs, where the configuration has none
_HASHES = "ple.ple_embedding"


def _mixer(module: str, target: str) -> dict[str, str]:
    """What makes the gates of the streams, and the shares of a branch's output."""
    return {
        f"{module}.hc_norm": f"{target}_norm",
        f"{module}.input_mix_weight_down": f"{target}_down",
        f"{module}.input_mix_weight_up": f"{target}_up",
    }


def _branch(module: str, target: str) -> dict[str, Targets]:
    return {**_mixer(module, target), f"{module}.block_inject_weight": f"{target}_inject"}


def _taps(values: np.ndarray) -> np.ndarray:
    return values.reshape(values.shape[0], -1)


class Qwen4Exp(Qwen35Moe):
    """Rows of the n-gram table come in shards, constants of its hashes as tensors of integers."""

    arch = "qwen4exp"
    prediction_modules: ClassVar[Modules] = {
        "pre_fc_norm_embedding": "nextn.enorm",
        "pre_fc_norm_hidden": "nextn.hnorm",
        **_mixer("hyper_connection_mixer", "nextn.hc_head"),
    }
    prediction_columns: ClassVar[Mapping[str, int]] = columns("fc_embedding", "fc_hidden")
    rotary_fraction = 1.0
    outer: ClassVar[Mapping[str, str]] = {
        **{module: target for module, target in Family.outer.items() if target != "output_norm"},
        **_mixer("model.hyper_connection_mixer", "output_hc"),
    }
    modules: ClassVar[Modules] = {
        **{module: target for module, target in Qwen35Moe.modules.items() if not module.endswith("_layernorm")},
        **_branch("attn_hyper_connection", "hc_attn"),
        **_branch("mlp_hyper_connection", "hc_ffn"),
        "self_attn.indexer.index_qk_proj": ("indexer.q_proj", "indexer.k_proj"),
        "self_attn.indexer.q_layernorm": "indexer.q_norm",
        "self_attn.indexer.k_layernorm": "indexer.k_norm",
        "ple.key_proj": "ple_key",
        "ple.value_proj": "ple_value",
        "ple.norm_key": "ple_norm_key",
        "ple.norm_query": "ple_norm_query",
        "ple.norm_conv": "ple_norm_conv",
        "ple.conv1d": "ple_conv1d",
    }
    layer_lists: ClassVar[Mapping[str, str]] = {
        f"{_HASHES}.layer_multipliers": "ple.layer_multipliers",
        f"{_HASHES}.ngram_heads_vocab_sizes": "ple.head_vocab_sizes",
        f"{_HASHES}.ngram_heads_offsets": "ple.head_offsets",
    }
    shards: ClassVar[Mapping[str, str]] = {f"{_HASHES}.ngram_embedding.shard_{{n}}": "per_layer_token_embd"}
    defaults: ClassVar[Mapping[str, int | float]] = {
        **Qwen35Moe.defaults,
        "hc_count": 4,
        "hc_lowrank": 320,
        "heads_per_ngram": 8,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "moe_intermediate_size": 512,
        "ngram_size": 3,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "ple_conv_kernel_size": 4,
        "rms_norm_eps": 1e-6,
        "shared_expert_intermediate_size": 512,
        "split_ngram_parts": 512,
    }

    @property
    def attends(self) -> list[bool]:
        """Whether each layer attends."""
        config = self.config
        kinds = config.get("layer_types", default=self.usual_order)
        config.require(f"{len(kinds)} kinds of layers", len(kinds) == config.n_layer)
        config.require("another kind of layers", set(kinds) <= {"linear_attention", *_ATTENDS})
        return [kind in _ATTENDS for kind in kinds]

    @property
    def ngram_layer(self) -> int | None:
        """The layer with embeddings of n-grams, counted from 0."""
        if self.predicts_alone:
            return None
        layers = sorted(set(self.config.get("ple_layer_ids", default=[])))
        self.config.require(f"n-gram embeddings in {len(layers)} layers", len(layers) <= 1)
        return layers[0] - 1 if layers else None

    @property
    def n_shards(self) -> int:
        return self.config.count("split_ngram_parts")

    def check_order(self) -> None:
        pass  # files list them

    def check(self) -> None:
        super().check()
        config, layer = self.config, self.ngram_layer
        gate = config.get("output_gate_type", "hidden_act", default="silu")
        config.require(f"output_gate_type '{gate}'", gate == "sigmoid")
        heads = config.integer("indexer_kv_heads")
        config.require(f"indexer_kv_heads {heads}", heads == 1)
        if layer is None:
            return
        attends = self.attends
        config.require(
            f"ple_layer_ids [{layer + 1}] of {len(attends)} layers, which must be a linear_attention one",
            0 <= layer < len(attends) and not attends[layer],
        )
        heads = self._n_ngram_heads
        config.require(f"ple_embed_dim {self._ngram_width} for {heads} heads", self._ngram_width % max(1, heads) == 0)

    @property
    def _n_ngram_heads(self) -> int:
        return (self.config.integer("ngram_size") - 1) * self.config.integer("heads_per_ngram")

    @property
    def _ngram_width(self) -> int:
        return self.config.integer("ple_embed_dim", "hidden_size")

    def needs_list(self, module: str) -> bool:
        return self.ngram_layer is not None

    def keys(self) -> Keys:
        config, attends = self.config, self.attends
        ratio = config.integer("indexer_compress_ratio")
        sections = config.rope().get("mrope_section") or _SECTIONS
        keys = super().keys() | {
            "rope.dimension_sections": [*sections, 0],
            "attention.recurrent_layers": [not each for each in attends],
            "attention.indexer.head_count": config.integer("indexer_n_heads"),
            "attention.indexer.key_length": config.integer("indexer_head_dim"),
            "attention.indexer.top_k": config.integer("indexer_budget"),
            "attention.compress_ratios": [ratio if each else 0 for each in attends],
            "hyper_connection.count": config.integer("hc_count"),
            "hyper_connection.low_rank": config.integer("hc_lowrank"),
        }
        return keys | (self._ngram_keys(self.ngram_layer) if self.ngram_layer is not None else {})

    def prediction_lists(self) -> Mapping[str, list[Any]]:
        return {
            "attention.recurrent_layers": [False] * self.n_predict,
            "attention.compress_ratios": [self.config.integer("indexer_compress_ratio")] * self.n_predict,
        }

    def _ngram_keys(self, layer: int) -> Keys:
        config = self.config
        ends = config.get("eos_token_id")
        keys: Keys = {
            "ple.layers": [layer],
            "ple.ngram_size": config.integer("ngram_size"),
            "ple.heads_per_ngram": config.integer("heads_per_ngram"),
            "ple.conv_kernel": config.integer("ple_conv_kernel_size"),
            "ple.eos_token_id": int(ends[0] if isinstance(ends, list) else ends),
            "embedding_length_per_layer_input": self._ngram_width // self._n_ngram_heads,
        }
        image = config.get("image_token_id", default=None)
        return keys | ({"ple.image_token_id": int(image)} if image is not None else {})

    def change(self, target: str) -> Change | None:
        offset = np.float32(self.norm_offset)
        return (lambda values: values + offset) if target.startswith("ple_norm_") else super().change(target)

    def view(self, target: str, source: str) -> View | None:
        if source == "self_attn.indexer.index_qk_proj":
            n = self.config.integer("indexer_n_heads") * self.config.integer("indexer_head_dim")
            return lambda rows: rows[:n] if target == "indexer.q_proj" else rows[n:]
        return _taps if target == "ple_conv1d" else super().view(target, source)
