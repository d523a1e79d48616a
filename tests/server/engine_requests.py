"""Requests to an engine without HTTP."""

from __future__ import annotations

from ikpy.engine.sampling import Sampler, SamplingParams
from ikpy.server.build import Server
from ikpy.server.params import GenerationParams
from ikpy.server.tasks import CompletionTask, Event, Failed, Finished
from tests.server.live import wait_for


def ask(server: Server, prompt: list[int], n: int = 4) -> list[Event]:
    """Events of a request, which go on to come."""
    events: list[Event] = []
    params = GenerationParams(SamplingParams(temperature=0.0), limit=n)
    sampler = Sampler(params.sampling, server.front.vocab.n_tokens)
    server.engine.submit(CompletionTask(prompt, events.append, params=params, sampler=sampler))
    return events


def ended(events: list[Event]) -> bool:
    return wait_for(lambda: events and isinstance(events[-1], (Finished, Failed)))
