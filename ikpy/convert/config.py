"""Typed access to config.json, in the spellings of transformers 4 and 5."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ikpy.convert.odd_values import shown
from ikpy.errors import FileFormatError

_REQUIRED = object()
# Layers, experts, elements of a head: many times what any model has, and few enough to list them all.
MAX_COUNT = 1 << 16
MAX_CONTEXT = (1 << 31) - 1
MINICPM_V2_WIDTH = 2304
TEXT_PARTS = ("text_config", "llm_config", "lm_config", "language_config", "transformer_layer_config")
_TIED = "tie_word_embeddings"
# Models whose whole alone says in transformers whether embeddings are tied; what it does not say is false.
_WHOLE_TELLS = ("glm5_next",)


class Config:
    """Values of the language model: those of `text_config` (InternVL: `llm_config`, GLM-ASR: `lm_config`, DeepSeek-OCR:
    `language_config`, drafters of the speculators package: `transformer_layer_config`) over the outer ones.

    FileFormatError if it is none.
    """

    def __init__(self, values: dict[str, Any], path: Path) -> None:
        name = next((name for name in TEXT_PARTS if values.get(name)), TEXT_PARTS[0])
        inner = values.get(name) or {}
        if not isinstance(inner, dict):
            raise FileFormatError(f"{path}: '{name}' is not an object")
        self.values = {**values, **inner}
        if inner and values.get("model_type") in _WHOLE_TELLS:
            self.values[_TIED] = None if values.get(_TIED) else False
        elif len({part[_TIED] for part in (values, inner) if _TIED in part}) > 1:
            self.values[_TIED] = None  # the tensors tell
        self.has_part = bool(inner)
        self.path = path
        self.model_type = str(self.values.get("model_type", ""))

    def get(self, *names: str, default: Any = _REQUIRED) -> Any:
        """The first of the names that is set and not null. FileFormatError if there is none and no default."""
        for name in names:
            if self.values.get(name) is not None:
                return self.values[name]
        if default is _REQUIRED:
            raise FileFormatError(f"{self.path}: '{names[0]}' is missing")
        return default

    def _name(self, names: Sequence[str]) -> str:
        """The first of the names that is set, else the first one."""
        return next((name for name in names if self.values.get(name) is not None), names[0])

    def integer(self, *names: str, default: Any = _REQUIRED) -> int:
        """An integer."""
        value = self.get(*names, default=default)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]  # one equal value per layer
        if isinstance(value, bool) or not isinstance(value, int):
            raise FileFormatError(f"{self.path}: '{self._name(names)}' is {shown(value)}, not an integer")
        return value

    def count(self, *names: str, default: Any = _REQUIRED) -> int:
        """An integer that may be listed one by one: 0 to MAX_COUNT."""
        return self.bounded(self._name(names), self.integer(*names, default=default))

    def bounded(self, name: str, value: int) -> int:
        """A value that comes from this name; FileFormatError unless it is 0 to MAX_COUNT."""
        if not 0 <= value <= MAX_COUNT:
            raise FileFormatError(f"{self.path}: '{name}' is {value}; 0 to {MAX_COUNT} are possible")
        return value

    def number(self, *names: str, default: Any = _REQUIRED) -> float:
        """A float."""
        value = self.get(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise FileFormatError(f"{self.path}: '{self._name(names)}' is {shown(value)}, not a number")
        return float(value)

    def epsilon(self, *names: str, default: Any = _REQUIRED) -> float:
        """A small number that keeps divisors above 0: finite, at least 0."""
        value = self.number(*names, default=default)
        if not 0 <= value < math.inf:
            raise FileFormatError(f"{self.path}: '{names[0]}' is {value:g}; a finite number from 0 on is possible")
        return value

    def require(self, what: str, is_met: bool) -> None:
        """FileFormatError unless a condition of the GGUF architecture is met."""
        if not is_met:
            raise FileFormatError(f"{self.path}: {what}; a GGUF file of this architecture cannot say so")

    @property
    def class_name(self) -> str:
        """The first class of `architectures`, "" if there is none."""
        classes = self.get("architectures", default=None)
        return classes[0] if isinstance(classes, list) and classes and isinstance(classes[0], str) else ""

    @property
    def minicpm_version(self) -> str:
        """Version of a MiniCPM-V or -o as two numbers, which configurations up to 2.5 do not have."""
        usual = "2.0" if self.values.get("hidden_size") == MINICPM_V2_WIDTH else "2.5"
        version = self.get("version", default=usual)
        is_number = isinstance(version, int | float) and not isinstance(version, bool)
        return f"{float(version):.1f}" if is_number else str(version)

    @property
    def n_layer(self) -> int:
        """Layers of the model, prediction layers not counted."""
        return self.count("num_hidden_layers")

    @property
    def n_context(self) -> int:
        """Tokens of the longest text."""
        value = self.integer("max_position_embeddings")
        if not 1 <= value <= MAX_CONTEXT:
            raise FileFormatError(
                f"{self.path}: max_position_embeddings (the longest text) is {value}; 1 to {MAX_CONTEXT} are possible"
            )
        return value

    @property
    def head_dim(self) -> int:
        """Size of an attention head."""
        heads = self.integer("num_attention_heads")
        return self.integer("head_dim", default=self.integer("hidden_size") // heads)

    def rope(self, layer_type: str = "full_attention") -> dict[str, Any]:
        """rope_theta, rope_type and its parameters; of one kind of layers where they differ."""
        values = dict(self.get("rope_parameters", "rope_scaling", default={}))
        if isinstance(values.get(layer_type), dict):
            values = dict(values[layer_type])
        values["rope_type"] = values.get("rope_type") or values.get("type") or "default"
        values.setdefault("rope_theta", self.number("rope_theta", default=10000.0))
        return values

    def rotary_fraction(self, default: float = 1.0) -> float:
        """Part of a head that is rotated."""
        rope = self.get("rope_parameters", default={})
        return float(rope.get("partial_rotary_factor") or self.number("partial_rotary_factor", default=default))

    def sliding_layers(self) -> list[bool] | None:
        """Whether each layer attends to a window; None if the configuration has no list."""
        kinds = self.get("layer_types", default=None)
        return None if kinds is None else [kind in ("sliding_attention", "chunked_attention") for kind in kinds]

    def labels(self) -> list[str]:
        """Names of the scores of a classifier; none if config.json does not say them."""
        named = self.get("id2label", default={})
        if not isinstance(named, dict):
            raise FileFormatError(f"{self.path}: 'id2label' is {shown(named)}, not an object")
        return [str(label) for label in named.values()]
