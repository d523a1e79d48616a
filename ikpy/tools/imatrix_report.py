"""Reports on an importance matrix: statistics per tensor and layer, coverage of the experts, layer similarity."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import escaped
from ikpy.graph.activations import SimilaritySums
from ikpy.tools.imatrix_data import Entry, ImatrixData

# A column counts as active above this mean square.
ACTIVE = 1e-5
_BLOCK = re.compile(r"blk\.(\d{1,9})\.(.+?)(\.weight)?$")


@dataclass(frozen=True)
class TensorStatistics:
    """Figures of one entry over its n mean squares m.

    total: sum of m; active: share of m above ACTIVE; entropy: of m / total in bits; z_share: share of m more than one
    standard deviation above the mean; similarity: cosine with the same tensor of the layer before (None: no such).
    """

    name: str
    layer: int | None
    kind: str
    n: int
    total: float
    low: float
    high: float
    mean: float
    deviation: float
    active: float
    entropy: float
    z_share: float
    similarity: float | None

    @property
    def relative_entropy(self) -> float:
        """Entropy as a share of its maximum log2(n)."""
        return self.entropy / float(np.log2(self.n)) if self.n > 1 else 0.0


def split_name(name: str) -> tuple[int | None, str]:
    """Layer (None outside the blocks) and kind, such as (3, "ffn_down")."""
    match = _BLOCK.match(name)
    return (int(match[1]), match[2]) if match else (None, name.removesuffix(".weight"))


def _means(entry: Entry) -> NDArray[np.float64]:
    """Mean squares of matrices with data, flat."""
    return entry.means()[entry.rows > 0].reshape(-1)


def tensor_statistics(data: ImatrixData) -> list[TensorStatistics]:
    """Figures of every entry, largest sum first."""
    result = []
    for name, entry in data.entries():
        m = _means(entry)
        if not len(m):
            continue
        layer, kind = split_name(name)
        total = float(m.sum())
        p = m[m > 0] / total if total > 0 else m[:0]
        deviation = float(m.std())
        result.append(
            TensorStatistics(
                name=name,
                layer=layer,
                kind=escaped(kind),
                n=len(m),
                total=total,
                low=float(m.min()),
                high=float(m.max()),
                mean=float(m.mean()),
                deviation=deviation,
                active=float((m > ACTIVE).mean()),
                entropy=float(-(p * np.log2(p)).sum()),
                z_share=float((m > m.mean() + deviation).mean()) if deviation > 0 else 0.0,
                similarity=_similarity(data, layer, name, entry),
            )
        )
    return sorted(result, key=lambda row: -row.total)


def _similarity(data: ImatrixData, layer: int | None, name: str, entry: Entry) -> float | None:
    """Cosine of the mean squares of an entry and of the same one in the layer before; None where there is none."""
    if not layer:
        return None
    previous = name.replace(f"blk.{layer}.", f"blk.{layer - 1}.", 1)
    if previous not in data.names:
        return None
    a, b = np.nan_to_num(entry.means().reshape(-1)), np.nan_to_num(data.entry(previous).means().reshape(-1))
    norm = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norm if len(a) == len(b) and norm > 0 else None


def statistics_lines(data: ImatrixData, source: str) -> list[str]:
    """Tables per tensor and per layer, then the coverage of the experts."""
    rows = tensor_statistics(data)
    widest = max([len(row.kind) for row in rows], default=6)
    head = f"{'Layer':>5} {'Tensor':>{widest}} {'Sum(act^2)':>12} {'Min':>10} {'Max':>12} {'Mean':>10} {'StdDev':>10}"
    lines = [
        f"Statistics of {source} ({len(rows)} tensors)",
        "",
        f"{head} {'%Active':>8} {'N':>8} {'Entropy':>8} {'E(norm)':>8} {'ZD':>7} {'CosSim':>7}",
    ]
    for row in rows:
        layer = "-" if row.layer is None else str(row.layer)
        similarity = "-" if row.similarity is None else f"{row.similarity:.4f}"
        lines.append(
            f"{layer:>5} {row.kind:>{widest}} {row.total:12.2f} {row.low:10.4f} {row.high:12.4f} {row.mean:10.4f} "
            f"{row.deviation:10.4f} {100 * row.active:7.2f}% {row.n:8d} {row.entropy:8.4f} "
            f"{100 * row.relative_entropy:7.2f}% {100 * row.z_share:6.2f}% {similarity:>7}"
        )
    return [*lines, "", *_layer_lines(rows), *coverage_lines(data, each=True)]


def _layer_lines(rows: list[TensorStatistics]) -> list[str]:
    """Means over the tensors of a layer, weighted by their number of columns."""
    lines = [f"{'Layer':>5} {'Sum(act^2)':>12} {'ZD':>7} {'CosSim':>7}"]
    for layer in sorted({row.layer for row in rows if row.layer is not None}):
        members = [row for row in rows if row.layer == layer]
        weights = [row.n for row in members]
        total = np.average([row.total for row in members], weights=weights)
        z_share = np.average([row.z_share for row in members], weights=weights)
        similar = [row for row in members if row.similarity is not None]
        similarity = "-"
        if similar:
            mean = np.average([row.similarity or 0.0 for row in similar], weights=[row.n for row in similar])
            similarity = f"{mean:.4f}"
        lines.append(f"{layer:5d} {total:12.2f} {100 * z_share:6.2f}% {similarity:>7}")
    return lines


def _expert_rows(data: ImatrixData) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """Rows per expert of one expert tensor of every layer (all of a layer see the same tokens)."""
    seen = set()
    for name in data.names:
        layer, kind = split_name(name)
        if "_exps" in kind and layer not in seen:
            rows = data.entry(name).rows
            if len(rows) > 1:
                seen.add(layer)
                yield name, rows


def coverage_lines(data: ImatrixData, *, each: bool) -> list[str]:
    """How many rows every expert saw: a summary, with `each` a line per layer; empty without expert data.

    Legacy files do not hold this; only what a run collects or a GGUF file stores is reported.
    """
    layers = list(_expert_rows(data))
    if not layers:
        return []
    all_rows = np.concatenate([rows for _, rows in layers])
    covered = int((all_rows > 0).sum())
    name, rows = min(layers, key=lambda item: item[1].min())
    lines = [
        f"expert coverage: {covered} of {len(all_rows)} experts in {len(layers)} layers have data; rows per expert: "
        f"mean {all_rows.mean():.1f}, fewest {rows.min():.0f} (blk.{split_name(name)[0]}, expert {rows.argmin()})"
    ]
    for name, rows in layers:
        empty = np.flatnonzero(rows == 0)
        if not each and not len(empty):
            continue
        text = f"blk.{split_name(name)[0]}: {len(rows) - len(empty)} of {len(rows)} experts have data"
        text += f", rows {rows.min():.0f} to {rows.max():.0f}, median {np.median(rows):.0f}"
        if len(empty):
            text += "; none for " + ", ".join(str(e) for e in empty[:16]) + (", ..." if len(empty) > 16 else "")
        lines.append(f"expert coverage: {text}")
    return lines


def similarity_lines(similarities: Mapping[tuple[str, int], SimilaritySums]) -> list[str]:
    """Tables of layer, attention and feed-forward importances, lowest similarity first (imatrix.md#statistics)."""
    lines: list[str] = []
    for kind in ("layer", "attention", "ffn"):
        values = [
            (block, sums.mean) for (k, block), sums in similarities.items() if k == kind and sums.mean == sums.mean
        ]
        if not values:
            continue
        lines += ["", f"======================== sorted {kind} importances"]
        for rank, (block, mean) in enumerate(sorted(values, key=lambda item: abs(item[1]))):
            lines.append(f"{rank:3d}: Layer {block:3d}, <cos_sim> = {mean:g}")
    return lines
