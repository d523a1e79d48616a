"""The log of the server: streams that break or lack characters do not stop it."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import select
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import httpx
import pytest
from starlette.testclient import TestClient

from ikpy.cli.server import make_server
from ikpy.errors import UsageError
from ikpy.server.log import ServerLog
from ikpy.server.log_writer import LogWriter
from tests.server.harness import MODELS, Session, loaded, parse
from tests.server.live import PATIENCE, address_of


def logged(out: io.StringIO, options: str = "") -> TestClient:
    """Client of a server that writes its log to a text; only its front works."""
    line = ["-m", MODELS["PUPPET"], "-t", "1", "-c", "256", "-np", "1", "--log-disable", *options.split()]
    base = loaded(MODELS["PUPPET"])
    session = Session(parse(line, "server"), base.model, base.vocab, base.path, base.timings)
    return TestClient(make_server(session, ServerLog("json", out)).app, raise_server_exceptions=False)


def test_request_lines_say_what_was_asked_and_why_it_was_refused() -> None:
    out = io.StringIO()
    client = logged(out, "--api-key first-key")
    headers = {"X-Api-Key": "first-key"}
    client.get("/health?include_slots=1&note=first-key", headers=headers)
    client.post("/completion", headers=headers, content=b"{}")
    client.post("/api/chat", headers=headers, json={"messages": "\n" + "x" * 9000})
    client.get("/props")
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    found = [line for line in lines if line["msg"] == "request"]
    assert [line["status"] for line in found] == [200, 400, 400, 401]
    assert found[0]["params"] == {"include_slots": "1", "note": "****"}
    assert "error" not in found[0] and found[0]["key"] == "key-1"
    assert found[1]["error"] == '"prompt" is required'
    assert 0 < len(found[2]["error"]) <= 200
    assert found[3]["error"] == "Invalid API Key" and "key" not in found[3]
    assert "first-key" not in out.getvalue()


def test_errors_that_nothing_expected_are_logged_with_their_traceback() -> None:
    out = io.StringIO()
    for error in (RuntimeError("broken"), UsageError("refused")):
        try:
            raise error
        except Exception as caught:
            ServerLog("json", out).caught("step", "batch failed", caught)
    unexpected, expected = map(json.loads, out.getvalue().splitlines())
    assert unexpected["error"] == "RuntimeError('broken')" and Path(__file__).name in unexpected["traceback"]
    assert "refused" in expected["error"] and "traceback" not in expected


def test_characters_that_the_stream_lacks_are_escaped() -> None:
    data = io.BytesIO()
    stream = io.TextIOWrapper(data, encoding="latin-1")
    ServerLog("text", stream).event("main", "request", path="/é/€")
    assert data.getvalue().decode("latin-1").endswith('path="/\\xe9/\\u20ac"\n')


def test_closed_and_full_streams_are_no_errors() -> None:
    closed = io.StringIO()
    closed.close()
    full = Path("/dev/full").open("w")  # noqa: SIM115 - closing it fails too
    ServerLog("json", full).event("main", "message")
    ServerLog("json", closed).failure("main", "message")
    with contextlib.suppress(OSError):
        full.close()


def test_a_server_whose_log_is_not_read_answers() -> None:
    end, start = os.pipe()
    os.close(end)
    broken = os.fdopen(start, "w")
    params = parse(["-m", MODELS["PUPPET"], "-t", "1", "-c", "256", "-np", "1", "--log-disable"], "server")
    base = loaded(MODELS["PUPPET"])
    session = Session(params, base.model, base.vocab, base.path, base.timings)
    server = make_server(session, ServerLog("text", broken))
    server.engine.start()
    try:
        client = TestClient(server.app, raise_server_exceptions=False)
        for _ in range(2):
            assert client.post("/completion", json={"prompt": "x", "n_predict": 1}).status_code == 200
    finally:
        server.engine.stop(10)
        with contextlib.suppress(BrokenPipeError):
            broken.close()


def test_fields_of_the_wrong_type_are_named() -> None:
    out = io.StringIO()
    client = logged(out)
    body = {"prompt": 5, "n_predict": "3", "temperature": True, "cache_prompt": 1, "top_k": None, "seed": 1.0, "zz": {}}
    client.post("/completion", json=body)
    client.post("/completion", json={"prompt": "a", "n": 4096 * 2, "n_predict": 1})
    assert "wrong type" not in out.getvalue(), "the prompt is refused first"
    client.post("/v1/completions", json=body | {"prompt": ["a"], "grammar": "root ::= ("})
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    found = [(line["level"], line["fields"]) for line in lines if "wrong type" in line["msg"]]
    assert found == [("WARN", ["n_predict", "cache_prompt"])]


def small_pipe() -> tuple[int, IO[str]]:
    """A pipe that holds one page: the end that is read, and the other one."""
    end, start = os.pipe()
    fcntl.fcntl(start, fcntl.F_SETPIPE_SZ, 4096)
    return end, os.fdopen(start, "w", encoding="utf-8")


def test_nobody_waits_for_who_reads_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ikpy.server.log_writer.MOST_WAITING", 20_000)
    end, stream = small_pipe()
    writer = LogWriter()
    log = ServerLog("json", stream, writer=writer)
    n_lines = 500
    for number in range(n_lines):  # which would not end
        log.event("main", "line", number=number, text="é")
    assert not writer.finish(0.1)
    with os.fdopen(end, encoding="utf-8") as reader:
        found = [json.loads(reader.readline())]
        while writer._n_waiting > 10_000:
            found.append(json.loads(reader.readline()))
        log.event("main", "line", number=n_lines)
        while found[-1].get("number") != n_lines:
            found.append(json.loads(reader.readline()))
        *whole, lost, _ = found
        assert [line["number"] for line in whole] == list(range(len(whole))) and len(whole) > 50
        assert (lost["level"], lost["function"], lost["n_lines"]) == ("WARN", "log", n_lines - len(whole))
        assert writer.finish(PATIENCE)
        stream.close()


def test_lines_of_texts_in_memory_and_of_broken_streams_are_written_or_passed_over() -> None:
    out, writer = io.StringIO(), LogWriter()
    end, broken = small_pipe()
    os.close(end)
    log = ServerLog("text", out, broken, writer)
    log.forward("one", error=True)
    log.forward("two", error=False)
    assert writer.finish(PATIENCE) and out.getvalue() == "two\n"
    with contextlib.suppress(BrokenPipeError):
        broken.close()


def test_a_full_pipe_that_does_not_block_is_waited_for() -> None:
    """As those are that a program above shares with its own event loop."""
    end, stream = small_pipe()
    os.set_blocking(stream.fileno(), False)
    writer = LogWriter()
    log = ServerLog("json", stream, writer=writer)
    for number in range(200):
        log.event("main", "line", number=number)
    assert not writer.finish(0.1)
    with os.fdopen(end, encoding="utf-8") as reader:
        assert [json.loads(reader.readline())["number"] for _ in range(200)] == list(range(200))
        assert writer.finish(PATIENCE)
        stream.close()


def test_a_server_goes_on_and_ends_while_its_log_is_not_read() -> None:
    end, stream = small_pipe()
    line = [sys.executable, "-m", "ikpy", "server", "-m", MODELS["PUPPET"], "-t", "1", "-c", "256", "-np", "1"]
    with stream, subprocess.Popen([*line, "--port", "0"], stdout=stream, stderr=stream) as server:
        reading = threading.Event()
        reader = threading.Thread(target=read_until, args=(end, reading), daemon=True)
        reader.start()
        try:
            address = address_of(server)
            reading.set()
            reader.join(PATIENCE)
            with httpx.Client(base_url=address, timeout=PATIENCE) as client:
                for _ in range(30):
                    answer = client.post("/completion", json={"prompt": "x", "n_predict": 1})
                    assert answer.status_code == 200
            server.terminate()
            assert server.wait(PATIENCE) == 0
        finally:
            server.kill()
            os.close(end)


def read_until(end: int, is_enough: threading.Event) -> None:
    """Reads what comes from a pipe, until it is told otherwise: then nobody does."""
    while not is_enough.is_set():
        if select.select([end], [], [], 0.05)[0]:
            os.read(end, 4096)
