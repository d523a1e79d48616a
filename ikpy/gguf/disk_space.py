"""Room for files on the file systems that they go to."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Room(NamedTuple):
    """One file system: a folder on it, the bytes needed there and those that are free."""

    folder: str
    needed: int
    free: int

    @property
    def is_enough(self) -> bool:
        return self.free >= self.needed


def room_for(files: Iterable[tuple[str, int]]) -> list[Room]:
    """What files of these paths and sizes need on every file system, in the order of their names.

    A link stands for the file that it points to, a folder that does not exist yet for the nearest one above it.
    Raises OSError.
    """
    needed: dict[int, int] = {}
    folders: dict[int, str] = {}
    for path, nbytes in files:
        folder = Path(os.path.realpath(path)).parent
        while not folder.is_dir():
            folder = folder.parent
        device = _device(folder)
        folders.setdefault(device, str(folder))
        needed[device] = needed.get(device, 0) + nbytes
    return [Room(folder, needed[device], shutil.disk_usage(folder).free) for device, folder in folders.items()]


def _device(folder: Path) -> int:
    return folder.stat().st_dev
