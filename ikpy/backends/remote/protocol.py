"""What goes over the wire between a program and a host.

Both ends are ikpy with the same protocol version and the same ops. All numbers are little-endian. A connection begins
with a greeting of the client (magic, version, JSON of what it is) and the host's answer; then the client sends messages
(a head of 32 bytes, for some a payload), and the host answers those that ask for something, in order. Memory is named
by addresses that the client gives out: the number of an allocation in the upper bits, an offset in the lower ones.
"""

from __future__ import annotations

import hashlib
import json
import socket
import struct
from enum import IntEnum
from typing import Any, NamedTuple

import ikpy
from ikpy._native import core
from ikpy.errors import ResourceError, printable

VERSION = 1
DEFAULT_PORT = 50052
MAGIC = b"ikpy-rpc"
GREETING = struct.Struct("<8sII")  # magic, version, bytes of the JSON that follows
HEAD = struct.Struct("<IIQQQ")  # message, bytes of the payload, three numbers
ANSWER = struct.Struct("<4sIQ")  # magic, status, bytes that follow
ANSWER_MAGIC = b"ikRA"
OK, FAILED = 0, 1

MAX_GREETING = 4096
MAX_PAYLOAD = 64 << 20
MAX_TEXT = 4096
OFFSET_BITS = 40
MAX_NUMBER = 1 << 22
SHA256_BYTES = 32


class Message(IntEnum):
    """Kinds of messages, and what their numbers are. Those marked with * are answered."""

    MEMORY = 1  # *: free and total bytes, two u64
    ALLOC = 2  # * number, bytes: free bytes when it was too much, else nothing
    FREE = 3  # number
    UPLOAD = 4  # address; payload: the bytes
    DOWNLOAD = 5  # * address, bytes: the bytes
    COPY = 6  # target, source, bytes
    FILL = 7  # address, byte, bytes
    PROGRAM = 8  # number, address of the run-time scalars; payload: records
    RUN = 9  # number
    DROP = 10  # number
    SYNC = 11  # *: nothing
    HAS = 12  # * address, bytes; payload: SHA-256: one byte, 1 if the host had the data and put it there
    KEEP = 13  # address, bytes; payload: SHA-256
    FORMAT = 14  # * weight type, rows, by expert: i32
    PREPARED = 15  # * payload: four i64: u64 bytes of prepared activations


class ProtocolError(ResourceError):
    """The other end said what makes no sense, or went away."""


class Head(NamedTuple):
    """A message without its payload."""

    message: int
    payload: int
    a: int
    b: int
    c: int


def address(number: int, offset: int = 0) -> int:
    """Address in an allocation."""
    return (number << OFFSET_BITS) + offset


def divided(where: int) -> tuple[int, int]:
    """Number of the allocation, and the offset in it."""
    return where >> OFFSET_BITS, where & ((1 << OFFSET_BITS) - 1)


def ops_digest() -> str:
    """Which ops there are, and their numbers."""
    return hashlib.sha256(json.dumps(core.op_kinds(), sort_keys=True).encode()).hexdigest()[:16]


def greeting() -> bytes:
    """What a client says first."""
    said = json.dumps({"ikpy": ikpy.__version__, "ops": ops_digest()}).encode()
    return GREETING.pack(MAGIC, VERSION, len(said)) + said


def read_exactly(connection: socket.socket, target: memoryview) -> None:
    """Fills memory from a connection. Raises OSError, also where it ends before."""
    while len(target):
        n = connection.recv_into(target)
        if not n:
            raise ConnectionError("the other end closed it")
        target = target[n:]


def received(connection: socket.socket, nbytes: int) -> bytes:
    """So many bytes from a connection; as read_exactly."""
    data = bytearray(nbytes)
    read_exactly(connection, memoryview(data))
    return bytes(data)


def parsed_json(data: bytes) -> dict[str, Any]:
    """An object of JSON. ProtocolError for anything else."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ProtocolError("the greeting is damaged")
    return found


def one_line(text: str) -> str:
    """A text of the other end that may be printed."""
    return printable(" ".join(text[:MAX_TEXT].split()))


def parse_endpoint(text: str) -> tuple[str, int]:
    """`HOST[:PORT]`, of IPv6 `[HOST]:PORT`. ValueError for a port that is none."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or port.endswith("]"):
        host, port = text.strip(), str(DEFAULT_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"expected HOST:PORT, got {text!r}")
    return host, int(port)


def keep_alive(connection: socket.socket) -> None:
    """Lets the system find out within a minute that the other machine is gone, and sends small messages at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 40_000)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
