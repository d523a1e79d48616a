"""DFlash (arXiv:2602.06036) and DFlash 2 drafters as their authors and SpecForge store them, and DSpark's: layers as
Qwen 3 has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ikpy.convert.checkpoint import Checkpoint
from ikpy.convert.config import Config
from ikpy.convert.families.base import ATTENTION, DENSE, HEAD_NORMS, Keys, Modules
from ikpy.convert.families.drafter import LayerDrafter
from ikpy.errors import FileFormatError, UnsupportedError
from ikpy.models.dflash import MASK

_SELECTOR = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_CAPS = {"output_multiplier": "logit_scale", "final_logit_softcapping": "final_logit_softcapping"}
_TRAINING = ("confidence_head_alpha", "enable_confidence_head", "markov_rank", "num_target_layers")
_READ = ("block_size", "causal", "confidence_head_with_markov", "markov_head_type", "mask_token_id", "projector_type")
_KNOWN = {*_SELECTOR, *_CAPS, *_TRAINING, *_READ, "sample_from_anchor", "target_layer_ids"}
"""Values of `dflash_config` that are read here, or tell of training alone."""
_PROJECTORS = ("dflash", "dflash2", "dspark")
_ANCHORED = ("Qwen3DSpark",)
"""Beginnings of the names of classes whose blocks guess from the first token on."""


class DFlash(LayerDrafter):
    """Norm weights and rows of q and k are stored as they are used."""

    arch = "dflash"
    has_windows = True
    modules: ClassVar[Modules] = {
        **ATTENTION,
        **HEAD_NORMS,
        **DENSE,
        "attention_conv.base_kernel": "attn_conv_base",
        "attention_conv.kernel_projection": "attn_conv_proj",
        "mlp_conv.base_kernel": "ffn_conv_base",
        "mlp_conv.kernel_projection": "ffn_conv_proj",
    }
    bare = frozenset({"attn_conv_base", "ffn_conv_base"})
    outer: ClassVar[Mapping[str, str]] = {
        "embed_tokens": "token_embd",
        "norm": "output_norm",
        "lm_head": "output",
        "fc": "fc",
        "hidden_norm": "enc.output_norm",
        "markov_head.markov_w1": "markov_w1",
        "markov_head.markov_w2": "markov_w2",
        "confidence_head.proj": "conf_proj",
        "candidate_selector.predecessor_codebook": "selector_predecessor",
        "candidate_selector.successor_codebook": "selector_successor",
        "candidate_selector.hidden_projection": "selector_hidden",
    }
    biases = frozenset({"conf_proj"})

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._has_markov = False

    @staticmethod
    def usual_name(path: str) -> str:
        return path.removeprefix("model.")

    def _setting(self, name: str, default: Any = None) -> Any:
        """A value of `dflash_config`, or one beside it."""
        own = self.config.get("dflash_config", default={})
        if not isinstance(own, dict):
            raise FileFormatError(f"{self.config.path}: 'dflash_config' is {own!r}, not an object")
        found = own.get(name)
        return self.config.get(name, default=default) if found is None else found

    def check(self) -> None:
        super().check()
        config = self.config
        for name in ("attention_bias", "mlp_bias"):
            config.require(f"{name} true", not config.get(name, default=False))
        for name, value in (self.config.get("dflash_config", default={}) or {}).items():
            if name not in _KNOWN and value:
                raise UnsupportedError(f"{config.path}: dflash_config.{name} {value!r} is not supported")
        kind = self._setting("projector_type", "dflash")
        if kind not in _PROJECTORS:
            raise UnsupportedError(f"{config.path}: dflash_config.projector_type '{kind}' is not supported")
        for name in ("aux_hidden_state_layer_ids", "transformer_layer_config"):
            if config.get(name, default=None):
                raise UnsupportedError(f"{config.path}: {name}: drafters of the speculators package are not supported")
        head = self._setting("markov_head_type", "vanilla")
        config.require(f"markov_head_type '{head}'", head == "vanilla")
        config.require("confidence_head_with_markov false", bool(self._setting("confidence_head_with_markov", True)))

    def take_target(self, target: Config, checkpoint: Checkpoint) -> None:
        super().take_target(target, checkpoint)
        own = self.config.integer("hidden_size")
        config = self.config
        config.require(f"states of {own} numbers for a model of {self.target_size}", own == self.target_size)
        n_layer = self._setting("num_target_layers")
        if n_layer is not None and n_layer != target.n_layer:
            raise FileFormatError(
                f"{config.path}: the drafter is for a model of {n_layer!r} layers (num_target_layers), "
                f"{target.path.parent} has {target.n_layer}; give the model that it was made for"
            )
        self._has_markov = any(name.endswith("markov_head.markov_w1.weight") for name in checkpoint.tensors)

    def _number(self, name: str) -> int:
        value = self._setting(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise FileFormatError(f"{self.config.path}: '{name}' is {value!r}, not an integer from 0 on")
        return value

    def _factor(self, name: str) -> float:
        value = self._setting(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise FileFormatError(f"{self.config.path}: '{name}' is {value!r}, not a number above 0")
        return float(value)

    @property
    def target_layers(self) -> list[int]:
        """Layers of the target whose inputs are read: checkpoints count outputs of layers from 0 on."""
        config, n_layer = self.config, self.target.n_layer
        ids = self._setting("target_layer_ids")
        n = config.n_layer
        if ids is None:  # as the authors' code chooses them
            last = n_layer - 3
            ids = [n_layer // 2] if n == 1 else [round(1 + i * (last - 1) / (n - 1)) for i in range(n)]
        if not isinstance(ids, list) or any(type(il) is not int or not 0 <= il < n_layer - 1 for il in ids) or not ids:
            raise FileFormatError(
                f"{config.path}: the drafter reads what layers {ids} give, of a model of {n_layer}; all but the last "
                "are possible"
            )
        return [il + 1 for il in ids]

    def keys(self) -> Keys:
        config = self.config
        keys = super().keys() | {"target_layers": self.target_layers, "block_size": self._number("block_size")}
        windows = config.sliding_layers()
        if windows and any(windows):
            keys["attention.sliding_window"] = config.integer("sliding_window")
            keys["attention.sliding_window_pattern"] = windows
        if self._setting("causal") or config.get("is_causal", default=False):
            keys["attention.causal"] = True
        if self._setting("selector_rank"):
            keys |= {name: self._number(name) for name in _SELECTOR}
            keys |= {key: self._factor(name) for name, key in _CAPS.items() if self._setting(name)}
        if self._has_markov:
            anchored = self.config.class_name.startswith(_ANCHORED)
            keys["sample_from_anchor"] = bool(self._setting("sample_from_anchor", anchored))
        return keys

    def keys_of_tokens(self) -> Keys:
        return {MASK: self._number("mask_token_id")}
