"""Names of split files: `<prefix>-00001-of-00003.gguf`, numbered from 1."""

from __future__ import annotations

import re
from pathlib import Path

from ikpy.errors import UsageError

_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def split_path(prefix: str, index: int, count: int) -> str:
    """Path of shard `index` (from 0) of `count`."""
    return f"{prefix}-{index + 1:05d}-of-{count:05d}.gguf"


def split_prefix(path: str, index: int, count: int) -> str | None:
    """Prefix of a path that names shard `index` (from 0) of `count`, else None."""
    match = _NAME.fullmatch(path)
    if match is None or int(match["number"]) != index + 1 or int(match["count"]) != count:
        return None
    return match["prefix"]


def split_parts(path: str) -> tuple[str, int, int] | None:
    """Prefix, index (from 0) and count of a path that names a shard, else None."""
    match = _NAME.fullmatch(path)
    return None if match is None else (match["prefix"], int(match["number"]) - 1, int(match["count"]))


def shard_paths(path: str) -> list[str]:
    """Paths of all shards of the split model that a path belongs to; the path alone if it names no shard."""
    part = split_parts(path)
    if part is None or part[2] < 1:
        return [path]
    return [split_path(part[0], i, part[2]) for i in range(part[2])]


def paths_from_first(path: str, option: str) -> list[str]:
    """`shard_paths` of the first shard of a model; UsageError, which begins with ``option``, for another one."""
    paths = shard_paths(path)
    if path != paths[0]:
        raise UsageError(f"{option}: give the first part of the split model, {paths[0]}")
    return paths


def output_prefix(path: str | Path) -> str:
    """Prefix for writing shards: the path without a trailing `.gguf`, or that of the shard it names."""
    part = split_parts(str(path))
    return str(path).removesuffix(".gguf") if part is None else part[0]
