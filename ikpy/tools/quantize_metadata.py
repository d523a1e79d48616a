"""Metadata of a quantized file."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from ikpy.errors import FileFormatError, IkpyError, UnsupportedError, UsageError
from ikpy.gguf import encode
from ikpy.gguf.metadata import scalar_or
from ikpy.gguf.reader import GGUFFile
from ikpy.gguf.types import KEY_ALIGNMENT, SPLIT_KEYS, GGUFValueType
from ikpy.models import architecture
from ikpy.models.keys import Keys
from ikpy.quants import registry
from ikpy.tools.model_logs import common_type
from ikpy.tools.quantize_prune import pruned_values, stored_like
from ikpy.vocab import Vocab
from ikpy.vocab.keys import text

if TYPE_CHECKING:
    from ikpy.tools.quantize_plan import QuantizeOptions

QUANTIZATION_VERSION = 2
MAX_STORED_NAME = 127
_T = GGUFValueType
_WHOLE_NUMBERS = (_T.UINT32, _T.INT32, _T.UINT64, _T.INT64, _T.UINT16, _T.INT16, _T.UINT8, _T.INT8)
_OVERRIDE_TYPES: tuple[tuple[type, tuple[GGUFValueType, ...]], ...] = (
    (bool, (_T.BOOL,)),
    (int, _WHOLE_NUMBERS),
    (float, (_T.FLOAT32, _T.FLOAT64)),
    (str, (_T.STRING,)),
)
"""Types that a value of the command line may be stored in, the usual one first."""


def stored_file_type(file: GGUFFile, options: QuantizeOptions) -> int:
    """The output's ``general.file_type``: that of the request, for copies the model's own."""
    if options.repack:
        return repacked_ftype(own_file_type(file))
    return options.ftype.id if options.ftype else own_file_type(file)


def own_file_type(file: GGUFFile) -> int:
    """The model's file type; that of its most frequent tensor type if it does not tell."""
    usual = registry.usual_ftype(common_type(file))
    return scalar_or(file.metadata, "general.file_type", usual.id if usual else 0)


def output_metadata(file: GGUFFile, options: QuantizeOptions, file_type: int) -> dict[str, encode.StoredValue]:
    """Metadata values that the output adds or changes."""
    u32 = GGUFValueType.UINT32
    values = {"general.quantization_version": encode.scalar(u32, QUANTIZATION_VERSION)}
    pruned = pruned_values(file, options.prune_layers)
    values |= {key: stored_like(file, key, value) for key, value in pruned.items()}
    # Keys that the input lacks come in this order, that of the reference.
    values |= {key: _override(file, key, value) for key, value in options.kv_overrides.items()}
    _check_read_types(file, options.kv_overrides)
    for key, stored in (_imatrix_values(options) | {"general.file_type": encode.scalar(u32, file_type)}).items():
        values.setdefault(key, stored)
    return values


def _imatrix_values(options: QuantizeOptions) -> dict[str, encode.StoredValue]:
    """The keys that name the importance matrix; none without one."""
    if not options.imatrix or options.repack or options.ftype is None:
        return {}
    i32, string = GGUFValueType.INT32, GGUFValueType.STRING
    path, dataset = options.imatrix_path, options.imatrix.dataset
    entries, chunks = len(options.imatrix.values), options.imatrix.chunks
    if options.hide_imatrix:
        path = dataset = "top_secret"
        entries = chunks = 0
    values = {"quantize.imatrix.file": encode.scalar(string, _shortened(path))}
    if dataset:
        values["quantize.imatrix.dataset"] = encode.scalar(string, _shortened(dataset))
    values["quantize.imatrix.entries_count"] = encode.scalar(i32, entries)
    if chunks > 0 or options.hide_imatrix:
        values["quantize.imatrix.chunks_count"] = encode.scalar(i32, chunks)
    return values


def _shortened(value: str) -> str:
    # Paths may hold bytes that are no text.
    return value.encode("utf-8", "surrogateescape")[:MAX_STORED_NAME].decode("utf-8", "ignore")


def _override(file: GGUFFile, key: str, value: object) -> encode.StoredValue:
    """A value in the type that the key has, as readers want no other; of new keys whole numbers are u32 if they can."""
    if key == KEY_ALIGNMENT or key in SPLIT_KEYS:
        raise UsageError(f"--override-kv {key}: the key describes the file itself and cannot be replaced")
    types = next(types for kind, types in _OVERRIDE_TYPES if isinstance(value, kind))
    _check_kind(file, key, value, types)
    stored = file.stored_metadata.entry(key).type if key in file.metadata else None
    if stored in types:
        try:
            return encode.scalar(stored, value)
        except UsageError as error:
            raise UsageError(f"--override-kv {key}: {error}") from None
    if isinstance(value, int) and types is _WHOLE_NUMBERS:
        fits = (t for t in types if np.can_cast(np.min_scalar_type(value), encode.DTYPES[t]))
        return encode.scalar(next(fits), value)
    return encode.scalar(types[0], value)


def _check_kind(file: GGUFFile, key: str, value: object, types: tuple[GGUFValueType, ...]) -> None:
    """UsageError for a value of another kind than that of the key in the file: the output could not be loaded."""
    if key not in file.metadata:
        return
    entry = file.stored_metadata.entry(key)
    kind = entry.type
    # Of arrays only those with a value for every layer may become a single value.
    if entry.element_type is not None and key.startswith(f"{file.get('general.architecture')}."):
        kind = entry.element_type
    if kind not in types:
        raise UsageError(f"--override-kv {key}: value {value!r} is not of the key's type {kind.name.lower()}")


def _check_read_types(file: GGUFFile, overrides: Mapping[str, object]) -> None:
    """UsageError for a value of another kind than the file's architecture reads a key as, which the file may lack."""
    if not overrides:
        return
    with suppress(FileFormatError, UnsupportedError):  # a file may be quantized that cannot be run
        keys = Keys(file, overrides)
        cls = architecture(keys.arch)
        cls.__new__(cls).read_hparams(keys)
    if any(key.startswith("tokenizer.") for key in overrides):
        _check_tokenizer(file, overrides)


def _check_tokenizer(file: GGUFFile, overrides: Mapping[str, object]) -> None:
    """UsageError if overrides make a vocabulary unreadable that the file has."""
    with suppress(FileFormatError, UnsupportedError):
        Vocab.from_metadata(file.metadata)
        try:
            Vocab.from_metadata({**file.metadata, **overrides})
            text(overrides, "tokenizer.chat_template")
        except FileFormatError as error:
            raise UsageError(f"--override-kv: {error}") from None


def repacked_ftype(number: int) -> int:
    """File type after repacking; unchanged where there is no interleaved one."""
    try:
        after = registry.ftype_by_id(number).after_repack
    except IkpyError:
        return number
    return number if after < 0 else after
