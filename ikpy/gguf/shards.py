"""The files of a GGUF model: one, or the parts of a split one, and the tensors that they hold."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ikpy.errors import FileFormatError, IkpyError, UnsupportedError
from ikpy.gguf.file_bytes import Reading, file_bytes
from ikpy.gguf.header import Header, TensorRecord, parse_header
from ikpy.gguf.metadata import Metadata, scalar_or
from ikpy.gguf.splits import split_path, split_prefix
from ikpy.gguf.types import KEY_SPLIT_COUNT, KEY_SPLIT_NO, KEY_SPLIT_TENSORS, GGUFValueType
from ikpy.quants import registry

_MAX_OFFSET = (1 << 63) - 1


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of the table.

    `shape` is in ggml order (ne0, the row length, first) with as many dimensions as stored; `offset` is the
    byte position of the data in its shard, counted from the start of that file.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    shard: int
    stored_nbytes: int | None

    @property
    def nbytes(self) -> int:
        """Bytes of the data; UnsupportedError if the type id is unknown."""
        if self.stored_nbytes is None:
            raise UnsupportedError(
                f"tensor '{self.name}' has unknown type id {self.type_id}; "
                "the file is damaged or needs a newer version of ikpy"
            )
        return self.stored_nbytes

    @property
    def has_known_type(self) -> bool:
        return self.stored_nbytes is not None

    @property
    def element_count(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Shard:
    """One file: `data` is a read-only uint8 view of all of it, `data_offset` where tensors begin.

    `mapped`: the bytes are the file's own pages, not a copy in memory. `page_size`: bytes of the reserved huge pages
    of the copy, 0 without them.
    """

    path: str
    index: int
    data: np.ndarray
    header: Header
    metadata: Metadata
    mapped: bool
    page_size: int = 0

    @property
    def file_size(self) -> int:
        return int(self.data.size)

    @property
    def data_offset(self) -> int:
        return self.header.data_offset


def open_shard(path: str, index: int) -> Shard:
    data, _ = file_bytes(path, None)
    header = parse_header(data, path)
    return Shard(path, index, data, header, Metadata(data, header.entries, path), mapped=True)


def read_shard(shard: Shard, how: Reading) -> Shard:
    data, page_size = file_bytes(shard.path, how)
    if data.size != shard.file_size:
        raise FileFormatError(f"{shard.path}: the file changed while it was read; try again")
    metadata = Metadata(data, shard.header.entries, shard.path)
    return replace(shard, data=data, metadata=metadata, mapped=False, page_size=page_size)


def open_other_shards(first: Shard) -> list[Shard]:
    """Shards after the first, checked to belong together."""
    metadata = first.metadata
    if KEY_SPLIT_COUNT not in metadata:
        return []
    count = metadata.require(KEY_SPLIT_COUNT, GGUFValueType.UINT16)
    if count <= 1:
        return []
    number = metadata.require(KEY_SPLIT_NO, GGUFValueType.UINT16)
    if number != 0:
        raise FileFormatError(
            f"{first.path}: illegal split file: {number}, model must be loaded with the first split; "
            f"give the file named ...-00001-of-{count:05d}.gguf"
        )
    prefix = split_prefix(first.path, 0, count)
    if prefix is None:
        raise FileFormatError(
            f"{first.path}: invalid split file; the first of {count} parts must be named "
            f"<prefix>-00001-of-{count:05d}.gguf"
        )
    return [_open_part(split_path(prefix, index, count), index, count) for index in range(1, count)]


def _open_part(path: str, index: int, count: int) -> Shard:
    if not os.path.exists(path):
        raise FileFormatError(
            f"failed to load GGUF split from {path}: it does not exist; put all {count} parts of the model together"
        )
    try:
        shard = open_shard(path, index)
    except IkpyError as error:
        raise FileFormatError(f"failed to load GGUF split from {path}; {error}") from error
    for key, expected in ((KEY_SPLIT_NO, index), (KEY_SPLIT_COUNT, count)):
        if key not in shard.metadata:
            raise FileFormatError(
                f"{path}: invalid split file: it has no key {key}, so it is no part of a split model; "
                "put all parts of one model together under their original names"
            )
        found = shard.metadata.require(key, GGUFValueType.UINT16)
        if found != expected:
            raise FileFormatError(
                f"{path}: invalid split file: {key} is {found} but expected {expected}; "
                "put all parts of one model together under their original names"
            )
    return shard


def check_tensor_total(shards: Sequence[Shard], n_tensors: int) -> None:
    first = shards[0].metadata
    if len(shards) == 1:
        return
    expected = first.require(KEY_SPLIT_TENSORS, GGUFValueType.INT32)
    for shard in shards[1:]:
        found = scalar_or(shard.metadata, KEY_SPLIT_TENSORS, expected)
        if found != expected:
            raise FileFormatError(
                f"{shard.path}: this part is of a model of {found} tensors, the first one of a model of {expected}; "
                "put all parts of one model together or download them again"
            )
    if expected != n_tensors:
        raise FileFormatError(
            f"{shards[0].path}: corrupted model: {expected} tensors expected but {n_tensors} found; "
            "put all parts of one model together or download them again"
        )


def collect_tensors(shards: list[Shard]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        for record in shard.header.tensors:
            if record.name in tensors:
                raise FileFormatError(
                    f"{shard.path}: invalid model: tensor '{record.name}' is duplicated; "
                    "it is also in an earlier part, download the parts again"
                )
            tensors[record.name] = _tensor_info(record, shard)
    return tensors


def _tensor_info(record: TensorRecord, shard: Shard) -> TensorInfo:
    try:
        tensor_type = registry.by_id(record.type_id)
    except (FileFormatError, UnsupportedError):
        tensor_type = None
    nbytes = None
    if tensor_type is not None:
        try:
            nbytes = tensor_type.tensor_nbytes(record.shape)
        except IkpyError as error:
            raise FileFormatError(f"{shard.path}: tensor '{record.name}': {error}") from error
    offset = shard.data_offset + record.offset
    if offset + (nbytes or 0) > _MAX_OFFSET:
        raise FileFormatError(
            f"{shard.path}: tensor '{record.name}' lies at an impossible offset {record.offset}; "
            "the file is damaged, download or convert it again"
        )
    return TensorInfo(record.name, record.shape, record.type_id, offset, shard.index, nbytes)
