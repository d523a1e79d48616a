"""Session files: the tokens and the cached state of one sequence, to go on later without evaluating them again.

Little endian: magic, u32 version, u32 CRC-32 of all that follows the prefix, u32 header length, header (JSON: signature
of model and cache, tokens, cells), then the cells of every cache tensor in the order of their positions, then the
states of recurrent layers.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ikpy._native import core
from ikpy.engine.cells import WindowCells, lowest_visible, whole_from
from ikpy.engine.recurrent import Checkpoint
from ikpy.engine.saved_media import PROJECTOR, check_tokens, known_tokens, media_header, other_projector
from ikpy.errors import FileFormatError, UsageError
from ikpy.gguf.atomic import replacing
from ikpy.graph.ir import F32, Value
from ikpy.models.batch import EVERY, FULL, Window

if TYPE_CHECKING:
    from ikpy.engine.context import Context

MAGIC = b"ikpysess"
VERSION = 5
PREFIX = struct.Struct("<8s3I")
MAX_INT32 = (1 << 31) - 1
CHECKED_VALUES = 1 << 20
NOT_FINITE = "holds values that are not numbers (NaN or infinity)"
MAX_SCALE = float(np.finfo(np.float32).max)


def cache_tensors(context: Context) -> dict[str, NDArray[np.uint8]]:
    """Bytes of every cache tensor as [number of cells, bytes per cell]; a cell's values are contiguous."""
    found: dict[str, NDArray[np.uint8]] = {}
    for (layer, name), value in context.kv.tensors.items():
        address = value.buffer.address
        assert address is not None
        nbytes = value.shape[2] * value.strides[2]
        memory = (ctypes.c_uint8 * nbytes).from_address(address + value.offset)
        found[f"{name}.{layer}"] = np.ctypeslib.as_array(memory).reshape(value.shape[2], -1)
    return found


def cache_signature(context: Context) -> dict[str, Any]:
    """What must agree between the writing and the reading context."""
    hp = context.model.hparams
    tensors = {
        f"{name}.{layer}": [value.type_id, value.shape[0], value.shape[1], *context.kv.window_of[layer, name]]
        for (layer, name), value in context.kv.tensors.items()
    }
    shapes = context.kv.recurrent.shapes if context.kv.recurrent else {}
    tensors |= {f"{name}.{layer}": [F32, *shape] for (layer, name), shape in shapes.items()}
    model = context.model
    weights = [model.n_params, model.size_bytes, model.fingerprint]
    params = context.graph_params
    rotation = model.arch.rotation_name(params)
    return {
        "model": [hp.n_vocab, hp.n_layer, hp.n_embd, *weights],
        "tensors": tensors,
        "keys": [*astuple(params.rope), params.k_hadamard, params.v_hadamard, *([rotation] if rotation else [])],
        "steering": context.steering_checksum,
    }


def used_adapters(context: Context, seq_id: int) -> list[list[float]]:
    """Fingerprint and scale of the adapters that act on a sequence; those of scale 0 do not."""
    pairs = zip(context.params.adapters, context.adapter_scales[seq_id].tolist(), strict=True)
    return [[adapter.fingerprint, scale] for adapter, scale in pairs if scale]


def scales_of(context: Context, used: list[list[float]]) -> NDArray[np.float32] | None:
    """Scales of all adapters of the context as `used_adapters` lists them; None if it lacks one of them."""
    scales = np.zeros(len(context.params.adapters), np.float32)
    left = list(used)
    for i, adapter in enumerate(context.params.adapters):
        found = next((item for item in left if item[0] == adapter.fingerprint), None)
        if found is not None:
            left.remove(found)
            scales[i] = found[1]
    return None if left else scales


MISMATCHES = (
    ("model", "another model"),
    ("tensors", "another cache type or -mla mode"),
    ("keys", "other RoPE parameters, -khad or -vhad"),
    ("steering", "other control vectors"),
)
ADAPTERS = "other LoRA adapters or scales"


def mismatch(context: Context, header: dict[str, Any]) -> str | None:
    """In what a saved state was made with something else than the context, if it was."""
    wanted = json.loads(json.dumps(cache_signature(context)))
    reason = next((reason for key, reason in MISMATCHES if header.get(key) != wanted[key]), None)
    if reason is None and other_projector(context, header):
        return PROJECTOR
    return ADAPTERS if reason is None and scales_of(context, header["adapters"]) is None else reason


