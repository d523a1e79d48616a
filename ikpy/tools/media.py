"""What texts may have beside words: pictures and sounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from numpy.typing import NDArray


@dataclass(eq=False)
class Media:
    """A picture or a sound with a ``key`` that others have not; ``read`` makes its content.

    ``what``: how errors of llama-server call it.
    """

    what: ClassVar[str]
    key: bytes
    read: Callable[[], NDArray[Any]] = field(repr=False)
    _content: NDArray[Any] | None = field(default=None, repr=False)

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
