"""The models of a router: those of a folder, and single files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ikpy.gguf.model_names import is_model
from ikpy.gguf.splits import shard_paths, split_parts


@dataclass(frozen=True)
class ModelFile:
    """A model: its name in requests, its (first) file, and the bytes of all its files.

    Without a path (then size and time are 0), and apart from it, ``arguments`` of its process say what is loaded and
    how; ``stop_seconds``: how long its requests may take to end when it is unloaded.
    """

    name: str
    path: Path | None
    size: int
    changed: int
    arguments: tuple[str, ...] = ()
    stop_seconds: float = 35.0


def scan(folder: Path) -> dict[str, ModelFile]:
    """Models by name: every GGUF file in the folder and in folders below it, split models once.

    The name is the path in the folder without ending and part number. Files that vanish meanwhile are left out.
    """
    found: dict[str, ModelFile] = {}
    for path in sorted(folder.rglob("*.gguf")):
        part = split_parts(str(path))
        if not is_model(path.name) or (part and part[1] != 0):
            continue
        prefix = path.with_suffix("") if part is None else Path(part[0])
        name = prefix.relative_to(folder).as_posix()
        size, changed = size_of(path)
        if changed:
            found[name] = ModelFile(name, path, size, changed)
    return found


def size_of(path: Path) -> tuple[int, int]:
    """Bytes of a model, all its parts, and the time it was changed; zeros if a file is not there."""
    try:
        stats = [Path(file).stat() for file in shard_paths(str(path))]
    except OSError:
        return 0, 0
    return sum(stat.st_size for stat in stats), int(stats[0].st_mtime)
