"""Grammars of requests beside other work: compiled once, refused by their limits, masks that hold up nobody else."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from ikpy.engine.grammars import grammar as grammars
from ikpy.engine.grammars.grammar import TextGrammar
from ikpy.server.build import Server
from ikpy.server.front import MOST_MAKERS
from tests.cpu.vocab.grammar_bombs import BOMBS
from tests.server.live import PATIENCE, listening, wait_for

TINY = "llama-server -m MODEL -t 1 -tb 1 -c 2048"
PROMPT = {"prompt": "The old man looked at", "temperature": 0, "n_predict": 24}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "days": {"enum": [1, 2]}}, "required": ["name"]}
FREE = {"prompt": "It was the best", "temperature": 0, "n_predict": 40, "ignore_eos": True}


def ask(client: httpx.Client, **body: Any) -> dict[str, Any]:
    return client.post("/completion", json=PROMPT | body).raise_for_status().json()


class Masks:
    """Masks that wait where a test wants it; those of a grammar's start are computed as ever."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go = threading.Event()
        self.may_go.set()
        self.waits: Callable[[], object] = lambda: self.may_go.wait(PATIENCE)
        self.n_starts = 0
        self.n_others = 0
        self.n_waiting = 0
        compute, prepare = TextGrammar._mask, TextGrammar.prepare
        preparing = threading.local()

        def counted(grammar: TextGrammar) -> None:
            preparing.now = True
            prepare(grammar)
            preparing.now = False

        def slow(grammar: TextGrammar) -> Any:
            if getattr(preparing, "now", False):
                self.n_starts += 1
            else:
                self.n_others += 1
                self.n_waiting += 1
                self.waits()
                self.n_waiting -= 1
            return compute(grammar)

        monkeypatch.setattr(TextGrammar, "prepare", counted)
        monkeypatch.setattr(TextGrammar, "_mask", slow)


@pytest.fixture(name="masks")
def watched_masks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Masks]:
    masks = Masks(monkeypatch)
    yield masks
    masks.may_go.set()


@pytest.fixture(scope="module", name="served")
def start_server() -> Iterator[tuple[httpx.Client, Server]]:
    with listening(f"{TINY} -np 2") as served:
        yield served


def test_a_schema_is_compiled_once_for_requests_at_the_same_time(
    served: tuple[httpx.Client, Server], masks: Masks, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = SCHEMA | {"title": "compiled once"}
    made: list[str] = []
    translate = grammars.schema_to_gbnf
    begun = threading.Event()

    def slow(wanted: Any) -> str:
        made.append("schema")
        assert begun.wait(PATIENCE)
        return translate(wanted)

    monkeypatch.setattr(grammars, "schema_to_gbnf", slow)
    client, _ = served
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask, client, json_schema=schema, n_predict=1) for _ in range(4)]
        assert wait_for(lambda: bool(made))
        assert ask(client, n_predict=2)["tokens_predicted"] == 2, "requests without grammars go on meanwhile"
        begun.set()
        texts = {answer.result()["content"] for answer in answers}
    assert ask(client, json_schema=schema, n_predict=1)["content"] in texts and len(texts) == 1
    assert (made, masks.n_starts) == (["schema"], 1), "the mask of the start comes with the grammar"


