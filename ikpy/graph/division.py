"""Which matrices all devices share (-sm graph), and what part of them each gets.

The hidden columns of a network are divided: rows of `up` and `gate`, columns of `down`. Every device then makes its
part of the hidden values and, from these alone, a part of the sum that the layer adds. The output matrix is divided by
rows: every device makes the logits of some tokens.
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
OUTPUTS = ("output.weight", "token_embd.weight")
"""Names of the output matrix: the first one that a file has."""
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


@dataclass(frozen=True)
class Placed:
    """What a division goes by.

    matrices: by tensor name; tensors: device of every tensor; overridden: those that a rule took; layers, output: their
    devices; shares: of the devices, not negative.
    """

    matrices: Mapping[str, Matrix]
    tensors: Mapping[str, str]
    overridden: Collection[str]
    layers: Sequence[str]
    output: str
    shares: Mapping[str, float]

    def holds(self, *names: str) -> bool:
        """Whether the model has all these matrices, none of them where a rule says."""
        return all(name in self.matrices and name not in self.overridden for name in names)


def divide(placed: Placed) -> tuple[dict[str, Division], list[str]]:
    """Divisions by tensor name, and what is said of them."""
    networks, output = divide_networks(placed), divide_output(placed)
    notes = [_networks_note(placed, networks)]
    if output:
        notes.append(f"{len(placed.shares)} devices share the output matrix")
    return networks | output, notes


def divide_networks(placed: Placed) -> dict[str, Division]:
    """The networks of layers that are on a device.

    Those that a rule took a matrix of stay whole, and those whose hidden columns cannot be cut where blocks and groups
    of rows end.
    """
    found: dict[str, Division] = {}
    for il, device in enumerate(placed.layers):
        for ending in NETWORKS if device in placed.shares else ():
            up, gate, down = (f"blk.{il}.ffn_{part}{ending}.weight" for part in ("up", "gate", "down"))
            if placed.holds(up, gate, down):
                matrices = placed.matrices
                parts = _network_parts(matrices[up], matrices[gate], matrices[down], placed.shares)
                if len(parts) > 1:
                    n = matrices[up].rows
                    found |= dict.fromkeys((up, gate), Division("rows", n, parts))
                    found[down] = Division("columns", n, parts)
    return found


def _network_parts(up: Matrix, gate: Matrix, down: Matrix, shares: Mapping[str, float]) -> tuple[Part, ...]:
    """Parts of the hidden columns; none if they cannot be cut."""
    if not up.rows == gate.rows == down.columns or any(m.kind.tensor_extra_bytes for m in (up, gate, down)):
        return ()
    unit = math.lcm(GROUP, up.kind.interleave, gate.kind.interleave, down.kind.block_elements)
    return () if up.rows % unit else _cut(up.rows, unit, shares)


def _networks_note(placed: Placed, divisions: Mapping[str, Division]) -> str:
    """How many of the feed-forward networks on devices all devices share."""
    endings = tuple(f".ffn_down{ending}.weight" for ending in NETWORKS)
    offloaded = [name for name in placed.matrices if name.endswith(endings) and placed.tensors[name] in placed.shares]
    return shared_note(placed, "feed-forward networks", sum(name in divisions for name in offloaded), len(offloaded))


def shared_note(placed: Placed, what: str, n: int, total: int) -> str:
    """That the devices share n of so many."""
    whole = f"; {total - n} stay whole" if n < total else ""
    return f"{len(placed.shares)} devices share {n} of {total} {what}{whole}"


def divide_output(placed: Placed) -> dict[str, Division]:
    """The output matrix, if it is on a device; whole if a rule took it."""
    name = next((name for name in OUTPUTS if name in placed.matrices), "")
    if placed.output not in placed.shares or not placed.holds(name):
        return {}
    matrix = placed.matrices[name]
    if matrix.kind.tensor_extra_bytes:
        return {}
    parts = _cut(matrix.rows, math.lcm(GROUP, matrix.kind.interleave), placed.shares)
    return {name: Division("rows", matrix.rows, parts)} if len(parts) > 1 else {}


def _cut(n: int, unit: int, shares: Mapping[str, float]) -> tuple[Part, ...]:
    """Consecutive parts of n rows or columns in proportion to the shares, of whole units but for the last one."""
    total = sum(shares.values())
    ends = [min(n, round(n / unit * end / total) * unit) for end in accumulate(shares.values())]
    last = max(i for i, share in enumerate(shares.values()) if share > 0)
    bounds = [0, *ends[:last], *[n] * (len(ends) - last)]
    pieces = zip(shares, pairwise(bounds), strict=True)
    return tuple(Part(device, start, end - start) for device, (start, end) in pieces if end > start)
