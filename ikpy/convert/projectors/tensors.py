"""Tensors of a projector file, each with what it is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ikpy.convert.families.base import Change, View


@dataclass(frozen=True)
class Wanted:
    """A tensor of the file and the tensor of the checkpoint that it is made of.

    shape: in the checkpoint, slowest dimension first. floats: f32, or f16 in a file of f16, since an engine convolves
    or transposes it. exact: always f32; half: always f16. stack: of so many tensors, whose numbers stand for {e} in
    the source. values: f32, of which the checkpoint has no tensor.
    """

    target: str
    source: str
    shape: tuple[int, ...]
    view: View | None = None
    change: Change | None = None
    floats: bool = False
    exact: bool = False
    half: bool = False
    stack: int = 0
    values: np.ndarray | None = None

    @property
    def sources(self) -> list[str]:
        """All tensors of the checkpoint that it is made of."""
        if self.values is not None:
            return []
        return [self.source.replace("{e}", str(e)) for e in range(self.stack)] if self.stack else [self.source]


def linear(target: str, source: str, n_out: int, n_in: int, *, bias: bool = True, **more: Any) -> Iterator[Wanted]:
    """A matrix [n_out, n_in] and its bias."""
    yield Wanted(f"{target}.weight", f"{source}.weight", (n_out, n_in), **more)
    if bias:
        yield Wanted(f"{target}.bias", f"{source}.bias", (n_out,))


def norm(target: str, source: str, n: int, *, bias: bool = True) -> Iterator[Wanted]:
    """Weight of a norm, and its bias if it is a LayerNorm."""
    for part in ("weight", "bias")[: 1 + bias]:
        yield Wanted(f"{target}.{part}", f"{source}.{part}", (n,))


def table(target: str, source: str, *shape: int, view: View | None = None) -> Wanted:
    """Vectors that are added as they are: positions, and what stands for a whole picture or a break of lines."""
    return Wanted(target, source, shape, view, exact=True)


def constant(target: str, values: np.ndarray) -> Wanted:
    """Numbers that are the same in all models of a kind."""
    return Wanted(target, "", values.shape, exact=True, values=values)


def patches(source: str, n: int, size: int, *, bias: bool = True) -> Iterator[Wanted]:
    """The embedding of patches, a convolution [n, 3, size, size]."""
    yield Wanted("v.patch_embd.weight", f"{source}.weight", (n, 3, size, size), floats=True)
    if bias:
        yield Wanted("v.patch_embd.bias", f"{source}.bias", (n,))


def flat_patches(source: str, n: int, size: int, *, bias: bool) -> Iterator[Wanted]:
    """The embedding of patches as a matrix [n, size * size * 3], whose columns take the colours of a pixel together."""

    def convolution(rows: np.ndarray) -> np.ndarray:
        return rows.reshape(n, size, size, 3).transpose(0, 3, 1, 2)

    yield Wanted("v.patch_embd.weight", f"{source}.weight", (n, 3 * size * size), convolution, floats=True)
    if bias:
        yield Wanted("v.patch_embd.bias", f"{source}.bias", (n,))


def paired_patches(source: str, n: int, size: int, *, bias: bool) -> Iterator[Wanted]:
    """The embedding of patches of two frames [n, 3, 2, size, size], a convolution of each."""
    for frame, suffix in enumerate(("", ".1")):
        yield Wanted(
            f"v.patch_embd.weight{suffix}", f"{source}.weight", (n, 3, 2, size, size), at(2, frame), floats=True
        )
    if bias:
        yield Wanted("v.patch_embd.bias", f"{source}.bias", (n,))


def at(axis: int, index: int) -> View:
    """One place of an axis."""
    return lambda values: np.moveaxis(values, axis, 0)[index]


def third(index: int) -> View:
    """Rows of q, k or v that are stored one after the other."""

    def view(rows: np.ndarray) -> np.ndarray:
        n = rows.shape[0] // 3
        return rows[index * n : (index + 1) * n]

    return view


def lines(values: np.ndarray) -> np.ndarray:
    """All but the last dimension as one."""
    return values.reshape(-1, values.shape[-1])
