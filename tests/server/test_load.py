"""A server under load for a few seconds: no errors, the answers of single requests, steady memory.

The long run is `python -m benchmarks.server_load` (64 clients, 5 minutes).
"""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest
from starlette.testclient import TestClient

from benchmarks.server_load import run
from tests.server.harness import MODELS, running

WARM_UP, ROUNDS = 16, 20
MOST_GROWTH = 20_000
"""Bytes per round of 11 requests. Words and times in bounded caches that are not full yet are 4500; keeping the tasks
of every request would be 240,000."""


def test_load() -> None:
    report = run(MODELS["MODEL"], slots=4, clients=16, seconds=10, threads=1, cache_ram=2, malformed=0.1)
    print(*report.lines(), sep="\n")
    assert report.failures == []
    assert report.different == []
    assert report.completed > 10 and report.cancelled > 1 and report.malformed > 0, report.lines()
    # Plans of new batch sizes and the allocator still warm up in so short a run; 5 minutes end within 5 %.
    assert report.memory_growth < 0.15, report.lines()[-1]


def test_requests_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of all kinds, each unlike the others: neither objects of Python nor arrays pile up."""
    monkeypatch.setattr("ikpy.engine.grammars.grammar.MOST_COMPILED", WARM_UP)
    with running("llama-server -m MODEL -t 1 -c 1024 -np 2 --cache-ram 0 --embeddings --pooling mean") as client:
        tracemalloc.start()
        try:
            sizes = [traced_bytes(client, range(WARM_UP))]
            sizes.append(traced_bytes(client, range(1000, 1000 + ROUNDS)))
        finally:
            tracemalloc.stop()
    growth = (sizes[1] - sizes[0]) / ROUNDS
    print(f"{growth:.0f} bytes more per round, {sizes[0]} before")
    assert growth < MOST_GROWTH


def traced_bytes(client: TestClient, numbers: range) -> int:
    """Bytes in use behind rounds of requests."""
    for number in numbers:
        one_of_each(client, number)
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def one_of_each(client: TestClient, number: int) -> None:
    """A request of each kind that is unlike those of other numbers; digits are words that soon are all known."""
    word = f"x {random.Random(number).randrange(10**8)}"
    schema = {"type": "object", "properties": {word: {"type": "boolean"}}, "required": [word]}
    chat = {"messages": [{"role": "user", "content": f"Hello {word}"}], "max_tokens": 4}
    text = {"prompt": f"{word} looked at", "n_predict": 4, "max_tokens": 4}
    for path, body in (
        ("/v1/chat/completions", chat | {"logprobs": True, "top_logprobs": 20}),
        ("/v1/chat/completions", chat | {"stream": True, "n": 2}),
        (
            "/v1/chat/completions",
            chat | {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
        ),
        ("/v1/responses", {"input": word, "max_output_tokens": 3, "stream": True}),
        ("/v1/messages", chat),
        ("/v1/completions", text | {"echo": True, "logprobs": 5, "prompt": [f"{word} looked at", word * 20]}),
        ("/completion", text | {"n_probs": 5, "logit_bias": [[word, -1]]}),
        ("/completion", text | {"grammar": f'root ::= "{word}"'}),
        ("/completion", text | {"banned_strings": [word], "banned_regex": ["[0-9]x"]}),
        ("/v1/embeddings", {"input": [word, f"The {word}"]}),
    ):
        answer = client.post(path, json=body)
        assert answer.status_code == 200, f"{path}: {answer.text}"
    assert client.post("/completion", json=text | {"n_probs": "x", "regex": "(x"}).status_code == 400
