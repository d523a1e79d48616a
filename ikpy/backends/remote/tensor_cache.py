"""Pieces of weights that a host keeps on its disk, by their SHA-256."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from ikpy.gguf.atomic import write_whole


class TensorCache:
    """Files named by what they hold, which is checked when they are read. Errors of the disk count as not there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @classmethod
    def default(cls) -> TensorCache:
        """In $XDG_CACHE_HOME/ikpy/rpc."""
        return cls(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ikpy" / "rpc")

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self.folder / name[:2] / name

    def read(self, digest: bytes, target: memoryview) -> bool:
        """Fills memory with the data of this digest, if it is there and whole."""
        path = self._path(digest)
        try:
            with path.open("rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size != len(target):
                    return False
                done = 0
                while done < len(target) and (n := file.readinto(target[done:])):
                    done += n
        except OSError:
            return False
        return done == len(target) and hashlib.sha256(target).digest() == digest

    def keep(self, digest: bytes, data: memoryview) -> None:
        """Writes data that has this digest, and nothing else."""
        if hashlib.sha256(data).digest() != digest:
            return
        path = self._path(digest)
        try:
            path.parent.mkdir(exist_ok=True)
            write_whole(path, bytes(data))
        except OSError:
            return
