"""The asyncio side: what request handlers share, and generations they wait for."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import string
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request

from ikpy.errors import IkpyError
from ikpy.server.context_fit import RequestError
from ikpy.server.errors import ApiError, bad_request
from ikpy.server.http import disconnected
from ikpy.server.keys import KeyRing
from ikpy.server.params import GenerationParams, default_params, describe
from ikpy.server.read_params import read_generation
from ikpy.server.slot_reports import status
from ikpy.server.tasks import CompletionTask, Embedded, Event, Failed, Finished, Task, next_request
from ikpy.tools.sampler_setup import make_sampler

if TYPE_CHECKING:
    from ikpy.engine.model import Model
    from ikpy.engine.sampling import Sampler
    from ikpy.server.prompts import Prompt
    from ikpy.server.scheduler import Engine
    from ikpy.server.settings import ServerSettings
    from ikpy.vocab import Vocab
    from ikpy.vocab.templates import ChatTemplate

T = TypeVar("T")
MOST_TASKS = 4096
"""Answers to all prompts of a request; each has a sampler from the beginning."""
FEW_PROBABILITIES = 100
"""Probabilities per token that answers without a limit may have; OpenAI's clients ask for at most 20."""
MOST_PROBABILITIES = 4_000_000
"""Of a request's scored prompts and its answers; each takes about 120 bytes, and as much as JSON."""
MOST_REPEATED = 64 << 20
"""Bytes of a request that all of its answers together may repeat: settings and prompts."""
FEW_TASKS = 8
"""Answers whose samplers are made in the event loop, if they have no grammar: 20 us each, another thread's turn 200."""
MOST_MAKERS = 8
"""Threads that make the other samplers: large grammars take seconds, and must not hold up what reads request bodies."""
LETTERS = string.ascii_letters + string.digits


