"""Session files: the tokens and the cached state of one sequence, to go on later without evaluating them again.

Little endian: magic, u32 version, u32 header length, header (JSON: tokens, cells, tensors), then the bytes of every
cache tensor up to the last used cell.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import FileFormatError, UsageError

if TYPE_CHECKING:
    from ikpy.engine.context import Context

MAGIC = b"ikpysess"
VERSION = 1
PREFIX = struct.Struct("<8s2I")


def cache_tensors(context: Context) -> dict[str, NDArray[np.uint8]]:
    """Bytes of every cache tensor as [n_ctx, bytes per cell]; a cell's values are contiguous."""
    found = {}
    for (layer, name), value in context.kv.tensors.items():
        address = value.buffer.address
        assert address is not None
        memory = (ctypes.c_uint8 * value.buffer.nbytes).from_address(address)
        found[f"{name}.{layer}"] = np.ctypeslib.as_array(memory).reshape(context.n_ctx, -1)
    return found


def cache_signature(context: Context) -> dict[str, Any]:
    """What must agree between the writing and the reading context."""
    hp = context.model.hparams
    tensors = {
        f"{name}.{layer}": [value.type_id, value.shape[0], value.shape[1]]
        for (layer, name), value in context.kv.tensors.items()
    }
    weights = [context.model.n_params, context.model.size_bytes]
    return {"model": [hp.n_vocab, hp.n_layer, hp.n_embd, *weights], "tensors": tensors}


def save_session(path: str | os.PathLike[str], context: Context, tokens: list[int]) -> None:
    """Writes ``tokens`` and the cache that holds them (all cells must belong to sequence 0)."""
    used = np.flatnonzero(context.kv.pos >= 0)
    n_cells = int(used[-1]) + 1 if len(used) else 0
    cells, shifts = context.kv.pos[:n_cells].tolist(), context.kv.delta[:n_cells].tolist()
    header = json.dumps({**cache_signature(context), "tokens": tokens, "cells": cells, "shifts": shifts}).encode()
    temporary = Path(path).with_name(f".{Path(path).name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(PREFIX.pack(MAGIC, VERSION, len(header)))
            file.write(header)
            for data in cache_tensors(context).values():
                file.write(data[:n_cells].tobytes())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"cannot write session file '{path}': {error.strerror}") from None


def load_session(path: str | os.PathLike[str], context: Context) -> list[int]:
    """Restores the cache and returns its tokens; nothing changes if an error is raised.

    Raises FileFormatError for a file of another program, model or cache type, or one too long for the context.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read session file '{path}': {error.strerror}") from None
    header, start = _read_header(path, data)
    wanted = json.loads(json.dumps(cache_signature(context)))
    for key, reason in (("model", "another model"), ("tensors", "another cache type or -mla mode")):
        if header.get(key) != wanted[key]:
            raise FileFormatError(f"session file '{path}' was made with {reason}; delete it to start afresh")
    tokens, cells = header["tokens"], header["cells"]
    if len(cells) > context.n_ctx:
        raise FileFormatError(
            f"session file '{path}' holds {len(cells)} tokens, the context only {context.n_ctx}: raise -c"
        )
    tensors = cache_tensors(context)
    expected = start + sum(len(cells) * array.shape[1] for array in tensors.values())
    if len(data) != expected:
        raise FileFormatError(f"session file '{path}' is damaged: {len(data)} bytes, {expected} expected")
    context.kv.clear()
    context.kv.place(np.array(cells, np.int32), np.ones(len(cells), np.uint64))
    context.kv.seq[: len(cells)][np.array(cells) < 0] = 0
    context.kv.delta[: len(cells)] = header["shifts"]
    for array in tensors.values():
        size = len(cells) * array.shape[1]
        array[: len(cells)] = np.frombuffer(data, np.uint8, size, start).reshape(len(cells), -1)
        start += size
    return list(tokens)


def _read_header(path: str | os.PathLike[str], data: bytes) -> tuple[dict[str, Any], int]:
    """Header and the position behind it."""
    if len(data) < PREFIX.size or not data.startswith(MAGIC):
        raise FileFormatError(f"'{path}' is not a session file; choose another name for --prompt-cache")
    _, version, length = PREFIX.unpack_from(data)
    if version != VERSION:
        raise FileFormatError(f"session file '{path}' has version {version}, not {VERSION}; delete it")
    try:
        header = json.loads(data[PREFIX.size : PREFIX.size + length])
        if not len(header["cells"]) == len(header["shifts"]) >= len(header["tokens"]):
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise FileFormatError(f"session file '{path}' is damaged; delete it") from None
    return header, PREFIX.size + length
