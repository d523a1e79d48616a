"""What `ikpy gguf dump` shows of a file, as text and as JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ikpy.errors import FileFormatError, UnsupportedError, UsageError
from ikpy.gguf.reader import GGUFFile, TensorInfo
from ikpy.gguf.splits import shard_paths
from ikpy.gguf.strings import StringArray
from ikpy.gguf.types import KEY_SPLIT_COUNT, KEY_SPLIT_NO, KEY_SPLIT_TENSORS, type_label
from ikpy.quants import registry
from ikpy.tools.sizes import format_size

_SHOWN_ITEMS = 6
_SHOWN_CHARACTERS = 80


def type_name(type_id: int) -> str:
    """Name of a tensor type; `unknown(ID)` for ids that are in no table."""
    try:
        return registry.by_id(type_id).name
    except (FileFormatError, UnsupportedError):
        return f"unknown({type_id})"


def open_model(path: str, *, this_file: bool) -> GGUFFile:
    """The header of a model with those of all its parts; of ``this_file`` alone, and of a part that is not the first.

    Raises what `GGUFFile.open` does, and UsageError if a part does not exist.
    """
    alone = GGUFFile.open(path, header_only=True, follow_splits=False)
    part = part_of(alone)
    if this_file or part is None or part[0] > 1:
        return alone
    alone.close()
    if lacking := next((name for name in shard_paths(path) if not os.path.exists(name)), None):
        raise UsageError(f"{lacking}: this part of the model does not exist; --this-file shows the first one alone")
    return GGUFFile.open(path, header_only=True)


def part_of(file: GGUFFile) -> tuple[int, int] | None:
    """Number (from 1) and count of the parts, if the open file is a single part of a split model."""
    number, count = file.get(KEY_SPLIT_NO), file.get(KEY_SPLIT_COUNT)
    if len(file.shards) > 1 or type(number) is not int or type(count) is not int or not 0 <= number < count > 1:
        return None
    return number + 1, count


def describe(file: GGUFFile, *, tensors: bool = True, full: bool = False) -> dict[str, Any]:
    """Content of an open file as JSON-ready data; arrays are cut to six items unless `full`."""
    result: dict[str, Any] = {
        "files": [{"path": shard.path, "bytes": shard.file_size} for shard in file.shards],
        "version": file.version,
        "alignment": file.alignment,
        "tensor_count": len(file.tensors),
        "metadata": {key: _describe_value(file, key, full) for key in file.metadata},
    }
    if part := part_of(file):
        result["part"] = dict(zip(("number", "count"), part, strict=True))
    if tensors:
        result["tensors"] = [_describe_tensor(info) for info in file.tensors.values()]
    return result


def _describe_value(file: GGUFFile, key: str, full: bool) -> dict[str, Any]:
    entry, value = file.stored_metadata.entry(key), file.metadata[key]
    if entry.element_type is None:
        return {"type": entry.type.label, "value": _json_ready(value)}
    shown = _items(value, None if full else _SHOWN_ITEMS)
    return {
        "type": entry.type.label,
        "element_type": entry.element_type.label,
        "count": entry.count,
        "value": [_json_ready(item) for item in shown],
        "complete": len(shown) == entry.count,
    }


def _items(values: np.ndarray | StringArray, limit: int | None) -> list[Any]:
    if isinstance(values, np.ndarray):
        return list(values[:limit].tolist())
    return values.tolist() if limit is None else values[:limit]


def _json_ready(value: Any) -> Any:
    """JSON has no infinities and no NaN: they become strings."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _describe_tensor(info: TensorInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "type": type_name(info.type_id),
        "type_id": info.type_id,
        "shape": list(info.shape),
        "offset": info.offset,
        "nbytes": info.stored_nbytes,
        "shard": info.shard,
    }


def dump_lines(file: GGUFFile, *, tensors: bool = True, full: bool = False) -> Iterator[str]:
    """The same content as lines of text."""
    for shard in file.shards:
        yield f"file: {shard.path} ({format_size(shard.file_size)})"
    if part := part_of(file):
        total = file.get(KEY_SPLIT_TENSORS)
        of_all = f" of {total}" if type(total) is int else ""
        yield f"part {part[0]} of {part[1]} of a split model: {len(file.tensors)}{of_all} tensors, and this part's keys"
    yield f"GGUF version {file.version}, alignment {file.alignment}"
    yield f"metadata: {len(file.metadata)} keys"
    width = max((len(key) for key in file.metadata), default=0)
    for key in file.metadata:
        entry = file.stored_metadata.entry(key)
        label = type_label(entry.type, entry.element_type)
        yield f"  {key:<{width}}  {label:<9} {_value_text(file.metadata[key], entry.count, full)}"
    yield f"tensors: {len(file.tensors)}"
    if tensors:
        yield from _tensor_lines(file)
    yield from _type_summary(file.tensors.values())


def _value_text(value: Any, count: int, full: bool) -> str:
    if not isinstance(value, np.ndarray | StringArray):
        return scalar_text(value, full)
    shown = _items(value, None if full else _SHOWN_ITEMS)
    more = ", ..." if len(shown) < count else ""
    return f"[{count}] " + ", ".join(scalar_text(item, full) for item in shown) + more


def scalar_text(value: Any, full: bool = False) -> str:
    """A metadata value as text; strings quoted and cut to 80 characters unless `full`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        # The shortest text that reads back as the stored number: most floats are 32 bits wide.
        with np.errstate(over="ignore"):
            narrow = np.float32(value)
        return str(narrow) if float(narrow) == value else repr(value)
    if not isinstance(value, str):
        return str(value)
    if full or len(value) <= _SHOWN_CHARACTERS:
        return json.dumps(value, ensure_ascii=False)
    return f"{json.dumps(value[:_SHOWN_CHARACTERS], ensure_ascii=False)}... ({len(value)} characters)"


def _tensor_lines(file: GGUFFile) -> Iterator[str]:
    rows = [("name", "type", "shape", "bytes", "offset", "file")]
    for info in file.tensors.values():
        nbytes = "?" if info.stored_nbytes is None else str(info.stored_nbytes)
        shape = " x ".join(map(str, info.shape))
        rows.append((info.name, type_name(info.type_id), shape, nbytes, str(info.offset), str(info.shard + 1)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        left = [cell.ljust(width) for cell, width in zip(row[:3], widths[:3], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True)]
        yield "  " + "  ".join(left + right)


def _type_summary(tensors: Iterable[TensorInfo]) -> Iterator[str]:
    count: dict[str, int] = {}
    nbytes: dict[str, int] = {}
    for info in tensors:
        name = type_name(info.type_id)
        count[name] = count.get(name, 0) + 1
        nbytes[name] = nbytes.get(name, 0) + (info.stored_nbytes or 0)
    for name in sorted(count, key=lambda name: -nbytes[name]):
        size = format_size(nbytes[name]) if nbytes[name] else "size unknown"
        yield f"type {name}: {count[name]} tensors, {size}"
