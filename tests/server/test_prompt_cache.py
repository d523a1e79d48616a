"""Reuse of evaluated text: saved texts in host memory, other slots; order of the queue; size of prompt chunks."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ikpy.engine.kv_cache import KVCacheFullError
from ikpy.engine.session import SequenceState
from ikpy.models.batch import FULL
from ikpy.server import cached_text
from ikpy.server.batching import BatchPlan
from ikpy.server.build import Server
from ikpy.server.log import ServerLog
from ikpy.server.prompt_cache import PromptCache, SavedText
from ikpy.server.slot_reports import SlotState
from ikpy.server.tasks import CompletionTask, Task
from tests.server.harness import start_server
from tests.server.live import PATIENCE, listening

TINY = "llama-server -m MODEL -t 1 -tb 1 -c 1024"
STORY = "The old man looked at the sea and thought of the long years that had passed since he was young. "
OTHER = "A girl of seven came down the stairs and asked her mother whether the letter had come at last. "


def ask(client: object, prompt: str, **more: object) -> tuple[str, int]:
    """Greedy answer and the number of prompt tokens that were not evaluated."""
    body = {"prompt": prompt, "n_predict": 16, "temperature": 0, **more}
    answer = client.post("/completion", json=body).raise_for_status().json()  # type: ignore[attr-defined]
    return answer["content"], answer["tokens_evaluated"] - answer["timings"]["prompt_n"]


def test_a_text_whose_slot_was_taken_comes_back_from_memory() -> None:
    with listening(f"{TINY} -np 1") as (client, server):
        first, reused = ask(client, STORY)
        assert reused == 0
        ask(client, OTHER)
        assert len(server.engine.prompt_cache) == 1
        again, reused = ask(client, STORY)
        assert again == first
        assert reused > 20
        longer, reused = ask(client, STORY + first + " Then")
        assert reused > 20
        fresh, _ = ask(client, STORY + first + " Then", cache_prompt=False)
        assert longer == fresh
        assert server.engine.prompt_cache.n_hits == 1
    with listening(f"{TINY} -np 1 -cram 0") as (client, server):
        ask(client, STORY)
        ask(client, OTHER)
        assert ask(client, STORY) == (first, 1), "only the BOS token is common"
        assert len(server.engine.prompt_cache) == 0


def test_least_tokens_and_similarity_of_saved_texts() -> None:
    with listening(f"{TINY} -np 1 -cram-n-min 500") as (client, server):
        ask(client, STORY)
        ask(client, OTHER)
        assert len(server.engine.prompt_cache) == 0
    with listening(f"{TINY} -np 1 -crs 0") as (client, server):
        ask(client, STORY)
        ask(client, OTHER)
        assert len(server.engine.prompt_cache) == 0


def test_saving_a_text_may_push_out_the_one_that_is_loaded() -> None:
    with listening(f"{TINY} -np 1") as (client, server):
        first, _ = ask(client, STORY)
        ask(client, OTHER)
        server.engine.prompt_cache.limit = server.engine.prompt_cache.nbytes + 100
        assert ask(client, STORY)[0] == first
        ask(client, OTHER)
        again, reused = ask(client, STORY)
        assert again == first and reused > 20
        assert server.engine.prompt_cache.nbytes <= server.engine.prompt_cache.limit


def test_a_saved_text_without_room_is_evaluated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(context: Any, seq_id: int, state: Any) -> None:
        context.kv.seq_rm(seq_id, -1, -1)
        raise KVCacheFullError("full")

    with listening(f"{TINY} -np 1") as (client, server):
        server.engine.reuse._log = ServerLog("json", log := io.StringIO())
        first, _ = ask(client, STORY)
        ask(client, OTHER)
        monkeypatch.setattr(cached_text, "put_state", full)
        assert ask(client, STORY) == (first, 0)
        assert "no room for the saved text" in log.getvalue()


def test_an_unexpected_error_ends_the_running_requests_only() -> None:
    with listening(f"{TINY} -np 2") as (client, server):
        first, _ = ask(client, STORY)

        def broken(slot: object) -> None:
            raise RuntimeError("broken")

        server.engine.reuse.find_text = broken  # type: ignore[method-assign, assignment]
        answer = client.post("/completion", json={"prompt": STORY, "n_predict": 2})
        assert answer.status_code == 500 and "broken" in answer.json()["error"]["message"]
        del server.engine.reuse.find_text
        assert ask(client, STORY)[0] == first


def test_a_text_of_another_slot_is_shared_without_a_copy() -> None:
    with listening(f"{TINY} -np 2") as (client, server):
        first, _ = ask(client, STORY, id_slot=0)
        used = server.engine.context.kv.used_cells
        second, reused = ask(client, STORY, id_slot=1)
        assert second == first
        assert reused > 20
        assert server.engine.context.kv.used_cells < used + 20
        different, reused = ask(client, STORY + "But", id_slot=1)
        assert reused > 20
        assert ask(client, STORY + "But", id_slot=0, cache_prompt=False)[0] == different


def test_a_context_shift_leaves_the_other_slot_of_shared_text_alone() -> None:
    command = "llama-server -m PUPPET -t 1 -c 512 -np 2 --context-shift on"
    server = start_server(command)
    try:
        if not server.engine.context.kv.can_shift:
            pytest.skip("the model cannot shift")
    finally:
        server.engine.stop(PATIENCE)
    endless = {"ignore_eos": True, "logit_bias": [[449, 100]], "n_predict": 400}
    with listening(command) as (client, server):
        ask(client, "x" * 60, id_slot=0)
        kept = list(server.engine.slots[0].tokens)
        saved = server.engine.call(server.engine.slots[0].take_state).result()
        assert server.engine.slots[0].state_nbytes == sum(data.nbytes for data in saved.state.cells) > 0
        _, reused = ask(client, "x" * 60, id_slot=1, **endless)
        assert reused > 10
        assert server.engine.slots[1].truncated
        after = server.engine.call(server.engine.slots[0].take_state).result()
        assert server.engine.slots[0].tokens == kept
        np.testing.assert_array_equal(after.state.pos[FULL], saved.state.pos[FULL])
        for old, new in zip(saved.state.cells, after.state.cells, strict=True):
            np.testing.assert_array_equal(old, new)


def state(tokens: list[int], nbytes: int) -> SavedText:
    n = len(tokens)
    cells = (np.zeros((n, nbytes), np.uint8),)
    pos, shifts = {FULL: np.arange(n, dtype=np.int32)}, {FULL: np.zeros(n, np.int32)}
    return SavedText(SequenceState(tokens, pos, shifts, cells))


def test_the_byte_limit_holds_and_the_oldest_goes_first() -> None:
    one = state(list(range(10)), 100)
    cache = PromptCache(3 * one.nbytes + 10)
    for start in (0, 100, 200):
        cache.store(state(list(range(start, start + 10)), 100))
    assert len(cache) == 3
    n, found = cache.best([0, 1, 2, 99])
    assert n == 3 and found is not None
    cache.use(found)
    cache.store(state(list(range(300, 310)), 100))
    assert cache.nbytes <= cache.limit
    assert cache.best([0, 1])[0] == 2, "the used one stays"
    assert cache.best([100, 101])[0] == 0, "the oldest is gone"
    cache.store(state(list(range(400, 410)), 10_000))
    assert cache.nbytes <= cache.limit and cache.best([400])[0] == 0, "a text above the limit is not kept"
    assert not cache.wants([0, 1, 2]) and cache.wants([0, 5])
    assert cache.has_room_for(cache.limit) and not cache.has_room_for(cache.limit + 1)
    cache.store(state([*range(10), 77], 100))
    assert sum(s.tokens[0] == 0 for s in cache._by_use.values()) == 1, "a longer text replaces its beginning"


def test_texts_of_other_scales_of_adapters_are_others() -> None:
    cache = PromptCache(-1)
    for scale in (0.0, 1.0):
        assert cache.wants([0, 1, 2], (scale,))
        cache.store(replace(state([0, 1, 2], 10), scales=(scale,)))
    assert len(cache) == 2 and not cache.wants([0, 1], (1.0,)) and cache.wants([0, 1], (0.5,))
    n, found = cache.best([0, 1, 5], (1.0,))
    assert n == 2 and found is not None and found.scales == (1.0,)
    assert cache.best([0, 1, 5], (0.5,)) == (0, None)


def queue_of(server: Server, requests: list[int]) -> list[int]:
    """Order in which tasks of these requests get the only slot."""
    engine, order = server.engine, []
    params = server.front.settings
    from ikpy.server.read_params import read_generation

    body = {"n_predict": 1, "temperature": 0}
    tasks: list[Task] = []
    for request in requests:
        generation = read_generation(body, params, server.front.vocab, 1)
        sampler = server.front.sampler(generation)
        task = CompletionTask([1, 2, 3], lambda event: None, params=generation, sampler=sampler, request=request)
        tasks.append(task)
    engine.submit(*tasks)
    original = engine._start

    def noted(slot: object, task: Task) -> None:
        order.append(task.request)
        original(slot, task)  # type: ignore[arg-type]

    engine._start = noted  # type: ignore[method-assign]
    engine.start()
    engine.call(lambda: None).result()
    while engine.n_deferred or engine.n_idle == 0:
        engine.call(lambda: None).result()
    return order


def test_a_request_with_many_prompts_does_not_block_later_ones() -> None:
    from ikpy.cli.server import make_server
    from tests.server.harness import MODELS, ServerLog, Session, loaded, parse

    params = parse(["-m", MODELS["PUPPET"], "-t", "1", "-c", "256", "-np", "1", "--log-disable"], "server")
    base = loaded(MODELS["PUPPET"])
    server = make_server(Session(params, base.model, base.vocab, base.path, base.timings), ServerLog())
    try:
        order = queue_of(server, [7, 7, 7, 7, 8, 9])
    finally:
        server.engine.stop(PATIENCE)
    assert sorted(order) == [7, 7, 7, 7, 8, 9]
    assert order[:3] == [7, 8, 9], order


def test_prompt_chunks_follow_the_measured_speed() -> None:
    server = start_server(f"{TINY} -np 2 -ub 256 --max-token-delay 100")
    try:
        prompts = server.engine.prompts
        prompts.token_seconds = 0.0
        assert prompts.chunk() == 256, "nothing measured yet"
        for seconds, chunk in ((1e-5, 256), (1e-3, 64), (2e-3, 32), (1.0, 16)):
            prompts.token_seconds = seconds
            assert prompts.chunk() == chunk, seconds
    finally:
        server.engine.stop(PATIENCE)


def test_the_delay_between_tokens_is_reported() -> None:
    with listening(f"{TINY} -np 1 --metrics") as (client, _):
        ask(client, STORY)
        text = client.get("/metrics").text
    values = [float(line.split()[1]) for line in text.splitlines() if line.startswith("ikpy:inter_token_delay")]
    assert len(values) == 3 and 0 < values[0] <= values[1] <= values[2] < 60


@pytest.mark.parametrize("more", [{"cache_prompt": False}, {"echo": True, "logprobs": 1}])
def test_a_request_that_goes_on_from_nothing_loses_no_text(more: dict[str, Any]) -> None:
    with listening(f"{TINY} -np 1") as (client, server):
        first, _ = ask(client, STORY)
        client.post("/v1/completions", json={"prompt": OTHER, "max_tokens": 4, **more}).raise_for_status()
        assert len(server.engine.prompt_cache) == 1
        again, reused = ask(client, STORY)
        assert again == first
        assert reused > 20


def test_embedding_texts_keep_what_a_slot_held_and_are_not_kept_themselves() -> None:
    with listening(f"{TINY} -np 1 --embeddings --pooling mean") as (client, server):
        first, _ = ask(client, STORY)
        for text in (OTHER, OTHER + "Yes.", "Not at all: " + OTHER):
            client.post("/v1/embeddings", json={"input": text}).raise_for_status()
        assert len(server.engine.prompt_cache) == 1, "the story alone is worth saving"
        assert server.engine.context.kv.used_cells == 0
        again, reused = ask(client, STORY)
        assert again == first
        assert reused > 20


def test_every_waiting_prompt_gets_on_with_a_small_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    server = start_server("llama-server -m PUPPET -t 1 -c 2048 -np 4 -ub 64")
    server.engine.stop(PATIENCE)
    prompts = server.engine.prompts
    for slot, n in zip(server.engine.slots, (30, 40, 50, 60), strict=True):
        slot.state, slot.prompt = SlotState.PROMPT, [slot.id] * n
    monkeypatch.setattr(prompts._context, "n_batch", 2)
    plan = BatchPlan()
    prompts.add_to(plan)
    assert [(slot.id, n) for slot, _, n in plan.parts] == [(0, 1), (1, 1)], "the shortest come first"
