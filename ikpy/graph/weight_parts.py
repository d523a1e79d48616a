"""Parts of weights as values of their own, read from where the whole tensor lies in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ikpy.graph.division import Part
from ikpy.graph.ir import Buffer, Gather, Value, contiguous_strides
from ikpy.quants import registry


def whole_name(name: str) -> str:
    """Name of the tensor that a weight with this name is, or is a part of."""
    return name.partition(" [")[0]


def is_contiguous(weight: Value) -> bool:
    """Whether the rows of all experts lie one behind the other."""
    row = registry.by_id(weight.type_id).row_nbytes(weight.shape[0])
    return weight.strides[1] == row and (weight.shape[2] == 1 or weight.strides[2] == row * weight.shape[1])


class WeightParts:
    """Parts of weights, each made once, whatever number of graphs use them; None is a part of None."""

    def __init__(self) -> None:
        self._made: dict[tuple[Buffer, int, str, Part], Value] = {}

    def rows(self, value: Value | None, part: Part) -> Value | None:
        """As `rows_part`."""
        return self._part(value, part, rows_part)

    def columns(self, value: Value | None, part: Part) -> Value | None:
        """As `columns_part`."""
        return self._part(value, part, columns_part)

    def bias(self, value: Value | None, part: Part) -> Value | None:
        """As `bias_part`."""
        return self._part(value, part, bias_part)

    def _part(self, value: Value | None, part: Part, make: Callable[[Value, Part], Value]) -> Value | None:
        if value is None:
            return None
        key = value.buffer, value.offset, make.__name__, part
        if key not in self._made:
            self._made[key] = make(value, part)
        return self._made[key]


def rows_part(weight: Value, part: Part) -> Value:
    """Rows of a matrix [K, N], or of every expert of [K, N, E], whole groups of interleaved rows."""
    row = registry.by_id(weight.type_id).row_nbytes(weight.shape[0])
    shape = (weight.shape[0], part.length, weight.shape[2])
    gather = Gather(weight.shape[2], weight.shape[1] * row, ((part.start * row, part.length * row),))
    return _part(weight, part, shape, gather)


def columns_part(weight: Value, part: Part) -> Value:
    """Columns of a matrix [K, N] or [K, N, E], whole blocks, each row with its header."""
    kind = registry.by_id(weight.type_id)
    group = kind.interleave  # rows whose headers, and then whose blocks, lie side by side
    header, block = group * kind.row_extra_bytes, group * kind.block_bytes
    start, n = (block * (columns // kind.block_elements) for columns in (part.start, part.length))
    ranges = (((0, header),) if header else ()) + ((header + start, n),)
    n_groups = weight.shape[1] * weight.shape[2] // group
    gather = Gather(n_groups, group * kind.row_nbytes(weight.shape[0]), ranges)
    return _part(weight, part, (part.length, weight.shape[1], weight.shape[2]), gather)


def bias_part(bias: Value, part: Part) -> Value:
    """Elements of a vector f32 [N], or of that of every expert [N, E]."""
    item = bias.strides[0]
    gather = Gather(bias.shape[1], bias.strides[1], ((part.start * item, part.length * item),))
    return _part(bias, part, (part.length, bias.shape[1]), gather)


def _part(whole: Value, part: Part, shape: Sequence[int], gather: Gather) -> Value:
    assert whole.buffer.address is not None
    # Views of a tensor that joins several matrices differ in their offset.
    at = f" from byte {whole.offset}" if whole.offset else ""
    buffer = Buffer(
        gather.nbytes,
        whole.buffer.address + whole.offset,
        whole.buffer.owner,
        "weight",
        f"{whole.buffer.name} [{part.start}:{part.start + part.length}]{at}",
        gather,
    )
    full = (*shape, *[1] * (4 - len(shape)))
    strides = contiguous_strides(whole.type_id, shape)
    return Value(buffer, whole.type_id, (full[0], full[1], full[2], full[3]), strides, name=buffer.name)
