"""What a host makes of damaged and hostile messages: one line, the connection closed, and the next client served."""

from __future__ import annotations

import json
import random
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from ikpy._native import core
from ikpy.backends.cuda.api import DeviceError, Stream
from ikpy.backends.remote import hosts, protocol
from ikpy.backends.remote.connection import Connection
from ikpy.backends.remote.device import RemoteDevice
from ikpy.backends.remote.kernels import COUNTS, Program
from ikpy.backends.remote.protocol import ANSWER, GREETING, HEAD, Head, Message, address, parse_endpoint
from ikpy.backends.remote.store import Store, extent_of
from ikpy.errors import UsageError
from ikpy.graph.ir import F32
from ikpy.graph.placement import PlacementParams
from ikpy.graph.plan import OP_DTYPE, TENSOR_DTYPE
from tests.cpu.engine.remote_hosts import ON_CPU, RunningHost, context_on, evaluated, running, tokens_for
from tests.shared import DATA

QWEN3 = DATA / "zoo" / "qwen3.gguf"


@pytest.fixture(scope="module")
def host() -> Iterator[RunningHost]:
    with running("-m", "512") as one:
        yield one


def raw(host: RunningHost) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", host.port), 20)
    connection.settimeout(30)
    return connection


def last_words(connection: socket.socket) -> str:
    """Text of the refusal, the connection being closed behind it."""
    data = b""
    try:
        while part := connection.recv(1 << 16):
            data += part
    except ConnectionResetError:
        pass
    connection.close()
    if len(data) < ANSWER.size:
        return ""
    _, status, nbytes = ANSWER.unpack_from(data)
    return data[ANSWER.size : ANSWER.size + nbytes].decode() if status else ""


def greeted(host: RunningHost) -> socket.socket:
    connection = raw(host)
    connection.sendall(protocol.greeting())
    _, status, nbytes = ANSWER.unpack(protocol.received(connection, ANSWER.size))
    said = json.loads(protocol.received(connection, nbytes))
    assert status == 0 and said["threads"] == 1
    return connection


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "serves `ikpy --rpc` only"),
        (GREETING.pack(protocol.MAGIC, 99, 2) + b"{}", "protocol 99.: install the same version on both machines"),
        (GREETING.pack(protocol.MAGIC, 1, 2) + b"{}", "install the same version"),
        (GREETING.pack(protocol.MAGIC, 1, 2) + b"[]", "the greeting is damaged"),
        (GREETING.pack(protocol.MAGIC, 1, 1 << 31), "install the same version"),
    ],
)
def test_strangers_are_refused(host: RunningHost, said: bytes, wanted: str) -> None:
    connection = raw(host)
    connection.sendall(said)
    text = last_words(connection)
    assert "\n" not in text
    assert re.search(wanted, text), text


def test_other_versions_are_one_line(host: RunningHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "VERSION", 2)
    with pytest.raises(DeviceError, match=r"RPC\[x\]: the host is ikpy .*protocol 1.*protocol 2.*same version"):
        Connection("127.0.0.1", host.port, "RPC[x]")


def test_what_is_no_host_is_one_line() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = listener.accept()
        connection.recv(100)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        connection.close()

    threading.Thread(target=answer, daemon=True).start()
    with listener, pytest.raises(DeviceError, match="is no `ikpy rpc-server`"):
        Connection("127.0.0.1", listener.getsockname()[1], "RPC[x]")


MESSAGES = [
    ("unknown", HEAD.pack(99, 0, 0, 0, 0), "message 99 is unknown"),
    ("payload", HEAD.pack(Message.UPLOAD, 1 << 31, 0, 0, 0), "payload of 2147483648 bytes"),
    ("payload of none", HEAD.pack(Message.SYNC, 4, 0, 0, 0) + b"abcd", "has no payload"),
    ("no memory", HEAD.pack(Message.DOWNLOAD, 0, address(1), 8, 0), "are not memory of this connection"),
    ("no program", HEAD.pack(Message.RUN, 0, 7, 0, 0), "there is no program 7"),
    ("free", HEAD.pack(Message.FREE, 0, 7, 0, 0), "there is no allocation 7"),
    ("no size", HEAD.pack(Message.ALLOC, 0, 1, 0, 0), "an allocation of 0 bytes"),
    ("number", HEAD.pack(Message.ALLOC, 0, 1 << 60, 8, 0), "is no number"),
    ("huge", HEAD.pack(Message.ALLOC, 0, 1, 1 << 63, 0), "an allocation of"),
    ("type", HEAD.pack(Message.FORMAT, 0, 1 << 62, 1, 0), "unknown tensor type"),
    ("sizes", HEAD.pack(Message.PREPARED, 32, 0, 0, 0) + struct.pack("<4q", 1, -1, 1, 1), "sizes of activations"),
    ("no cache", HEAD.pack(Message.ALLOC, 0, 1, 64, 0) + HEAD.pack(Message.HAS, 32, address(1), 8, 0), "no cache"),
    ("empty", HEAD.pack(Message.ALLOC, 0, 1, 64, 0) + HEAD.pack(Message.PROGRAM, 0, 1, address(1), 0), "too short"),
]


