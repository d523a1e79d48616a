"""Tasks that wait for a slot, and who is next."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ikpy.server.slots import Slot
    from ikpy.server.tasks import Task

LONG_WAIT = 5.0
"""Seconds in the queue after which a task is no longer overtaken."""


class TaskQueue:
    """Waiting tasks in the order they came. Callers of several threads need a lock; lengths may be read without."""

    def __init__(self) -> None:
        self._tasks: deque[Task] = deque()
        self._started: Counter[int] = Counter()
        """Tasks that have left the queue, by request; of requests with waiting tasks."""

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks)

    @property
    def n_requests(self) -> int:
        """Requests with waiting tasks."""
        return len({task.request for task in self._tasks})

    def extend(self, tasks: Iterable[Task]) -> None:
        """Adds tasks."""
        self._tasks.extend(tasks)

    def clear(self) -> list[Task]:
        """Empties the queue; the tasks that waited."""
        waiting = list(self._tasks)
        self._tasks.clear()
        return waiting

    def drop_cancelled(self) -> None:
        """Removes tasks that were given up."""
        self._tasks = deque(task for task in self._tasks if not task.cancelled)

    def take(self, slot_for: Callable[[Task], Slot | None]) -> tuple[Slot, Task] | None:
        """Takes the next task for which there is a slot.

        First come tasks of requests of which the fewest were started, then the oldest: a request with many prompts
        cannot keep a later one waiting until all of its own are answered. Who has waited for long comes first in any
        case.
        """
        old = time.monotonic() - LONG_WAIT
        first: dict[int, Task] = {}
        for task in self._tasks:
            first.setdefault(task.request, task)
        self._started = Counter({request: n for request, n in self._started.items() if request in first})
        # Other tasks of a request want the same slot and come later.
        for task in sorted(first.values(), key=lambda t: 0 if t.queued < old else self._started[t.request]):
            slot = slot_for(task)
            if slot is not None:
                self._tasks.remove(task)
                self._started[task.request] += 1
                return slot, task
        return None
