"""Which job an unfinished output belongs to: a digest of everything that its bytes depend on."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path

import ikpy
from ikpy import quants
from ikpy.gguf.reader import GGUFFile
from ikpy.tools import tensor_convert
from ikpy.tools.quantize_files import OutputFile
from ikpy.tools.resumable import fingerprint

SAMPLED_BYTES = 4096
"""Bytes read at the beginning of every tensor of the source."""


def job_digest(file: GGUFFile, outputs: Sequence[OutputFile], *, symmetric_q4_0: bool) -> str:
    """Digest of the source, the headers and types of the outputs, the importance values and the code that encodes.

    The source is told apart by path, size, time of change and samples of every tensor: a file may have been replaced
    by one of the same size whose time was set.
    """
    values: list[tuple[str, object]] = [
        ("version", (ikpy.__version__, tensor_convert.PIECE_ELEMENTS, symmetric_q4_0)),
        ("code", encoder_digest()),
        ("source", source_samples(file)),
    ]
    for output in outputs:
        values += [(step.name, step.source.name) for step in output.steps if step.name != step.source.name]
        values += [(step.name, step.imatrix) for step in output.steps if step.imatrix is not None]
    return fingerprint([output.layout for output in outputs], [shard.path for shard in file.shards], values)


def source_samples(file: GGUFFile) -> str:
    """Digest of the first bytes of every tensor."""
    digest = hashlib.blake2b(digest_size=16)
    for info in file.tensors.values():
        digest.update(file.data(info)[:SAMPLED_BYTES].tobytes())
    return digest.hexdigest()


@functools.cache
def encoder_digest() -> str:
    """Digest of the code that makes the bytes: the native module in use (of this build and tier), the types' tables
    and decoders, and the conversion of tensors."""
    from ikpy._native import core

    assert core.__file__ is not None
    folder = Path(quants.__file__).parent
    tables = sorted(path for path in folder.iterdir() if path.suffix in (".py", ".json"))
    digest = hashlib.blake2b(digest_size=16)
    for path in (Path(core.__file__), *tables, Path(tensor_convert.__file__)):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)} ".encode() + content)
    return digest.hexdigest()
