"""Builder of XOR-compressed double arrays, the lookup structure of ``precompiled_charsmap``."""

from __future__ import annotations

import struct


class DoubleArrayBuilder:
    """Byte strings to u32 values. Node: label in bits 0-7, leaf in bit 8, base from bit 10; values have bit 31."""

    def __init__(self, entries: dict[bytes, int]):
        self.units: dict[int, int] = {0: 0}
        self._next_block = 1
        self._place(0, sorted(entries.items()), 0)

    def _place(self, position: int, entries: list[tuple[bytes, int]], depth: int) -> None:
        labels = sorted({key[depth] if len(key) > depth else 0 for key, _ in entries})
        block = self._next_block
        while any(block ^ label in self.units for label in labels):
            block += 1
        self._next_block = block + 1  # two parents must not share a block
        ends = [value for key, value in entries if len(key) == depth]
        self.units[position] |= (block ^ position) << 10 | (0x100 if ends else 0)
        if ends:
            self.units[block] = 1 << 31 | ends[0]
        for label in labels:
            if label:
                self.units[block ^ label] = label
        for label in labels:
            if label:
                children = [item for item in entries if len(item[0]) > depth and item[0][depth] == label]
                self._place(block ^ label, children, depth + 1)

    def data(self) -> bytes:
        """The array, little endian, holes as nodes no byte can reach."""
        size = max(self.units) | 0xFF
        return b"".join(struct.pack("<I", self.units.get(index, 1 << 31)) for index in range(size + 1))


def charsmap(replacements: dict[str, str]) -> bytes:
    """``precompiled_charsmap`` data that maps every key to its replacement."""
    texts = bytearray()
    entries: dict[bytes, int] = {}
    for key, replacement in replacements.items():
        entries[key.encode()] = len(texts)
        texts += replacement.encode() + b"\0"
    array = DoubleArrayBuilder(entries).data()
    return struct.pack("<I", len(array)) + array + bytes(texts)
