"""EAGLE-3 drafters (arXiv:2503.01840), as SpecForge, AngelSlim, ModelOpt and the speculators package store them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ikpy.convert.checkpoint import Checkpoint
from ikpy.convert.config import Config
from ikpy.convert.families import family
from ikpy.convert.families.base import ATTENTION, DENSE, Keys, Modules
from ikpy.convert.families.llama import Llama
from ikpy.errors import FileFormatError
from ikpy.models.eagle3 import N_READ
from ikpy.models.layer_reading import MAPPING

_CHOICE = "t2d"
"""Tensor that says of every token of the target whether the drafter guesses it."""
_LAYERS = "eagle_aux_hidden_state_layer_ids"
# Values of `eagle_config` that a GGUF file cannot say otherwise.
_EXPECTED = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}


class Eagle3(Llama):
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
    needs_embedding = False
    writes_texts = False
    reads_target = True
    own_tensors = frozenset({MAPPING, _CHOICE})

    target: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        # Copied from the target; the drafter's output matrix is its own.
        config.values["tie_word_embeddings"] = None
        self._choice: dict[str, np.ndarray] = {}

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

    def take_target(self, target: Config, checkpoint: Checkpoint) -> None:
        """Tells the drafter for which model it is."""
        self.target = target
        width = self.config.integer("target_hidden_size", default=self.target_size)
        if width != self.target_size:
            raise FileFormatError(
                f"{self.config.path}: the drafter reads states of {width} numbers, those of {target.path.parent} have "
                f"{self.target_size}; give the model that it was made for"
            )
        n_vocab = self.config.integer("target_vocab_size", "vocab_size", default=self.n_vocab)
        if n_vocab not in (self.n_vocab, self._n_guessed):
            raise FileFormatError(
                f"{self.config.path}: the drafter is for a vocabulary of {n_vocab} tokens, {target.path.parent} has "
                f"{self.n_vocab}; give the model that it was made for"
            )
        own = self.config.integer("hidden_size")
        lacking = [name for name in ("embed_tokens", "lm_head") if not _has(checkpoint, f"{name}.weight")]
        if own != self.target_size and lacking:
            raise FileFormatError(
                f"{checkpoint.folder}: {lacking[0]} is missing, and that of the model has {self.target_size} columns "
                f"instead of {own}"
            )
        self.usual_pre = family(target).usual_pre
        self._read_choice(checkpoint)

    @property
    def target_size(self) -> int:
        """Numbers of a state of the target."""
        return self.target.integer("hidden_size")

    @property
    def n_vocab(self) -> int:
        """Tokens of the target."""
        return self.target.integer("vocab_size")

    @property
    def _n_guessed(self) -> int:
        """Tokens that the drafter may guess: rows of its output matrix."""
        return self.config.integer("draft_vocab_size", default=self.n_vocab)

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

    def extra_tensors(self) -> dict[str, np.ndarray]:
        return super().extra_tensors() | self._choice

    def _read_choice(self, checkpoint: Checkpoint) -> None:
        """Tokens i64 of the target for the rows of the output matrix, stored as what they are above the row."""
        folder, n_vocab = checkpoint.folder, self.n_vocab
        names = {name.removeprefix("model."): name for name in checkpoint.tensors}
        n_rows = self._n_guessed
        if MAPPING not in names:
            if n_rows != n_vocab:
                raise FileFormatError(f"{folder}: {MAPPING} (tokens of the {n_rows} guesses) is missing")
            return
        stored = checkpoint.raw(names[MAPPING])
        if stored.dtype.kind != "i" or stored.shape != (n_rows,):
            raise FileFormatError(f"{folder}: '{names[MAPPING]}' must be {n_rows} integers")
        tokens = stored.astype(np.int64) + np.arange(n_rows)
        if tokens.min(initial=0) < 0 or tokens.max(initial=0) >= n_vocab or len(np.unique(tokens)) != n_rows:
            raise FileFormatError(f"{folder}: '{names[MAPPING]}' does not name {n_rows} of the {n_vocab} tokens")
        if _CHOICE in names:
            chosen = np.flatnonzero(checkpoint.raw(names[_CHOICE]))
            if not np.array_equal(chosen, np.sort(tokens)):
                raise FileFormatError(f"{folder}: '{names[MAPPING]}' and '{names[_CHOICE]}' name other tokens")
        self._choice = {MAPPING: tokens}


def _has(checkpoint: Checkpoint, name: str) -> bool:
    """Whether there is a tensor of this name, which may stand in a model."""
    return name in checkpoint.tensors or f"model.{name}" in checkpoint.tensors
