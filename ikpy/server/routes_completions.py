"""OpenAI route /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from ikpy.server import probabilities
from ikpy.server.chat.request import model_of
from ikpy.server.errors import bad_request, error_body
from ikpy.server.front import Front, check_number, check_repeated, random_id
from ikpy.server.generation import Generation
from ikpy.server.http import (
    DONE,
    EventStream,
    aside,
    data_event,
    data_events,
    encoded_size,
    made_event,
    made_response,
    read_body,
)
from ikpy.server.params import GenerationParams
from ikpy.server.prompts import Prompt, is_batch, is_token, read_prompts
from ikpy.server.read_params import flag, integer
from ikpy.server.routes_openai import stop_reason, truncation, usage
from ikpy.server.routes_status import front_of
from ikpy.server.settings import BUILD
from ikpy.server.tasks import Failed, Finished, Piece, Progress
from ikpy.server.token_lists import TokenLists, prompt_pieces

if TYPE_CHECKING:
    from ikpy.vocab import Vocab

MOST_ECHOED_LOGPROBS = 100
"""Bound of ``logprobs`` with ``echo``: so many are kept for every token of a prompt."""


@dataclass(frozen=True)
class Echo:
    """A prompt as answers repeat it: its text, and tokens with the bytes that each adds to the text."""

    text: str
    tokens: Sequence[int]
    pieces: Sequence[bytes]

    @classmethod
    def of(cls, prompt: Prompt, vocab: Vocab) -> Echo:
        """The text as it was given, or that of the tokens."""
        pieces = prompt_pieces(vocab, prompt.tokens)
        text = prompt.text if prompt.text is not None else b"".join(pieces).decode("utf-8", "replace")
        return cls(text, prompt.tokens, pieces)


def read_echoes(prompts: Sequence[Prompt], params: GenerationParams, vocab: Vocab) -> list[Echo]:
    """The prompts as answers repeat them. Raises ApiError 400 if that is too much."""
    check_number(len(prompts) * params.n)
    if any(prompt.media for prompt in prompts):
        raise bad_request("echo is not supported for prompts with pictures or sounds")
    echoes = [Echo.of(prompt, vocab) for prompt in prompts]
    check_repeated(params.n * encoded_size(echo.text for echo in echoes))
    return echoes


class Completions:
    """Answers to one /v1/completions request. ``echoes``: the prompts, if answers begin with them; ``n_top`` most
    probable tokens are shown, None for no log probabilities."""

    def __init__(
        self, front: Front, params: GenerationParams, model: str, n_top: int | None, echoes: Sequence[Echo] = ()
    ) -> None:
        self.front = front
        self.params = params
        self.model = model
        self.id = random_id("chatcmpl-")
        self.created = int(time.time())
        self._n_top = n_top
        self._echoes = echoes
        self._lists: dict[int, TokenLists] = {}
        """Of streamed answers, by index: where their texts have got to."""

    def logprobs(self, index: int, found: Sequence[Any]) -> Any:
        """Object ``logprobs`` of the next tokens of an answer, or None: the lists of OpenAI and llama.cpp's array."""
        if self._n_top is None:
            return None
        shown = probabilities.openai(self.front.vocab, found, post_sampling=self.params.post_sampling_probs)
        if self.params.post_sampling_probs:
            return shown
        lists = self._lists.setdefault(index, self.token_lists())
        return shown | lists.add(found)

    def n_values(self, event: Piece | Finished) -> int:
        """About how many values the tokens of an event have in an answer."""
        if self._n_top is None:
            return 0
        n_prompt = event.n_prompt if self._echoes else 0
        return (n_prompt + len(event.probabilities)) * (1 + self._n_top) * probabilities.N_ENTRY

    def token_lists(self) -> TokenLists:
        """Lists of an answer without tokens."""
        return TokenLists(self.front.vocab, self._n_top or 0, special=self.front.settings.special)

    def choice(self, index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
        """One element of ``choices``."""
        return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}

    def whole_choice(self, event: Finished, first: Finished) -> dict[str, Any]:
        """The choice of an answer that has ended; ``first``: the first answer to the same prompt, which scored it."""
        if not self._echoes:
            return self.choice(
                event.index, event.text, self.logprobs(event.index, event.probabilities), stop_reason(event)
            )
        echo = self._echoes[event.index // self.params.n]
        logprobs = None
        if self._n_top is not None:
            lists = self.token_lists()
            before = lists.add_prompt(echo.tokens, echo.pieces, first.prompt_probabilities)
            after = lists.add(event.probabilities)
            logprobs = {name: before[name] + after[name] for name in before}
        return self.choice(event.index, echo.text + event.text, logprobs, stop_reason(event))

    def head(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The fields every object begins with."""
        head = {"choices": choices, "created": self.created, "model": self.model, "system_fingerprint": BUILD}
        return head | {"object": "text_completion"}

    def answer(self, events: Sequence[Finished]) -> dict[str, Any]:
        """The whole answer: a choice for every answer to every prompt, in order."""
        n = self.params.n
        choices = [self.whole_choice(event, events[i - i % n]) for i, event in enumerate(events)]
        tail = {"usage": usage(events, n), "id": self.id, "timings": events[-1].timings.json()}
        return self.head(choices) | tail | truncation(events)

    def chunk(self, index: int, text: str, logprobs: Any = None) -> dict[str, Any]:
        """New text of an answer."""
        return self.head([self.choice(index, text, logprobs, None)]) | {"id": self.id}

    def chunk_of(self, event: Piece) -> dict[str, Any]:
        """The chunk of a piece with log probabilities or timings."""
        logprobs = self.logprobs(event.index, event.probabilities) if event.probabilities else None
        more = {} if event.timings is None else {"timings": event.timings.json()}
        return self.chunk(event.index, event.text, logprobs) | more

    async def stream(self, generation: Generation) -> AsyncIterator[str]:
        """Events of a stream."""
        plain: dict[int, Callable[[str], str]] = {}
        """Events of answers with nothing but text."""
        for index in range(len(generation.tasks) if self._echoes else 0):
            yield data_event(self.chunk(index, self._echoes[index // self.params.n].text))
        async for event in generation.events():
            if isinstance(event, Failed):
                yield data_event(error_body(event.code, event.message))
            elif isinstance(event, Piece) and event.timings is None and not event.probabilities:
                if event.index not in plain:
                    plain[event.index] = data_events(partial(self.chunk, event.index))
                yield plain[event.index](event.text)
            elif isinstance(event, Piece):
                yield await made_event(self.n_values(event), partial(self.chunk_of, event))
            elif isinstance(event, Progress):
                yield data_event(self.chunk(event.index, "") | {"prompt_progress": event.json()})
            elif isinstance(event, Finished):
                choice = self.choice(event.index, "", None, stop_reason(event))
                tail = {"usage": usage([event], 1), "id": self.id, "timings": event.timings.json()}
                yield data_event(self.head([choice]) | tail | truncation([event]))
        yield DONE


def read_logprobs(body: Mapping[str, Any], params: GenerationParams) -> tuple[GenerationParams, int | None]:
    """Parameters with the number of reported probabilities, and that number; None: no log probabilities are shown.

    0 shows those of the tokens themselves if the prompt is echoed, and nothing else. Raises ApiError 400.
    """
    n = integer(body, "logprobs", params.n_probs)
    if not flag(body, "echo"):
        return replace(params, n_probs=n), n if n > 0 else None
    if not is_token(body.get("logprobs")) and n <= 0:
        return replace(params, n_probs=0), None
    if not 0 <= n <= MOST_ECHOED_LOGPROBS:
        raise bad_request(f"logprobs must be between 0 and {MOST_ECHOED_LOGPROBS} with echo, not {n}")
    if params.stream:
        raise bad_request("echo with logprobs is not streamed: leave out one of echo, logprobs and stream")
    if params.post_sampling_probs:
        raise bad_request("prompts have no probabilities after sampling: leave out post_sampling_probs or echo")
    return replace(params, n_probs=max(n, 1), prompt_probs=n), n


async def completions(request: Request) -> Response:
    """POST /v1/completions."""
    front = front_of(request)
    body = await read_body(request, front.settings)
    if "prompt" not in body:
        raise bad_request('"prompt" is required')
    for name, harmless in (("best_of", integer(body, "n", 1)), ("suffix", "")):
        if body.get(name) not in (None, harmless):
            raise bad_request(f"Unsupported param: {name}")
    params = await aside(request, front.read_params, body)
    params, n_top = read_logprobs(body, params)
    if await aside(request, is_batch, body["prompt"]):
        check_number(len(body["prompt"]) * params.n)  # before all of them are tokenized
    prompts = await aside(request, read_prompts, body["prompt"], front.vocab)
    prompts = [await front.seen(prompt, request) for prompt in prompts]
    echoes = await aside(request, read_echoes, prompts, params, front.vocab) if flag(body, "echo") else []
    answers = Completions(front, params, model_of(body, front), n_top, echoes)
    generation = await front.start(prompts, params, request)
    if params.stream:
        await generation.first(request)
        return EventStream(answers.stream(generation), generation.cancel, ping=front.settings.ping_interval)
    results = await generation.results(request)
    return await made_response(sum(map(answers.n_values, results)), lambda: answers.answer(results))
