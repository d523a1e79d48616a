"""Sizes and settings of encoders, from the clip.* keys of a projector file."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import FileFormatError, UnsupportedError
from ikpy.models.keys import MAX_LAYERS, Keys

RESIZE_METHODS = ("bilinear", "bicubic", "lanczos")
MAX_SIZE = 1 << 16
MAX_IMAGE_SIZE = 1 << 13


@dataclass(frozen=True)
class EncoderParams:
    """What every encoder is told.

    projection_dim: as in the file; families know what it means. activation: of the feed-forward networks.
    """

    n_embd: int
    n_ff: int
    n_head: int
    n_layer: int
    projection_dim: int
    eps: float
    activation: str

    @property
    def head_size(self) -> int:
        """Elements of a head."""
        return self.n_embd // max(1, self.n_head)

    @staticmethod
    def read_common(keys: Keys, part: str) -> dict[str, Any]:
        """The values of an encoder under clip.`part`. Raises FileFormatError for missing keys and senseless ones."""
        found = {
            "n_embd": size(keys, "embedding_length", part=part),
            "n_ff": size(keys, "feed_forward_length", default=0, least=0, part=part),
            "n_head": size(keys, "attention.head_count", least=0, part=part),
            "n_layer": size(keys, "block_count", least=0, most=MAX_LAYERS, part=part),
            "projection_dim": size(keys, "projection_dim", default=0, least=0, part=part),
            "eps": keys.f32(f"{part}.attention.layer_norm_epsilon"),
        }
        n_embd, n_head = found["n_embd"], found["n_head"]
        if found["n_layer"] and (not n_head or n_embd % n_head):
            raise FileFormatError(
                f"{keys.gguf.path}: clip.{part}.embedding_length {n_embd} is no multiple of "
                f"attention.head_count {n_head}"
            )
        if found["eps"] < 0:
            raise FileFormatError(
                f"{keys.gguf.path}: clip.{part}.attention.layer_norm_epsilon {found['eps']} is below 0"
            )
        return found


@dataclass(frozen=True)
class VisionParams(EncoderParams):
    """What every encoder of pictures is told.

    image_size: height and width of a whole picture, or of one tile. mean, std: of the colours, float32 [3].
    """

    image_size: int
    patch_size: int
    mean: NDArray[np.float32]
    std: NDArray[np.float32]

    @property
    def grid_size(self) -> int:
        """Patches of a side of a picture of image_size."""
        return self.image_size // self.patch_size

    @property
    def with_exact_gelu(self) -> VisionParams:
        """The same with GELU itself where files say "gelu", which else means its approximation by tanh."""
        return replace(self, activation="gelu_erf" if self.activation == "gelu" else self.activation)

    @classmethod
    def read(cls, keys: Keys) -> VisionParams:
        """Raises FileFormatError for keys that are missing or make no sense."""
        params = cls(
            **cls.read_common(keys, "vision"),
            image_size=size(keys, "image_size", most=MAX_IMAGE_SIZE),
            patch_size=size(keys, "patch_size", most=MAX_IMAGE_SIZE),
            mean=_colours(keys, "image_mean"),
            std=_colours(keys, "image_std"),
            activation=_activation(keys),
        )
        if not params.std.all():
            raise FileFormatError(f"{keys.gguf.path}: clip.vision.image_std is 0")
        return params


def size(
    keys: Keys,
    name: str,
    *,
    default: int | None = None,
    least: int = 1,
    most: int = MAX_SIZE,
    part: str = "vision",
) -> int:
    """Integer clip.`part`.`name` between least and most; without a default it must be there."""
    value = keys.u32(f"{part}.{name}") if default is None else keys.u32(f"{part}.{name}", default)
    if not least <= value <= most:
        raise FileFormatError(f"{keys.gguf.path}: clip.{part}.{name} is {value}, not {least} to {most}")
    return int(value)


def integers(keys: Keys, name: str, *, part: str = "vision") -> list[int]:
    """The integers of an array clip.`part`.`name`, none if it is absent."""
    key = f"clip.{part}.{name}"
    values = np.asarray(keys.gguf.metadata.get(key, np.empty(0, np.int32)))
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise FileFormatError(f"{keys.gguf.path}: key {key} must hold integers")
    return [int(n) for n in values]


def resize_method(keys: Keys, default: str) -> str:
    """clip.vision.image_resize_algo, a method of `resize.stretched`."""
    method = str(keys.string("vision.image_resize_algo", default))
    if method not in RESIZE_METHODS:
        raise UnsupportedError(
            f"{keys.gguf.path}: clip.vision.image_resize_algo '{method}' is not known; {', '.join(RESIZE_METHODS)} are"
        )
    return method


def _colours(keys: Keys, name: str) -> NDArray[np.float32]:
    key = f"clip.vision.{name}"
    values = np.asarray(keys.gguf.metadata.get(key, ()))
    if values.shape != (3,) or values.dtype.kind != "f" or not all(map(math.isfinite, values)):
        raise FileFormatError(f"{keys.gguf.path}: key {key} must hold 3 floats")
    return values.astype(np.float32)


def _activation(keys: Keys) -> str:
    gelu, silu = keys.boolean("use_gelu", False), keys.boolean("use_silu", False)
    if gelu and silu:
        raise FileFormatError(f"{keys.gguf.path}: both clip.use_gelu and clip.use_silu are set")
    return "gelu" if gelu else "silu" if silu else "gelu_quick"
