"""Batches with room for fewer tokens than there are slots."""

from __future__ import annotations

import dataclasses

import pytest

from ikpy.engine.sampling import Sampler, SamplingParams
from ikpy.server.params import GenerationParams
from ikpy.server.tasks import CompletionTask, Finished
from tests.server.harness import start_server
from tests.server.live import wait_for

N_LONG = 3


@pytest.mark.parametrize("wanted", [{}, {"prompt_probs": 1}], ids=["plain", "scored"])
def test_prompts_go_on_beside_more_answers_than_a_batch_has_tokens(wanted: dict[str, int]) -> None:
    server = start_server("llama-server -m MODEL -t 1 -c 2048 -np 4 -b 2 -ub 2")
    n_vocab = server.front.model.hparams.n_vocab
    events: list[object] = []
    finished: list[str] = []

    def submit(name: str, n: int, prompt: list[int], **more: int) -> None:
        params = dataclasses.replace(GenerationParams(SamplingParams(temperature=0.0)), limit=n, stream=True, **more)

        def take(event: object) -> None:
            events.append(event)
            if len(events) == 3 * N_LONG:  # in the engine thread, while the long answers are being written
                submit("short", 1, list(range(5, 25)), **wanted)
            if isinstance(event, Finished):
                finished.append(name)

        sampler = Sampler(params.sampling, n_vocab, eos_ids=frozenset())
        server.engine.submit(CompletionTask(prompt, take, params=params, sampler=sampler))

    for i in range(N_LONG):
        submit("long", 300, [5 + i, 6])
    assert wait_for(lambda: finished)
    server.engine.stop(0)
    assert finished[0] == "short"
