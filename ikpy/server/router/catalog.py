"""The models of a folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ikpy.gguf.splits import split_parts, split_path

NO_MODELS = re.compile(r"mmproj|imatrix", re.IGNORECASE)


@dataclass(frozen=True)
class ModelFile:
    """A model: its name in requests, its (first) file, and the bytes of all its files."""

    name: str
    path: Path
    size: int
    changed: int


def scan(folder: Path) -> dict[str, ModelFile]:
    """Models by name: every GGUF file in the folder and in folders below it, split models once.

    The name is the path in the folder without ending and part number. Files that vanish meanwhile are left out.
    """
    found: dict[str, ModelFile] = {}
    for path in sorted(folder.rglob("*.gguf")):
        part = split_parts(str(path))
        if NO_MODELS.search(path.name) or (part and part[1] != 0):
            continue
        prefix = path.with_suffix("") if part is None else Path(part[0])
        name = prefix.relative_to(folder).as_posix()
        files = [path] if part is None else [Path(split_path(part[0], i, part[2])) for i in range(part[2])]
        try:
            stats = [file.stat() for file in files]
        except OSError:
            continue
        found[name] = ModelFile(name, path, sum(stat.st_size for stat in stats), int(stats[0].st_mtime))
    return found
