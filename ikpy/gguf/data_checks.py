"""Checks of where the data of a file's tensors are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ikpy.errors import FileFormatError, UnsupportedError

if TYPE_CHECKING:
    from ikpy.gguf.reader import Shard, TensorInfo


def check_data(tensors: Mapping[str, TensorInfo], shards: Sequence[Shard], *, header_only: bool) -> None:
    """Checks that tensors do not overlap and, unless only headers are wanted, that their data can be had.

    Raises:
        FileFormatError: tensors overlap, or data are not in the file. UnsupportedError: a tensor is of unknown type.
    """
    previous: TensorInfo | None = None
    for info in sorted(tensors.values(), key=lambda info: (info.shard, info.offset)):
        path = shards[info.shard].path
        if not header_only:
            _check_loadable(info, shards[info.shard])
        if (
            previous is not None
            and previous.shard == info.shard
            and info.offset < previous.offset + max(1, previous.stored_nbytes or 0)
        ):
            raise FileFormatError(
                f"{path}: tensors '{previous.name}' and '{info.name}' overlap at offset {info.offset}; "
                "the file is damaged, download or convert it again"
            )
        previous = info


def _check_loadable(info: TensorInfo, shard: Shard) -> None:
    if not info.has_known_type:
        raise UnsupportedError(
            f"{shard.path}: tensor '{info.name}' has unknown type id {info.type_id}; "
            "the file is damaged or needs a newer version of ikpy"
        )
    end = info.offset + info.nbytes
    if end > shard.file_size:
        raise FileFormatError(
            f"{shard.path}: tensor '{info.name}' needs bytes {info.offset} to {end} but the file has only "
            f"{shard.file_size}; the file is truncated, download it again"
        )
