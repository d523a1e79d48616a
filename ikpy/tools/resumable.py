"""Output files whose writing can be killed at any moment and continued by the same command.

The files grow under temporary names beside their targets. A journal next to the first of them names the job and, again
and again, how much is safely on disk: data are forced to disk before the journal says so. The targets are replaced by
renames when everything is complete, so a reader sees the old file or the whole new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from ikpy.errors import ResourceError, UsageError
from ikpy.file_locks import lock_file
from ikpy.gguf.atomic import hidden_name, sync_folder
from ikpy.gguf.types import align_up
from ikpy.gguf.writer import ShardPlan

_BUFFER_BYTES = 1 << 20
# Forcing data to disk may take this share of the time.
SYNC_SHARE = 0.05
_FORMAT = 1
_sync = getattr(os, "fdatasync", os.fsync)


def fingerprint(layouts: Iterable[ShardPlan], inputs: Iterable[str], values: Iterable[tuple[str, Any]]) -> str:
    """Digest of a job: the headers to be written, the input files (path, size, time of change) and named values.

    Two runs with one digest write the same bytes. ``values`` may hold numpy arrays.
    """
    digest = hashlib.blake2b(digest_size=16)
    for layout in layouts:
        digest.update(layout.header)
    for path in inputs:
        status = os.stat(path)
        digest.update(repr((os.path.realpath(path), status.st_size, status.st_mtime_ns)).encode())
    for name, value in values:
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(value).data if isinstance(value, np.ndarray) else repr(value).encode())
    return digest.hexdigest()


@dataclass
class _Part:
    """A file under its temporary name."""

    layout: ShardPlan
    target: str
    path: str
    position: int = 0

    @classmethod
    def of(cls, layout: ShardPlan) -> _Part:
        # A link stays a link: the file it points to is replaced.
        target = os.path.realpath(layout.path)
        folder, name = os.path.split(target)
        return cls(layout, target, os.path.join(folder, hidden_name(name, ".part")))

    @property
    def is_there(self) -> bool:
        """Whether the complete file lies under its temporary name or, renamed, under its own."""
        return any(
            os.path.exists(path) and os.path.getsize(path) == self.layout.nbytes for path in (self.path, self.target)
        )


class ResumableOutput:
    """Writes files of known layout one after another.

    Args:
        layouts: the files, in the order of writing. Their folders exist.
        job: digest that tells whether an unfinished earlier run was the same (see `fingerprint`).

    `open` takes the files; then `resumed_bytes`, `write` and `pad` per tensor; then `publish`, or `keep` or `discard`.
    ResourceError if something cannot be written, UsageError if another process writes the same output.
    """

    def __init__(self, layouts: Sequence[ShardPlan], job: str):
        self._parts = [_Part.of(layout) for layout in layouts]
        folder, name = os.path.split(self.target)
        self.journal_path = os.path.join(folder, hidden_name(name, ".journal"))
        self._job = job
        self._current = 0
        self._handle: BinaryIO | None = None
        self._journal: BinaryIO | None = None
        self._next_sync = 0.0
        self._is_complete = False
        self.is_published = False

    @property
    def paths(self) -> list[str]:
        """Temporary files."""
        return [part.path for part in self._parts]

    @property
    def n_done_bytes(self) -> int:
        """Bytes of all files that an earlier run or this one has written."""
        return sum(part.position for part in self._parts)

    @property
    def target(self) -> str:
        """The first file."""
        return self._parts[0].target

    def missing_bytes(self) -> list[tuple[str, int]]:
        """Path and number of the bytes that are still to be written, for every file."""
        return [(part.target, part.layout.nbytes - part.position) for part in self._parts]

    # journal

    def open(self) -> bool:
        """Take the output for this process; True if an unfinished run of the same job is continued."""
        try:
            descriptor = os.open(self.journal_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._journal = os.fdopen(descriptor, "r+b")
            self._lock(descriptor)
            records, valid = _records(self._journal.read())
            self._journal.truncate(valid)
            if not records or records[0] != self._head() or not self._recall(records[1:]):
                self._restart()
        except OSError as error:
            raise self._problem(error) from error
        return self._is_complete or self.n_done_bytes > 0

    def _lock(self, descriptor: int) -> None:
        try:
            lock_file(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return
        except BlockingIOError:
            pass
        self._close()
        raise UsageError(f"{self.target}: another process is writing this file; wait for it or give another name")

    def _head(self) -> dict[str, Any]:
        return {"format": _FORMAT, "job": self._job, "files": [os.path.basename(part.target) for part in self._parts]}

    def _restart(self) -> None:
        assert self._journal is not None
        self._is_complete = False
        self._journal.truncate(0)
        for part in self._parts:
            part.position = 0
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part.path)
        try:
            self._record(self._head())
        except OSError:
            self.discard()
            raise

    def _record(self, record: dict[str, Any]) -> None:
        assert self._journal is not None
        self._journal.seek(0, os.SEEK_END)
        self._journal.write(json.dumps(record).encode() + b"\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())

    def _recall(self, records: Sequence[dict[str, Any]]) -> bool:
        """Take over positions as far as the files really have that many bytes; False to begin anew."""
        self._is_complete = any("complete" in record for record in records)
        if self._is_complete:
            for part in self._parts:
                part.position = part.layout.nbytes
            return all(part.is_there for part in self._parts)
        for record in records:
            self._parts[record["file"]].position = record["position"]
        for index, part in enumerate(self._parts):
            size = os.path.getsize(part.path) if os.path.exists(part.path) else 0
            if size < part.position:
                part.position = 0
            if part.position < part.layout.nbytes:
                for later in self._parts[index + 1 :]:
                    later.position = 0
                break
        return True

    # data

    def resumed_bytes(self, index: int, offset: int, nbytes: int) -> int:
        """How many of a tensor's bytes are already there; ``offset`` is its place in file ``index``."""
        if self._is_complete:
            return nbytes
        return max(0, min(self._parts[index].position - offset, nbytes))

    def write(self, index: int, data: np.ndarray | bytes) -> None:
        """Append to file ``index``; a file begins with its header by itself."""
        part = self._parts[index]
        try:
            handle = self._file(index)
            handle.write(data.data if isinstance(data, np.ndarray) else data)
        except OSError as error:
            raise self._problem(error) from error
        part.position += data.nbytes if isinstance(data, np.ndarray) else len(data)
        if time.monotonic() >= self._next_sync:
            self.checkpoint()

    def pad(self, index: int, position: int) -> None:
        """Zeros up to a position of file ``index``, if it is not that long yet."""
        missing = position - self._parts[index].position
        if missing > 0 and not self._is_complete:
            self.write(index, bytes(missing))

    def checkpoint(self) -> None:
        """Force what was written to disk and note it in the journal."""
        start = time.monotonic()
        try:
            if self._handle is not None:
                self._handle.flush()
                _sync(self._handle.fileno())
                self._record({"file": self._current, "position": self._parts[self._current].position})
        except OSError as error:
            raise self._problem(error) from error
        now = time.monotonic()
        self._next_sync = now + (now - start) / SYNC_SHARE

    def _file(self, index: int) -> BinaryIO:
        if self._handle is not None and index == self._current:
            return self._handle
        self._end_file()
        part = self._parts[index]
        descriptor = os.open(part.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        handle = self._handle = os.fdopen(descriptor, "wb", buffering=_BUFFER_BYTES)
        self._current = index
        handle.truncate(part.position)
        handle.seek(part.position)
        if part.position == 0:
            handle.write(part.layout.header)
            part.position = len(part.layout.header)
        return handle

    def _end_file(self) -> None:
        if self._handle is not None:
            self.checkpoint()
            self._handle.close()
            self._handle = None

    # end

    def publish(self) -> None:
        """Give the complete files their names; Ctrl-C in between takes effect behind them, a second one at once."""
        try:
            if not self._is_complete:
                self._check_complete()
                self._record({"complete": True})
            try:
                self._rename()
            except KeyboardInterrupt:
                self._rename()
                raise
        except OSError as error:
            raise self._problem(error) from error
        finally:
            self._close()

    def _rename(self) -> None:
        """Rename the first file last: a split model is loaded through it. Goes on where it was interrupted."""
        first, *others = self._parts
        if any(os.path.exists(part.path) for part in others) and os.path.exists(first.target):
            os.unlink(first.target)
            sync_folder(os.path.dirname(first.target))
        for part in (*others, first):
            if os.path.exists(part.path):
                with contextlib.suppress(FileNotFoundError):
                    os.chmod(part.path, stat.S_IMODE(os.stat(part.target).st_mode))
                os.replace(part.path, part.target)
        sync_folder(os.path.dirname(first.target))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.journal_path)
        self.is_published = True

    def _check_complete(self) -> None:
        for index, part in enumerate(self._parts):
            self._file(index)  # files without tensors get their header here
            if part.position != part.layout.nbytes:
                raise ValueError(f"{part.target}: {part.position} of {part.layout.nbytes} bytes were written")
        self._end_file()

    def keep(self) -> None:
        """Stop for now: what was written stays for the next run."""
        with contextlib.suppress(ResourceError):
            self.checkpoint()
        self._close()

    def discard(self) -> None:
        """Give up: remove the temporary files and the journal."""
        self._close()
        for path in (*self.paths, self.journal_path):
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _close(self) -> None:
        for handle in (self._handle, self._journal):
            if handle is not None:
                with contextlib.suppress(OSError):
                    handle.close()
        self._handle = self._journal = None

    def _problem(self, error: OSError) -> ResourceError:
        return ResourceError(f"{self.target}: cannot write: {error.strerror or error}")


def _records(content: bytes) -> tuple[list[dict[str, Any]], int]:
    """Whole lines of a journal and their length in bytes; a torn last line does not count."""
    records: list[dict[str, Any]] = []
    valid = 0
    for line in content.splitlines(keepends=True):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not line.endswith(b"\n") or not isinstance(record, dict):
            break
        records.append(record)
        valid += len(line)
    return records, valid


def tensor_places(layout: ShardPlan, alignment: int) -> list[int]:
    """Position in the file of every tensor of a layout."""
    places, position = [], len(layout.header)
    for tensor in layout.tensors:
        places.append(position)
        position += align_up(tensor.nbytes, alignment)
    return places