class ClientGoneError(Exception):
    """The client closed the connection; nobody reads an answer."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of work; ClientGoneError as soon as the client has gone. The request body must have been read."""
    gone = asyncio.ensure_future(disconnected(request.receive))
    working = asyncio.ensure_future(work)
    try:
        await asyncio.wait({gone, working}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        gone.cancel()
        working.cancel()


def check_number(n_tasks: int) -> None:
    """Raises ApiError 400 for more answers than one request may ask for."""
    if n_tasks > MOST_TASKS:
        raise bad_request(f"{n_tasks} answers in one request are too many: at most {MOST_TASKS}")


def check_probabilities(n: int) -> None:
    """Raises ApiError 400 for more probabilities than one request may ask for."""
    if n > MOST_PROBABILITIES:
        raise bad_request(
            f"{n} probabilities in one request are too many: at most {MOST_PROBABILITIES}; "
            "ask for fewer per token, give max_tokens, or divide the prompts among requests"
        )


def check_repeated(n_bytes: int) -> None:
    """Raises ApiError 400 for more bytes than the answers to one request may repeat of it."""
    if n_bytes > MOST_REPEATED:
        raise bad_request(
            f"the answers would repeat {n_bytes >> 20} MiB of the request: at most {MOST_REPEATED >> 20}; "
            "divide the prompts among requests, or shorten what each answer repeats (prompt, stop, penalty_prompt, "
            "grammar, logit_bias)"
        )


def random_id(prefix: str) -> str:
    """An identifier with 32 random letters and digits."""
    number, out = secrets.randbits(256), []
    for _ in range(32):
        number, digit = divmod(number, len(LETTERS))
        out.append(LETTERS[digit])
    return prefix + "".join(out)


class Inbox:
    """Events for one reader, in the event loop's thread; `asyncio.Queue`, made for several, takes longer."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._arrival: asyncio.Future[None] | None = None

    def put(self, event: Event) -> None:
        """Adds an event and wakes the reader if it waits."""
        self._events.append(event)
        if self._arrival is not None:
            if not self._arrival.done():
                self._arrival.set_result(None)
            self._arrival = None

    async def first(self) -> Event:
        """The next event, which stays."""
        while not self._events:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        return self._events[0]

    async def get(self) -> Event:
        """The next event."""
        if not self._events:
            await self.first()
        return self._events.popleft()


class Mail:
    """Events on their way from the engine thread to an event loop, which is woken once for those of a batch."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: deque[tuple[Inbox, Event]] = deque()

    def put(self, inbox: Inbox, event: Event) -> None:
        """Takes an event, from any thread; `send` brings it to its inbox."""
        self._waiting.append((inbox, event))

    def send(self) -> None:
        """Wakes the loop if there are events."""
        if self._waiting:
            with contextlib.suppress(RuntimeError):  # a closed loop has no readers any more
                self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        while self._waiting:
            inbox, event = self._waiting.popleft()
            inbox.put(event)


class Generation:
    """Tasks of one request, given to the engine, and their events in the order they happen."""

    def __init__(self, engine: Engine, mail: Mail) -> None:
        self.tasks: list[Task] = []
        self._engine = engine
        self._mail = mail
        self._events = Inbox()

    def sink(self, event: Event) -> None:
        """Takes an event from the engine thread, which sends the mail after every batch."""
        self._mail.put(self._events, event)

    def submit(self, tasks: Sequence[Task]) -> None:
        """Queues the tasks. Raises ApiError 503."""
        self.tasks = list(tasks)
        number = next_request()
        for task in self.tasks:
            task.request = number
            task.wake = self._mail.send
        self._engine.submit(*tasks)

    def cancel(self) -> None:
        """Gives up what is still running."""
        self._engine.cancel(*self.tasks)

    async def events(self) -> AsyncIterator[Event]:
        """Events until every task has ended."""
        running = len(self.tasks)
        while running:
            event = await self._events.get()
            if isinstance(event, (Finished, Failed, Embedded)):
                running -= 1
            yield event

    async def first(self, request: Request) -> Event:
        """The first event, which stays in the queue.

        Raises ApiError if it is an error, ClientGoneError when the client went away; both end all tasks.
        """
        try:
            event = await unless_gone(request, self._events.first())
            if isinstance(event, Failed):
                raise ApiError(event.code, event.message)
        except BaseException:
            self.cancel()
            raise
        return event

    async def results(self, request: Request) -> list[Any]:
        """Finished or Embedded event of every task, by index.

        Raises ApiError when one failed, ClientGoneError when the client went away; both end the others.
        """
        try:
            return await unless_gone(request, self._collect())
        finally:
            self.cancel()

    async def _collect(self) -> list[Any]:
        found: dict[int, Event] = {}
        async for event in self.events():
            if isinstance(event, Failed):
                raise ApiError(event.code, event.message)
            if isinstance(event, (Finished, Embedded)):
                found[event.index] = event
        return [found[index] for index in sorted(found)]


class Front:
    """What request handlers share: engine, vocabulary, template, settings."""

    def __init__(
        self,
        engine: Engine,
        model: Model,
        vocab: Vocab,
        settings: ServerSettings,
        template: ChatTemplate,
        tool_template: ChatTemplate | None = None,
    ) -> None:
        self.engine = engine
        self.model = model
        self.vocab = vocab
        self.settings = settings
        self.template = template
        self.tool_template = tool_template or template
        self.keys = KeyRing(settings.api_keys)
        self.started = int(time.time())
        self._mail: Mail | None = None
        self._makers = ThreadPoolExecutor(MOST_MAKERS, "samplers")

    def generation(self) -> Generation:
        """A generation whose events go to the running event loop."""
        loop = asyncio.get_running_loop()
        if self._mail is None or self._mail.loop is not loop:
            self._mail = Mail(loop)
        return Generation(self.engine, self._mail)

    def read_params(self, body: Mapping[str, Any]) -> GenerationParams:
        """Generation parameters of a request, of a penalty prompt only what the penalties see. Raises ApiError 400."""
        params = read_generation(body, self.settings, self.vocab, self.settings.n_slots)
        if params.penalty_prompt is None:
            return params
        windows = params.sampling.repeat_last_n, params.sampling.dry_penalty_last_n
        n_seen = min(self.n_ctx, max(self.n_ctx if n < 0 else n for n in windows))
        n_left_out = max(0, len(params.penalty_prompt) - n_seen)
        return replace(params, penalty_prompt=params.penalty_prompt[n_left_out:])

    def template_for(self, tools: Sequence[Any]) -> ChatTemplate:
        """The template of a request with these tools."""
        return self.tool_template if tools else self.template

    @property
    def n_ctx(self) -> int:
        """Tokens of the whole context."""
        return self.engine.context.n_ctx

    @property
    def n_ctx_slot(self) -> int:
        """Tokens that one request may have, prompt and answer together: the share of a slot."""
        return self.engine.n_ctx_slot

    @property
    def model_name(self) -> str:
        """File name of the model."""
        return self.settings.model_path.replace("\\", "/").rpartition("/")[2]

    def describe(self, params: GenerationParams, *, seed: int | None = None) -> dict[str, Any]:
        """Generation settings of a request."""
        shown = describe(params, self.settings, self.n_ctx, self.n_ctx_slot, self.vocab.eos)
        return shown if seed is None else shown | {"seed": seed}

    def default_settings(self) -> dict[str, Any]:
        """Generation settings without a request."""
        return self.describe(default_params(self.settings))

    def slot_status(self) -> list[dict[str, Any]]:
        """Objects of /slots."""
        fresh = self.default_settings()
        out = []
        for slot in self.engine.slots:
            task = slot.last_task
            shown = self.describe(task.params) if isinstance(task, CompletionTask) else fresh
            out.append(shown | status(slot))
        return out

    def sampler(self, params: GenerationParams) -> Sampler:
        """Sampler of one answer. Raises ApiError 400 for a grammar that cannot be used."""
        try:
            n_vocab = self.model.hparams.n_vocab
            return make_sampler(params.sampling, self.vocab, n_vocab, self.n_ctx, params.trigger, params.thinking)
        except IkpyError as error:
            raise bad_request(str(error)) from None

    async def start(
        self, prompts: Sequence[Prompt], params: GenerationParams, request: Request | None = None
    ) -> Generation:
        """Queues ``params.n`` answers for every prompt. Raises ApiError, and ClientGoneError if the client of
        ``request``, whose body must have been read, goes away before."""
        if self.model.arch.is_encoder:
            raise ApiError(501, "This model embeds texts and writes none: use /v1/embeddings")
        if params.wrong_types:
            message = "fields of the wrong type, defaults are used"
            self.engine.log.caution("read_generation", message, fields=list(params.wrong_types))
        n_answers = len(prompts) * params.n
        check_number(n_answers)
        params = self._with_few_probabilities(prompts, params)
        generation = self.generation()
        if n_answers <= FEW_TASKS and params.has_quick_sampler:
            tasks = self._tasks(prompts, params, generation)
        else:
            made = self._made(partial(self._tasks, prompts, params, generation))
            tasks = await (made if request is None else unless_gone(request, made))
        generation.submit(tasks)
        return generation

    def _with_few_probabilities(self, prompts: Sequence[Prompt], params: GenerationParams) -> GenerationParams:
        """The parameters; answers with few probabilities per token and without a limit (or one that is none) get one,
        at which the probabilities are used up. Raises ApiError 400 for too many.
        """
        n_answers, n_vocab = len(prompts) * params.n, self.model.hparams.n_vocab
        n_prompt = params.n * sum(len(prompt.tokens) for prompt in prompts)
        n_scored = 0 if params.prompt_probs is None else (params.prompt_probs + 1) * n_prompt
        check_probabilities(n_scored)
        n_each = n_answers * min(params.n_probs, n_vocab)
        if n_each <= 0:
            return params
        longest = self.engine.longest_answer
        if params.limit >= 0 and (params.limit <= longest or params.n_probs > FEW_PROBABILITIES):
            longest = params.limit
        elif params.n_probs <= FEW_PROBABILITIES:
            longest = max(1, min(longest, (MOST_PROBABILITIES - n_scored) // n_each))
            params = replace(params, limit=longest)
        check_probabilities(n_scored + n_each * longest)
        return params

    def _fitting(self, prompt: Prompt, params: GenerationParams) -> list[int]:
        """Tokens of a prompt as far as a slot needs them. Raises ApiError 400 for one that cannot fit."""
        try:
            return self.engine.slots[0].fit.shortened(prompt.tokens, params)
        except RequestError as error:
            raise bad_request(str(error)) from None

    async def _made(self, make: Callable[[], T]) -> T:
        """What a function makes in one of the threads for that. Given up, it is not called if none was free."""
        return await asyncio.get_running_loop().run_in_executor(self._makers, make)

    def _tasks(self, prompts: Sequence[Prompt], params: GenerationParams, generation: Generation) -> list[Task]:
        tasks: list[Task] = []
        for prompt in prompts:
            tokens = self._fitting(prompt, params)
            for i in range(params.n):
                sampling = params.sampling
                if i and sampling.seed != 0xFFFFFFFF:
                    sampling = replace(sampling, seed=(sampling.seed + i) % 0xFFFFFFFF)
                own = replace(params, sampling=sampling, prompt_probs=None if i else params.prompt_probs)
                tasks.append(
                    CompletionTask(
                        tokens, generation.sink, len(tasks), prompt.shown, params=own, sampler=self.sampler(own)
                    )
                )
        return tasks
