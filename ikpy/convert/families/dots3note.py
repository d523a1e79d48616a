"""dots3 note (dots3note), its text model: sparse latent attention beside latent attention to a window."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ikpy.convert.config import Config
from ikpy.convert.families.base import Change, Keys, Modules, View
from ikpy.convert.families.deepseek import INDEXER, DeepSeekV3, LatentHead, indexer_keys

_WINDOW, _INDEXED = "sliding_attention", "indexed_attention"
# What layers with a window have where a configuration does not say.
_WINDOW_DEFAULTS = {
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "head_dim": 256,
    "qk_nope_head_dim": 192,
    "v_head_dim": 128,
}
_BASES = {_INDEXED: 80_000_000.0, _WINDOW: 50_000.0}


class Dots3Note(LatentHead, DeepSeekV3):
    """Factors of latents are part of their norms."""

    arch = "dots3note"
    has_windows = True
    biases = needed_biases = frozenset({"indexer.k_norm"})
    usual_pre = "qwen2"
    defaults: ClassVar[Mapping[str, int | float]] = {
        "index_head_dim": 128,
        "index_n_heads": 64,
        "index_topk": 2048,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
    }
    modules: ClassVar[Modules] = {
        **DeepSeekV3.modules,
        "self_attn.kv_b_proj": ("attn_k_b", "attn_v_b"),
        "self_attn.k_rope_only_layernorm": "attn_k_norm",
        "self_attn.g_proj": "attn_gate",
        **INDEXER,
    }

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.get("mlp_layer_types", "first_k_dense_replace", default=None) is None:
            config.values["first_k_dense_replace"] = 1

    @property
    def kinds(self) -> list[str]:
        """What each layer attends to; files from before transformers say full attention for indexers."""
        config = self.config
        has_indexers = config.values.get("use_dsa", None if "per_layer_config" in config.values else True)
        kinds = config.get("layer_types", default=None)
        if kinds is None:
            slides = config.get("use_sliding_window", default=True)
            own = _INDEXED if has_indexers in (None, True) else "full_attention"
            return [own if not slides or il < 2 or il % 4 == 1 else _WINDOW for il in range(config.n_layer)]
        return [_INDEXED if has_indexers and kind == "full_attention" else kind for kind in kinds]

    @property
    def local(self) -> dict[str, Any]:
        """Values of the layers with a window."""
        values = self.config.values
        given = {int(il): own for il, own in (values.get("per_layer_config") or {}).items()}
        if given:
            return {**values, **given.get(self.kinds.index(_WINDOW), {})} if _WINDOW in self.kinds else values
        local = {name: values.get(f"swa_{name}", usual) for name, usual in _WINDOW_DEFAULTS.items()}
        rotated = values.get("swa_qk_rope_head_dim", local["head_dim"] - local["qk_nope_head_dim"])
        return {**values, **local, "qk_rope_head_dim": rotated}

    def _rope(self, kind: str) -> dict[str, Any]:
        given = self.config.get("rope_parameters", "rope_scaling", default=None)
        if given is not None:
            return self.config.rope(kind)
        name = "swa_rope_theta" if kind == _WINDOW else "rope_theta"
        return {"rope_type": "default", "rope_theta": self.config.number(name, default=_BASES[kind])}

    def check(self) -> None:
        super().check()
        config, kinds, local = self.config, self.kinds, self.local
        config.require(f"{len(kinds)} kinds of layers", len(kinds) == config.n_layer)
        strange = sorted(set(kinds) - {_WINDOW, _INDEXED})
        config.require(f"layers of kind '{strange[0] if strange else ''}'", not strange)
        given = {int(il): own for il, own in (config.values.get("per_layer_config") or {}).items()}
        expected = {il: given.get(kinds.index(_WINDOW), {}) for il, kind in enumerate(kinds) if kind == _WINDOW}
        config.require("layers of a kind that differ", not given or given == expected)
        same = local["q_lora_rank"] == config.integer("q_lora_rank")
        config.require("windows with a q_lora_rank of their own", same)
        whole = local["head_dim"] == local["qk_nope_head_dim"] + local["qk_rope_head_dim"]
        config.require(f"heads of {local['head_dim']} with a window", whole)
        shared = config.integer("moe_shared_expert_intermediate_size", "shared_experts_intermediate_size", default=1536)
        width = config.integer("moe_intermediate_size")
        config.require(f"shared experts of {shared} beside {width}", shared == width)
        for kind in (_INDEXED, _WINDOW):
            scaling = self._rope(kind)["rope_type"]
            config.require(f"RoPE scaling '{scaling}'", scaling == "default")

    def keys(self) -> Keys:
        config, kinds = self.config, self.kinds
        windows, local = [kind == _WINDOW for kind in kinds], Config(self.local, self.config.path)
        window_rank = local.integer("kv_lora_rank")
        heads = local.integer("num_attention_heads")
        return super().keys() | {
            **indexer_keys(config),
            "attention.head_count": [heads if window else self.n_head for window in windows],
            "attention.key_length_mla_swa": local.integer("head_dim"),
            "attention.value_length_mla_swa": local.integer("v_head_dim"),
            "attention.key_length_swa": window_rank + local.integer("qk_rope_head_dim"),
            "attention.value_length_swa": window_rank,
            "attention.kv_lora_rank_swa": window_rank,
            "attention.sliding_window": config.integer("sliding_window", "sliding_window_size", default=512),
            "attention.sliding_window_pattern": windows,
            "attention.indexer.types": [not window for window in windows],
            "rope.dimension_count_swa": local.integer("qk_rope_head_dim"),
            "rope.freq_base": float(self._rope(_INDEXED)["rope_theta"]),
            "rope.freq_base_swa": float(self._rope(_WINDOW)["rope_theta"]),
        }

    def view(self, target: str, source: str) -> View | None:
        if target in ("attn_k_b", "attn_v_b"):
            return lambda kv: self._part_of_kv(kv, target)
        if target == "indexer.attn_q_b":
            heads = self.config.integer("index_n_heads")
            return lambda rows: (
                self._halves(rows.reshape(heads, -1, rows.shape[-1]).swapaxes(0, 1)).swapaxes(0, 1).reshape(rows.shape)
            )
        if target in ("indexer.attn_k", "indexer.k_norm"):
            return self._halves
        return super().view(target, source)

    def _part_of_kv(self, kv: np.ndarray, target: str) -> np.ndarray:
        """[H, rank, n_nope] or [H, n_value, rank] of attn_kv_b of either kind of layers, which its shape tells."""
        for values in (self.config.values, self.local):
            heads, n_nope, n_value = (values[n] for n in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim"))
            if kv.shape == (heads * (n_nope + n_value), values["kv_lora_rank"]):
                parts = kv.reshape(heads, n_nope + n_value, -1)
                return parts[:, :n_nope].swapaxes(1, 2) if target == "attn_k_b" else parts[:, n_nope:]
        raise ValueError(f"shape {kv.shape} of kv_b_proj")

    def _halves(self, rows: np.ndarray) -> np.ndarray:
        """Elements of index heads along the first axis with the rotated ones from adjacent pairs to halves."""
        n_rot = self.n_rot
        return np.concatenate([rows[0:n_rot:2], rows[1:n_rot:2], rows[n_rot:]])

    def change(self, target: str) -> Change | None:
        if target not in ("attn_q_a_norm", "attn_kv_a_norm"):
            return super().change(target)
        width = self.config.integer("hidden_size")
        return lambda values: values * np.float32(math.sqrt(width / values.shape[-1]))
