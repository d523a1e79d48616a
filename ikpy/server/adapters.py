"""LoRA adapters and control vectors of a running server. Used by the engine thread only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ikpy.engine.control_vector import in_range, load_control_vector
from ikpy.errors import UsageError

if TYPE_CHECKING:
    from ikpy.engine.context import Context


@dataclass
class ControlVector:
    """A loaded control vector: directions float32 [n_layer, n_embd] of its layers, and the scale it is added with."""

    id: int
    path: str
    scale: float
    layer_start: int
    layer_end: int
    rows: NDArray[np.float32]

    def json(self) -> dict[str, Any]:
        """The vector as answers show it."""
        return {name: getattr(self, name) for name in ("id", "path", "scale", "layer_start", "layer_end")}


class Adapters:
    """Scales of the adapters a context was made with, and the control vectors added to it."""

    def __init__(self, context: Context, base: NDArray[np.float32] | None = None) -> None:
        self._context = context
        self._base = base
        self.scales: NDArray[np.float32] = context.adapter_scales[0].copy()
        self.vectors: list[ControlVector] = []
        self._n_loaded = 0

    # LoRA

    def lora_json(self) -> list[dict[str, Any]]:
        """Adapters with the scales of requests that do not name their own."""
        adapters = self._context.params.adapters
        return [{"id": i, "path": a.path, "scale": float(self.scales[i])} for i, a in enumerate(adapters)]

    def set_lora(self, scales: Mapping[int, float]) -> None:
        """Scales of all adapters; those not named get 0. Raises UsageError for an unknown id."""
        self.scales = self._all(scales)

    def _all(self, scales: Mapping[int, float]) -> NDArray[np.float32]:
        found = np.zeros(len(self.scales), np.float32)
        for index, scale in scales.items():
            if not 0 <= index < len(found):
                raise UsageError("invalid adapter id")
            found[index] = scale
        return found

    def wanted(self, scales: Mapping[int, float] | None) -> NDArray[np.float32]:
        """Scales of all adapters that a request names, the server's own for None. Raises UsageError for an unknown
        id."""
        return self.scales if scales is None or not len(self.scales) else self._all(scales)

    def has(self, seq_id: int, scales: NDArray[np.float32]) -> bool:
        """Whether a sequence has these scales."""
        return bool((self._context.adapter_scales[seq_id] == scales).all())

    def serves(self, seq_id: int, scales: Mapping[int, float] | None) -> bool:
        """Whether a sequence has the scales of a request; it has not if that names an unknown adapter."""
        try:
            return self.has(seq_id, self.wanted(scales))
        except UsageError:
            return False

    def use(self, seq_id: int, scales: NDArray[np.float32]) -> None:
        """Sets the scales of a sequence, whose text serves no more if they are others than before."""
        self._context.adapter_scales[seq_id] = scales

    def are_equal(self, seq_id: int, other: int) -> bool:
        """Whether two sequences have the same scales."""
        return self.has(seq_id, self._context.adapter_scales[other])

    # control vectors

    def load_vector(self, file: str, path: str, scale: float, first: int, last: int) -> ControlVector:
        """Loads a control vector for layers first to last and adds it; ``path`` is what answers call the file. Raises
        IkpyError for an unusable file."""
        hp = self._context.model.hparams
        rows = in_range(load_control_vector(file, hp.n_layer, hp.n_embd), first, last)
        vector = ControlVector(self._n_loaded, path, scale, first, last, rows)
        self._n_loaded += 1
        self.vectors.append(vector)
        self._steer()
        return vector

    def unload_vector(self, index: int) -> None:
        """Forgets a control vector. Raises UsageError for an unknown id."""
        self.vectors.remove(self._vector(index))
        self._steer()

    def scale_vectors(self, scales: Mapping[int, float]) -> None:
        """New scales of control vectors. Raises UsageError for an unknown id; nothing changes then."""
        for vector, scale in [(self._vector(index), scale) for index, scale in scales.items()]:
            vector.scale = scale
        self._steer()

    def _vector(self, index: int) -> ControlVector:
        for vector in self.vectors:
            if vector.id == index:
                return vector
        raise UsageError("invalid control vector id")

    def _steer(self) -> None:
        parts = [vector.rows * np.float32(vector.scale) for vector in self.vectors]
        if self._base is not None:
            parts.append(self._base)
        self._context.steer(np.sum(parts, axis=0) if parts else None)
