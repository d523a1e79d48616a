"""`--no-cont-batching`: prompts wait until nothing is generated."""

from __future__ import annotations

import dataclasses

import pytest

from ikpy.engine.sampling import Sampler, SamplingParams
from ikpy.server.params import GenerationParams
from ikpy.server.tasks import CompletionTask, Finished
from tests.server.harness import start_server
from tests.server.live import wait_for

N_LONG = 30


@pytest.mark.parametrize(("option", "waits"), [("-cb", False), ("--no-cont-batching", True)])
def test_prompts_wait_for_generating_slots(option: str, waits: bool) -> None:
    server = start_server(f"llama-server -m MODEL -t 1 -c 512 -np 2 {option}")
    vocab, n_vocab = server.front.vocab, server.front.model.hparams.n_vocab
    seen: list[tuple[str, object]] = []

    def submit(name: str, n: int, prompt: list[int]) -> None:
        params = dataclasses.replace(GenerationParams(SamplingParams(temperature=0.0)), limit=n, stream=True)
        sampler = Sampler(params.sampling, n_vocab, eos_ids=frozenset())

        def take(event: object) -> None:
            seen.append((name, event))
            if name == "long" and len(seen) == 3:  # in the engine thread, while the long answer is being written
                submit("short", 2, [6, 7, 8])

        server.engine.submit(CompletionTask(prompt, take, params=params, sampler=sampler))

    submit("long", N_LONG, [vocab.bos or 1, 5])
    assert wait_for(lambda: sum(isinstance(event, Finished) for _, event in seen) == 2)
    server.engine.stop(10)
    order = [name for name, event in seen if isinstance(event, Finished)]
    assert order == (["long", "short"] if waits else ["short", "long"]), order
