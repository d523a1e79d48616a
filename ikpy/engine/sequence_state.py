"""State files of one sequence of a context: its tokens and cached values, to go on later without evaluating them again.

Little endian: magic, u32 version, u32 header length, header (JSON: signature of model and cache, tokens, positions,
shifts), then the cells of every cache tensor in the order of the tokens.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ikpy.engine.session import cache_signature, cache_tensors
from ikpy.errors import FileFormatError

if TYPE_CHECKING:
    from ikpy.engine.context import Context

MAGIC = b"ikpyslot"
VERSION = 1
PREFIX = struct.Struct("<8s2I")


def save_sequence(path: str | os.PathLike[str], context: Context, seq_id: int, tokens: list[int]) -> int:
    """Writes the sequence, replacing the file as a whole; returns the bytes written. Raises OSError."""
    kv = context.kv
    cells = np.flatnonzero((kv.seq & np.uint64(1 << seq_id)) != 0)
    cells = cells[np.argsort(kv.pos[cells], kind="stable")]
    values = {"tokens": tokens, "pos": kv.pos[cells].tolist(), "shifts": kv.delta[cells].tolist()}
    header = json.dumps({**cache_signature(context), **values}).encode()
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(PREFIX.pack(MAGIC, VERSION, len(header)))
            file.write(header)
            for data in cache_tensors(context).values():
                file.write(data[cells].tobytes())
            size = file.tell()
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return size


def load_sequence(path: str | os.PathLike[str], context: Context, seq_id: int, n_max: int) -> tuple[list[int], int]:
    """Replaces the sequence by a saved one of at most ``n_max`` tokens; returns its tokens and the bytes read.

    Raises OSError, FileFormatError for a damaged file or one of another model or cache type, KVCacheFullError; nothing
    changes then but for the last, which leaves the sequence empty.
    """
    data = Path(path).read_bytes()
    header, start = _header(data)
    wanted = json.loads(json.dumps(cache_signature(context)))
    if any(header.get(key) != value for key, value in wanted.items()):
        raise FileFormatError("the state was saved with another model, cache type or -mla mode")
    tokens, pos = header["tokens"], header["pos"]
    if len(tokens) > n_max:
        raise FileFormatError(f"the state holds {len(tokens)} tokens, there is room for {n_max}")
    tensors = cache_tensors(context)
    if len(data) != start + sum(len(pos) * tensor.shape[1] for tensor in tensors.values()):
        raise FileFormatError("the state is damaged: its length is wrong")
    context.kv.seq_rm(seq_id, -1, -1)
    if not pos:
        return [], len(data)
    masks = np.full(len(pos), 1 << seq_id, np.uint64)
    cells = context.kv.place(np.array(pos, np.int32), masks)
    context.kv.delta[cells] = header["shifts"]
    for tensor in tensors.values():
        size = len(pos) * tensor.shape[1]
        tensor[cells] = np.frombuffer(data, np.uint8, size, start).reshape(len(pos), -1)
        start += size
    return list(tokens), len(data)


def _header(data: bytes) -> tuple[dict[str, Any], int]:
    """Checked header and the position behind it."""
    if len(data) < PREFIX.size or not data.startswith(MAGIC):
        raise FileFormatError("the file holds no saved state")
    _, version, length = PREFIX.unpack_from(data)
    if version != VERSION:
        raise FileFormatError(f"the state has version {version}, not {VERSION}")
    try:
        header = json.loads(data[PREFIX.size : PREFIX.size + length])
        if not len(header["tokens"]) == len(header["pos"]) == len(header["shifts"]):
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise FileFormatError("the state is damaged: its header cannot be read") from None
    return header, PREFIX.size + length
