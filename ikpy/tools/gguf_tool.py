"""What `ikpy gguf` does: show, split, merge and edit GGUF files (digests: `ikpy.tools.gguf_hash`)."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ikpy.errors import FileFormatError, ResourceError, UnsupportedError, UsageError
from ikpy.gguf import encode
from ikpy.gguf.metadata import scalar_or
from ikpy.gguf.reader import GGUFFile, TensorInfo
from ikpy.gguf.strings import StringArray
from ikpy.gguf.types import (
    KEY_ALIGNMENT,
    KEY_SPLIT_COUNT,
    KEY_SPLIT_NO,
    LABELS,
    SPLIT_KEYS,
    GGUFValueType,
    type_label,
)
from ikpy.gguf.writer import GGUFWriter, ShardPlan
from ikpy.quants import registry

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) while data are copied."""

DEFAULT_SPLIT_TENSORS = 128
_COPY_BYTES = 8 << 20
KEY_ARCHITECTURE = "general.architecture"
_SHOWN_ITEMS = 6
_SHOWN_CHARACTERS = 80
_SIZE_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def parse_size(text: str) -> int:
    """Bytes of a size such as `500M` or `2G` (powers of 1000); UsageError if it is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip().upper())
    size = int(float(match[1]) * _SIZE_UNITS[match[2]]) if match else 0
    if size < 1:
        raise UsageError(f"size '{text}' is not a number of bytes such as 500M or 2G")
    return size


def format_size(nbytes: int) -> str:
    """Bytes as text with a decimal unit, as `parse_size` reads it."""
    value, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{nbytes} B" if unit == "B" else f"{value:.2f} {unit}"


def type_name(type_id: int) -> str:
    """Name of a tensor type; `unknown(ID)` for ids that are in no table."""
    try:
        return registry.by_id(type_id).name
    except (FileFormatError, UnsupportedError):
        return f"unknown({type_id})"


def parse_value_type(text: str) -> GGUFValueType:
    """The value type of a name such as `u32`, `str` or `string`; UsageError naming all if there is none."""
    wanted = {"string": "str", "int": "i32", "float": "f32"}.get(text.lower(), text.lower())
    for value_type, label in LABELS.items():
        if label == wanted and value_type is not GGUFValueType.ARRAY:
            return value_type
    known = ", ".join(label for label in LABELS.values() if label != "arr")
    raise UsageError(f"unknown value type '{text}'; one of {known}")


def parse_value(value_type: GGUFValueType, text: str) -> Any:
    """A scalar of that type from text; UsageError if the text is no such value."""
    try:
        if value_type is GGUFValueType.STRING:
            return text
        if value_type is GGUFValueType.BOOL:
            return _TRUTH[text.lower()]
        return int(text, 0) if value_type.is_integer else float(text)
    except (KeyError, ValueError):
        raise UsageError(f"'{text}' is not a value of type {value_type.label}") from None


# --- dump -------------------------------------------------------------------------------------------------


def describe(file: GGUFFile, *, tensors: bool = True, full: bool = False) -> dict[str, Any]:
    """Content of an open file as JSON-ready data; arrays are cut to six items unless `full`."""
    result: dict[str, Any] = {
        "files": [{"path": shard.path, "bytes": shard.file_size} for shard in file.shards],
        "version": file.version,
        "alignment": file.alignment,
        "tensor_count": len(file.tensors),
        "metadata": {key: _describe_value(file, key, full) for key in file.metadata},
    }
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


# --- split and merge --------------------------------------------------------------------------------------


def split(
    source: str,
    prefix: str,
    *,
    max_tensors: int | None = None,
    max_bytes: int | None = None,
    dry_run: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> list[ShardPlan]:
    """Cut a model (one file or already split) into shards `<prefix>-0000i-of-0000N.gguf`.

    Without a limit each shard holds at most 128 tensors. Returns what was (or, with `dry_run`, would be)
    written. Raises UsageError if an output exists and `overwrite` is off.
    """
    if max_tensors is None and max_bytes is None:
        max_tensors = DEFAULT_SPLIT_TENSORS
    with GGUFFile.open(source) as file:
        writer = GGUFWriter(prefix, alignment=file.alignment, split_max_tensors=max_tensors, split_max_bytes=max_bytes)
        return _copy(file, writer, dry_run=dry_run, overwrite=overwrite, progress=progress)


def merge(
    source: str,
    target: str,
    *,
    dry_run: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> list[ShardPlan]:
    """Put the shards of a split model, named by its first, into one file; raises as `split` does."""
    with GGUFFile.open(source) as file:
        if KEY_SPLIT_COUNT not in file.metadata:
            raise UsageError(f"{source}: not a split model, there is nothing to merge")
        writer = GGUFWriter(target, alignment=file.alignment)
        return _copy(file, writer, dry_run=dry_run, overwrite=overwrite, progress=progress)


def _copy(
    file: GGUFFile, writer: GGUFWriter, *, dry_run: bool, overwrite: bool, progress: Progress | None
) -> list[ShardPlan]:
    """Copy metadata without the split keys, and all tensors."""
    writer.copy_metadata(file, skip=SPLIT_KEYS)
    _declare_tensors(file, writer)
    plan = writer.plan()
    if dry_run:
        return plan
    existing = [shard.path for shard in plan if os.path.exists(shard.path)]
    if existing and not overwrite:
        raise UsageError(f"{existing[0]}: output file exists already; remove it or add --overwrite")
    _write_tensors(file, writer, progress)
    return plan


def _declare_tensors(file: GGUFFile, writer: GGUFWriter) -> None:
    for info in file.tensors.values():
        writer.add_tensor(info.name, info.shape, info.type_id, info.nbytes)


def _write_tensors(file: GGUFFile, writer: GGUFWriter, progress: Progress | None) -> None:
    total = sum(info.nbytes for info in file.tensors.values())
    done = 0
    with writer:
        for info in file.tensors.values():
            data = file.data(info)
            for start in range(0, data.size, _COPY_BYTES):
                chunk = data[start : start + _COPY_BYTES]
                writer.write(info.name, chunk)
                done += chunk.size
                if progress is not None:
                    progress(done, total)


# --- set --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SetResult:
    """What `set_value` changed, or would change; `old` is None for a new key."""

    key: str
    type: GGUFValueType
    old: Any
    new: Any
    in_place: bool
    target: str


def set_value(
    path: str,
    key: str,
    text: str,
    *,
    value_type: GGUFValueType | None = None,
    change_type: bool = False,
    output: str | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> SetResult:
    """Change or add one scalar metadata key of a file.

    Args:
        value_type: needed for a new key; for an existing one it must be the stored type unless `change_type`.
        output: write the changed model there instead of changing the file.
    A value of the same stored size is changed in place; otherwise the file is written anew and replaced in
    one step. Of a split model the first shard is changed: metadata of the others are not used.
    """
    _check_key(key)
    with GGUFFile.open(path, follow_splits=False) as file:
        _check_first(file)
        chosen = _chosen_type(file, key, value_type, change_type)
        new = encode.scalar(chosen, parse_value(chosen, text))
        in_place = output is None and _same_place(file, key, new)
        target = _shown_target(path, output)
        old = file.get(key)
        result = SetResult(key, chosen, old, parse_value(chosen, text), in_place, target)
        if dry_run:
            return result
        _check_free(output, overwrite)
        if in_place:
            _patch(path, file.stored_metadata.entry(key).offset, new.stored)
        else:
            _rewrite(file, output or path, progress, replace={key: new})
        return result


def change_keys(
    path: str,
    changes: Mapping[str, str],
    *,
    output: str | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> str:
    """Rename metadata keys of a file ("" as the new name removes one); returns the path that was, or would be, written.

    The file is written anew and replaced in one step, or written to ``output``. Renamed keys come last. Raises
    UsageError for keys that the file does not have or that describe its layout, and for new names in use.
    """
    with GGUFFile.open(path, follow_splits=False) as file:
        _check_first(file)
        moved = {}
        for key, new_key in changes.items():
            for name in (key, new_key or key):
                _check_key(name)
                if name in (KEY_ALIGNMENT, KEY_ARCHITECTURE):
                    raise UsageError(f"{name} is needed to read the file; change it with 'ikpy gguf set'")
            if key not in file.metadata:
                raise UsageError(f"{file.path}: there is no key {key}")
            if new_key and (new_key in file.metadata or new_key in moved):
                raise UsageError(f"{file.path}: there is a key {new_key} already")
            if new_key:
                moved[new_key] = _stored(file, key)
        if not dry_run:
            _check_free(output, overwrite)
            _rewrite(file, output or path, progress, skip=changes, replace=moved)
        return _shown_target(path, output)


def _shown_target(path: str, output: str | None) -> str:
    """The file that is written, behind the link that was given for it."""
    if output is None and os.path.islink(path):
        return f"{path} -> {os.path.realpath(path)}"
    return output or path


def _stored(file: GGUFFile, key: str) -> encode.StoredValue:
    entry = file.stored_metadata.entry(key)
    return encode.StoredValue(entry.type, entry.element_type, entry.count, file.stored_metadata.stored(key).tobytes())


def _check_key(key: str) -> None:
    if key in SPLIT_KEYS:
        raise UsageError(f"{key} describes how the model is split; use 'ikpy gguf split' or 'merge' to change that")
    if not key:
        raise UsageError("the metadata key is empty")


def _check_first(file: GGUFFile) -> None:
    if scalar_or(file.metadata, KEY_SPLIT_NO, 0) != 0:
        raise UsageError(f"{file.path}: metadata are taken from the first shard only; give that one")


def _check_free(output: str | None, overwrite: bool) -> None:
    if output is not None and os.path.exists(output) and not overwrite:
        raise UsageError(f"{output}: output file exists already; remove it or add --overwrite")


def _chosen_type(file: GGUFFile, key: str, wanted: GGUFValueType | None, change_type: bool) -> GGUFValueType:
    if key not in file.metadata:
        if wanted is None:
            raise UsageError(f"{file.path}: there is no key {key}; give --type to add it")
        return wanted
    stored = file.value_type(key)
    if stored is GGUFValueType.ARRAY:
        raise UsageError(f"{file.path}: key {key} is an array; only single values can be set")
    if wanted is None:
        return stored
    if wanted is not stored and not change_type:
        raise UsageError(
            f"{file.path}: key {key} has type {stored.label}, not {wanted.label}; leave out --type or add --change-type"
        )
    return wanted


def _same_place(file: GGUFFile, key: str, new: encode.StoredValue) -> bool:
    """Whether the new value fits exactly where the old one is; the alignment also moves the data."""
    if key not in file.metadata or key == KEY_ALIGNMENT:
        return False
    entry = file.stored_metadata.entry(key)
    return entry.type is new.type and entry.nbytes == len(new.stored)


def _patch(path: str, offset: int, stored: bytes) -> None:
    try:
        with open(path, "r+b", buffering=0) as handle:
            handle.seek(offset)
            handle.write(stored)
            os.fsync(handle.fileno())
    except OSError as error:
        raise ResourceError(f"{path}: cannot write: {error.strerror or error}; check its permissions") from error


def _rewrite(
    file: GGUFFile,
    target: str,
    progress: Progress | None,
    *,
    skip: Collection[str] = (),
    replace: Mapping[str, encode.StoredValue],
) -> None:
    alignment = file.alignment
    if KEY_ALIGNMENT in replace:
        new = replace[KEY_ALIGNMENT]
        alignment = int.from_bytes(new.stored, "little") if new.type is GGUFValueType.UINT32 else 0
    writer = GGUFWriter(target, alignment=alignment)
    writer.copy_metadata(file, skip=skip, replace=replace)
    _declare_tensors(file, writer)
    _write_tensors(file, writer, progress)
