"""Memory that launches touch, by which those that have nothing to do with each other are known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Place(NamedTuple):
    """Memory of slices of so many bytes, a stride apart, from address on."""

    address: int
    slice_bytes: int
    stride: int
    n_slices: int

    @classmethod
    def whole(cls, address: int, nbytes: int) -> Place:
        """So many bytes from an address on."""
        return cls(address, nbytes, max(nbytes, 1), 1)

    def meets(self, other: Place) -> bool:
        """Whether they may share a byte."""
        if self.stride == other.stride:  # slices may take turns, as columns of the same rows do
            apart = (other.address - self.address) % self.stride
            if apart >= self.slice_bytes and apart + other.slice_bytes <= self.stride:
                return False
        ends = [p.address + (p.n_slices - 1) * p.stride + p.slice_bytes for p in (self, other)]
        return self.address < ends[1] and other.address < ends[0]


class Touched(NamedTuple):
    """What a launch writes, and what it reads."""

    written: list[Place]
    read: list[Place]

    def reaches(self, other: Touched) -> bool:
        """Whether it writes what the other one reads or writes."""
        return _any_meet(self.written, [*other.written, *other.read])

    def meets(self, other: Touched) -> bool:
        """Whether the order of the two matters."""
        return self.reaches(other) or other.reaches(self)


def _any_meet(some: Iterable[Place], others: list[Place]) -> bool:
    return any(a.meets(b) for a in some for b in others)
