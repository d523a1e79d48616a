"""Damage at random to bytes, GGUF files, JSON texts, safetensors files, states and texts."""

from __future__ import annotations

import json
import struct
import zlib
from random import Random
from typing import Any

from ikpy.engine.session import PREFIX

NUMBERS = [0, 1, 2, 3, 7, 8, 31, 32, 33, 64, 127, 128, 255, 256, 1023, 65535, 65536, 2**24, 2**31 - 1, 2**31, 2**32 - 1,
           2**40, 2**62, 2**63, 2**64 - 1]  # fmt: skip
JSON_VALUES = [0, -1, 1, 2, 3, 255, 2**31, 2**63, 2**70, 1.5, -0.0, 1e400, float("nan"), None, "", "x", "0", [], [[]],
               [1], {}, {"a": 1}, True, False]  # fmt: skip
SCALAR_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9
TYPE_IDS = [0, 1, 2, 8, 10, 12, 13, 14, 16, 20, 23, 30, 39, 137, 139, 144, 152, 156, 202, 212, 230, 337, 398, 2**31]
MEANINGFUL = [
    *(bytes([c]) for c in b'\n\r\0{}[]()|"\\*%\xff'),
    b"{65535}",
    b"{{",
    b"{%",
    b"\x1b[31m",
    b"::=",
    b"1e999",
    b" " * 99,
]


def damage_bytes(random: Random, data: bytes, start: int = 0, end: int | None = None) -> bytes:
    """One to four changes between two offsets: bytes, bits, numbers, parts removed, doubled, cut off, overwritten."""
    content = bytearray(data)
    for _ in range(random.randint(1, 4)):
        last = min(len(content), len(data) if end is None else end)
        if last - start < 9:
            return bytes(content) + b"\xff" * random.randrange(9)
        at = random.randrange(start, last - 8)
        kind = random.randrange(9)
        if kind == 0:
            content[at] = random.randrange(256)
        elif kind == 1:
            content[at] ^= 1 << random.randrange(8)
        elif kind in (2, 3):
            struct.pack_into("<I", content, at, random.choice(NUMBERS) % 2**32)
        elif kind == 4:
            struct.pack_into("<Q", content, at, random.choice(NUMBERS))
        elif kind == 5:
            del content[at : at + random.choice([1, 4, 8, 100])]
        elif kind == 6:
            content[at:at] = content[at : at + random.choice([1, 4, 8, 100])]
        elif kind == 7 and random.random() < 0.3:
            del content[at:]
        elif kind == 8:
            length = min(random.choice([4, 32, 400]), last - at)
            content[at : at + length] = random.randbytes(length)
    return bytes(content)


