"""Matrices that checkpoints do not store as one number after the other."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ikpy.convert.checkpoint import StoredTensor
from ikpy.errors import FileFormatError

WEIGHT = ".weight"
BLOCK_TYPES = ("q4_0", "q4_1", "nvfp4")
"""Types of GGUF that hold the codes of some."""


def wrong_part(stored: StoredTensor, name: str, what: str = "is missing") -> FileFormatError:
    """The error about a tensor that the codes of a matrix need."""
    return FileFormatError(f"{stored.path}: tensor '{name}' {what}; '{stored.name}' needs it")


class StoredMatrix(Protocol):
    """A matrix X.weight [rows, columns] of codes and scales."""

    @property
    def rows(self) -> int: ...

    @property
    def columns(self) -> int: ...

    @property
    def stored(self) -> StoredTensor:
        """The tensor of the codes."""

    @property
    def block_type(self) -> str:
        """The one of BLOCK_TYPES that its blocks have."""

    @property
    def no_blocks(self) -> str:
        """Why no blocks hold the matrix without loss, "" if they do, or as well as is asked for. Reads scales."""

    @property
    def is_rounded(self) -> bool:
        """Whether its blocks have values that differ a little."""

    def blocks(self) -> np.ndarray:
        """Blocks u8 [rows, bytes]."""

    def factor(self) -> float:
        """What the numbers of the blocks are to be multiplied by."""

    def values(self) -> np.ndarray:
        """Float32 [rows, columns]."""

    def release(self) -> None:
        """Give the pages of all its tensors back."""


class CodedMatrix:
    """What holds of matrices that do not say otherwise: no factor, and no blocks."""

    @property
    def block_type(self) -> str:
        return "q4_0"

    @property
    def is_rounded(self) -> bool:
        return False

    def factor(self) -> float:
        return 1.0

    def blocks(self) -> np.ndarray:
        raise NotImplementedError
