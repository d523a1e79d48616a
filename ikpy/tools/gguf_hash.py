"""Digests of the tensors of a model, and manifests that a copy is compared with (`ikpy gguf hash`).

Digests cover the data of tensors without padding, in file order: a model has the same ones split and in one file, and
after changes of its metadata.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ikpy.errors import UsageError
from ikpy.gguf.reader import GGUFFile

Progress = Callable[[int, int], None]
ALGORITHMS = ("sha256", "sha1", "uuid")
# That of llama-gguf-hash: a version 5 name of the URL of llama.cpp's page.
UUID_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "en.wikipedia.org/wiki/Llama.cpp")
_STEP = 8 << 20
# Algorithm, digest, and the tensor behind the last colon of the file's name.
_LINE = re.compile(r"^(\w+)\s+([0-9a-fA-F-]+)\s+(.+)$")


@dataclass(frozen=True)
class Digest:
    """Digest of one tensor, or of all ("" as its name), in hexadecimal."""

    algorithm: str
    tensor: str
    hexadecimal: str

    def line(self, path: str) -> str:
        """A line of a manifest."""
        return f"{self.algorithm:<7} {self.hexadecimal}  {path}" + (f":{self.tensor}" if self.tensor else "")


def digests(path: str, algorithm: str, *, progress: Progress | None = None) -> Iterator[Digest]:
    """Digests of the tensors in file order, and that of all data last. Tensors are read a piece at a time.

    "uuid" is one version 5 UUID of all data, without digests of tensors.

    Raises:
        UsageError: unknown algorithm, or no such file.
        FileFormatError: the file is damaged or incomplete.
    """
    if algorithm not in ALGORITHMS:
        raise UsageError(f"unknown algorithm '{algorithm}'; one of {', '.join(ALGORITHMS)}")
    with GGUFFile.open(path) as file:
        total, done = sum(info.nbytes for info in file.tensors.values()), 0
        is_uuid = algorithm == "uuid"
        kind = "sha1" if is_uuid else algorithm
        whole = hashlib.new(kind, UUID_NAMESPACE.bytes if is_uuid else b"")
        for name, info in file.tensors.items():
            data, one = file.data(info), hashlib.new(kind)
            for start in range(0, data.size, _STEP):
                piece = data[start : start + _STEP].data
                if not is_uuid:
                    one.update(piece)
                whole.update(piece)
                done += piece.nbytes
                if progress is not None:
                    progress(done, total)
            file.release(info)
            if not is_uuid:
                yield Digest(algorithm, name, one.hexdigest())
        digest = whole.digest()
        yield Digest(algorithm, "", str(uuid.UUID(bytes=digest[:16], version=5)) if is_uuid else digest.hex())


def read_manifest(manifest: str, path: str) -> list[Digest]:
    """Digests of a file in a manifest: lines `ALGORITHM DIGEST FILE[:TENSOR]`, whose files are compared by name only.

    Raises:
        UsageError: it cannot be read, or has no line about the file.
    """
    try:
        text = Path(manifest).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{manifest}: {getattr(error, 'strerror', None) or error}") from None
    wanted, found = Path(path).name, []
    for line in text.splitlines():
        match = _LINE.match(line.strip())
        if not match or match[1] not in ALGORITHMS:
            continue
        name = match[3].replace("\\", "/").rpartition("/")[2]
        if name == wanted or name.startswith(f"{wanted}:"):
            found.append(Digest(match[1], name[len(wanted) + 1 :], match[2].lower()))
    if not found:
        raise UsageError(f"{manifest}: no {', '.join(ALGORITHMS[:-1])} or {ALGORITHMS[-1]} digest of {wanted} in it")
    return found


def differences(path: str, expected: list[Digest], *, progress: Progress | None = None) -> list[str]:
    """What differs from a manifest, one line each; empty if nothing does."""
    actual = {
        (digest.algorithm, digest.tensor): digest.hexadecimal
        for algorithm in sorted({digest.algorithm for digest in expected})
        for digest in digests(path, algorithm, progress=progress)
    }
    lines = []
    for digest in expected:
        what = f"tensor {digest.tensor}" if digest.tensor else "all tensors"
        found = actual.get((digest.algorithm, digest.tensor))
        if found is None:
            lines.append(f"{what}: missing")
        elif found != digest.hexadecimal:
            lines.append(f"{what}: {digest.algorithm} is {found}, not {digest.hexadecimal}")
    return lines
