"""Typed access to a model's metadata under its architecture prefix, with user overrides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ikpy.errors import FileFormatError, UsageError
from ikpy.gguf.reader import GGUFFile
from ikpy.gguf.types import GGUFValueType as VT

REQUIRED = object()
MAX_LAYERS = 512
MAX_U32 = 2**32 - 1
LARGEST_SCALE = 1e9
"""Of scales and of their inverses: products with weights, gates or logits stay float32 numbers."""


class Keys:
    """Reads `A.name` keys (A = general.architecture) as numbers and lists of the wanted type."""

    def __init__(self, gguf: GGUFFile, overrides: Mapping[str, Any] | None = None) -> None:
        self.gguf = gguf
        self.overrides = dict(overrides or {})
        self.arch = str(self._scalar("general.architecture", VT.STRING, REQUIRED))

    def u32(self, name: str, default: Any = REQUIRED) -> Any:
        """Unsigned integer `A.name`."""
        return self._scalar(f"{self.arch}.{name}", VT.UINT32, default)

    def f32(self, name: str, default: Any = REQUIRED) -> Any:
        """Float `A.name`. FileFormatError if it is undefined, infinite or no possible scale, as all logits would be."""
        value = self._scalar(f"{self.arch}.{name}", VT.FLOAT32, default)
        is_scale = name.endswith("scale") and isinstance(value, float) and value != 0
        if isinstance(value, float) and not math.isfinite(value):
            raise FileFormatError(f"{self.gguf.path}: {self.arch}.{name} is {value}")
        if is_scale and not 1 / LARGEST_SCALE <= abs(value) <= LARGEST_SCALE:
            raise FileFormatError(f"{self.gguf.path}: {self.arch}.{name} is {value:g}, no possible scale")
        return value

    def boolean(self, name: str, default: Any = REQUIRED) -> Any:
        """Bool `A.name`."""
        return self._scalar(f"{self.arch}.{name}", VT.BOOL, default)

    def string(self, name: str, default: Any = REQUIRED) -> Any:
        """String `A.name`."""
        return self._scalar(f"{self.arch}.{name}", VT.STRING, default)

    def has(self, name: str) -> bool:
        """Whether the file or an override gives `A.name`."""
        key = f"{self.arch}.{name}"
        return key in self.overrides or key in self.gguf.metadata

    def is_list(self, name: str) -> bool:
        """Whether the file gives an array as `A.name`, and no override another value."""
        return self._is_list(f"{self.arch}.{name}")

    def per_layer(self, name: str, n_layer: int, default: Any = REQUIRED) -> list[int]:
        """u32, or array of integers or booleans with one value per layer, as a list of n_layer integers."""
        key = f"{self.arch}.{name}"
        if self._is_list(key):
            values = np.asarray(self.gguf.metadata[key])
            if values.dtype.kind not in "iub":
                raise FileFormatError(f"{self.gguf.path}: key {key} must hold integers or booleans")
            if len(values) > MAX_LAYERS:
                raise FileFormatError(
                    f"{self.gguf.path}: key {key}: array length {len(values)} exceeds max {MAX_LAYERS}"
                )
            if len(values) != n_layer:
                raise FileFormatError(
                    f"{self.gguf.path}: key {key} has wrong array length; expected {n_layer}, got {len(values)}"
                )
            return [int(v) for v in values]
        return [int(self._scalar(key, VT.UINT32, default))] * n_layer

    def integers(self, name: str, n: int | None = None) -> list[int]:
        """Array of n integers, or of any number, from 0 on and of any width, `A.name`."""
        key = f"{self.arch}.{name}"
        values = np.asarray(self.gguf.require(key, VT.ARRAY))
        is_any = len(values) == 0 and not n
        if not is_any and (values.dtype.kind not in "iu" or n not in (None, len(values)) or values.min(initial=0) < 0):
            wanted = "integers" if n is None else f"{n} integers"
            raise FileFormatError(f"{self.gguf.path}: key {key} must hold {wanted}, none below 0")
        return [int(value) for value in values]

    def floats_per_layer(self, name: str, n_layer: int, default: Any = REQUIRED) -> list[float]:
        """f32, or array of floats with a value per layer, as n_layer numbers. FileFormatError unless all are finite."""
        return self._floats(f"{self.arch}.{name}", n_layer, default)

    def bare_floats_per_layer(self, key: str, n_layer: int) -> list[float]:
        """As floats_per_layer, of a key that has no architecture in its name and must be there."""
        return self._floats(key, n_layer, REQUIRED)

    def optional_integers(self, name: str, n: int) -> list[int]:
        """Array of n integers of any sign `A.name`; empty if the file has none."""
        values = np.asarray(self.gguf.metadata.get(f"{self.arch}.{name}", np.empty(0, np.int64)))
        if values.ndim != 1 or (len(values) and (values.dtype.kind not in "iu" or len(values) != n)):
            raise FileFormatError(f"{self.gguf.path}: key {self.arch}.{name} must hold {n} integers")
        return [int(v) for v in values]

    def limits_per_layer(self, name: str, n_layer: int) -> list[float]:
        """As floats_per_layer, of bounds, which may be infinite. FileFormatError for what is no number."""
        return self._floats(f"{self.arch}.{name}", n_layer, REQUIRED, may_be_infinite=True)

    def _floats(self, key: str, n_layer: int, default: Any, *, may_be_infinite: bool = False) -> list[float]:
        if self._is_list(key):
            values = np.asarray(self.gguf.metadata[key])
            if values.dtype.kind != "f" or len(values) != n_layer:
                raise FileFormatError(f"{self.gguf.path}: key {key} must hold {n_layer} floats, one per layer")
            numbers = [float(v) for v in values]
        else:
            numbers = [float(self._scalar(key, VT.FLOAT32, default))] * n_layer
        if any(math.isnan(x) or (math.isinf(x) and not may_be_infinite) for x in numbers):
            raise FileFormatError(f"{self.gguf.path}: key {key} holds numbers that are not finite")
        return numbers

    def _is_list(self, key: str) -> bool:
        is_stored = key not in self.overrides and key in self.gguf.metadata
        return is_stored and self.gguf.value_type(key) is VT.ARRAY

    def n_listed(self, name: str, n_layer: int) -> int:
        """Numbers in a list of one per layer, in which those of prediction layers may follow; n_layer if `A.name` is
        none.
        """
        value = self.gguf.metadata.get(f"{self.arch}.{name}")
        n = len(value) if isinstance(value, list | np.ndarray) else n_layer
        if not n_layer <= n <= MAX_LAYERS:
            raise FileFormatError(
                f"{self.gguf.path}: key {self.arch}.{name} must hold a number for each of {n_layer} layers"
            )
        return n

    def _scalar(self, key: str, kind: VT, default: Any) -> Any:
        if key in self.overrides:
            return _checked_override(key, self.overrides[key], kind)
        if default is not REQUIRED and key not in self.gguf.metadata:
            return default
        return self.gguf.require(key, kind)


def _checked_override(key: str, value: Any, kind: VT) -> Any:
    classes: dict[VT, tuple[type, ...]] = {
        VT.UINT32: (int,),
        VT.FLOAT32: (float,),
        VT.BOOL: (bool,),
        VT.STRING: (str,),
    }
    fits = isinstance(value, classes[kind]) and (kind is VT.BOOL or not isinstance(value, bool))
    if not fits:
        raise UsageError(f"--override-kv {key}: value {value!r} is not of the key's type {kind.name.lower()}")
    if kind is VT.UINT32 and not 0 <= value <= MAX_U32:
        raise UsageError(f"--override-kv {key}: {value} is not in the range of the key, 0 to {MAX_U32}")
    return value
