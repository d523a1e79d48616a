"""Behaviour over a real connection: parallel requests, disconnects, queue limit, shutdown."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from ikpy.server.build import Server
from ikpy.server.routes_slots import BUSY_WAIT
from ikpy.server.tasks import Task
from tests.server.live import PATIENCE, listening, wait_for

TINY = "llama-server -m MODEL -t 1 -tb 1 -c 2048"
PUPPET = "llama-server -m PUPPET -t 1 -tb 1 -c 2048"
PROMPTS = ["The old man looked at", "It was the best", "A young girl", "On the sea", "One", "Two", "He", "She"]
SHORT = httpx.Timeout(PATIENCE, read=0.3)
"""For requests whose answer does not come."""
ENDLESS = {"prompt": "x", "n_predict": 10**9, "temperature": 0, "logit_bias": [[449, 100]]}


def complete(client: httpx.Client, prompt: str, **more: object) -> dict:
    body = {"prompt": prompt, "n_predict": 24, "temperature": 0, **more}
    return client.post("/completion", json=body).raise_for_status().json()


def test_parallel_answers_are_those_of_single_requests() -> None:
    with listening(f"{TINY} -np 1") as (client, _):
        alone = [complete(client, prompt)["content"] for prompt in PROMPTS]
    with listening(f"{TINY} -np 4") as (client, server):
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            together = list(pool.map(lambda prompt: complete(client, prompt)["content"], PROMPTS))
        assert {slot.id for slot in server.engine.slots if slot.last_task} == {0, 1, 2, 3}
    assert together == alone


def decoded_at_cancel(server: Server) -> list[int]:
    """Filled with the number of tokens the first slot has decoded when a request is first given up."""
    found: list[int] = []
    cancel = server.engine.cancel

    def noted(*tasks: Task) -> None:
        cancel(*tasks)
        found.append(server.engine.slots[0].n_decoded)

    server.engine.cancel = noted  # type: ignore[method-assign]
    return found


def test_closing_a_stream_frees_the_slot_within_one_batch() -> None:
    with listening(f"{PUPPET} -np 1") as (client, server):
        with client.stream("POST", "/completion", json=ENDLESS | {"stream": True}) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            assert server.engine.n_idle == 0
            decoded = decoded_at_cancel(server)
        assert wait_for(lambda: server.engine.n_idle == 1)
        assert server.engine.slots[0].n_decoded <= decoded[0] + 1
        assert complete(client, "x", logit_bias=[[259, 100]])["content"] == "Hello world."


def test_a_client_that_stops_waiting_frees_the_slot() -> None:
    with listening(f"{PUPPET} -np 1") as (client, server):
        with pytest.raises(httpx.ReadTimeout):
            client.post("/completion", json=ENDLESS, timeout=SHORT)
        assert wait_for(lambda: server.engine.n_idle == 1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_waiting_request_can_be_given_up(stream: bool) -> None:
    with (
        listening(f"{PUPPET} -np 1") as (client, server),
        client.stream("POST", "/completion", json=ENDLESS | {"stream": True}) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        with pytest.raises(httpx.ReadTimeout):
            client.post("/completion", json=ENDLESS | {"stream": stream}, timeout=SHORT)
        assert wait_for(lambda: server.engine.n_deferred == 0)
        assert server.engine.n_idle == 0


def test_an_action_on_a_busy_slot_can_be_given_up(tmp_path: Path) -> None:
    """It must not happen later, when nobody expects it any more."""
    with listening(f"{PUPPET} -np 1") as (client, server):
        server.front.settings.slot_save_path = str(tmp_path)
        with client.stream("POST", "/completion", json=ENDLESS | {"stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            with pytest.raises(httpx.ReadTimeout):
                client.post("/slots/0?action=erase", timeout=SHORT)
        assert wait_for(lambda: server.engine.n_idle == 1)
        time.sleep(5 * BUSY_WAIT)
        assert server.engine.slots[0].tokens


def test_a_full_queue_answers_503_with_retry_after() -> None:
    with listening(f"{PUPPET} -np 1", queue_limit=1) as (client, server):
        with client.stream("POST", "/completion", json=ENDLESS | {"stream": True}) as first:
            lines = first.iter_lines()
            next(lines)
            waiting = threading.Thread(target=lambda: complete(client, "x", n_predict=1))
            waiting.start()
            assert wait_for(lambda: server.engine.n_deferred == 1)
            refused = client.post("/completion", json=ENDLESS)
            assert refused.status_code == 503
            assert refused.headers["retry-after"].isdigit()
            assert refused.json()["error"]["type"] == "unavailable_error"
        waiting.join(PATIENCE)
        assert not waiting.is_alive(), "the waiting request was not answered when the slot was free"


def test_health_and_slots_answer_while_all_slots_are_busy() -> None:
    with (
        listening(f"{PUPPET} -np 1") as (client, _),
        client.stream("POST", "/completion", json=ENDLESS | {"stream": True}) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        assert client.get("/health").json()["status"] == "no slot available"
        assert client.get("/health?fail_on_no_slot=1").status_code == 503
        slot = client.get("/slots").json()[0]
        assert slot["state"] == 1
        assert slot["next_token"]["n_decoded"] > 0


def test_a_long_prompt_delays_other_streams_by_one_micro_batch() -> None:
    """A prompt of 1000 tokens is evaluated in pieces of 32 between the tokens of the running answer."""
    with listening(f"{TINY} -np 2 -ub 32 -b 2048") as (client, server):
        steps: list[int] = []
        decode = server.engine.context.decode
        waiting = threading.Event()

        def counted(batch: object, *, copy: bool) -> object:
            if len(steps) == 3:  # a few tokens are generated: the long prompt comes now
                assert waiting.wait(PATIENCE)
            steps.append(len(batch))  # type: ignore[arg-type]
            return decode(batch, copy=copy)  # type: ignore[arg-type]

        server.engine.context.decode = counted  # type: ignore[method-assign, assignment]
        body = {"prompt": "Once", "n_predict": 200, "temperature": 0, "stream": True, "ignore_eos": True}
        with ThreadPoolExecutor(1) as pool, client.stream("POST", "/completion", json=body) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            answer = pool.submit(complete, client, "word " * 950, n_predict=1)
            assert wait_for(lambda: server.engine.n_deferred == 1 or server.engine.n_idle == 0)
            waiting.set()
            assert answer.result()["tokens_evaluated"] > 900
            assert len(steps) > 950 / 32
            assert max(steps) <= 32, f"largest batch while generating: {max(steps)} tokens"
            assert json.loads(list(lines)[-1][6:])["tokens_predicted"] == 200


def test_shutdown_lets_running_requests_end_and_refuses_new_ones() -> None:
    with listening(f"{PUPPET} -np 1") as (client, server):
        body = ENDLESS | {"n_predict": 300, "stream": True}
        with client.stream("POST", "/completion", json=body) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            stopping = threading.Thread(target=server.engine.stop, args=(PATIENCE,))
            stopping.start()
            assert wait_for(lambda: server.engine._stopping)
            assert client.post("/completion", json=ENDLESS).status_code == 503
            assert json.loads(list(lines)[-1][6:])["tokens_predicted"] == 300
        stopping.join(PATIENCE)
        assert not stopping.is_alive()