class GGUFPlaces:
    """Offsets in a GGUF file: values of scalars and of arrays, lengths and bytes of strings, records of tensors."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 24
        self.numbers: list[tuple[int, int]] = []
        self.strings: list[int] = []
        self.kinds: list[int] = []
        self.tensors: list[tuple[int, int]] = []
        n_tensors, n_keys = struct.unpack_from("<QQ", data, 8)
        for _ in range(n_keys):
            self._string(keep=False)
            self.kinds.append(self.at)
            self._value(self._number("<I"))
        for _ in range(n_tensors):
            self._string()
            n_dims = self._number("<I")
            self.tensors.append((self.at, n_dims))
            self.at += 8 * n_dims + 12
        self.end = self.at

    def _number(self, form: str) -> int:
        value = struct.unpack_from(form, self.data, self.at)[0]
        self.at += struct.calcsize(form)
        return int(value)

    def _string(self, keep: bool = True) -> None:
        if keep:
            self.strings.append(self.at)
        self.at += 8 + struct.unpack_from("<Q", self.data, self.at)[0]

    def _value(self, kind: int) -> None:
        if kind == STRING:
            self._string()
        elif kind == ARRAY:
            element, n = self._number("<I"), self._number("<Q")
            for i in range(n):
                if element != STRING and i > 64:
                    self.at += SCALAR_SIZES[element] * (n - i)
                    break
                self._value(element)
        else:
            self.numbers.append((self.at, SCALAR_SIZES[kind]))
            self.at += SCALAR_SIZES[kind]


def damage_gguf(random: Random, data: bytes) -> bytes:
    """Bytes of the header or anywhere, or values of keys, texts, types and shapes in a file that stays readable."""
    places = GGUFPlaces(data)
    kind = random.randrange(8)
    if kind == 0:
        return damage_bytes(random, data)
    if kind == 1:
        return damage_bytes(random, data, 4, places.end)
    content = bytearray(data)
    for _ in range(random.randint(1, 3)):
        choice = random.randrange(8)
        at, size = random.choice(places.numbers)
        tensor, n_dims = random.choice(places.tensors)
        if choice < 3:
            number = random.choice([*NUMBERS, random.randrange(300)])
            floats = random.choice([0.0, -1.0, 1e-30, 1e30, float("nan"), float("inf")])
            packed = struct.pack("<f", floats) if size == 4 and random.random() < 0.3 else number.to_bytes(8, "little")
            content[at : at + size] = packed[:size]
        elif choice == 3:
            _damage_string(random, content, random.choice(places.strings))
        elif choice == 4:
            struct.pack_into("<Q", content, tensor + 8 * random.randrange(max(n_dims, 1)), random.choice(NUMBERS))
        elif choice == 5:
            struct.pack_into("<I", content, tensor + 8 * n_dims, random.choice(TYPE_IDS))
        elif choice == 6:
            struct.pack_into("<Q", content, tensor + 8 * n_dims + 4, random.choice(NUMBERS) & ~31)
        else:
            struct.pack_into("<I", content, random.choice(places.kinds), random.randrange(14))
    if kind == 2:
        return damage_bytes(random, bytes(content), places.end)
    return bytes(content)


def _damage_string(random: Random, content: bytearray, at: int) -> None:
    length = min(struct.unpack_from("<Q", content, at)[0], len(content) - at - 8)
    for _ in range(min(length, random.choice([1, 2, length]))):
        content[at + 8 + random.randrange(length)] = random.choice(
            [0, 10, 27, 32, 37, 123, 128, 255, random.randrange(256)]
        )


def damage_json(random: Random, value: Any) -> Any:
    """One to three values, at any depth, replaced, removed, renamed, doubled or moved."""
    for _ in range(random.randint(1, 3)):
        value = _damage_node(random, value)
    return value


def _damage_node(random: Random, value: Any) -> Any:
    if not isinstance(value, (dict, list)) or not value or random.random() < 0.05:
        return _another(random, value)
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key = random.choice(keys)  # type: ignore[arg-type]
    kind = random.randrange(12)
    if kind == 0:
        del value[key]
    elif kind == 1 and isinstance(value, dict):
        value[random.choice(["", "x", *map(str, keys)])] = value.pop(key)
    elif kind == 1:
        value.insert(random.randrange(len(value)), value[key])
    elif kind == 2:
        value[key] = value[random.choice(keys)]  # type: ignore[arg-type]
    else:
        value[key] = _damage_node(random, value[key])
    return value


def _another(random: Random, value: Any) -> Any:
    if isinstance(value, str) and value and random.random() < 0.5:
        at = random.randrange(len(value))
        return value[:at] + random.choice(["", "\0", "\n", "\x1b", "\ud800", "ä", "(", "*"]) + value[at + 1 :]
    if isinstance(value, int) and random.random() < 0.4:
        return random.choice([value + 1, value - 1, -value, value * 2, value * 1000, str(value), float(value)])
    return random.choice(JSON_VALUES)


def _json_bytes(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def damage_json_text(random: Random, data: bytes) -> bytes:
    """Bytes of the text, or values."""
    if random.random() < 0.25:
        return damage_bytes(random, data)
    return _json_bytes(damage_json(random, json.loads(data)))


def damage_safetensors(random: Random, data: bytes) -> bytes:
    """Bytes, or values of the header, whose length is made right."""
    if random.random() < 0.2:
        return damage_bytes(random, data)
    length = struct.unpack_from("<Q", data)[0]
    header, body = data[8 : 8 + length], data[8 + length :]
    header = damage_json_text(random, header)
    if random.random() < 0.2:
        body = damage_bytes(random, body)
    return struct.pack("<Q", len(header)) + header + body


def damage_state(random: Random, data: bytes) -> bytes:
    """Bytes, or header or cells under a checksum that is right."""
    if random.random() < 0.2:
        return damage_bytes(random, data)
    magic, version, _, length = PREFIX.unpack_from(data)
    header, body = data[PREFIX.size : PREFIX.size + length], data[PREFIX.size + length :]
    if random.random() < 0.8:
        header = damage_json_text(random, header)
    else:
        body = damage_bytes(random, body)
    return PREFIX.pack(magic, version, zlib.crc32(body, zlib.crc32(header)), len(header)) + header + body


def damage_text(random: Random, data: bytes) -> bytes:
    """Bytes, or lines and characters that mean something to some parser."""
    if random.random() < 0.4:
        return damage_bytes(random, data)
    content = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(content) + 1)
        content[at:at] = random.choice(MEANINGFUL)
    return bytes(content)