@pytest.mark.parametrize(("data", "wanted"), [m[1:] for m in MESSAGES], ids=[m[0] for m in MESSAGES])
def test_damaged_messages_are_refused(host: RunningHost, data: bytes, wanted: str) -> None:
    connection = greeted(host)
    connection.sendall(data)
    received = b""
    while part := connection.recv(1 << 16):
        received += part
    connection.close()
    assert wanted in received.decode(errors="replace")


def test_memory_beyond_the_limit_is_not_given(host: RunningHost) -> None:
    device = RemoteDevice(0, "127.0.0.1", host.port)
    for nbytes in (513 << 20, (1 << 40) - 256):
        with pytest.raises(DeviceError, match=r"the host lends 512\.00 MiB more"):
            device.alloc(nbytes)
    device.alloc(512 << 20)
    assert device.memory().free == 0
    device.connection.close()


def test_half_a_message_and_silence_end_in_time(host: RunningHost) -> None:
    connection = raw(host)
    connection.sendall(protocol.greeting()[:10])
    assert "nothing came in time" in last_words(connection)


def captured(monkeypatch: pytest.MonkeyPatch, host: RunningHost) -> list[bytes]:
    """All that a client says to a host, message by message."""
    said: list[bytes] = []
    send = Connection._send

    def kept(self: Connection) -> None:
        said.extend(bytes(part) for part in self._queue)
        send(self)

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "_send", kept)
        hosts.use([host.endpoint])
        context = context_on(QWEN3, PlacementParams())
        evaluated(context, tokens_for(context, 12), 8)
    del context
    hosts.use(())
    return said


