"""EAGLE-3 drafters (arXiv:2503.01840), as SpecForge, AngelSlim, ModelOpt and the speculators package store them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ikpy.convert.families.base import ATTENTION, DENSE, Keys, Modules
from ikpy.convert.families.drafter import LayerDrafter
from ikpy.convert.families.llama import Llama
from ikpy.errors import FileFormatError
from ikpy.models.eagle3 import N_READ

_LAYERS = "eagle_aux_hidden_state_layer_ids"
# Values of `eagle_config` that a GGUF file cannot say otherwise.
_EXPECTED = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}


class Eagle3(LayerDrafter, Llama):
    """Rows of q and k are arranged as in LLaMA. What the target has is not in the file: which are its vocabulary, and
    often the token embedding.
    """

    arch = "eagle3"
    biases = frozenset[str]()
    modules: ClassVar[Modules] = {**ATTENTION, **DENSE, "hidden_norm": "attn_norm_2"}
    outer: ClassVar[Mapping[str, str]] = {
        "embed_tokens": "token_embd",
        "norm": "output_norm",
        "lm_head": "output",
        "fc": "fc",
    }

    @staticmethod
    def usual_name(path: str) -> str:
        path = path.removeprefix("model.")
        rest = path.removeprefix("midlayer.")
        return path if rest == path else f"layers.0.{rest}"

    def check(self) -> None:
        super().check()
        config = self.config
        config.require(f"a drafter of {config.n_layer} layers", config.n_layer == 1)
        for name in ("norm_before_fc", "fc_norm", "attention_bias", "mlp_bias"):
            config.require(f"{name} true", not config.get(name, default=False))
        for name, expected in _EXPECTED.items():
            found = bool(self._eagle_config.get(name, expected))
            config.require(f"eagle_config.{name} {str(found).lower()}", found == expected)

    @property
    def _eagle_config(self) -> dict[str, Any]:
        found = self.config.get("eagle_config", default={})
        if not isinstance(found, dict):
            raise FileFormatError(f"{self.config.path}: 'eagle_config' is {found!r}, not an object")
        return found

    @property
    def target_layers(self) -> list[int]:
        """Layers of the target whose inputs are read, in the order in which they run.

        `eagle_config` counts outputs of layers from 0 on, as SpecForge and SGLang do; the speculators package and vLLM
        count their inputs, outside of it. Without either they are those of the authors' code.
        """
        n_layer = self.target.n_layer
        outputs, inputs = self._eagle_config.get(_LAYERS), self.config.get(_LAYERS, default=None)
        layers = [il + 1 for il in outputs] if outputs else inputs or [2, n_layer // 2, n_layer - 3]
        whole = sorted({il for il in layers if type(il) is int and 0 <= il < n_layer})
        is_before = any(type(il) is int and il < 0 for il in outputs or ())
        if len(layers) != N_READ or len(whole) != N_READ or is_before:
            raise FileFormatError(
                f"{self.config.path}: the drafter reads layers {layers} of a model of {n_layer}; {N_READ} of them "
                "are possible"
            )
        return whole

    def keys(self) -> Keys:
        return super().keys() | {
            "target_layers": self.target_layers,
            "target_hidden_size": self.target_size,
            "norm_before_residual": bool(self.config.get("norm_before_residual", default=False)),
        }
