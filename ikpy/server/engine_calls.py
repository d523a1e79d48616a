"""Functions that other threads have run in the engine thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class EngineCall(Generic[T]):
    """A function to run and the ``future`` of its result. Once whoever asked has gone, nothing happens any more."""

    def __init__(self, function: Callable[[], T]) -> None:
        self.future: Future[T] = Future()
        self._function = function

    def run(self) -> None:
        """Runs the function."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._function())
        except BaseException as error:
            self.future.set_exception(error)

    def refuse(self, error: Exception) -> None:
        """Gives an error instead of a result."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)
