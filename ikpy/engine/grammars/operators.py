"""Operators of grammars and regular expressions, over nodes of any kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

N = TypeVar("N")


@dataclass(frozen=True)
class Group(Generic[N]):
    """Items in order."""

    items: tuple[N, ...]


@dataclass(frozen=True)
class Choice(Generic[N]):
    """One of several nodes."""

    options: tuple[N, ...]


@dataclass(frozen=True)
class Repeat(Generic[N]):
    """``low`` to ``high`` times (None: without limit)."""

    item: N
    low: int
    high: int | None
