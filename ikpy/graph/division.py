"""Which matrices all devices share (-sm graph), and what part of them each gets.

The hidden columns of a network are divided: rows of `up` and `gate`, columns of `down`. Every device then makes its
part of the hidden values and, from these alone, a part of the sum that the layer adds. The output matrix is divided by
rows: every device makes the logits of some tokens. Attention is divided by K/V heads, with the heads that read them:
rows of the projections, columns of the output matrix. Latent attention (MLA) has one K/V head for all: it is divided by
heads of queries, and every device has the whole cache of the layer.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from ikpy.quants.registry import TensorType

NETWORKS = ("", "_shexp", "_exps")
"""Endings of the names of dense networks, shared experts and routed ones."""
TIED_OUTPUT = "token_embd.weight"
OUTPUTS = ("output.weight", TIED_OUTPUT)
"""Names of the output matrix: the first one that a file has."""
ATTENTION_OUTPUT = "attn_output"
PROJECTIONS = ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_gate")
ATTENTION_TENSORS = (*PROJECTIONS, ATTENTION_OUTPUT, "attn_sinks")
LATENT = "attn_kv_a_mqa"
"""What layers with latent attention have, and no others."""
PER_HEAD = ("attn_kv_b", "attn_k_b", "attn_v_b")
"""What latent attention makes keys and values of heads with."""
LATENT_PROJECTIONS = ("attn_q", "attn_q_b", "attn_gate", *PER_HEAD)
_DIVIDED = dict.fromkeys((*PROJECTIONS, *LATENT_PROJECTIONS, ATTENTION_OUTPUT))
_ATTENTION = re.compile(rf"blk\.(\d{{1,9}})\.({'|'.join(_DIVIDED)})\.weight")
RULE = "a rule takes a tensor of it"
# Groups that activations are quantized in.
GROUP = 32


class Matrix(NamedTuple):
    """Extents of a matrix, or of each of the experts that a tensor holds."""

    columns: int
    rows: int
    kind: TensorType
    has_factor: bool = False


class Part(NamedTuple):
    """Rows or columns start .. start + length of a matrix on a device."""

    device: str
    start: int
    length: int


@dataclass(frozen=True)
class Division:
    """A tensor of which every device holds a part. extent: rows, columns or heads of all parts."""

    axis: Literal["rows", "columns"]
    extent: int
    parts: tuple[Part, ...]

    def nbytes(self, total: int) -> dict[str, int]:
        """Bytes on each device of a tensor of so many, apart from headers of rows, which every part of columns has."""
        bounds = [total * part.start // self.extent for part in self.parts] + [total]
        return {part.device: end - start for part, (start, end) in zip(self.parts, pairwise(bounds), strict=True)}

    def cuts(self, n: int, unit: int = 1) -> bool:
        """Whether n rows are cut where the parts begin and end, in whole units."""
        return not any(n * m % (self.extent * unit) for part in self.parts for m in (part.start, part.length))

    def of(self, n: int, part: Part) -> Part:
        """The part of n rows that are cut as the extent is."""
        return Part(part.device, n * part.start // self.extent, n * part.length // self.extent)


def attention_tensor(name: str) -> tuple[int, str]:
    """Layer and short name of a matrix of attention; (-1, "") for other tensors."""
    match = _ATTENTION.fullmatch(name)
    return (int(match[1]), match[2]) if match else (-1, "")


@dataclass(frozen=True)
class Placed:
    """What a division goes by.

    matrices: by tensor name; tensors: device of every tensor; overridden: those that a rule took; layers, output: their
    devices; shares: of the devices, not negative. heads: K/V heads of the layers whose attention can be divided by
    them, heads of latent attention, 0 for others; kv_offload: whether caches are on the devices of their layers.
    """

    matrices: Mapping[str, Matrix]
    tensors: Mapping[str, str]
    overridden: Collection[str]
    layers: Sequence[str]
    output: str
    shares: Mapping[str, float]
    heads: Sequence[int] = ()
    kv_offload: bool = True

    @property
    def n_sharing(self) -> int:
        """Devices that have a share."""
        return sum(share > 0 for share in self.shares.values())

    def holds(self, *names: str) -> bool:
        """Whether the model has all these matrices, none of them where a rule says."""
        return all(name in self.matrices and name not in self.overridden for name in names)


def divide(placed: Placed) -> tuple[dict[str, Division], list[str]]:
    """Divisions by tensor name, and what is said of them."""
    if placed.n_sharing < 2:
        return {}, ["-sm graph divides nothing: one device has all shares"]
    networks, output = divide_networks(placed), divide_output(placed)
    attention, reasons = divide_attention(placed)
    notes = [_networks_note(placed, networks)]
    n_divided, n_whole = sum(attention_tensor(name)[1] == ATTENTION_OUTPUT for name in attention), len(reasons)
    if n_divided + n_whole:
        notes.append(_shared_note(placed, "attention of {} of {} layers", n_divided, n_divided + n_whole))
        notes += whole_notes(reasons)
    if output:
        notes.append(f"{placed.n_sharing} devices share the output matrix")
    return networks | attention | output, notes


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
    cannot_be_cut = any(m.kind.tensor_extra_bytes or m.has_factor for m in (up, gate, down))
    if not up.rows == gate.rows == down.columns or cannot_be_cut:
        return ()
    unit = math.lcm(GROUP, up.kind.interleave, gate.kind.interleave, down.kind.block_elements)
    return () if up.rows % unit else _cut(up.rows, unit, shares)


def _networks_note(placed: Placed, divisions: Mapping[str, Division]) -> str:
    """How many of the feed-forward networks on devices all devices share."""
    endings = tuple(f".ffn_down{ending}.weight" for ending in NETWORKS)
    offloaded = [name for name in placed.matrices if name.endswith(endings) and placed.tensors[name] in placed.shares]
    n_divided = sum(name in divisions for name in offloaded)
    return _shared_note(placed, "{} of {} feed-forward networks", n_divided, len(offloaded))


def _shared_note(placed: Placed, what: str, n: int, total: int) -> str:
    whole = f"; {total - n} stay whole" if n < total else ""
    return f"{placed.n_sharing} devices share {what.format(n, total)}{whole}"


def divide_attention(placed: Placed) -> tuple[dict[str, Division], dict[int, str]]:
    """Attention of layers that are on a device, and of the layers where it stays whole the reason."""
    found: dict[str, Division] = {}
    reasons: dict[int, str] = {}
    owed = dict.fromkeys(placed.shares, 0.0)
    for il, device in enumerate(placed.layers):
        latent = f"blk.{il}.{LATENT}.weight" in placed.matrices
        projections, what = (LATENT_PROJECTIONS, "head") if latent else (PROJECTIONS, "K/V head")
        tensors = {t: f"blk.{il}.{t}.weight" for t in (*projections, ATTENTION_OUTPUT)}
        matrices = {t: placed.matrices[name] for t, name in tensors.items() if name in placed.matrices}
        if device not in placed.shares or ATTENTION_OUTPUT not in matrices:
            continue
        n_heads = placed.heads[il] if il < len(placed.heads) else 0
        unit = _fewest_latent_heads(matrices, n_heads) if latent else _fewest_heads(matrices, n_heads)
        parts = _cut(n_heads, unit, placed.shares, owed) if unit and n_heads % unit == 0 else ()
        if not placed.kv_offload:
            reasons[il] = "its cache is in host memory"
        elif any(name.startswith(tuple(f"blk.{il}.{t}" for t in ATTENTION_TENSORS)) for name in placed.overridden):
            reasons[il] = RULE
        elif any(matrix.has_factor for matrix in matrices.values()):
            reasons[il] = "its matrices have factors"
        elif not n_heads:
            reasons[il] = "it is of a kind that is not divided"
        elif n_heads == 1:
            reasons[il] = f"it has one {what}"
        elif not unit or n_heads % unit or n_heads == unit:
            reasons[il] = f"its {what}s cannot be parted where blocks of columns and groups of rows end"
        elif len(parts) == 1:
            reasons[il] = f"one device has all of its {what}s"
        else:
            heads = Division("rows", n_heads, parts)
            given = {part.device: part.length for part in parts}
            owed = {d: owed[d] + exact - given.get(d, 0) for d, exact in _exactly(n_heads, placed.shares).items()}
            for t, matrix in matrices.items():
                axis: Literal["rows", "columns"] = "columns" if t == ATTENTION_OUTPUT else "rows"
                # Of latent attention in heads, whatever each of them has of a tensor.
                n = n_heads if latent else matrix.columns if t == ATTENTION_OUTPUT else matrix.rows
                found[tensors[t]] = Division(axis, n, tuple(heads.of(n, part) for part in parts))
    return found, reasons


def _fewest_heads(matrices: Mapping[str, Matrix], n_heads: int) -> int:
    """Consecutive K/V heads that a part must have so many of, or a multiple; 0 if there is no such number."""
    out = matrices[ATTENTION_OUTPUT]
    rows = {t: matrix.rows for t, matrix in matrices.items() if t != ATTENTION_OUTPUT}
    if not n_heads or any(n % n_heads for n in (*rows.values(), out.columns)):
        return 0
    if any(matrix.kind.tensor_extra_bytes for matrix in matrices.values()):
        return 0
    # Rows or columns per K/V head, and how many of them may not be parted.
    cuts = [(out.columns, math.lcm(GROUP, out.kind.block_elements))]
    cuts += [(n, matrices[t].kind.interleave) for t, n in rows.items()]
    if "attn_qkv" in rows:
        # What is not q is k and v, alike.
        cuts += [((rows["attn_qkv"] - out.columns) // 2, matrices["attn_qkv"].kind.interleave)]
        cuts += [(out.columns, matrices["attn_qkv"].kind.interleave)]
    return math.lcm(*(unit // math.gcd(unit, n // n_heads) for n, unit in cuts))


def _fewest_latent_heads(matrices: Mapping[str, Matrix], n_heads: int) -> int:
    """As `_fewest_heads`, of latent attention; attn_k_b and attn_v_b are a matrix per head."""
    out = matrices[ATTENTION_OUTPUT]
    cuts = [(out.columns, math.lcm(GROUP, out.kind.block_elements))]
    by_rows = (t for t in matrices if t not in ("attn_k_b", "attn_v_b", ATTENTION_OUTPUT))
    cuts += [(matrices[t].rows, matrices[t].kind.interleave) for t in by_rows]
    if not n_heads or any(n % n_heads for n, _ in cuts) or any(m.kind.tensor_extra_bytes for m in matrices.values()):
        return 0
    return math.lcm(*(unit // math.gcd(unit, n // n_heads) for n, unit in cuts))


def whole_notes(reasons: Mapping[int, str]) -> list[str]:
    """How many layers have their attention on one device for every reason."""
    counts = Counter(reasons.values())
    return [f"attention of {n} layer{'s' if n > 1 else ''} stays whole: {reason}" for reason, n in counts.items()]


def output_name(matrices: Collection[str]) -> str:
    """Name of the output matrix among those that a model multiplies with; "" without one."""
    return next((name for name in OUTPUTS if name in matrices), "")


def divide_output(placed: Placed) -> dict[str, Division]:
    """The output matrix, if it is on a device; whole if a rule took it."""
    name = output_name(placed.matrices)
    if placed.output not in placed.shares or not placed.holds(name):
        return {}
    matrix = placed.matrices[name]
    if matrix.kind.tensor_extra_bytes or matrix.has_factor:
        return {}
    parts = _cut(matrix.rows, math.lcm(GROUP, matrix.kind.interleave), placed.shares)
    return {name: Division("rows", matrix.rows, parts)} if len(parts) > 1 else {}


def _cut(n: int, unit: int, shares: Mapping[str, float], owed: Mapping[str, float] | None = None) -> tuple[Part, ...]:
    """Consecutive parts of n rows or columns in proportion to the shares, of whole units but for the last one.

    owed: rows or columns that earlier cuts gave each device too few of.
    """
    n_units = -(-n // unit)
    wanted = _exactly(n_units, shares)
    counts = {device: int(exact) for device, exact in wanted.items()}
    lacking = {d: wanted[d] - counts[d] + (owed[d] / unit if owed else 0.0) for d in shares if shares[d] > 0}
    # What is left of the units goes to those who lack most.
    for device in sorted(lacking, key=lacking.__getitem__, reverse=True)[: n_units - sum(counts.values())]:
        counts[device] += 1
    bounds = [0, *(min(n, unit * end) for end in accumulate(counts.values()))]
    pieces = zip(shares, pairwise(bounds), strict=True)
    return tuple(Part(device, start, end - start) for device, (start, end) in pieces if end > start)


def _exactly(n: int, shares: Mapping[str, float]) -> dict[str, float]:
    """What each device should have of n."""
    total = sum(shares.values())
    return {device: n * share / total for device, share in shares.items()}
