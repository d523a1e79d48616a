"""Errors in the engine thread that nothing expected: requests end with them, and the server goes on or says that it
cannot."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from ikpy.engine.session import take_state
from ikpy.gguf.reader import GGUFFile
from ikpy.server import slot_files
from ikpy.server.build import Server
from ikpy.server.errors import ApiError
from ikpy.server.slots import Slot
from ikpy.server.tasks import Embedded, EmbeddingTask, Event, Failed, Finished, Task
from tests.server.engine_requests import ask, ended
from tests.server.harness import MODELS, start_server
from tests.server.live import PATIENCE, wait_for

BAD = 7
"""The token that prompts begin with which no slot can be chosen for."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    found = start_server("llama-server -m MODEL -t 1 -c 512 -np 2 --slot-save-path x --slot-autosave", tmp_path)
    yield found
    found.engine.stop(10)


@pytest.fixture
def lines(server: Server) -> io.StringIO:
    """What the server logs from now on."""
    out = io.StringIO()
    server.engine.log.style, server.engine.log._out = "json", out
    return out


def errors(lines: io.StringIO) -> list[tuple[str, str]]:
    """Message and error of the lines about failures."""
    found = [json.loads(line) for line in lines.getvalue().splitlines()]
    return [(line["msg"], line["error"]) for line in found if line["level"] == "ERR"]


