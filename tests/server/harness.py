"""Servers in the test process, and recorded requests played against them."""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

import ikpy
from ikpy.cli.parser import parse
from ikpy.cli.server import make_server
from ikpy.cli.session import Session, load
from ikpy.engine.sampling import Sampler, SamplingParams
from ikpy.server.build import Server
from ikpy.server.log import ServerLog
from ikpy.server.params import GenerationParams
from ikpy.server.scheduler import Engine
from ikpy.server.tasks import CompletionTask, Finished

DATA = Path(__file__).parents[1] / "data"
MODELS = {"MODEL": str(ikpy.default_model_path()), "PUPPET": str(DATA / "models" / "puppet.gguf")}


@functools.cache
def load_captures() -> list[dict[str, Any]]:
    """Recorded requests and answers, in the order they were made."""
    with gzip.open(DATA / "server" / "captures.json.gz", "rt", encoding="utf-8") as file:
        return json.load(file)


@functools.cache
def loaded(path: str) -> Session:
    """A model, loaded once for all servers of a test run."""
    return load(parse(["-m", path, "--log-disable"], "server"))


def start_server(command: str, save_path: Path | None = None) -> Server:
    """A running server with the options of a recorded command line; its model is called MODEL or PUPPET."""
    arguments = shlex.split(command)[1:]
    name = arguments[arguments.index("-m") + 1]
    arguments[arguments.index("-m") + 1] = MODELS[name]
    if "--slot-save-path" in arguments:
        arguments[arguments.index("--slot-save-path") + 1] = str(save_path)
    params = parse([*arguments, "--log-disable"], "server")
    base = loaded(MODELS[name])
    session = Session(params, base.model, base.vocab, base.path, base.timings)
    params.model.alias = params.model.alias or name
    server = make_server(session, ServerLog())
    server.front.settings.model_path = name
    server.engine.start()
    return server


@contextlib.contextmanager
def running(command: str, save_path: Path | None = None) -> Iterator[TestClient]:
    """Client of a server that ends with the block."""
    server = start_server(command, save_path)
    try:
        yield TestClient(server.app, raise_server_exceptions=False)
    finally:
        server.engine.stop(10)


def play(client: TestClient, capture: dict[str, Any]) -> dict[str, Any]:
    """Sends a recorded request; the answer in the form of a capture."""
    kwargs: dict[str, Any] = {"headers": capture.get("request_headers") or {}}
    if "request_raw" in capture:
        kwargs["content"] = capture["request_raw"].encode()
    elif "request_raw_hex" in capture:
        kwargs["content"] = bytes.fromhex(capture["request_raw_hex"])
    elif capture.get("request") is not None:
        kwargs["content"] = json.dumps(capture["request"]).encode()
        kwargs["headers"] = {"Content-Type": "application/json"} | kwargs["headers"]
    response = client.request(capture["method"], capture["path"], **kwargs)
    got: dict[str, Any] = {"status": response.status_code, "content_type": response.headers.get("content-type")}
    if (got["content_type"] or "").startswith("text/event-stream"):
        got["events"] = read_events(response.text)
    elif (got["content_type"] or "").startswith("application/json") and response.text:
        got["response"] = response.json()
    else:
        got["response_text"] = response.text
    return got


def greedy_answer(
    engine: Engine, prompt: list[int], n_vocab: int, eos_ids: frozenset[int] = frozenset(), **more: Any
) -> Finished:
    """What a started engine answers a prompt of token ids, without HTTP. ``more``: parameters of the generation."""
    done: list[Any] = []
    params = GenerationParams(SamplingParams(temperature=0.0), **more)
    sampler = Sampler(params.sampling, n_vocab, eos_ids=eos_ids)
    engine.submit(CompletionTask(prompt, done.append, params=params, sampler=sampler))
    while not done:
        engine.call(lambda: None).result()
    assert isinstance(done[-1], Finished), done[-1]
    return done[-1]


def read_events(text: str) -> list[dict[str, Any]]:
    """Server-sent events of a stream."""
    events = []
    assert text.endswith("\n\n"), f"stream does not end with an empty line: {text[-40:]!r}"
    for block in text[:-2].split("\n\n"):
        event: dict[str, Any] = {}
        for line in block.split("\n"):
            field, _, value = line.partition(": ")
            event[field] = value if field == "event" or value == "[DONE]" else json.loads(value)
        events.append(event)
    return events