def sequence_cells(context: Context, seq_id: int) -> dict[Window, NDArray[np.intp]]:
    """Cells of a sequence in the order of their positions; of a window's cells those that its next token may attend to,
    behind a context shift as well.
    """
    kv = context.kv
    found = {}
    for window, cells in kv.cells.items():
        first = cells.lowest_kept(kv.seq_pos_max(seq_id) + 1) if isinstance(cells, WindowCells) else -1
        indices = np.flatnonzero(cells.matching(seq_id, first, -1))
        found[window] = indices[np.argsort(cells.pos[indices], kind="stable")]
    return found


def sequence_nbytes(context: Context, seq_id: int) -> int:
    """Bytes of a sequence's cells in all cache tensors and of its states, without copying them."""
    counts = {window: len(indices) for window, indices in sequence_cells(context, seq_id).items()}
    recurrent = context.kv.recurrent
    return _cells_nbytes(context, counts) + (recurrent.nbytes_of(seq_id) if recurrent else 0)


def _cells_nbytes(context: Context, counts: dict[Window, int]) -> int:
    """Bytes of so many cells of every kind."""
    tensors = cache_tensors(context)
    return sum(
        counts[window] * tensors[f"{name}.{layer}"].shape[1] for (layer, name), window in context.kv.window_of.items()
    )


@dataclass(frozen=True)
class SequenceState:
    """Tokens of a sequence; positions and pending shifts (int32 [n]) for every kind of cells; the cells' bytes.

    ``cells``: per cache tensor uint8 [n, bytes per cell], in the order of the context's tensors. ``states``: of
    recurrent layers, checkpoints and the state at the end of the tokens.
    """

    tokens: list[int]
    pos: dict[Window, NDArray[np.int32]]
    shifts: dict[Window, NDArray[np.int32]]
    cells: tuple[NDArray[np.uint8], ...]
    states: tuple[Checkpoint, ...] = ()

    def reusable(self, length: int) -> int:
        """Tokens, at most `length`, behind which a sequence can go on: with recurrent layers those before a state, none
        if a window's tokens that the next one sees were not saved."""
        if self.states:
            length = max((saved.end for saved in self.states if saved.end <= length), default=0)
        for (kind, size), pos in self.pos.items():
            first = whole_from(pos, self.pos[FULL], len(self.tokens))
            if kind not in (FULL[0], EVERY) and first > lowest_visible(kind, size, length):
                return 0
        return length

    @property
    def nbytes(self) -> int:
        """Bytes of memory, the token list (8 bytes each) included."""
        positions = sum(data.nbytes for data in (*self.pos.values(), *self.shifts.values()))
        cells = sum(data.nbytes for data in self.cells)
        states = sum(saved.nbytes for saved in self.states)
        return cells + states + positions + 8 * len(self.tokens)


def take_state(context: Context, seq_id: int, tokens: list[int]) -> SequenceState:
    """A copy of the state of a sequence that holds these tokens. ResourceError if that of recurrent layers is lost."""
    kv = context.kv
    states = kv.recurrent.take(seq_id) if kv.recurrent else ()
    context.sync_caches_to_host()
    chosen = sequence_cells(context, seq_id)
    tensors = cache_tensors(context)
    cells = tuple(tensors[f"{name}.{layer}"][chosen[window]] for (layer, name), window in kv.window_of.items())
    pos = {window: kv.cells[window].pos[indices] for window, indices in chosen.items()}
    shifts = {window: kv.cells[window].delta[indices] for window, indices in chosen.items()}
    return SequenceState(list(tokens), pos, shifts, cells, states)


def put_state(context: Context, seq_id: int, state: SequenceState) -> None:
    """Replaces a sequence by a state of the same context.

    Raises KVCacheFullError, which leaves the sequence empty.
    """
    kv = context.kv
    kv.seq_rm(seq_id, -1, -1)
    taken = kv.restore(seq_id, state.pos)
    for window, indices in taken.items():
        kv.cells[window].shift(indices, state.shifts[window])
    context.sync_caches_to_host()
    tensors = cache_tensors(context)
    for ((layer, name), window), data in zip(kv.window_of.items(), state.cells, strict=True):
        tensors[f"{name}.{layer}"][taken[window]] = data
    context.sync_caches_to_devices()
    if kv.recurrent:
        kv.recurrent.put(seq_id, state.states)