def test_finalizers_in_the_midst_of_a_transfer(host: RunningHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """A context that is collected while its thread waits for an answer, or sends, drains and frees: nobody waits."""
    device = RemoteDevice(0, "127.0.0.1", host.port)
    streams, addresses = device.new_stream(), [device.alloc(1 << 20) for _ in range(4)]
    monkeypatch.setattr(device.connection, "_read_head", meddling(device, streams, addresses, "_read_head"))
    monkeypatch.setattr(device.connection, "_send", meddling(device, streams, addresses, "_send"))
    assert device.memory().total == 512 << 20
    monkeypatch.undo()
    assert not addresses and device.memory().free == 512 << 20
    device.connection.close()


def meddling(device: RemoteDevice, stream: Stream, addresses: list[int], name: str) -> Callable[[], object]:
    """A method of the connection, in front of which memory is given back as finalizers do."""
    method = getattr(device.connection, name)

    def call() -> object:
        for _ in range(2):
            if addresses:
                stream.synchronize()
                device.release(addresses.pop())
        return method()

    return call


def test_fuzzed_conversations(host: RunningHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole conversations of a client with bytes changed: the host lives, and serves the next one."""
    said = captured(monkeypatch, host)
    heads = [i for i, part in enumerate(said) if len(part) == HEAD.size]
    random_ = random.Random(2026)
    ended = 0
    for attempt in range(60):
        parts = list(said)
        for _ in range(random_.choice((1, 1, 3, 10))):
            i = random_.choice(heads) if random_.random() < 0.5 else random_.randrange(len(parts))
            data = bytearray(parts[i])
            data[random_.randrange(min(len(data), 4096))] ^= 1 << random_.randrange(8)
            parts[i] = bytes(data)
        connection = greeted(host)
        connection.settimeout(5)
        reader = threading.Thread(target=drain, args=(connection,), daemon=True)
        reader.start()
        try:
            connection.sendall(b"".join(parts))
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            ended += 1
        reader.join(30)
        connection.close()
        assert host.process.poll() is None, attempt
    here, tokens = context_on(QWEN3, ON_CPU), None
    tokens = tokens_for(here, 12)
    hosts.use([host.endpoint])
    assert np.array_equal(evaluated(context_on(QWEN3, PlacementParams()), tokens, 8), evaluated(here, tokens, 8))
    hosts.use(())


def drain(connection: socket.socket) -> None:
    """Reads until the end."""
    try:
        while connection.recv(1 << 20):
            pass
    except OSError:
        pass


def test_fuzzed_records_never_pass_unchecked(monkeypatch: pytest.MonkeyPatch, host: RunningHost) -> None:
    """Programs with changed addresses, shapes and strides: none reaches memory outside of its allocations."""
    records: list[tuple[int, bytes]] = []
    make = Program.records

    def kept(self: Program) -> bytes:
        records.append((self.runtime, make(self)))
        return records[-1][1]

    monkeypatch.setattr(Program, "records", kept)
    captured(monkeypatch, host)
    runtime, program = max(records, key=lambda item: len(item[1]))
    random_ = random.Random(7)
    refused = 0
    n_tensors = protocol.struct.unpack_from("<I", program)[0]
    for _ in range(400):
        store = Store(64 << 20, 1)
        for number in range(1, 12):
            store.alloc(number, 4 << 20)
        data = bytearray(program)
        place = 12 + random_.randrange(n_tensors) * 80 + random_.randrange(80)
        data[place] ^= 1 << random_.randrange(8)
        try:
            store.compile(1, runtime, bytes(data))
        except protocol.ProtocolError as error:
            assert "\n" not in str(error)
            refused += 1
    assert 100 < refused <= 400


CHANGES = {
    "slopes without positions": ("attention", "fp", 2, 1.0),
    "slopes that are no numbers": ("attention", "fp", 2, float("nan")),
    "more rows than there are": ("mul_mat", "ip", 1, 1 << 24),
    "more rows of two matrices": ("mul_mat_up_gate", "ip", 1, 1 << 16),
    "a mask that is made now and then": ("kq_mask", "above", 0, 1 << 20),
    "a mask for few cells": ("kq_mask", "upto", 0, 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_records_that_would_crash_a_host(name: str, monkeypatch: pytest.MonkeyPatch, host: RunningHost) -> None:
    """What mutated programs ended a host's process with is refused when they come."""
    kind, field, place, value = CHANGES[name]
    said = b"".join(captured(monkeypatch, host))
    store, at, refused = Store(64 << 20, 1), 0, 0
    while at < len(said):
        head = Head(*HEAD.unpack_from(said, at))
        payload, at = said[at + HEAD.size : at + HEAD.size + head.payload], at + HEAD.size + head.payload
        if head.message == Message.ALLOC:
            store.alloc(head.a, head.b)
        if head.message != Message.PROGRAM:
            continue
        store.compile(head.a, head.b, payload)
        n_tensors, n_ops, _ = COUNTS.unpack_from(payload)
        data, start = bytearray(payload), COUNTS.size + n_tensors * TENSOR_DTYPE.itemsize
        ops = np.frombuffer(data, OP_DTYPE, n_ops, start)
        chosen = np.flatnonzero(ops["kind"] == core.op_kinds()[kind])
        if len(chosen):
            ops[field].reshape(n_ops, -1)[chosen[0], place] = value
            with pytest.raises(protocol.ProtocolError, match=f"^{kind} of shapes"):
                store.compile(head.a, head.b, bytes(data))
            refused += 1
    assert refused


def test_memory_of_tensors_whose_strides_overlap() -> None:
    """Kernels may take rows to be contiguous: there is memory for that, whatever the strides say."""
    assert extent_of(F32, [64, 8, 1, 1], [0, 0, 0, 0]) == 4 * 64
    assert extent_of(F32, [64, 8, 1, 1], [4, 1024, 0, 0]) == 7 * 1024 + 4 * 64
    assert extent_of(F32, [8, 64, 1, 1], [256, 4, 0, 0]) == 4 * 64 * 8


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a:1", ("a", 1)),
        ("10.0.0.2", ("10.0.0.2", 50052)),
        ("[::1]:7", ("::1", 7)),
        ("[::1]", ("::1", 50052)),
    ],
)
def test_endpoints(text: str, wanted: tuple[str, int]) -> None:
    assert parse_endpoint(text) == wanted


def closed(call: Callable[[], object]) -> None:
    with pytest.raises(UsageError, match="--rpc: "):
        call()


def test_bad_endpoints() -> None:
    for endpoints in (["a:b"], [":1"], ["a:99999"], ["a:1", "a:1"]):
        closed(lambda endpoints=endpoints: hosts.use(endpoints))  # type: ignore[misc]