def test_grammars_of_clients_that_have_gone_are_not_compiled(
    served: tuple[httpx.Client, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    may_go = threading.Event()
    translate = grammars.schema_to_gbnf

    def slow(wanted: Any) -> str:
        begun.append(wanted["title"])
        assert may_go.wait(PATIENCE)
        return translate(wanted)

    monkeypatch.setattr(grammars, "schema_to_gbnf", slow)
    client, server = served
    submit, jobs = server.front._makers.submit, []

    def noted(*args: Any) -> Any:
        jobs.append(submit(*args))
        return jobs[-1]

    monkeypatch.setattr(server.front._makers, "submit", noted)
    leaving = httpx.Timeout(PATIENCE, read=1.0)

    def leave(i: int) -> None:
        body = PROMPT | {"json_schema": SCHEMA | {"title": f"gone {i}"}, "n_predict": 1}
        with pytest.raises(httpx.ReadTimeout):
            client.post("/completion", json=body, timeout=leaving)

    with ThreadPoolExecutor(MOST_MAKERS + 4) as pool:
        gone = [pool.submit(leave, i) for i in range(MOST_MAKERS)]
        assert wait_for(lambda: len(begun) == MOST_MAKERS)
        gone += [pool.submit(leave, MOST_MAKERS + i) for i in range(4)]
        for answer in gone:
            answer.result()
        assert wait_for(lambda: sum(job.cancelled() for job in jobs) == 4), "no thread had taken them"
        may_go.set()
    assert ask(client, json_schema=SCHEMA | {"title": "stays"}, n_predict=1)["tokens_predicted"] == 1
    assert set(begun) == {f"gone {i}" for i in range(MOST_MAKERS)} | {"stays"}


def test_a_mask_that_takes_long_holds_up_no_other_slot(served: tuple[httpx.Client, Server], masks: Masks) -> None:
    client, server = served
    wanted = ask(client, json_schema=SCHEMA)["content"], ask(client, **FREE)["content"]
    assert masks.n_others > 0, "the answer needs masks behind its beginning"
    masks.may_go.clear()
    with ThreadPoolExecutor(1) as pool:
        constrained = pool.submit(ask, client, json_schema=SCHEMA)
        assert wait_for(lambda: masks.n_waiting > 0 and any(slot.is_held for slot in server.engine.slots))
        assert ask(client, **FREE)["content"] == wanted[1], "40 tokens while the mask of the other slot is computed"
        assert not constrained.done() and masks.n_waiting > 0
        masks.may_go.set()
        assert constrained.result()["content"] == wanted[0]


def test_masks_are_computed_while_the_model_works(
    served: tuple[httpx.Client, Server], masks: Masks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mask of the next token may only end when the model has begun to evaluate another token, which cannot wait for
    it."""
    client, server = served
    decode, accept = server.engine.context.decode, TextGrammar.accept
    n_decoded, n_before = [0], [0]

    def counted(batch: Any, *, copy: bool) -> Any:
        n_decoded[0] += 1
        return decode(batch, copy=copy)

    def noted(grammar: TextGrammar, token: int) -> None:
        n_before[0] = n_decoded[0]
        accept(grammar, token)

    def overlapped() -> None:
        assert wait_for(lambda: n_decoded[0] > n_before[0]), "the model waits for the mask"

    monkeypatch.setattr(server.engine.context, "decode", counted)
    monkeypatch.setattr(TextGrammar, "accept", noted)
    wanted = ask(client, json_schema=SCHEMA | {"title": "ahead"})["content"]
    masks.n_others = 0
    masks.waits = overlapped
    with ThreadPoolExecutor(1) as pool:
        # Another answer keeps the model busy: a mask that was not foreseen is not waited for either.
        other = pool.submit(ask, client, **FREE | {"n_predict": 900})
        assert wait_for(lambda: server.engine.n_idle == 1)
        assert ask(client, json_schema=SCHEMA | {"title": "ahead"})["content"] == wanted
        assert masks.n_others > 0
        other.result()


def test_a_request_whose_mask_takes_long_can_be_given_up(served: tuple[httpx.Client, Server], masks: Masks) -> None:
    client, server = served
    ask(client, json_schema=SCHEMA)
    masks.may_go.clear()
    with pytest.raises(httpx.ReadTimeout):
        client.post("/completion", json=PROMPT | {"json_schema": SCHEMA}, timeout=httpx.Timeout(PATIENCE, read=0.5))
    assert wait_for(lambda: server.engine.n_idle == 2)
    assert masks.n_waiting > 0, "the slot is free before the mask is there"
    assert ask(client, id_slot=0)["content"] == ask(client, id_slot=1)["content"]


@pytest.mark.parametrize("more", [{}, {"temperature": 1.3, "seed": 4, "n_probs": 3}, {"cache_prompt": False}])
def test_answers_do_not_depend_on_when_masks_come(
    served: tuple[httpx.Client, Server], masks: Masks, more: dict[str, Any]
) -> None:
    client, _ = served
    body = {"regex": "([A-Z][a-z]{2,6} ){3,9}[0-9]{2,4}", "n_predict": 40, **more}
    at_once = ask(client, **body)
    pause = threading.Event()
    masks.waits = lambda: pause.wait(0.01)
    late = ask(client, **body)
    assert masks.n_others > 0
    for field in ("content", "completion_probabilities", "tokens_predicted", "stopped_eos"):
        assert late.get(field) == at_once.get(field), field


def test_an_orderly_end_waits_for_masks(masks: Masks) -> None:
    with listening(f"{TINY} -np 1") as (client, server), ThreadPoolExecutor(1) as pool:
        wanted = ask(client, json_schema=SCHEMA)["content"]
        masks.may_go.clear()
        answer = pool.submit(ask, client, json_schema=SCHEMA)
        assert wait_for(lambda: server.engine.slots[0].is_held)
        stopping = threading.Thread(target=server.engine.stop, args=(PATIENCE,))
        stopping.start()
        assert wait_for(lambda: server.engine._stopping)
        masks.may_go.set()
        assert answer.result()["content"] == wanted
        stopping.join(PATIENCE)
        assert not stopping.is_alive()


REFUSED = ("deep groups", "a long name", "doubled allOf", "doubled properties", "deep expression", "intersections")


@pytest.mark.parametrize("name", REFUSED)
def test_grammars_above_the_limits_are_errors_of_their_request(served: tuple[httpx.Client, Server], name: str) -> None:
    client, _ = served
    field, text, wanted = BOMBS[name]
    bodies: list[tuple[str, dict[str, Any]]] = [("/completion", {"prompt": "x", field: text})]
    if field == "json_schema":
        schema = json.loads(text)
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        chat = {"messages": [{"role": "user", "content": "x"}], "response_format": form}
        bodies = [("/completion", {"prompt": "x", field: schema}), ("/v1/chat/completions", chat)]
    for path, body in bodies:
        answer = client.post(path, json=body | {"max_tokens": 2})
        assert answer.status_code == 400, f"{path}: {answer.text[:300]}"
        assert str(wanted) in answer.json()["error"]["message"]
        assert len(answer.text) < 1000
    assert ask(client, n_predict=1)["tokens_predicted"] == 1


def test_a_grammar_that_meets_its_limit_while_it_writes_ends_its_answer_only(
    served: tuple[httpx.Client, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = served
    monkeypatch.setattr(grammars, "MOST_ROW_ITEMS", 40)
    rules = "\n".join(f'r{i} ::= [a-z ]* "{i}"' for i in range(30))
    source = f"root ::= [ ] [a-z] ({' | '.join(f'r{i}' for i in range(30))}) root?\n{rules}"
    answer = client.post("/completion", json=PROMPT | {"grammar": source})
    assert answer.status_code == 400
    assert "max is 40" in answer.json()["error"]["message"]
    assert ask(client, n_predict=1)["tokens_predicted"] == 1