def write_state(path: Path, magic: bytes, version: int, context: Context, seq_id: int, tokens: list[int]) -> int:
    """Writes a sequence, replacing the file as a whole; returns the bytes written.

    Raises OSError.
    """
    state = take_state(context, seq_id, tokens)
    cells = [[*window, pos.tolist(), state.shifts[window].tolist()] for window, pos in state.pos.items()]
    used = used_adapters(context, seq_id)
    parts = {**cache_signature(context), "adapters": used, **media_header(context, tokens), "cells": cells}
    header = json.dumps(parts).encode()
    checksum = zlib.crc32(header)
    body: list[NDArray[Any]] = list(state.cells)
    for saved in state.states[-1:]:
        body += saved.data
    for data in body:
        checksum = zlib.crc32(data.data, checksum)
    with replacing(path) as file:
        file.write(PREFIX.pack(magic, version, checksum, len(header)))
        file.write(header)
        for data in body:
            file.write(data.data)
        size = file.tell()
    return size


def state_nbytes(context: Context, header: dict[str, Any]) -> int:
    """Bytes of data that a header announces for this context; -1 if its kinds of cells are others."""
    counts = {(kind, size): len(pos) for kind, size, pos, _ in header["cells"]}
    if set(counts) != set(context.kv.cells):
        return -1
    return _cells_nbytes(context, counts) + 4 * sum(_state_sizes(context, counts[FULL]))


def _state_sizes(context: Context, n_tokens: int) -> list[int]:
    """Values of every state tensor of a sequence in a file: none without tokens."""
    recurrent = context.kv.recurrent
    return recurrent.sizes if recurrent and n_tokens else []


def saved_states(context: Context, header: dict[str, Any], data: bytes) -> tuple[Checkpoint, ...]:
    """States of recurrent layers, which lie at the end of a file; nothing is copied."""
    positions = next(pos for kind, size, pos, _ in header["cells"] if (kind, size) == FULL)
    sizes = _state_sizes(context, len(positions))
    if not sizes:
        return ()
    values = np.frombuffer(data, np.float32, sum(sizes), len(data) - 4 * sum(sizes))
    return (Checkpoint(max(positions) + 1, tuple(np.split(values, np.cumsum(sizes)[:-1]))),)


def saved_tensors(
    context: Context, header: dict[str, Any], data: bytes, start: int
) -> Iterator[tuple[Value, NDArray[np.uint8]]]:
    """Every cache tensor with its cells in the file, uint8 [n, bytes per cell]; nothing is copied."""
    counts = {(kind, size): len(pos) for kind, size, pos, _ in header["cells"]}
    tensors = cache_tensors(context)
    for (layer, name), window in context.kv.window_of.items():
        n, width = counts[window], tensors[f"{name}.{layer}"].shape[1]
        cells = np.frombuffer(data, np.uint8, n * width, start).reshape(n, width)
        yield context.kv.tensors[layer, name], cells
        start += n * width


