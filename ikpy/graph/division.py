"""Which feed-forward matrices all devices share (-sm graph), and what part of them each gets.

The hidden columns of a network are divided: rows of `up` and `gate`, columns of `down`. Every device then makes its
part of the hidden values and, from these alone, a part of the sum that the layer adds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from ikpy.quants.registry import TensorType

NETWORKS = ("", "_shexp", "_exps")
"""Endings of the names of dense networks, shared experts and routed ones."""
# Groups that activations are quantized in.
GROUP = 32


class Matrix(NamedTuple):
    """Extents of a matrix, or of each of the experts that a tensor holds."""

    columns: int
    rows: int
    kind: TensorType


class Part(NamedTuple):
    """Rows or columns start .. start + length of a matrix on a device."""

    device: str
    start: int
    length: int


@dataclass(frozen=True)
class Division:
    """A tensor of which every device holds a part. extent: rows or columns of all parts."""

    axis: Literal["rows", "columns"]
    extent: int
    parts: tuple[Part, ...]

    def nbytes(self, total: int) -> dict[str, int]:
        """Bytes on each device of a tensor of so many, apart from headers of rows, which every part of columns has."""
        bounds = [total * part.start // self.extent for part in self.parts] + [total]
        return {part.device: end - start for part, (start, end) in zip(self.parts, pairwise(bounds), strict=True)}


def divide_networks(
    matrices: Mapping[str, Matrix], layers: Sequence[str], overridden: Collection[str], shares: Mapping[str, float]
) -> dict[str, Division]:
    """Divisions by tensor name of the networks of layers that are on a device (shares: of devices, not negative).

    Networks that a rule took a matrix of stay whole, and those whose hidden columns cannot be cut where blocks and
    groups of rows end.
    """
    found: dict[str, Division] = {}
    for il, device in enumerate(layers):
        for ending in NETWORKS if device in shares else ():
            up, gate, down = (f"blk.{il}.ffn_{part}{ending}.weight" for part in ("up", "gate", "down"))
            if all(name in matrices and name not in overridden for name in (up, gate, down)):
                parts = _parts(matrices[up], matrices[gate], matrices[down], shares)
                if len(parts) > 1:
                    n = matrices[up].rows
                    found |= dict.fromkeys((up, gate), Division("rows", n, parts))
                    found[down] = Division("columns", n, parts)
    return found


def _parts(up: Matrix, gate: Matrix, down: Matrix, shares: Mapping[str, float]) -> tuple[Part, ...]:
    """Consecutive parts of the hidden columns in proportion to the shares; none if they cannot be cut."""
    if not up.rows == gate.rows == down.columns or any(m.kind.tensor_extra_bytes for m in (up, gate, down)):
        return ()
    unit = math.lcm(GROUP, up.kind.interleave, gate.kind.interleave, down.kind.block_elements)
    if up.rows % unit:
        return ()
    total = sum(shares.values())
    bounds = [0, *(round(up.rows // unit * end / total) * unit for end in accumulate(shares.values()))]
    pieces = zip(shares, pairwise(bounds), strict=True)
    return tuple(Part(device, start, end - start) for device, (start, end) in pieces if end > start)
