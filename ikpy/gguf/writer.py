"""Streaming, atomic GGUF writer; one file or several shards.

Order of use: metadata and tensors are declared first, then the data are written in the declared order, in
chunks of any size. Files get their names when all is complete, so an interrupted write leaves the old file.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from ikpy.errors import ResourceError, UsageError
from ikpy.gguf import encode
from ikpy.gguf.atomic import AtomicFile, sync_folder
from ikpy.gguf.disk_space import room_for
from ikpy.gguf.reader import GGUFFile
from ikpy.gguf.splits import output_prefix, split_path
from ikpy.gguf.types import (
    DEFAULT_ALIGNMENT,
    KEY_ALIGNMENT,
    KEY_SPLIT_COUNT,
    KEY_SPLIT_NO,
    KEY_SPLIT_TENSORS,
    MAGIC,
    MAX_ALIGNMENT,
    MAX_DIMS,
    SPLIT_KEYS,
    WRITE_VERSION,
    GGUFValueType,
    align_up,
)
from ikpy.quants import registry

_MAX_SHARDS = 65535


@dataclass(frozen=True)
class DeclaredTensor:
    """A tensor to be written: shape in ggml order (ne0 first), size in bytes without padding."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    nbytes: int


@dataclass(frozen=True)
class ShardPlan:
    """One output file: its path, tensors, encoded header (padded) and total size in bytes."""

    path: str
    tensors: tuple[DeclaredTensor, ...]
    header: bytes
    nbytes: int


