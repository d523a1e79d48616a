"""Changes of metadata: what `ikpy gguf set`, `rename` and `remove` do."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ikpy.errors import ResourceError, UsageError
from ikpy.gguf import encode
from ikpy.gguf.metadata import scalar_or
from ikpy.gguf.reader import GGUFFile
from ikpy.gguf.types import (
    KEY_ALIGNMENT,
    KEY_SPLIT_NO,
    LABELS,
    MAX_NAME_BYTES,
    SPLIT_KEYS,
    GGUFValueType,
)
from ikpy.gguf.writer import GGUFWriter
from ikpy.tools.gguf_split import Progress, declare_tensors, write_tensors

KEY_ARCHITECTURE = "general.architecture"
_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


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
            _check_text(text, "the value")
            return text
        if value_type is GGUFValueType.BOOL:
            return _TRUTH[text.lower()]
        return int(text, 0) if value_type.holds_integers else float(text)
    except (KeyError, ValueError):
        raise UsageError(f"'{text}' is not a value of type {value_type.label}") from None


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
        target = _shown_target(path, output, in_place=in_place)
        old = file.get(key)
        result = SetResult(key, chosen, old, parse_value(chosen, text), in_place, target)
        if dry_run:
            return result
        _check_target(path, output, overwrite)
        if in_place:
            _patch(path, file.stored_metadata.entry(key).offset, new.stored)
        else:
            _rewrite(file, path if output is None else output, progress, replace={key: new})
        return result


def change_keys(
    path: str,
    changes: Mapping[str, str | None],
    *,
    output: str | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> str:
    """Rename metadata keys of a file (to None: remove); returns the path that was, or would be, written.

    The file is written anew and replaced in one step, or written to ``output``. Renamed keys come last. Raises
    UsageError for keys that the file does not have or that describe its layout, and for new names in use.
    """
    with GGUFFile.open(path, follow_splits=False) as file:
        _check_first(file)
        moved = {}
        for key, new_key in changes.items():
            for name in (key, key if new_key is None else new_key):
                _check_key(name)
                if name in (KEY_ALIGNMENT, KEY_ARCHITECTURE):
                    raise UsageError(f"{name} is needed to read the file; change it with 'ikpy gguf set'")
            if key not in file.metadata:
                raise UsageError(f"{file.path}: there is no key {key}")
            if new_key is not None and (new_key in file.metadata or new_key in moved):
                raise UsageError(f"{file.path}: there is a key {new_key} already")
            if new_key is not None:
                moved[new_key] = _stored(file, key)
        target = _shown_target(path, output)
        if not dry_run:
            _check_target(path, output, overwrite)
            _rewrite(file, path if output is None else output, progress, skip=changes, replace=moved)
        return target


def _shown_target(path: str, output: str | None, *, in_place: bool = False) -> str:
    """The file that is written, behind the link that was given for it, and what becomes of its other hard links."""
    if output is not None:
        return output
    shown = f"{path} -> {os.path.realpath(path)}" if os.path.islink(path) else path
    others = os.stat(path).st_nlink - 1
    effect = "change with it" if in_place else "keep the old contents"
    return f"{shown} (other hard links, {others}, {effect})" if others else shown


def _stored(file: GGUFFile, key: str) -> encode.StoredValue:
    entry = file.stored_metadata.entry(key)
    return encode.StoredValue(entry.type, entry.element_type, entry.count, file.stored_metadata.stored(key).tobytes())


def _check_key(key: str) -> None:
    if key in SPLIT_KEYS:
        raise UsageError(f"{key} describes how the model is split; use 'ikpy gguf split' or 'merge' to change that")
    if not key:
        raise UsageError("the metadata key is empty")
    _check_text(key, "the metadata key")
    if len(key.encode()) > MAX_NAME_BYTES:
        raise UsageError(f"the metadata key has {len(key.encode())} bytes, more than the {MAX_NAME_BYTES} allowed")


def _check_text(text: str, what: str) -> None:
    """UsageError for what bytes of a command line become that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{what} is not valid UTF-8") from None


def _check_first(file: GGUFFile) -> None:
    if scalar_or(file.metadata, KEY_SPLIT_NO, 0) != 0:
        raise UsageError(f"{file.path}: metadata are taken from the first shard only; give that one")


def _check_target(path: str, output: str | None, overwrite: bool) -> None:
    """UsageError if a file must not be replaced or changed. The rights of root say nothing about what was meant."""
    if output is None and not os.stat(path).st_mode & 0o222:
        raise UsageError(f"{path}: the file is read-only; write a changed copy with -o, or permit it with chmod u+w")
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
        if new.type is not GGUFValueType.UINT32:
            raise UsageError(f"{KEY_ALIGNMENT} must be of type u32, not {new.type.label}")
        alignment = int.from_bytes(new.stored, "little")
    writer = GGUFWriter(target, alignment=alignment)
    writer.copy_metadata(file, skip=skip, replace=replace)
    declare_tensors(file, writer)
    write_tensors(file, writer, progress)
