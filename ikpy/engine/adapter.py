"""LoRA adapters in GGUF files (adapters.md)."""

from __future__ import annotations

import itertools
import math
import os
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ikpy.engine.model import Model
from ikpy.errors import FileFormatError
from ikpy.gguf.reader import GGUFFile, TensorInfo
from ikpy.gguf.types import GGUFValueType
from ikpy.graph.adapters import LowRank, LowRankWeights, pair_name
from ikpy.graph.ir import F32, Value, external
from ikpy.quants import dequantize

PARTS = (".lora_a", ".lora_b")
ALPHA = "adapter.lora.alpha"
EMBEDDING = "token_embd.weight"
# Multiplied where rows of the embedding are looked up, wherever the output is that shares them.
EMBEDDING_ROWS = f"{EMBEDDING}.rows"
# One expert of a layer in old files; such tensors are joined at load.
EXPERT = re.compile(r"(.*\.ffn_(?:gate|up|down))\.(\d{1,9})\.weight")
Pair = tuple[NDArray[np.float32], NDArray[np.float32]]
# Devices tell weights apart by name, and several adapters may have pairs for one tensor.
_serial = itertools.count()


@dataclass
class LoraAdapter:
    """A loaded adapter: A float32 [(n,) rank, n_in] and B [(n,) n_out, rank] by tensor; n: experts or heads, or 1."""

    path: str
    pairs: dict[str, Pair]

    @cached_property
    def fingerprint(self) -> int:
        """CRC-32 of names and values: tells adapters apart wherever their files lie."""
        checksum = 0
        for name, parts in sorted(self.pairs.items()):
            for data in (name.encode(), *(part.tobytes() for part in parts)):
                checksum = zlib.crc32(data, checksum)
        return checksum

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Model) -> LoraAdapter:
        """Reads an adapter for a model.

        alpha / rank is multiplied into B, so the scale of use is the user's alone. Raises FileFormatError for a file
        that is not an adapter of this model's architecture and shapes.
        """
        with GGUFFile.open(Path(path)) as gguf:
            _check_type(gguf)
            _check_arch(gguf, model.hparams.arch)
            alpha = _alpha(gguf)
            pairs = {}
            for name in sorted({n[: -len(PARTS[0])] for n in gguf.tensors if n.endswith(PARTS)}):
                pairs[name] = _pair(gguf, model, name, alpha)
            _join_experts(pairs, model)
            extra = [n for n in gguf.tensors if not n.endswith(PARTS)]
            if extra or not pairs:
                what = f"tensor '{extra[0]}' is no part of a LoRA pair" if extra else "it holds no LoRA pairs"
                raise FileFormatError(f"{path}: {what}")
            return cls(str(path), pairs)


def check_adapter_file(path: str | os.PathLike[str], arch: str | None = None) -> None:
    """Raises FileFormatError unless the header is that of a LoRA adapter, for a model of this architecture if named."""
    with GGUFFile.open(Path(path), header_only=True) as gguf:
        _check_type(gguf)
        if arch is not None:
            _check_arch(gguf, arch)


def _check_type(gguf: GGUFFile) -> None:
    for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
        found = gguf.get(key)
        if found is None:
            raise FileFormatError(f"{gguf.path}: not a LoRA adapter: it has no key {key} ('{wanted}' in adapters)")
        if not isinstance(found, str) or found != wanted:
            raise FileFormatError(f"{gguf.path}: not a LoRA adapter: {key} is {found!r}, not '{wanted}'")


def _check_arch(gguf: GGUFFile, arch: str) -> None:
    found = gguf.require("general.architecture", GGUFValueType.STRING)
    if found != arch:
        raise FileFormatError(f"{gguf.path}: the adapter is for '{found}', the model is '{arch}'")


def _alpha(gguf: GGUFFile) -> float:
    """The strength the adapter was trained with, 0 if the file does not say."""
    if ALPHA not in gguf.metadata:
        return 0.0
    alpha = float(gguf.require(ALPHA, GGUFValueType.FLOAT32))
    if not math.isfinite(alpha):
        raise FileFormatError(f"{gguf.path}: {ALPHA} is {alpha}, not a finite number")
    return alpha


