"""Which matrices may be rearranged into row-interleaved types when a file is loaded (-rtr)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ikpy._native import core
from ikpy.gguf.reader import TensorInfo
from ikpy.quants import registry

# Looked up row by row: never repacked.
EMBEDDINGS = ("token_embd.", "per_layer_token_embd.", "token_types.", "position_embd.")


def interleaved_type(info: TensorInfo, parts: Sequence[int] = ()) -> registry.TensorType | None:
    """The row-interleaved type that a matrix, or parts of so many rows of it, can be rearranged into without loss."""
    name = registry.repack_target(registry.by_id(info.type_id).name)
    # F16 would lose precision as BF16_R16, and needs no rearrangement: its rows are read as they are.
    if not name or name == "bf16_r16" or len(info.shape) < 2 or info.name.startswith(EMBEDDINGS):
        return None
    target = registry.by_name(name)
    fits = all(rows % target.interleave == 0 for rows in (info.shape[1], *parts))
    return target if fits and core.has_decoder(target.id) else None


def interleaved_sizes(infos: Iterable[TensorInfo]) -> list[int]:
    """Bytes of each tensor that may be rearranged, once it is."""
    targets = [(info, interleaved_type(info)) for info in infos]
    return [target.tensor_nbytes(info.shape) for info, target in targets if target]