def refuse_bad_prompts(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = server.engine.reuse.choose

    def faulty(task: Task) -> Slot | None:
        if task.tokens[0] == BAD:
            raise ValueError("no such text")
        return choose(task)

    monkeypatch.setattr(server.engine.reuse, "choose", faulty)


def test_an_error_while_a_slot_is_chosen_ends_the_request(
    server: Server, lines: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_bad_prompts(server, monkeypatch)
    for prompt in ([BAD, 8, 9], [1, 2, 3]):
        events = ask(server, prompt)
        assert ended(events), prompt
        failed = [event for event in events if isinstance(event, Failed)]
        assert [(e.code, e.message) for e in failed] == (
            [(500, "internal error: ValueError: no such text")] if prompt[0] == BAD else []
        )
    assert errors(lines) == [("internal error", "ValueError('no such text')")]
    assert server.engine.is_running and server.engine.failure is None


def test_an_error_while_the_next_task_is_taken_ends_what_waits(
    server: Server, lines: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at the first task alone finds work, one at all of them fails: the thread must not go round in it."""

    def fail(*_: Any) -> None:
        raise IndexError("no task")

    monkeypatch.setattr(server.engine._queue, "take", fail)
    events = ask(server, [1, 2, 3])
    assert ended(events) and isinstance(events[-1], Failed)
    monkeypatch.undo()
    events = ask(server, [1, 2, 3])
    assert ended(events) and isinstance(events[-1], Finished)
    assert len(errors(lines)) == 1


def test_an_error_before_a_slot_begins_ends_the_request(
    server: Server, lines: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("no scales")

    monkeypatch.setattr(server.engine, "_use_adapters", fail)
    events = ask(server, [1, 2, 3])
    assert ended(events) and isinstance(events[-1], Failed) and events[-1].message.endswith("ValueError: no scales")
    assert server.engine.n_idle == 2


@pytest.mark.parametrize("method", ["begin", "draft", "accept"])
def test_answers_go_on_without_a_drafter_that_fails(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("no guess")

    prompt = [5, 6, 7] * 6
    with monkeypatch.context() as patch:
        drafting = start_server("llama-server -m MODEL -t 1 -c 512 -np 2 --spec-type ngram-map-k:size_n=2")
        log = io.StringIO()
        drafting.engine.log.style, drafting.engine.log._out = "json", log
        assert drafting.engine.slots[0].speculator is not None
        patch.setattr(drafting.engine.slots[0].speculator.drafters[0], method, fail)
        both = [ask(drafting, prompt, 30), ask(drafting, prompt, 30)]
        assert all(map(ended, both))
        drafting.engine.stop(10)
    answers = [events[-1] for events in both]
    assert isinstance(answers[0], Finished) and isinstance(answers[1], Finished), answers
    assert answers[0].text == answers[1].text
    assert errors(log) == [("drafting failed, the answer goes on without", "ValueError('no guess')")]


@pytest.mark.parametrize("method", ["take_state", "put_state", "state_nbytes"])
def test_texts_are_saved_and_restored_without_a_drafter_that_fails(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("no state")

    server = start_server("llama-server -m MODEL -t 1 -c 512 -np 1 --spec-type ngram-map-k:size_n=2")
    log = io.StringIO()
    server.engine.log.style, server.engine.log._out = "json", log
    assert server.engine.slots[0].speculator is not None
    drafter = type(server.engine.slots[0].speculator.drafters[0])
    if method == "put_state":
        state = take_state(server.engine.context, 0, [1, 2, 3])
        monkeypatch.setattr(drafter, "take_state", lambda _: state)
    monkeypatch.setattr(drafter, method, property(fail) if method == "state_nbytes" else fail)
    first, second = list(range(5, 80)), list(range(200, 280))
    answers = []
    for prompt in (first, second, first):
        events = ask(server, prompt, 10)
        assert ended(events)
        answers.append(events[-1])
    server.engine.stop(10)
    again, *_, last = answers
    assert isinstance(again, Finished) and isinstance(last, Finished), answers
    assert again.text == last.text and last.n_cached >= len(first) - 1
    assert set(errors(log)) == {("drafting failed, the answer goes on without", "ValueError('no state')")}


@pytest.mark.parametrize("method", ["write_state", "read_state"])
def test_slots_are_kept_over_a_restart_without_a_drafter_that_fails(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a drafter that cannot be written no older file stays, which would be of another text."""

    def fail(*_: Any) -> None:
        raise ValueError("no states")

    command = "llama-server -m MODEL -t 1 -c 512 -np 2 --spec-type ngram-map-k:size_n=2 --slot-save-path x"
    first, second = (start_server(f"{command} --slot-autosave", tmp_path) for _ in range(2))
    log = io.StringIO()
    for server in (first, second):
        server.engine.log.style, server.engine.log._out = "json", log
        for slot in server.engine.slots:
            assert slot.speculator is not None
            for drafter in slot.speculator.drafters:
                monkeypatch.setattr(type(drafter), "needs_states", True)
                monkeypatch.setattr(type(drafter), method, fail)
    older = slot_files.draft_file(tmp_path, slot_files.autosave_file(first, first.engine.slots[0]).name)
    older.write_bytes(b"of another text")
    both = [ask(first, prompt) for prompt in ([1, 2, 3], [7, 8, 9])]
    assert all(map(ended, both))
    for server in (first, second):
        server.engine.stop(10)
    slot_files.save_slots(first)
    slot_files.restore_slots(second)
    assert [slot.tokens for slot in second.engine.slots] == [slot.tokens for slot in first.engine.slots]
    assert all(slot.tokens for slot in second.engine.slots)
    what = "saved" if method == "write_state" else "restored"
    assert errors(log) == [(f"drafter's cache not {what}", "ValueError('no states')")] * 2
    assert older.exists() is (method == "read_state")


def test_a_slot_that_cannot_be_written_keeps_no_other_from_it(
    server: Server, lines: io.StringIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = slot_files.save_sequence

    def fail(path: Path, context: Any, seq_id: int, tokens: list[int]) -> int:
        if seq_id == 0:
            raise MemoryError("no room for a copy")
        return write(path, context, seq_id, tokens)

    assert all(map(ended, [ask(server, prompt) for prompt in ([1, 2, 3], [7, 8, 9])]))
    server.engine.stop(10)
    monkeypatch.setattr(slot_files, "save_sequence", fail)
    slot_files.save_slots(server)
    assert errors(lines) == [("slot not saved", "MemoryError('no room for a copy')")]
    assert slot_files.autosave_file(server, server.engine.slots[1]).exists()


def test_an_engine_that_cannot_go_on_says_so(
    server: Server, lines: io.StringIO, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The caches of the slots cannot be emptied either: requests at work, waiting and to come are refused."""
    client = TestClient(server.app, raise_server_exceptions=False)
    running = ask(server, [1, 2, 3], 400)
    assert wait_for(lambda: server.engine.n_idle == 1)

    def fail(*_: Any) -> int:
        raise OSError("the device is gone")

    for slot in server.engine.slots:
        monkeypatch.setattr(slot, "truncate", fail)
    refuse_bad_prompts(server, monkeypatch)
    assert ended(ask(server, [BAD, 8]))
    assert ended(running) and isinstance(running[-1], Failed) and running[-1].code == 503
    assert wait_for(lambda: not server.engine.is_running)
    said = "the engine has ended, the server must be started again"
    for call in (lambda: ask(server, [1, 2, 3]), lambda: server.engine.call(lambda: None).result(PATIENCE)):
        with pytest.raises(ApiError, match=f"^{said}: OSError: the device is gone$"):
            call()
    for method, path in (("GET", "/health"), ("POST", "/completion"), ("POST", "/slots/0?action=erase")):
        answer = client.request(method, path, json={"prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["message"][: len(said)]) == (503, said), path
    slot_files.save_slots(server)
    assert not list(tmp_path.glob("autosave-*"))
    assert [message for message, _ in errors(lines)][-2:] == [said, "slots not saved"]
    server.engine.stop(1)


def test_a_prompt_without_numbers_spoils_no_later_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a batch, the tokens before the one that brings a NaN get it, too: a slot keeps none of them."""
    data = bytearray(Path(MODELS["MODEL"]).read_bytes())
    with GGUFFile.open(MODELS["MODEL"]) as file:
        info = file.tensors["token_embd.weight"]
    at = info.offset + BAD * info.nbytes // info.shape[1]
    data[at : at + 2] = np.float16(np.nan).tobytes()
    (tmp_path / "damaged.gguf").write_bytes(data)
    monkeypatch.setitem(MODELS, "DAMAGED", str(tmp_path / "damaged.gguf"))
    server = start_server("llama-server -m DAMAGED -t 1 -c 512")
    try:
        bad = ask(server, [1, 2, 3, BAD, 4])
        assert ended(bad) and isinstance(bad[-1], Failed) and "not numbers" in bad[-1].message
        sound = ask(server, [1, 2, 3, 4])
        assert ended(sound) and isinstance(sound[-1], Finished)
    finally:
        server.engine.stop(10)


def test_a_text_without_memory_for_its_states_is_no_error_of_others() -> None:
    server = start_server("llama-server -m MODEL -t 1 -c 512 -np 2 --embeddings --pooling mean")

    def fail(states: Any) -> Any:
        raise MemoryError("no room for states")

    events: list[Event] = []
    try:
        with server.engine._wake:  # both in one batch
            server.engine.submit(EmbeddingTask([1, 2, 3], events.append, 0, pool=fail))
            server.engine.submit(EmbeddingTask([4, 5], events.append, 1, pool=lambda states: states.mean(0)))
        assert wait_for(lambda: len(events) == 2)
    finally:
        server.engine.stop(10)
    failed, embedded = sorted(events, key=lambda event: event.index)
    assert isinstance(failed, Failed) and failed.message == "embedding failed: no room for states"
    assert isinstance(embedded, Embedded) and embedded.n_tokens == 2
