"""Output files that appear under their name only when complete."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from typing import BinaryIO

_BUFFER_BYTES = 1 << 20
_MAX_NAME = 255  # bytes of a name that file systems take


def hidden_name(name: str, ending: str) -> str:
    """Name of a file beside ``name``, in the same folder: ``.name`` and the ending.

    Names too long for that are cut, with a digest in place of the rest, so that two names never share one.
    """
    hidden = f".{name}{ending}"
    if len(os.fsencode(hidden)) <= _MAX_NAME:
        return hidden
    digest = hashlib.blake2b(os.fsencode(name), digest_size=8).hexdigest()
    room = _MAX_NAME - len(f".-{digest}") - len(os.fsencode(ending))
    return f".{os.fsencode(name)[:room].decode(errors='ignore')}-{digest}{ending}"


class AtomicFile:
    """A file written under a temporary name in the target's directory and renamed when complete."""

    def __init__(self, path: str):
        check_replaceable(path)
        # A link stays a link: the file it points to is replaced.
        self.target = os.path.realpath(path)
        folder, name = os.path.split(self.target)
        self.temporary = os.path.join(folder, hidden_name(name, f".{os.getpid()}-{secrets.token_hex(4)}.tmp"))
        mode = 0o666
        with contextlib.suppress(FileNotFoundError):
            mode = stat.S_IMODE(os.stat(self.target).st_mode)
        descriptor = os.open(self.temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        self.handle: BinaryIO = os.fdopen(descriptor, "wb", buffering=_BUFFER_BYTES)

    def finish(self) -> None:
        """Everything is written: force it to disk, keep the temporary name."""
        self.handle.flush()
        os.fsync(self.handle.fileno())
        self.handle.close()

    def publish(self) -> None:
        """Give the finished file its name, replacing an older file in one step."""
        os.replace(self.temporary, self.target)
        sync_folder(os.path.dirname(self.target))

    def discard(self) -> None:
        """Remove the temporary file, if it is still there."""
        with contextlib.suppress(OSError, AttributeError):  # an interruption may have come before there was a handle
            self.handle.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.temporary)

    def __del__(self) -> None:
        # Ctrl-C between the file and the `try` that discards it.
        if hasattr(self, "temporary"):
            self.discard()


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write that takes the place of ``path`` at the end; nothing changes if an error is raised. OSError."""
    file = AtomicFile(os.fspath(path))
    try:
        yield file.handle
        file.finish()
        file.publish()
    except BaseException:
        file.discard()
        raise


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a small file, whole or not at all; pipes and devices are written to as they are. OSError."""
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "wb") as stream:
            stream.write(data)
        return
    with replacing(path) as file:
        file.write(data)


def check_replaceable(path: str | os.PathLike[str]) -> None:
    """OSError for an empty name, and for what a file should not take the place of: a folder, a device, a pipe."""
    if not os.fspath(path):
        raise OSError(errno.EINVAL, "the name of the file is empty")
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(errno.EINVAL, "this is no regular file that could be replaced", os.fspath(path))


def sync_folder(folder: str) -> None:
    """Force renames and removals in a directory to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
