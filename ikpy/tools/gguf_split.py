"""Division of a model into several files and back: what `ikpy gguf split` and `merge` do."""

from __future__ import annotations

import os
from collections.abc import Callable

from ikpy.errors import UsageError
from ikpy.gguf.reader import GGUFFile
from ikpy.gguf.types import (
    KEY_SPLIT_COUNT,
    SPLIT_KEYS,
)
from ikpy.gguf.writer import GGUFWriter, ShardPlan

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) while data are copied."""

DEFAULT_SPLIT_TENSORS = 128
_COPY_BYTES = 8 << 20


def split(
    source: str,
    prefix: str,
    *,
    max_tensors: int | None = None,
    max_bytes: int | None = None,
    bare_first: bool = False,
    dry_run: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> list[ShardPlan]:
    """Cut a model (one file or already split) into shards `<prefix>-0000i-of-0000N.gguf`.

    Without a limit each shard holds at most 128 tensors. bare_first: none in the first. Returns what was (or, with
    `dry_run`, would be) written. Raises UsageError if an output exists and `overwrite` is off.
    """
    if max_tensors is None and max_bytes is None:
        max_tensors = DEFAULT_SPLIT_TENSORS
    with GGUFFile.open(source) as file:
        limits = {"split_max_tensors": max_tensors, "split_max_bytes": max_bytes}
        writer = GGUFWriter(prefix, alignment=file.alignment, bare_first=bare_first, **limits)
        return _copy(file, writer, dry_run=dry_run, overwrite=overwrite, progress=progress)


def merge(
    source: str,
    target: str,
    *,
    dry_run: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> list[ShardPlan]:
    """Put the shards of a split model, named by its first, into one file; raises as `split` does."""
    with GGUFFile.open(source) as file:
        if KEY_SPLIT_COUNT not in file.metadata:
            raise UsageError(f"{source}: not a split model, there is nothing to merge")
        writer = GGUFWriter(target, alignment=file.alignment)
        return _copy(file, writer, dry_run=dry_run, overwrite=overwrite, progress=progress)


def _copy(
    file: GGUFFile, writer: GGUFWriter, *, dry_run: bool, overwrite: bool, progress: Progress | None
) -> list[ShardPlan]:
    """Copy metadata without the split keys, and all tensors."""
    writer.copy_metadata(file, skip=SPLIT_KEYS)
    declare_tensors(file, writer)
    plan = writer.plan()
    if dry_run:
        return plan
    existing = [shard.path for shard in plan if os.path.exists(shard.path)]
    if existing and not overwrite:
        raise UsageError(f"{existing[0]}: output file exists already; remove it or add --overwrite")
    write_tensors(file, writer, progress)
    return plan


def declare_tensors(file: GGUFFile, writer: GGUFWriter) -> None:
    for info in file.tensors.values():
        writer.add_tensor(info.name, info.shape, info.type_id, info.nbytes)


def write_tensors(file: GGUFFile, writer: GGUFWriter, progress: Progress | None) -> None:
    total = sum(info.nbytes for info in file.tensors.values())
    done = 0
    with writer:
        for info in file.tensors.values():
            data = file.data(info)
            for start in range(0, data.size, _COPY_BYTES):
                chunk = data[start : start + _COPY_BYTES]
                writer.write(info.name, chunk)
                done += chunk.size
                if progress is not None:
                    progress(done, total)
            file.release(info)
