"""The models of a router: those of a folder, and single files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ikpy.gguf.model_names import is_model
from ikpy.gguf.splits import shard_paths, split_parts
from ikpy.server.errors import ApiError

LONGEST_SHOWN = 100
"""Characters of a name that errors repeat."""
MOST_SHOWN = 10
"""Models that errors name."""


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


class Catalog:
    """The models there are now, as ``read`` finds them. Files are looked at in other threads: a folder may be large, or
    on a slow drive."""

    def __init__(self, read: Callable[[], dict[str, ModelFile]]) -> None:
        self.read = read
        self._known: dict[str, ModelFile] = {}

    async def all(self) -> dict[str, ModelFile]:
        """All models by name."""
        self._known = await asyncio.to_thread(self.read)
        return self._known

    async def find(self, name: str) -> ModelFile | None:
        """The model of a name. One that is known is not looked for again, as long as its files stay what they were."""
        model = self._known.get(name)
        if model is not None and await asyncio.to_thread(is_unchanged, model):
            return model
        return (await self.all()).get(name)


def no_model(name: str, others: str = "") -> ApiError:
    """The error of a request for a model that there is not."""
    return ApiError(404, f"there is no model {shortened(name)}{others}")


def shown_names(models: Iterable[str]) -> str:
    """The first models by name for an error, and how all are found."""
    names = sorted(models)
    more = len(names) - MOST_SHOWN
    shown = ", ".join(map(shortened, names[:MOST_SHOWN])) or "none"
    return f"{shown} and {more} more (GET /v1/models lists all)" if more > 0 else shown


def shortened(name: str) -> str:
    """A name as errors repeat it."""
    return name if len(name) <= LONGEST_SHOWN else name[:LONGEST_SHOWN] + "..."


def is_unchanged(model: ModelFile) -> bool:
    """Whether the files of a model have the size and the time that are known."""
    return model.path is None or size_of(model.path) == (model.size, model.changed)


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
