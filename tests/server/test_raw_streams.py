"""Streams as bytes on the connection: head, chunks and their ends, next to recorded ones."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest

from tests.server.additions import without_added
from tests.server.compare import compare, compare_shape
from tests.server.expected import expected, free_fields
from tests.server.harness import DATA, read_events
from tests.server.live import PATIENCE, listening, wait_for

RECORDED = {c["name"]: c for c in json.loads((DATA / "server" / "raw_streams.json").read_text(encoding="utf-8"))}
WHOLE = [name for name in RECORDED if "raw-stream" in name]
CUT = RECORDED["326-disconnect-mid-stream"]
SLOT_MEMORY = {"ignore_eos", "logit_bias"}
"""Left there by an earlier request in the recorded program."""
COMMAND = "llama-server -m MODEL -t 1 -c 2048 -np 2 --metrics --slot-save-path slots/"


def split(data: bytes) -> tuple[dict[str, str], list[bytes]]:
    """Head and whole chunks of an answer, which may be cut anywhere."""
    head, _, rest = data.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    chunks = []
    while b"\r\n" in rest:
        size, _, rest = rest.partition(b"\r\n")
        n = int(size, 16)
        if len(rest) < n + 2:
            break
        assert rest[n : n + 2] == b"\r\n", "a chunk ends with a line end"
        chunks.append(rest[:n])
        rest = rest[n + 2 :]
    return headers | {"status": status}, chunks


def send(client: httpx.Client, capture: dict[str, Any]) -> socket.socket:
    """A connection on which a recorded request was sent."""
    body = json.dumps(capture["request"]).encode()
    connection = socket.create_connection((client.base_url.host, client.base_url.port), PATIENCE)
    head = f"POST {capture['path']} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.parametrize("name", WHOLE)
def test_streams_are_those_recorded_down_to_the_chunks(name: str) -> None:
    capture = RECORDED[name]
    with listening(COMMAND) as (client, _), send(client, capture) as connection:
        data = b""
        while piece := connection.recv(65536):
            data += piece
    wanted_head, wanted_chunks = split(capture["raw"].encode())
    head, chunks = split(data)
    assert (head["status"], head["transfer-encoding"]) == (wanted_head["status"], "chunked")
    assert head["content-type"].split(";")[0] == wanted_head["content-type"] == "text/event-stream"
    assert chunks[-1] == wanted_chunks[-1] == b"" and all(chunk.endswith(b"\n\n") for chunk in chunks[:-1])
    recorded = capture | {"status": 200, "events": read_events(b"".join(wanted_chunks).decode())}
    events = read_events(b"".join(chunks).decode())
    wanted = expected(recorded, {})["events"]
    events = without_added(wanted, events)
    assert [event.get("event") for event in events] == [event.get("event") for event in wanted]
    if capture["path"] in ("/completion", "/v1/completions"):
        compare(wanted, events, "events", free_fields(recorded) | SLOT_MEMORY)
    else:  # the recorded program guessed a template, so its prompt and text are others
        compare_shape(wanted, events, "events")


def test_a_recorded_stream_that_its_client_leaves() -> None:
    wanted = [read_events(chunk.decode())[0]["data"] for chunk in split(CUT["raw"].encode())[1]]
    with listening(COMMAND) as (client, server):
        with send(client, CUT) as connection:
            data = b""
            while len(found := split(data)[1]) < len(wanted):
                data += connection.recv(4096)
            slot = next(slot for slot in client.get("/slots").json() if slot["state"] == 1)
            assert slot["prompt"] == CUT["request"]["prompt"]
            assert slot["next_token"]["n_remain"] + slot["next_token"]["n_decoded"] == CUT["request"]["n_predict"]
        got = [read_events(chunk.decode())[0]["data"] for chunk in found[: len(wanted)]]
        compare(wanted, without_added(wanted, got), "data", frozenset())
        assert wait_for(lambda: server.engine.n_idle == 2)