class GGUFWriter:
    """Write a GGUF version 3 file at `path`, or shards `<prefix>-00001-of-0000N.gguf` when a limit is given.

    Args:
        path: the file; with limits the prefix of the shards (a trailing `.gguf` is dropped).
        alignment: bytes, a power of two; stored as `general.alignment` when it is not 32.
        split_max_tensors: most tensors per shard. split_max_bytes: most tensor bytes per shard, exceeded only
        by a single tensor larger than that. bare_first: the first shard holds the metadata and no tensors.

    Used as a context manager it closes on success and removes its temporary files on any exception.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        alignment: int = DEFAULT_ALIGNMENT,
        split_max_tensors: int | None = None,
        split_max_bytes: int | None = None,
        bare_first: bool = False,
    ):
        if not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise UsageError(f"alignment {alignment} is not a power of two up to {MAX_ALIGNMENT}")
        for limit, what in ((split_max_tensors, "tensors"), (split_max_bytes, "bytes")):
            if limit is not None and limit < 1:
                raise UsageError(f"{limit} {what} per shard are too few; at least 1 is needed")
        self.path = os.fspath(path)
        self._max_tensors = split_max_tensors
        self._max_bytes = split_max_bytes
        if not os.path.basename(self.path):
            what = "shards need a prefix, such as parts/model" if self.is_split else "name a file"
            raise UsageError(f"cannot write to '{self.path}': {what}")
        self.alignment = alignment
        self._bare_first = bare_first
        self._values: dict[str, encode.StoredValue] = {}
        self._tensors: dict[str, DeclaredTensor] = {}
        self._plan: list[ShardPlan] = []
        self._files: list[AtomicFile] = []
        self._shard = self._tensor = self._written = 0
        self._closed = False

    @property
    def is_split(self) -> bool:
        return self._max_tensors is not None or self._max_bytes is not None

    def add(self, key: str, value_type: GGUFValueType, value: Any) -> None:
        """Add a number, bool or string; UsageError if the type cannot hold the value."""
        self._store(key, encode.scalar(value_type, value))

    def add_array(self, key: str, element_type: GGUFValueType, values: Iterable[Any]) -> None:
        """Add an array of numbers, bools or strings; UsageError if the type cannot hold a value."""
        self._store(key, encode.array(element_type, values))

    def copy_metadata(
        self,
        source: GGUFFile,
        *,
        skip: Collection[str] = (),
        replace: Mapping[str, encode.StoredValue] = MappingProxyType({}),
    ) -> None:
        """Add the metadata of an open file bit for bit, in its order, without the keys in `skip`.

        Values in `replace` (see `encode.scalar`, `encode.array`) stand in for those of the same key; keys the
        source does not have are added at the end.
        """
        metadata = source.stored_metadata
        for key in metadata:
            if key in skip:
                continue
            if key in replace:
                self._store(key, replace[key])
                continue
            entry = metadata.entry(key)
            stored = metadata.stored(key).tobytes()
            self._store(key, encode.StoredValue(entry.type, entry.element_type, entry.count, stored))
        for key in replace:
            if key not in metadata:
                self._store(key, replace[key])

    def add_tensor(self, name: str, shape: Sequence[int], type_id: int, nbytes: int | None = None) -> None:
        """Declare the next tensor: shape in ggml order (ne0 first), `nbytes` checked against the type."""
        self._check_open_for_declarations()
        if not name or name in self._tensors:
            raise ValueError(f"tensor name {name!r} is empty or used twice")
        if not 1 <= len(shape) <= MAX_DIMS or min(shape) < 1:
            raise ValueError(f"tensor {name!r} has impossible shape {list(shape)}")
        size = registry.by_id(type_id).tensor_nbytes(shape)
        if nbytes is not None and nbytes != size:
            raise ValueError(f"tensor {name!r} takes {size} bytes, not {nbytes}")
        self._tensors[name] = DeclaredTensor(name, tuple(int(n) for n in shape), type_id, size)

    def plan(self) -> list[ShardPlan]:
        """Fix the output files from what was declared; nothing can be declared afterwards."""
        if not self._plan:
            groups = self._groups()
            if len(groups) > _MAX_SHARDS:
                raise UsageError(f"{self.path}: {len(groups)} shards are more than {_MAX_SHARDS}; allow more per shard")
            self._plan = [self._plan_shard(index, groups) for index in range(len(groups))]
        return self._plan

    def write(self, name: str, chunk: bytes | bytearray | memoryview | np.ndarray) -> None:
        """Append bytes to tensor `name`: the one begun last, or the next one once that is complete.

        `chunk` is any C-contiguous buffer (bytes, memoryview, numpy array).
        """
        view = (chunk.data if isinstance(chunk, np.ndarray) else memoryview(chunk)).cast("B")
        try:
            if not self._files:
                self._start()
            tensor = self._current(name)
            if self._written + len(view) > tensor.nbytes:
                raise ValueError(f"tensor {name!r} gets more than its {tensor.nbytes} bytes")
            self._files[-1].handle.write(view)
            self._written += len(view)
            if self._written == tensor.nbytes:
                self._end_tensor(tensor)
        except OSError as error:
            self.abort()
            raise self._resource_error(error) from error

    def close(self) -> None:
        """Check that all data came, force it to disk and give the files their names."""
        if self._closed:
            return
        try:
            if not self._files:
                self._start()
            if self._shard < len(self._plan):
                missing = self._plan[self._shard].tensors[self._tensor]
                raise ValueError(f"data of tensor {missing.name!r} is incomplete")
            self._publish()
            self._closed = True
        except OSError as error:
            raise self._resource_error(error) from error
        finally:
            self.abort()

    def abort(self) -> None:
        """Give up: remove the temporary files; existing files stay as they were."""
        self._closed = True
        for file in self._files:
            file.discard()

    def __enter__(self) -> GGUFWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _store(self, key: str, value: encode.StoredValue) -> None:
        self._check_open_for_declarations()
        if not key or key in self._values:
            raise ValueError(f"metadata key {key!r} is empty or used twice")
        if self.is_split and key in SPLIT_KEYS:
            raise ValueError(f"metadata key {key!r} is set by the writer itself")
        if key == KEY_ALIGNMENT and value != self._alignment_value():
            raise ValueError(f"{KEY_ALIGNMENT} must be u32 {self.alignment}, as the writer was made with")
        self._values[key] = value

    def _alignment_value(self) -> encode.StoredValue:
        return encode.scalar(GGUFValueType.UINT32, self.alignment)

    def _check_open_for_declarations(self) -> None:
        if self._plan or self._closed:
            raise ValueError("metadata and tensors must be declared before the data")

    def _groups(self) -> list[list[DeclaredTensor]]:
        """Tensors of each shard, in order."""
        groups: list[list[DeclaredTensor]] = [[]]
        filled = 0
        for tensor in self._tensors.values():
            size = align_up(tensor.nbytes, self.alignment)
            full = self._max_tensors is not None and len(groups[-1]) >= self._max_tensors
            if self._max_bytes is not None and filled + size > self._max_bytes:
                full = True
            bare = self._bare_first and len(groups) == 1
            if bare or (full and groups[-1]):
                groups.append([])
                filled = 0
            groups[-1].append(tensor)
            filled += size
        return groups

    def _plan_shard(self, index: int, groups: list[list[DeclaredTensor]]) -> ShardPlan:
        tensors, count = groups[index], len(groups)
        values = dict(self._values) if index == 0 else {}
        if self.alignment != DEFAULT_ALIGNMENT:
            values.setdefault(KEY_ALIGNMENT, self._alignment_value())
        path = self.path
        if self.is_split:
            path = split_path(output_prefix(path), index, count)
            values[KEY_SPLIT_NO] = encode.scalar(GGUFValueType.UINT16, index)
            values[KEY_SPLIT_COUNT] = encode.scalar(GGUFValueType.UINT16, count)
            values[KEY_SPLIT_TENSORS] = encode.scalar(GGUFValueType.INT32, len(self._tensors))
        header = self._header(values, tensors)
        return ShardPlan(path, tuple(tensors), header, len(header) + self._data_nbytes(tensors))

    def _data_nbytes(self, tensors: Iterable[DeclaredTensor]) -> int:
        return sum(align_up(tensor.nbytes, self.alignment) for tensor in tensors)

    def _header(self, values: dict[str, encode.StoredValue], tensors: list[DeclaredTensor]) -> bytes:
        parts = [MAGIC, struct.pack("<IQQ", WRITE_VERSION, len(tensors), len(values))]
        parts += [value.encode(key) for key, value in values.items()]
        offset = 0
        for tensor in tensors:
            dims = len(tensor.shape)
            parts.append(encode.length_prefixed(tensor.name))
            parts.append(struct.pack(f"<I{dims}QIQ", dims, *tensor.shape, tensor.type_id, offset))
            offset += align_up(tensor.nbytes, self.alignment)
        header = b"".join(parts)
        return header.ljust(align_up(len(header), self.alignment), b"\0")

    def _start(self) -> None:
        if self._closed:
            raise ValueError("the writer is closed")
        os.makedirs(os.path.dirname(os.path.realpath(self.plan()[0].path)), exist_ok=True)
        for room in room_for((shard.path, shard.nbytes) for shard in self._plan):
            if not room.is_enough:
                raise ResourceError(
                    f"{self.path}: needs {_size_text(room.needed)} of disk space but only {_size_text(room.free)} "
                    "are free; make room or write elsewhere"
                )
        self._start_shard()

    def _start_shard(self) -> None:
        """Begin the next shard's file and step over shards without tensors."""
        shard = self._plan[self._shard]
        self._files.append(AtomicFile(shard.path))
        self._files[-1].handle.write(shard.header)
        if not shard.tensors:
            self._end_shard()

    def _end_shard(self) -> None:
        self._files[-1].finish()
        self._shard += 1
        self._tensor = 0
        if self._shard < len(self._plan):
            self._start_shard()

    def _current(self, name: str) -> DeclaredTensor:
        expected = self._plan[self._shard].tensors[self._tensor] if self._shard < len(self._plan) else None
        if expected is None or expected.name != name:
            due = "no tensor" if expected is None else f"tensor {expected.name!r}"
            raise ValueError(f"data of tensor {name!r} came when {due} was due")
        return expected

    def _end_tensor(self, tensor: DeclaredTensor) -> None:
        self._files[-1].handle.write(b"\0" * (align_up(tensor.nbytes, self.alignment) - tensor.nbytes))
        self._written = 0
        self._tensor += 1
        if self._tensor == len(self._plan[self._shard].tensors):
            self._end_shard()

    def _publish(self) -> None:
        """Give the files their names; Ctrl-C in between takes effect behind them, a second one at once."""
        try:
            _publish_all(self._files)
        except KeyboardInterrupt:
            _publish_all([file for file in self._files if os.path.exists(file.temporary)])
            raise

    def _resource_error(self, error: OSError) -> ResourceError:
        return ResourceError(
            f"{self.path}: cannot write: {error.strerror or error}; check the folder and its free space"
        )


def _size_text(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.1f} KiB"


def _publish_all(files: list[AtomicFile]) -> None:
    """Rename the first shard last: a model is loaded through it, so old and new parts are never mixed."""
    if len(files) > 1 and os.path.exists(files[0].target):
        os.unlink(files[0].target)
        sync_folder(os.path.dirname(files[0].target))
    for file in (*files[1:], *files[:1]):
        file.publish()