def _pair(gguf: GGUFFile, model: Model, name: str, alpha: float) -> Pair:
    a, b = (gguf.tensors.get(name + part) for part in PARTS)
    if a is None or b is None:
        raise FileFormatError(f"{gguf.path}: '{name}' has only one of lora_a and lora_b")
    shape = _weight_shape(model, name)
    if shape is None:
        raise FileFormatError(f"{gguf.path}: the model has no tensor '{name}'")
    rank = b.shape[0]
    pair = _decoded(gguf, a, 1.0), _decoded(gguf, b, alpha / rank if alpha else 1.0)
    fitted = _fitted(*pair, *shape)
    if fitted is None and name == EMBEDDING:
        # As trained for look-ups: A holds a row per token, and B leads from the rank to the embedding.
        fitted = _fitted(pair[1].swapaxes(1, 2), pair[0], *shape)
    if fitted is None:
        raise FileFormatError(f"{gguf.path}: '{name}': shapes {a.shape} and {b.shape} do not fit {shape}")
    return fitted


def _weight_shape(model: Model, name: str) -> tuple[int, int, int] | None:
    """n_in, n_out and number of matrices of a weight, None if the model has no such weight."""
    weight, expert = model.weights.get(name), EXPERT.fullmatch(name)
    if weight is not None:
        return weight.shape[:3]
    joined = model.weights.get(f"{expert[1]}_exps.weight") if expert else None
    if joined is None or expert is None or int(expert[2]) >= joined.shape[2]:
        return None
    return joined.shape[0], joined.shape[1], 1


def _fitted(a: NDArray[np.float32], b: NDArray[np.float32], n_in: int, n_out: int, n: int) -> Pair | None:
    """The pair [n or 1, rank, n_in] and [n or 1, n_out, rank], of two dimensions if n is 1; None if it does not fit."""
    rank = b.shape[2]
    if n > 1 and b.shape == (1, n * n_out, rank):  # a stack of heads stored as one matrix
        b = b.reshape(n, n_out, rank)
    if a.shape[0] not in (1, n) or b.shape[0] not in (1, n):
        return None
    if a.shape[1:] != (rank, n_in) or b.shape[1:] != (n_out, rank):
        return None
    return (a, b) if n > 1 else (a[0], b[0])


def _decoded(gguf: GGUFFile, info: TensorInfo, factor: float) -> NDArray[np.float32]:
    """The tensor as float32 in three dimensions, times a factor."""
    if math.prod(info.shape[3:]) > 1:
        raise FileFormatError(f"{gguf.path}: '{info.name}' has {len(info.shape)} dimensions; at most 3 are possible")
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.asarray(dequantize(gguf.data(info), info.type_id, info.shape), np.float32) * np.float32(factor)
    if not np.isfinite(values).all():
        raise FileFormatError(f"{gguf.path}: '{info.name}' has elements that are not finite numbers")
    return values.reshape((*info.shape, 1, 1)[:3][::-1])


def _join_experts(pairs: dict[str, Pair], model: Model) -> None:
    """Replaces pairs of single experts by one pair of the joined tensor; experts without one get zeros."""
    experts: dict[str, dict[int, Pair]] = {}
    for name in list(pairs):
        if match := EXPERT.fullmatch(name):
            experts.setdefault(f"{match[1]}_exps.weight", {})[int(match[2])] = pairs.pop(name)
    for name, found in experts.items():
        n_in, n_out, n = model.weights[name].shape[:3]
        rank = max(b.shape[1] for _, b in found.values())
        joined = np.zeros((n, rank, n_in), np.float32), np.zeros((n, n_out, rank), np.float32)
        for expert, (a, b) in found.items():
            joined[0][expert, : len(a)], joined[1][expert, :, : b.shape[1]] = a, b
        pairs[name] = joined


def low_rank_weights(model: Model, adapters: Sequence[LoraAdapter]) -> LowRankWeights:
    """Pairs of all adapters by the weight they act on; those of a tensor act on what was derived from it as well."""
    found = LowRankWeights()
    for index, adapter in enumerate(adapters):
        for name, (a, b) in adapter.pairs.items():
            weight = model.weights[name]
            rows = _value(a.T, 1, EMBEDDING_ROWS) if name == EMBEDDING else None
            n = weight.shape[2]
            found.add(weight, LowRank(_value(a, n, name), _value(b, n, name), index, name, rows), whole=True)
            for part, (derived, part_a, part_b) in model.arch.adapted_parts(name, a, b).items():
                if part not in adapter.pairs:
                    n = derived.shape[2]
                    pair = LowRank(_value(part_a, n, part), _value(part_b, n, part), index, name)
                    found.add(derived, pair, whole=False)
    return found


def _value(values: NDArray[np.float32], n: int, tensor: str) -> Value:
    """F32 weight of n matrices, where a tensor has its place; a single one serves for all."""
    values = np.ascontiguousarray(values)
    value = external(values.ctypes.data, values, F32, values.shape[::-1], role="weight")
    value.buffer.name = pair_name(tensor, next(_serial))
    if n > 1 and value.shape[2] == 1:
        value = value.view((*value.shape[:2], n), (value.strides[1], 0))
    return value
