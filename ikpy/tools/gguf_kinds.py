"""What `ikpy gguf dump --by-kind` shows: the tensors of a model by their role, for rules of `-ot` and `--custom-q`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ikpy.gguf.reader import TensorInfo
from ikpy.tools.gguf_dump import type_name

BLOCK = re.compile(r"blk\.(\d{1,9})\.(.+)")
EXPERTS = re.compile(r"_exps\b")
MIB = 2**20


@dataclass
class Kind:
    """Tensors of the same role, type and shape.

    Attributes:
        name: behind `blk.N.`, or the whole name of a tensor that is in no block.
        shape: row length first.
        nbytes: of one tensor; None if the type is unknown.
        blocks: those that have one, in file order; empty for a tensor that is in none.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    nbytes: int | None
    blocks: list[int] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Bytes of all."""
        return (self.nbytes or 0) * max(1, len(self.blocks))

    def described(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"kind": self.name, "type": self.type, "shape": list(self.shape), "nbytes": self.nbytes} | {
            "blocks": self.blocks,
            "total": self.total,
        }


def kinds(tensors: Iterable[TensorInfo]) -> list[Kind]:
    """All kinds in the order in which they are met."""
    found: dict[tuple[str, str, tuple[int, ...]], Kind] = {}
    for info in tensors:
        match = BLOCK.fullmatch(info.name)
        key = (match[2] if match else info.name, type_name(info.type_id), tuple(info.shape))
        kind = found.setdefault(key, Kind(*key, info.stored_nbytes))
        if match:
            kind.blocks.append(int(match[1]))
    return list(found.values())


def kind_lines(tensors: Iterable[TensorInfo]) -> Iterator[str]:
    """The table, then what the experts take."""
    found = kinds(tensors)
    rows = [("blocks", "kind", "type", "shape", "MiB each", "MiB all")]
    for kind in found:
        each = "?" if kind.nbytes is None else f"{kind.nbytes / MIB:.2f}"
        shape = " x ".join(map(str, kind.shape))
        rows.append((ranges(kind.blocks), kind.name, kind.type, shape, each, f"{kind.total / MIB:.2f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        left = [cell.ljust(width) for cell, width in zip(row[:4], widths[:4], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(row[4:], widths[4:], strict=True)]
        yield "  " + "  ".join(left + right)
    yield from expert_lines(found)


def expert_lines(found: list[Kind]) -> Iterator[str]:
    """Experts of all blocks, of one block, and one expert; everything else."""
    experts = [kind for kind in found if EXPERTS.search(kind.name) and kind.blocks]
    blocks = {block for kind in experts for block in kind.blocks}
    if not blocks:
        return
    total = sum(kind.total for kind in experts)
    n_expert = max(kind.shape[-1] for kind in experts)
    mean = total / len(blocks)
    rest = sum(kind.total for kind in found) - total
    yield f"experts: {total / MIB:.2f} MiB in {len(blocks)} blocks ({ranges(sorted(blocks))})"
    yield f"experts of a block: {mean / MIB:.2f} MiB on average, {n_expert} of {mean / n_expert / MIB:.2f} MiB"
    yield f"everything else: {rest / MIB:.2f} MiB"


def ranges(blocks: list[int]) -> str:
    """`0-2,5` for 0, 1, 2 and 5; `-` for none."""
    parts: list[list[int]] = []
    for block in blocks:
        if parts and block == parts[-1][1] + 1:
            parts[-1][1] = block
        else:
            parts.append([block, block])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in parts) or "-"
