"""What texts may have beside words: pictures and sounds."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from numpy.typing import NDArray

from ikpy.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(eq=False)
class Media:
    """A picture or a sound with a ``key`` that others have not; ``read`` makes its content.

    ``what``: how errors of llama-server call it.
    """

    what: ClassVar[str]
    key: bytes
    read: Callable[[], NDArray[Any]] = field(repr=False)
    _content: NDArray[Any] | None = field(default=None, repr=False)

    @staticmethod
    def decode(data: bytes, name: str) -> NDArray[Any]:
        """Content of a file. Raises an IkpyError that calls it by the name."""
        raise NotImplementedError

    @classmethod
    def of_file(cls, data: bytes, name: str = "") -> Self:
        """That of a file's content. It is decoded at once, and again when rows of it are made a second time.

        Raises an IkpyError that calls it by the name.
        """
        read = partial(cls.decode, data, name or cls.what)
        return cls(hashlib.sha256(data).digest(), read, read())

    @classmethod
    def of_given(cls, value: Any) -> Self | None:
        """That of the name of a file, its content or a `data:` address; None for anything else. Raises an IkpyError."""
        if isinstance(value, str) and value.startswith("data:"):
            value = from_base64(value.partition(",")[2])
        if isinstance(value, (str, os.PathLike)):
            path = os.fspath(value)
            return cls.of_file(read_media_file(path), path)
        return cls.of_file(bytes(value)) if isinstance(value, (bytes, bytearray, memoryview)) else None

    @property
    def n_bytes(self) -> int:
        """Of the content, as far as it is kept."""
        return 0 if self._content is None else self._content.nbytes

    def drop(self) -> None:
        """Keeps no content: it is made again."""
        self._content = None

    def content(self) -> NDArray[Any]:
        """The content, which is not kept any longer."""
        content, self._content = self._content, None
        return self.read() if content is None else content


def read_media_file(path: str) -> bytes:
    """Content of a file. Raises UsageError that names it."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def from_base64(text: str) -> bytes:
    """Bytes of base64 text, none if it is wrong; line ends in it and missing padding do no harm."""
    clean = "".join(text.split()).rstrip("=").replace("-", "+").replace("_", "/")
    try:
        return base64.b64decode(clean + "=" * (-len(clean) % 4), validate=True)
    except ValueError:  # or characters that are not ASCII
        return b""
