"""Functions that run between two batches, and what slots report."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from ikpy.engine.grammars import json_schema
from ikpy.engine.kv_cache import KVCacheFullError
from ikpy.server import slot_files
from ikpy.server.build import Server
from ikpy.server.errors import SHUTTING_DOWN, ApiError
from ikpy.server.probabilities import largest
from ikpy.server.read_params import read_generation
from tests.server.harness import start_server
from tests.server.live import PATIENCE

TEXT = {"prompt": "The old man looked at", "n_predict": 4, "temperature": 0}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    found = start_server("llama-server -m MODEL -t 1 -c 512 -np 1 --slot-save-path x", tmp_path)
    yield found
    found.engine.stop(10)


def test_a_call_that_was_given_up_does_not_run(server: Server) -> None:
    client = TestClient(server.app, raise_server_exceptions=False)
    held, ran = threading.Event(), []
    first = server.engine.call(held.wait)
    second = server.engine.call(lambda: ran.append(1))
    assert second.cancel()
    held.set()
    assert first.result(60)
    assert client.post("/completion", json=TEXT).status_code == 200
    assert ran == []


def test_calls_after_the_end_are_refused_at_once(server: Server) -> None:
    """As a slot that is saved while the server ends: its client waited until the process was given up."""
    client = TestClient(server.app, raise_server_exceptions=False)
    assert server.engine.call(lambda: 1).result(PATIENCE) == 1
    server.engine.stop(PATIENCE)
    with pytest.raises(ApiError, match="shutting down"):
        server.engine.call(lambda: 1).result(1)
    for path, body in (
        ("/slots/0?action=save", {"filename": "kept"}),
        ("/slots/0?action=erase", {}),
        ("/lora-adapters", []),
    ):
        answer = client.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, SHUTTING_DOWN), path
    server.engine.give_up()


def test_a_restore_without_room_leaves_an_empty_slot(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    client = TestClient(server.app, raise_server_exceptions=False)
    wanted = client.post("/completion", json=TEXT).json()["content"]
    client.post("/slots/0?action=save", json={"filename": "kept"})

    def full(path: Path, context: Any, seq_id: int, n_max: int) -> None:
        context.kv.seq_rm(seq_id, -1, -1)
        raise KVCacheFullError("full")

    monkeypatch.setattr(slot_files, "load_sequence", full)
    assert client.post("/slots/0?action=restore", json={"filename": "kept"}).status_code == 400
    again = client.post("/completion", json=TEXT).json()
    assert (again["content"], again["timings"]["prompt_n"]) == (wanted, again["tokens_evaluated"])


def test_largest_values_are_those_of_a_stable_sort() -> None:
    rng = np.random.default_rng(3)
    for size in (1, 5, 40):
        for n in (1, 3, 40, 100):
            values = rng.integers(0, 6, size).astype(np.float64)
            np.testing.assert_array_equal(largest(values, n), np.argsort(-values, kind="stable")[:n])


def test_requests_say_more_about_reuse_than_the_command_line(server: Server) -> None:
    settings = replace(server.front.settings, cache_prompt=False)
    for body, wanted in (({}, False), ({"cache_prompt": True}, True)):
        assert read_generation(body, settings, server.front.vocab, 1).cache_prompt is wanted


def test_a_schema_is_shown_often_and_translated_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    translate = json_schema.schema_to_gbnf
    monkeypatch.setattr(json_schema, "schema_to_gbnf", lambda schema: seen.append(schema) or translate(schema))
    schema = {"type": "object", "properties": {"shown once": {"type": "boolean"}}}
    params = read_generation({"json_schema": schema}, server.front.settings, server.front.vocab, 1)
    texts = {server.front.describe(params)["grammar"] for _ in range(3)}
    assert (len(texts), seen) == (1, [schema])
    assert "shown once" in texts.pop()


@pytest.mark.parametrize(
    ("path", "body", "what"),
    [
        ("/delete_prompt", {"filename": "kept"}, "cannot delete kept: Read-only file system"),
        ("/rename_prompt", {"old_filename": "kept", "new_filename": "other"}, "cannot rename kept: Read-only"),
    ],
)
def test_files_that_cannot_be_changed_are_named(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, str], what: str
) -> None:
    client = TestClient(server.app, raise_server_exceptions=False)
    assert client.post("/slots/0?action=save", json={"filename": "kept"}).status_code == 200

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(Path, "rename", refuse)
    error = client.post(path, json=body).json()["error"]
    assert (error["code"], error["message"][: len(what)]) == (500, what)