def is_finite(context: Context, header: dict[str, Any], data: bytes, start: int) -> bool:
    """Whether all values of the saved cells and states are numbers.

    Others make logits NaN, which looks like the model's fault. A GB of f16 cells takes 0.3 s, one of q4_0 cells 1.1 s.
    """
    for value, cells in saved_tensors(context, header, data, start):
        n, n_heads = value.shape[0], value.shape[1]
        step = max(1, CHECKED_VALUES // (n * n_heads))
        for first in range(0, len(cells), step):
            piece = cells[first : first + step]
            if not np.isfinite(core.dequantize(piece, value.type_id, n, len(piece) * n_heads)).all():
                return False
    return all(np.isfinite(values).all() for saved in saved_states(context, header, data) for values in saved.data)


def read_cells(context: Context, header: dict[str, Any], data: bytes, start: int, seq_id: int) -> None:
    """Puts a checked state into empty cells. Raises KVCacheFullError."""
    saved = {(kind, size): (pos, shifts) for kind, size, pos, shifts in header["cells"]}
    cells = tuple(cells for _, cells in saved_tensors(context, header, data, start))
    pos = {window: np.array(positions, np.int32) for window, (positions, _) in saved.items()}
    shifts = {window: np.array(values, np.int32) for window, (_, values) in saved.items()}
    states = saved_states(context, header, data)
    put_state(context, seq_id, SequenceState(header["tokens"], pos, shifts, cells, states))


def save_session(path: str | os.PathLike[str], context: Context, tokens: list[int]) -> None:
    """Writes ``tokens`` and the cache that holds them (of sequence 0)."""
    try:
        write_state(Path(path), MAGIC, VERSION, context, 0, tokens)
    except OSError as error:
        raise UsageError(f"cannot write session file '{path}': {error.strerror}") from None


def load_session(path: str | os.PathLike[str], context: Context) -> list[int]:
    """Restores the cache and returns its tokens; nothing changes if an error is raised.

    Raises FileFormatError for a file of another program, model or cache type, or one too long for the context.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read session file '{path}': {error.strerror}") from None
    header, start = _read_header(path, data, context)
    reason = mismatch(context, header)
    if reason is None and header["adapters"] != used_adapters(context, 0):
        reason = ADAPTERS
    if reason:
        raise FileFormatError(f"session file '{path}' was made with {reason}; delete it to start afresh")
    tokens = header["tokens"]
    if len(tokens) > context.n_ctx:
        raise FileFormatError(
            f"session file '{path}' holds {len(tokens)} tokens, the context only {context.n_ctx}: raise -c"
        )
    expected = start + state_nbytes(context, header)
    if len(data) != expected:
        raise FileFormatError(f"session file '{path}' is damaged: {len(data)} bytes, {expected} expected")
    if not is_finite(context, header, data, start):
        raise FileFormatError(f"session file '{path}' {NOT_FINITE}; delete it to start afresh")
    known = known_tokens(context, header)
    context.kv.clear()
    read_cells(context, header, data, start, 0)
    return known


def parse_state(data: bytes, context: Context) -> tuple[dict[str, Any], int]:
    """Header of a file and the position behind it.

    Raises ValueError, KeyError, TypeError or RecursionError for a damaged one.
    """
    _, _, checksum, length = PREFIX.unpack_from(data)
    if zlib.crc32(memoryview(data)[PREFIX.size :]) != checksum:
        raise ValueError
    header = json.loads(data[PREFIX.size : PREFIX.size + length])
    tokens = _integers(header["tokens"])
    check_tokens(context, header)
    for _, scale in header["adapters"]:
        if not abs(scale) <= MAX_SCALE:
            raise ValueError
    for kind, size, pos, shifts in header["cells"]:
        if not isinstance(kind, str) or type(size) is not int or len(_integers(pos)) != len(_integers(shifts)):
            raise ValueError
        if any(shifts) and not context.kv.can_shift:
            raise ValueError
    _check_positions(context, len(tokens), {(kind, size): pos for kind, size, pos, _ in header["cells"]})
    return header, PREFIX.size + length


def _check_positions(context: Context, n_tokens: int, positions: dict[Window, list[int]]) -> None:
    """ValueError unless the cells are those of so many tokens: all of them, or any of a prediction head's entries, of
    which there is one less; of a window's cells some of those that the next token may attend to."""
    full = positions[FULL]
    n_cells = max(0, n_tokens - 1) if context.model.arch.reads_states else n_tokens
    is_whole = full == list(range(n_cells)) or context.model.arch.reads_states
    if not (is_whole and _rises_within(full, 0, n_cells)):
        raise ValueError
    following = full[-1] + 1 if full else 0
    for window, pos in positions.items():
        cells = context.kv.cells.get(window)
        if window[0] == EVERY and (window[1] < 1 or pos != [p for p in full if (p + 1) % window[1] == 0]):
            raise ValueError
        first = cells.lowest_kept(following) if isinstance(cells, WindowCells) else 0
        if not (_rises_within(pos, first, following) and set(pos) <= set(full)):
            raise ValueError


def _rises_within(values: list[int], first: int, end: int) -> bool:
    """Whether every value is above the one before, from first to end - 1."""
    return all(a < b for a, b in pairwise([first - 1, *values, end]))


def _integers(values: Any) -> list[int]:
    """The list, if it is one of integers of 32 bits."""
    if not isinstance(values, list) or not all(type(v) is int and abs(v) <= MAX_INT32 for v in values):
        raise TypeError
    return values


def _read_header(path: str | os.PathLike[str], data: bytes, context: Context) -> tuple[dict[str, Any], int]:
    """Header and the position behind it."""
    if len(data) < PREFIX.size or not data.startswith(MAGIC):
        raise FileFormatError(f"'{path}' is not a session file; choose another name for --prompt-cache")
    version = PREFIX.unpack_from(data)[1]
    if version != VERSION:
        raise FileFormatError(f"session file '{path}' has version {version}, not {VERSION}; delete it")
    try:
        return parse_state(data, context)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise FileFormatError(f"session file '{path}' is damaged; delete it") from None
