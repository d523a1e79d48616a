"""A loaded model: mapped file, architecture, sizes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ikpy._native import core
from ikpy.engine.params import ModelParams
from ikpy.errors import FileFormatError
from ikpy.gguf.reader import GGUFFile, TensorInfo
from ikpy.models import architecture
from ikpy.models.base import Architecture
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.weights import WeightSource
from ikpy.quants import registry


def _silent(_: str) -> None:
    """Default log: nothing."""


class Model:
    """Weights stay in the mapped file; nothing is copied but what the architecture derives."""

    def __init__(self, gguf: GGUFFile, arch: Architecture, params: ModelParams) -> None:
        self.gguf = gguf
        self.arch = arch
        self.params = params

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        params: ModelParams | None = None,
        *,
        log: Callable[[str], None] | None = None,
    ) -> Model:
        """Opens a GGUF file (the first part of a split one) and checks that it is a complete model.

        Raises FileFormatError or UnsupportedError with one line that names the file, tensor or key.
        """
        params = params or ModelParams()
        gguf = GGUFFile.open(Path(path))
        keys = Keys(gguf, params.kv_overrides)
        weights = WeightSource(gguf, log or _silent)
        arch = architecture(keys.arch)(keys, weights, log or _silent)
        weights.check_all_used()
        model = cls(gguf, arch, params)
        model.log_decoded_types(log or _silent)
        if params.check_tensors:
            model.check_finite()
        return model

    def log_decoded_types(self, log: Callable[[str], None]) -> None:
        """Notes the matrix types whose products decode to float first: correct, but slower than with an unpacker."""
        matrices = Counter(t.type_id for t in self.gguf.tensors.values() if len(t.shape) > 1)
        for type_id, count in sorted(matrices.items()):
            if core.has_decoder(type_id) and not core.has_unpacker(type_id):
                log(
                    f"llm_load_tensors: note: {count} tensors of type {registry.by_id(type_id).name} have no unpacker; "
                    "their products decode to float first (slower)"
                )

    @property
    def hparams(self) -> HParams:
        """Hyper-parameters of the architecture."""
        return self.arch.hp

    @property
    def n_params(self) -> int:
        """Number of weights in the file."""
        return sum(t.element_count for t in self.gguf.tensors.values())

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.gguf.tensors.values())

    def type_counts(self) -> Counter[int]:
        """Number of tensors per type id."""
        return Counter(t.type_id for t in self.gguf.tensors.values())

    def check_finite(self) -> None:
        """Decodes every tensor and raises FileFormatError naming the first with a NaN or infinity."""
        for info in self.gguf.tensors.values():
            row, column = self._first_bad(info)
            if row >= 0:
                raise FileFormatError(
                    f"{self.gguf.path}: tensor '{info.name}' has invalid data at row {row}, column {column}"
                )

    def _first_bad(self, info: TensorInfo) -> tuple[int, int]:
        kind = registry.by_id(info.type_id)
        ne0 = info.shape[0]
        n_rows = info.element_count // ne0
        step = max(kind.interleave, (1 << 22) // ne0 // kind.interleave * kind.interleave)
        data = self.gguf.data(info)
        row_nbytes = kind.row_nbytes(ne0)
        for row in range(0, n_rows, step):
            n = min(step, n_rows - row)
            values = core.dequantize(data[row * row_nbytes : (row + n) * row_nbytes], info.type_id, ne0, n)
            if not np.isfinite(values).all():
                bad = np.argwhere(~np.isfinite(values))[0]
                return row + int(bad[0]), int(bad[1])
        return -1, -1
