"""Gemma 3n, the text part: residual streams (AltUp), LAuReL, inputs for every layer, shared caches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import ClassVar

import numpy as np

from ikpy.convert.families.base import Keys, Modules, WindowFamily
from ikpy.convert.families.gemma import Gemma3

N_SPARSE, SPARSITY = 10, 0.95
"""First layers with sparse activations and their share of zeros, where the configuration is silent."""


class Gemma3n(WindowFamily):
    """Norm weights are stored as they are used."""

    arch = "gemma3n"
    activations = ("gelu_pytorch_tanh",)
    activation_names = ("hidden_activation",)
    outer: ClassVar[Mapping[str, str]] = {
        **WindowFamily.outer,
        "model.embed_tokens_per_layer": "per_layer_token_embd",
        "model.per_layer_model_projection": "per_layer_model_proj",
        "model.per_layer_projection_norm": "per_layer_proj_norm",
        "model.altup_projections.{e}": "altup_proj",
        "model.altup_unembed_projections.{e}": "altup_unembd_proj",
    }
    modules: ClassVar[Modules] = {
        **Gemma3.modules,
        "altup.correction_coefs": "altup_correct_coef",
        "altup.correct_output_scale": "altup_correct_scale",
        "altup.prediction_coefs": "altup_predict_coef",
        "altup.modality_router": "altup_router",
        "altup.router_norm": "altup_router_norm",
        "laurel.linear_left": "laurel_l",
        "laurel.linear_right": "laurel_r",
        "laurel.post_laurel_norm": "laurel_post_norm",
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
    }
    defaults: ClassVar[Mapping[str, int | float]] = {
        "head_dim": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 5,
        "altup_num_inputs": 4,
        "altup_active_idx": 0,
        "num_kv_shared_layers": 15,
        "hidden_size_per_layer_input": 256,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "final_logit_softcapping": 30.0,
    }

    def check(self) -> None:
        super().check()
        config = self.config
        config.require("altup_correct_scale false", bool(config.get("altup_correct_scale", default=True)))
        kind = config.rope("sliding_attention")["rope_type"] if self._has_own_rope else "default"
        config.require(f"RoPE scaling '{kind}' of the window layers", kind == "default")

    @property
    def _has_own_rope(self) -> bool:
        """Whether the configuration describes the rotation of window layers apart."""
        return "sliding_attention" in self.config.get("rope_parameters", default={})

    def n_parts(self, target: str) -> int:
        return self.config.count("altup_num_inputs") - 1

    def padded_rows(self, target: str) -> int:
        # Tokens behind the table of layers' inputs, which stand for images and sound, have those of token 0.
        return self.config.count("vocab_size", default=0) if target == "per_layer_token_embd" else 0

    @property
    def cutoffs(self) -> list[float]:
        """Standard deviations above the mean from which gates of a layer count; minus infinity: all do."""
        n_layer = self.config.n_layer
        usual = [SPARSITY if il < N_SPARSE else 0.0 for il in range(n_layer)]
        shares = self.config.get("activation_sparsity_pattern", default=usual)
        if not isinstance(shares, list):
            shares = [shares] * n_layer
        fits = len(shares) == n_layer and all(0 <= float(share) < 1 for share in shares)
        self.config.require(f"activation_sparsity_pattern {shares}", fits)
        return [NormalDist().inv_cdf(float(share)) if share else -math.inf for share in shares]

    def keys(self) -> Keys:
        config, n_layer = self.config, self.config.n_layer
        width = config.get("intermediate_size")
        widths = [int(n) for n in width] if isinstance(width, list) else [int(width)] * n_layer
        config.require(f"intermediate_size of {len(widths)} layers", len(widths) == n_layer)
        config.values["intermediate_size"] = widths[0]
        base = config.number("rope_local_base_freq", default=10000.0)
        keys = super().keys() | {
            "feed_forward_length": widths[0] if len(set(widths)) == 1 else widths,
            "attention.sliding_window_pattern": self.window_layers,
            "attention.shared_kv_layers": config.count("num_kv_shared_layers"),
            "embedding_length_per_layer_input": config.count("hidden_size_per_layer_input"),
            "altup.num_inputs": config.count("altup_num_inputs"),
            "altup.active_idx": config.count("altup_active_idx"),
            "activation_sparsity_scale": self.cutoffs,
            "rope.freq_base_swa": float(config.rope("sliding_attention")["rope_theta"]) if self._has_own_rope else base,
        }
        if config.get("final_logit_softcapping", default=None):
            keys["final_logit_softcapping"] = config.number("final_logit_softcapping")
        return keys

    def extra_tensors(self) -> dict[str, np.ndarray]:
        return {}
