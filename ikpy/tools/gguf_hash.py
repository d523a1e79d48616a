"""Digests of the tensors of a model, and manifests that a copy is compared with (`ikpy gguf hash`).

Digests cover the data of tensors without padding, in file order: a model has the same ones split and in one file, and
after changes of its metadata.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ikpy.errors import UsageError, escaped
from ikpy.gguf.reader import GGUFFile

Progress = Callable[[int, int], None]
ALGORITHMS = ("xxh64", "sha1", "sha256", "uuid")
# That of llama-gguf-hash: a version 5 name of the URL of llama.cpp's page.
UUID_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "en.wikipedia.org/wiki/Llama.cpp")
_STEP = 8 << 20
# Algorithm, digest, and the tensor behind the last colon of the file's name.
_LINE = re.compile(r"^(\w+)\s+([0-9a-fA-F-]+)\s+(.+)$")


class Hash(Protocol):
    """What the objects of hashlib and xxhash do."""

    def update(self, data: memoryview, /) -> None: ...

    def digest(self) -> bytes: ...


@dataclass(frozen=True)
class Digest:
    """Digest of one tensor, or of all ("" as its name), in hexadecimal."""

    algorithm: str
    tensor: str
    hexadecimal: str

    def line(self, path: str) -> str:
        """A line of a manifest."""
        return f"{self.algorithm:<7} {self.hexadecimal}  {path}" + (f":{self.tensor}" if self.tensor else "")


def _new(algorithm: str) -> Hash:
    if algorithm == "uuid":
        return hashlib.sha1(UUID_NAMESPACE.bytes)
    if algorithm == "xxh64":
        import xxhash

        return xxhash.xxh64()
    return hashlib.new(algorithm)


def _text(algorithm: str, made: Hash) -> str:
    digest = made.digest()
    return str(uuid.UUID(bytes=digest[:16], version=5)) if algorithm == "uuid" else digest.hex()


def digests(path: str, algorithms: Sequence[str], *, progress: Progress | None = None) -> Iterator[Digest]:
    """Digests of the tensors in file order, and those of all data last. The file is read once, a piece at a time.

    "uuid" is one version 5 UUID of all data, without digests of tensors.

    Raises:
        UsageError: unknown algorithm, or no such file.
        FileFormatError: the file is damaged or incomplete.
    """
    for algorithm in algorithms:
        if algorithm not in ALGORITHMS:
            raise UsageError(f"unknown algorithm '{algorithm}'; one of {', '.join(ALGORITHMS)}")
    with GGUFFile.open(path) as file:
        total, done = sum(info.nbytes for info in file.tensors.values()), 0
        whole = {algorithm: _new(algorithm) for algorithm in algorithms}
        for name, info in file.tensors.items():
            data = file.data(info)
            single = {algorithm: _new(algorithm) for algorithm in algorithms if algorithm != "uuid"}
            for start in range(0, data.size, _STEP):
                piece = data[start : start + _STEP].data
                for made in (*whole.values(), *single.values()):
                    made.update(piece)
                done += piece.nbytes
                if progress is not None:
                    progress(done, total)
            file.release(info)
            for algorithm, made in single.items():
                yield Digest(algorithm, name, _text(algorithm, made))
        for algorithm, made in whole.items():
            yield Digest(algorithm, "", _text(algorithm, made))


def read_manifest(
    manifest: str, path: str, algorithms: Sequence[str] = ALGORITHMS, *, only_whole: bool = False
) -> list[Digest]:
    """Digests of a file in a manifest: lines `ALGORITHM DIGEST FILE[:TENSOR]`, whose files are compared by name only.

    only_whole: none of single tensors.

    Raises:
        UsageError: it cannot be read, or has no line about the file.
    """
    try:
        text = Path(manifest).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{manifest}: {getattr(error, 'strerror', None) or error}") from None
    wanted, found = Path(path).name, []
    # Folders do not count; names have the escapes of printed lines, whose backslashes divide no folders.
    shown = escaped(wanted).encode("utf-8", "backslashreplace").decode()
    place = re.compile(rf"(?:^|[/\\]){re.escape(shown)}(?::(.+))?$")
    for line in text.splitlines():
        match = _LINE.match(line.strip())
        if not match or match[1] not in algorithms:
            continue
        named = place.search(match[3])
        if named and not (named[1] and only_whole):
            found.append(Digest(match[1], named[1] or "", match[2].lower()))
    if not found:
        names = " or ".join(filter(None, (", ".join(algorithms[:-1]), algorithms[-1])))
        raise UsageError(f"{manifest}: no {names} digest of {wanted} in it")
    return found


def differences(path: str, expected: list[Digest], *, progress: Progress | None = None) -> list[str]:
    """What differs from a manifest, one line each; empty if nothing does."""
    algorithms = list(dict.fromkeys(digest.algorithm for digest in expected))
    found_digests = digests(path, algorithms, progress=progress)
    # Manifests are printed, where control characters of names are escapes.
    actual = {(digest.algorithm, escaped(digest.tensor)): digest.hexadecimal for digest in found_digests}
    lines = []
    for digest in expected:
        what = f"tensor {digest.tensor}" if digest.tensor else "all tensors"
        found = actual.get((digest.algorithm, escaped(digest.tensor)))
        if found is None:
            lines.append(f"{what}: missing")
        elif found != digest.hexadecimal:
            lines.append(f"{what}: {digest.algorithm} is {found}, not {digest.hexadecimal}")
    return lines
