"""One sequence of a context: cells of its own, and state files to go on later without evaluating it again.

Files are those of sessions with another magic: a prefix with a checksum, a header (what the state belongs to, tokens,
positions, shifts), then the cells of every cache tensor in the order of the tokens.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ikpy.engine.cells import KVCacheFullError
from ikpy.engine.saved_media import known_tokens
from ikpy.engine.session import (
    NOT_FINITE,
    PREFIX,
    VERSION,
    cache_tensors,
    is_finite,
    mismatch,
    parse_state,
    read_cells,
    scales_of,
    state_nbytes,
    write_state,
)
from ikpy.errors import FileFormatError
from ikpy.models.batch import FULL

if TYPE_CHECKING:
    from ikpy.engine.context import Context

MAGIC = b"ikpyslot"


def save_sequence(path: str | os.PathLike[str], context: Context, seq_id: int, tokens: list[int]) -> int:
    """Writes the sequence, replacing the file as a whole; returns the bytes written.

    Raises OSError.
    """
    return write_state(Path(path), MAGIC, VERSION, context, seq_id, tokens)


def load_sequence(path: str | os.PathLike[str], context: Context, seq_id: int, n_max: int) -> tuple[list[int], int]:
    """Replaces the sequence by a saved one of at most ``n_max`` tokens; returns its tokens and the bytes read.

    The sequence gets the adapter scales that the saved one was evaluated with. Raises OSError, FileFormatError for a
    damaged file or one of another model, cache type, control vector or adapter, KVCacheFullError; nothing changes then
    but for the last, which leaves the sequence empty.
    """
    data = Path(path).read_bytes()
    header, start = _header(data, context)
    if reason := mismatch(context, header):
        raise FileFormatError(f"the state was saved with {reason}")
    tokens = header["tokens"]
    if len(tokens) > n_max:
        raise FileFormatError(f"the state holds {len(tokens)} tokens, there is room for {n_max}")
    if len(data) != start + state_nbytes(context, header):
        raise FileFormatError("the state is damaged: its length is wrong")
    if not is_finite(context, header, data, start):
        raise FileFormatError(f"the state {NOT_FINITE}")
    known = known_tokens(context, header)
    context.kv.seq_rm(seq_id, -1, -1)
    read_cells(context, header, data, start, seq_id)
    context.adapter_scales[seq_id] = scales_of(context, header["adapters"])
    return known, len(data)


def unshare_sequence(context: Context, seq_id: int) -> int:
    """Gives a sequence cells of its own for those it shares, so that its positions can move; returns how many.

    Raises KVCacheFullError if there is no room for the copies; nothing changes then but that window layers may have
    dropped tokens which no query sees.
    """
    kv = context.kv
    mask = 1 << seq_id
    kv.make_room_to_unshare(seq_id)
    shared = {window: cells.shared(seq_id) for window, cells in kv.cells.items()}
    own = {window: kv.cells[window].find([mask] * len(indices)) for window, indices in shared.items()}
    if any(len(own[window]) < len(indices) for window, indices in shared.items()):
        raise KVCacheFullError(f"no room to give sequence {seq_id} cells of its own; use a larger -c")
    if not any(len(indices) for indices in shared.values()):
        return 0
    for window, indices in shared.items():
        cells = kv.cells[window]
        cells.fill(own[window], cells.pos[indices].tolist(), [mask] * len(indices))
        cells.shift(own[window], cells.delta[indices])
        cells.seq[indices] &= ~np.uint64(mask)
    context.sync_caches_to_host()
    tensors = cache_tensors(context)
    for (layer, name), window in kv.window_of.items():
        tensor = tensors[f"{name}.{layer}"]
        tensor[own[window]] = tensor[shared[window]]
    context.sync_caches_to_devices()
    return len(shared[FULL])


def _header(data: bytes, context: Context) -> tuple[dict[str, Any], int]:
    """Checked header and the position behind it."""
    if len(data) < PREFIX.size or not data.startswith(MAGIC):
        raise FileFormatError("the file holds no saved state")
    version = PREFIX.unpack_from(data)[1]
    if version != VERSION:
        raise FileFormatError(f"the state has version {version}, not {VERSION}")
    try:
        return parse_state(data, context)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise FileFormatError("the state is damaged: its contents do not agree with its checksum") from None
