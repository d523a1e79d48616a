"""Memory-mapped, read-only access to GGUF files, split ones included."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import numpy as np

from ikpy.errors import FileFormatError, IkpyError
from ikpy.gguf.data_checks import check_data
from ikpy.gguf.file_bytes import Reading, areas_without, file_bytes, memory_map, no_report, share_of
from ikpy.gguf.header import parse_header
from ikpy.gguf.metadata import Metadata
from ikpy.gguf.page_fill import PageFill
from ikpy.gguf.pages import Area, whole_pages
from ikpy.gguf.shards import (
    Shard,
    TensorInfo,
    check_tensor_total,
    collect_tensors,
    open_other_shards,
    open_shard,
    read_shard,
)
from ikpy.gguf.types import GGUFValueType, align_up
from ikpy.machine.memory import check_memory


class GGUFFile:
    """An open GGUF model: metadata of the first shard, tensors of all shards.

    Views from `data` and arrays of strings stay valid after `close`: the mapping goes when the last of them
    does.
    """

    def __init__(self, path: str, shards: list[Shard], *, header_only: bool):
        first = shards[0]
        self.path = path
        self.shards = shards
        self.header_only = header_only
        self.version = first.header.version
        self.alignment = first.header.alignment
        self.file_size = sum(shard.file_size for shard in shards)
        self._metadata = first.metadata
        self._dropped: set[str] = set()
        self._mapped_again: dict[int, np.ndarray] = {}
        self._fill: PageFill | None = None
        self.tensors = collect_tensors(shards)
        check_data(self.tensors, shards, header_only=header_only)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        header_only: bool = False,
        follow_splits: bool = True,
        use_mmap: bool = True,
        reserved_pages: bool = False,
        wanted: Callable[[GGUFFile], Container[str]] | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> GGUFFile:
        """Open a file, and all further shards when it is the first of a split model.

        Args:
            header_only: accept files that end after the tensor table and tensors of unknown types; asking for
                the data of such a tensor is the error then.
            follow_splits: False opens this one shard only, whichever it is.
            use_mmap: False reads the files into memory instead of mapping them (never with header_only).
            reserved_pages: with use_mmap False, takes reserved huge pages if enough are free.
            wanted: with use_mmap False, which tensors are read; the data of the others stay the mapped file's.
            progress: is told the share (0 to 1) of the bytes that were read so far; mapped files have nothing to tell.
        Raises:
            FileFormatError: malformed, truncated or inconsistent. UnsupportedError: valid but not readable
            here. UsageError: no such file.
        """
        name = os.fspath(path)
        shards = [open_shard(name, 0)]
        if follow_splits:
            shards += open_other_shards(shards[0])
        file = cls(name, shards, header_only=header_only)
        if follow_splits:
            check_tensor_total(file.shards, len(file.tensors))
        if not use_mmap and not header_only:
            file._read(wanted(file) if wanted else file.tensors, reserved_pages, progress)
        return file

    @classmethod
    def of_header(cls, header: bytes, path: str) -> GGUFFile:
        """A file of which only the header exists, in memory. path: what errors name."""
        data = np.frombuffer(header, np.uint8)
        parsed = parse_header(data, path)
        shard = Shard(path, 0, data, parsed, Metadata(data, parsed.entries, path), mapped=False)
        return cls(path, [shard], header_only=True)

    def _read(self, wanted: Container[str], reserved_pages: bool, progress: Callable[[float], None] | None) -> None:
        """Reads all but the tensors that are not wanted into memory, in place of the mappings.

        Raises ResourceError, before anything is read, if it is more than the machine has.
        """
        self._dropped = {name for name in self.tensors if name not in wanted}
        left_out = sorted((t.shard, t.offset, t.offset + t.nbytes) for t in map(self.tensors.get, self._dropped) if t)
        areas = [
            areas_without(shard.file_size, [(start, end) for index, start, end in left_out if index == shard.index])
            for shard in self.shards
        ]
        total = sum(end - start for parts in areas for start, end in parts)
        check_memory(total, f"reading {self.path} takes", "without --no-mmap and -thp the file is mapped")
        report = share_of(total, progress) if progress else no_report
        for shard, parts in zip(self.shards, areas, strict=True):
            if any(index == shard.index for index, _, _ in left_out):
                self._mapped_again[shard.index] = shard.data
            self.shards[shard.index] = read_shard(shard, Reading(parts, report, reserved_pages))
        self._metadata = self.shards[0].metadata

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Metadata of the first shard, decoded on access; see `ikpy.gguf.metadata.Metadata`."""
        return self._metadata

    @property
    def stored_metadata(self) -> Metadata:
        """The same metadata with access to types and stored bytes."""
        return self._metadata

    def value_type(self, key: str) -> GGUFValueType:
        """Stored type of a key (`ARRAY` for arrays); FileFormatError if it is absent."""
        return self._metadata.value_type(key)

    def element_type(self, key: str) -> GGUFValueType | None:
        """Element type of an array key, None for scalars; FileFormatError if the key is absent."""
        return self._metadata.element_type(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Value of a key, or `default`."""
        return self._metadata.get(key, default)

    def require(
        self, key: str, type: GGUFValueType | tuple[GGUFValueType, ...], element: GGUFValueType | None = None
    ) -> Any:
        """Value of a key that must exist with this type (or one of these types).

        Raises:
            FileFormatError: "key not found in model: K" or "key K has wrong type X but expected type Y".
        """
        return self._metadata.require(key, type, element)

    def data(self, info: TensorInfo) -> np.ndarray:
        """Zero-copy read-only uint8 [info.nbytes] view of a tensor's bytes."""
        shard = self.shards[info.shard]
        end = info.offset + info.nbytes
        if info.name in self._dropped:
            return self._mapped_again[info.shard][info.offset : end]
        if end > shard.file_size:
            raise FileFormatError(
                f"{shard.path}: data of tensor '{info.name}' is not in the file (bytes {info.offset} to "
                f"{end} of {shard.file_size}); get the complete file"
            )
        return shard.data[info.offset : end]

    def address(self, info: TensorInfo) -> int:
        """Address of a tensor's first byte, for native code; valid while this file is open."""
        return int(self.data(info).ctypes.data)

    def maps(self, address: int) -> bool:
        """Whether an address is that of a byte in the mapped files, which the system reads when it is needed."""
        shards = (shard.data for shard in self.shards if shard.mapped)
        return any(0 <= address - data.ctypes.data < data.size for data in (*shards, *self._mapped_again.values()))

    def release(self, info: TensorInfo, nbytes: int | None = None) -> None:
        """Tell the system that a tensor's bytes are not needed for now: they leave this process's memory.

        ``nbytes``: only so many at its beginning. Reading them again works and takes them from the file. Of files that
        were read into memory nothing goes.
        """
        shard = self.shards[info.shard]
        mapping = memory_map(self._mapped_again[info.shard]) if info.name in self._dropped else _mapping(shard)
        first = info.offset // mmap.PAGESIZE * mmap.PAGESIZE
        size = info.nbytes if nbytes is None else min(nbytes, info.nbytes)
        if mapping and size:
            mapping.madvise(mmap.MADV_DONTNEED, first, info.offset + size - first)

    def read_by_rows(self, info: TensorInfo) -> None:
        """Pages of a mapped tensor are read one by one from now on, not with those behind them."""
        shard = self.shards[info.shard]
        mapping, first = _mapping(shard), align_up(info.offset, mmap.PAGESIZE)
        size = (info.offset + info.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if mapping and size > 0 and not self.header_only and hasattr(mmap, "MADV_RANDOM"):
            mapping.madvise(mmap.MADV_RANDOM, first, size)

    def drop_copy(self, info: TensorInfo) -> None:
        """Give back the memory of a tensor that was read into memory; from then on its data are the mapped file's.

        For tensors whose memory nobody reads any more: pages that it alone fills become zero. Reserved huge pages stay.
        """
        shard = self.shards[info.shard]
        first = align_up(info.offset, mmap.PAGESIZE)
        end = (info.offset + info.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if shard.mapped or shard.page_size or first >= end or info.name in self._dropped:
            return
        memory, data = memory_map(shard.data), self._file_again(shard)
        if memory is not None and data.size == shard.file_size:
            self._dropped.add(info.name)
            memory.madvise(mmap.MADV_DONTNEED, first, end - first)

    def _file_again(self, shard: Shard) -> np.ndarray:
        """The bytes of a shard's file, mapped; none of them if the file is gone."""
        if shard.index not in self._mapped_again:
            try:
                self._mapped_again[shard.index], _ = file_bytes(shard.path, None)
            except IkpyError:
                self._mapped_again[shard.index] = np.empty(0, np.uint8)
        return self._mapped_again[shard.index]

    def fill(self, tensors: Iterable[TensorInfo]) -> None:
        """Lets threads bring mapped tensors into memory until this file is closed."""
        of_shard: dict[int, list[Area]] = {}
        for info in tensors:
            of_shard.setdefault(info.shard, []).append((self.address(info), info.nbytes))
        areas = [area for shard in sorted(of_shard) for area in whole_pages(of_shard[shard])]
        self._fill = PageFill(areas, [shard.data for shard in self.shards])
        weakref.finalize(self, self._fill.stop)

    def wait_until_filled(self) -> None:
        """Waits until what is brought into memory is there, as measurements want it."""
        if self._fill:
            self._fill.wait()

    def stop_read_ahead(self) -> None:
        """Pages of the mapped tensors are read one by one from now on, each where the thread that wants it runs."""
        for shard in self.shards:
            mapping = _mapping(shard)
            if mapping and hasattr(mmap, "MADV_RANDOM"):
                mapping.madvise(mmap.MADV_RANDOM)

    def close(self) -> None:
        """Let go of the mapping; using the file afterwards is an error."""
        if self._fill:
            self._fill.stop()
        self.shards = []
        self.tensors = {}
        self._mapped_again = {}
        self._metadata = Metadata(np.empty(0, np.uint8), {}, self.path)

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _mapping(shard: Shard) -> mmap.mmap | None:
    """The mapping under the bytes of a shard, None for a copy in memory."""
    return memory_map(shard.data) if shard.mapped else None
