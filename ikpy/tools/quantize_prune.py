"""Models without some of their blocks: names of the tensors that stay, and the metadata that count blocks."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import numpy as np

from ikpy.errors import FileFormatError, UsageError
from ikpy.gguf import encode
from ikpy.gguf.reader import GGUFFile, TensorInfo
from ikpy.gguf.strings import StringArray
from ikpy.models.keys import MAX_LAYERS

BLOCK_COUNT = "block_count"
# These many blocks at the beginning or at the end are of another kind.
LEADING_COUNTS = ("leading_dense_block_count",)
TRAILING_COUNTS = ("nextn_predict_layers", "attention.shared_kv_layers")
# Arrays that have nothing to do with blocks, however many elements they have.
OTHER_ARRAYS = ("rope.dimension_sections", "classifier.output_labels")

# Keys with a value per block that have no architecture in their names.
BARE_PREFIX = "xielu."

# Blocks whose number decides what they are: kinds come in turns of so many, by architecture or by a key.
PERIODS = {"cohere2": 4, "gemma2": 2, "gemma3": 6, "gpt-oss": 2, "llama4": 4}
PERIOD_KEYS = ("attention.sliding_window_pattern", "full_attention_interval", "interleave_moe_layer_step")

_BLOCK = re.compile(r"^blk\.(\d{1,9})\.")


def kept_tensors(file: GGUFFile, removed: Collection[int]) -> dict[str, TensorInfo]:
    """Tensors of the other blocks in file order, by their names in the output: blocks are numbered without gaps."""
    kept = {}
    for name, info in file.tensors.items():
        block = _BLOCK.match(name)
        number = int(block[1]) if block else -1
        if number in removed:
            continue
        before = sum(n < number for n in removed)
        kept[f"blk.{number - before}.{name[block.end() :]}" if block and before else name] = info
    return kept


def pruned_values(file: GGUFFile, removed: Collection[int]) -> dict[str, Any]:
    """Metadata values that change when blocks go: counts of blocks, and arrays with a value per block.

    Raises:
        UsageError: the model lacks one of the blocks, or has no other ones.
        FileFormatError: the file does not say how many blocks it has.
    """
    if not removed:
        return {}
    prefix = f"{file.get('general.architecture', '')}."
    n = file.get(prefix + BLOCK_COUNT)
    if not isinstance(n, int):
        raise FileFormatError(f"{file.path}: --prune-layers: there is no key {prefix}{BLOCK_COUNT}")
    if n > MAX_LAYERS:
        raise FileFormatError(f"{file.path}: {prefix}{BLOCK_COUNT} is {n}; 1 to {MAX_LAYERS} are possible")
    _check(removed, n)
    values: dict[str, Any] = {prefix + BLOCK_COUNT: n - len(removed)}
    for names, from_end in ((LEADING_COUNTS, False), (TRAILING_COUNTS, True)):
        for key in (prefix + name for name in names):
            count = file.get(key, 0)
            if isinstance(count, int) and count:
                values[key] = count - sum((n - 1 - block if from_end else block) < count for block in removed)
    stay = [block for block in range(n) if block not in removed]
    for key in file.metadata:
        if not key.startswith((prefix, BARE_PREFIX)) or key.removeprefix(prefix) in OTHER_ARRAYS:
            continue
        value = file.metadata[key]
        if isinstance(value, np.ndarray | StringArray) and len(value) == n:
            values[key] = value[stay] if isinstance(value, np.ndarray) else [value[block] for block in stay]
    return values


def changed_kinds(file: GGUFFile, removed: Collection[int]) -> str:
    """A sentence about kept blocks that get the place of a block of another kind; empty if there are none."""
    arch = str(file.get("general.architecture", ""))
    n = file.get(f"{arch}.{BLOCK_COUNT}", 0)
    stored = [file.get(f"{arch}.{key}") for key in PERIOD_KEYS]
    periods = {period for period in (PERIODS.get(arch), *stored) if isinstance(period, int) and period > 1}
    stay = [block for block in range(n) if block not in removed]
    for period in sorted(periods):
        moved = [block for number, block in enumerate(stay) if block % period != number % period]
        if moved:
            return (
                f"what a block of {arch} is depends on its number modulo {period}: {len(moved)} of {len(stay)} kept "
                f"blocks (from {moved[0]} on) get a place of another kind; leave out {period} blocks in a row"
            )
    return ""


def _check(removed: Collection[int], n: int) -> None:
    for block in sorted(removed):
        if block >= n:
            raise UsageError(f"--prune-layers: there is no block {block}; the model has blocks 0 to {n - 1}")
    if len(removed) == n:
        raise UsageError("--prune-layers: no block would be left")


def stored_like(file: GGUFFile, key: str, value: Any) -> encode.StoredValue:
    """A value in the type that a key of the file has."""
    entry = file.stored_metadata.entry(key)
    if entry.element_type is None:
        return encode.scalar(entry.type, value)
    return encode.array(entry.element_type, value)
