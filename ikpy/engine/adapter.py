"""LoRA adapters in GGUF files (model semantics section 9: adapter files)."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ikpy.engine.model import Model
from ikpy.errors import FileFormatError, UsageError
from ikpy.gguf.reader import GGUFFile, TensorInfo
from ikpy.graph.adapters import LowRank
from ikpy.graph.ir import F32, Buffer, Value, external
from ikpy.quants import dequantize

# Latent attention splits these at load; the parts are not products with the tensor any more.
SPLIT_AT_LOAD = ("attn_kv_b.weight", "attn_k_b.weight", "attn_v_b.weight")
PARTS = (".lora_a", ".lora_b")
# Devices tell weights apart by name, and several adapters may have pairs for one tensor.
_serial = itertools.count()


@dataclass
class LoraAdapter:
    """A loaded adapter: its pairs by tensor, and what one unit of the user's scale means for each."""

    path: str
    pairs: dict[str, tuple[Value, Value]]

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Model) -> LoraAdapter:
        """Reads an adapter for a model.

        alpha / rank is multiplied into B, so the scale of use is the user's alone. Raises FileFormatError for a file
        that is not an adapter of this model's architecture and shapes, UsageError for tensors it cannot be applied to.
        """
        with GGUFFile.open(Path(path)) as gguf:
            _check_kind(gguf, model)
            alpha = float(gguf.get("adapter.lora.alpha", 0.0))
            pairs = {}
            for name in sorted({n[: -len(PARTS[0])] for n in gguf.tensors if n.endswith(PARTS)}):
                pairs[name] = _pair(gguf, model, name, alpha)
            extra = [n for n in gguf.tensors if not n.endswith(PARTS)]
            if extra or not pairs:
                what = f"tensor '{extra[0]}' is no part of a LoRA pair" if extra else "it holds no LoRA pairs"
                raise FileFormatError(f"{path}: {what}")
            return cls(str(path), pairs)


def _check_kind(gguf: GGUFFile, model: Model) -> None:
    for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
        if gguf.get(key) != wanted:
            raise FileFormatError(f"{gguf.path}: not a LoRA adapter: {key} is {gguf.get(key)!r}, not '{wanted}'")
    arch = gguf.get("general.architecture")
    if arch != model.hparams.arch:
        raise FileFormatError(f"{gguf.path}: the adapter is for '{arch}', the model is '{model.hparams.arch}'")


def _pair(gguf: GGUFFile, model: Model, name: str, alpha: float) -> tuple[Value, Value]:
    a, b = (gguf.tensors.get(name + part) for part in PARTS)
    if a is None or b is None:
        raise FileFormatError(f"{gguf.path}: '{name}' has only one of lora_a and lora_b")
    weight = model.weights.get(name)
    if weight is None:
        raise FileFormatError(f"{gguf.path}: the model has no tensor '{name}'")
    if name.endswith(SPLIT_AT_LOAD) or name == "token_embd.weight":
        raise UsageError(
            f"{gguf.path}: an adapter of '{name}' cannot be applied while running; merge it into the model"
        )
    rank = b.shape[0]
    shapes = [(*info.shape, 1, 1)[:4] for info in (a, b)]
    wanted = [(weight.shape[0], rank, *weight.shape[2:]), (rank, weight.shape[1], *weight.shape[2:])]
    if [(*s, 1, 1)[:4] for s in shapes] != wanted:
        raise FileFormatError(f"{gguf.path}: '{name}': shapes {a.shape} and {b.shape} do not fit {weight.shape}")
    return _decoded(gguf, a, 1.0), _decoded(gguf, b, alpha / rank if alpha else 1.0)


def _decoded(gguf: GGUFFile, info: TensorInfo, factor: float) -> Value:
    """The tensor as F32 in memory of its own, times a factor."""
    values = np.ascontiguousarray(dequantize(gguf.data(info), info.type_id, info.shape), np.float32)
    values *= np.float32(factor)
    return external(values.ctypes.data, values, F32, info.shape, f"{info.name}.{next(_serial)}", "weight")


def low_rank_weights(model: Model, adapters: Sequence[LoraAdapter]) -> dict[Buffer, list[LowRank]]:
    """Pairs of all adapters by the weight they belong to."""
    found: dict[Buffer, list[LowRank]] = {}
    for index, adapter in enumerate(adapters):
        for name, (a, b) in adapter.pairs.items():
            found.setdefault(model.weights[name].buffer, []).append(LowRank(a, b, index, name))
    return found
