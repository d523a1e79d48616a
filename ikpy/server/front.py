"""The asyncio side: what request handlers share, and generations they wait for."""

from __future__ import annotations

import asyncio
import secrets
import string
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request

from ikpy.errors import IkpyError
from ikpy.server.context_fit import TOO_LONG, RequestError
from ikpy.server.errors import ApiError, bad_request, prompt_too_long
from ikpy.server.generation import Generation, Mail, unless_gone
from ikpy.server.keys import KeyRing
from ikpy.server.media import NO_KINDS, NO_PROJECTOR, ChatMedia, MediaRules, decoded, fetched
from ikpy.server.params import GenerationParams, default_params, describe
from ikpy.server.read_params import read_generation
from ikpy.server.slot_reports import status
from ikpy.server.tasks import CompletionTask, Task
from ikpy.tools.media import Media
from ikpy.tools.sampler_setup import make_sampler
from ikpy.tools.sounds import Sound

if TYPE_CHECKING:
    from ikpy.engine.model import Model
    from ikpy.engine.sampling import Sampler
    from ikpy.server.prompts import Prompt
    from ikpy.server.scheduler import Engine
    from ikpy.server.settings import ServerSettings
    from ikpy.tools.media_tokens import MediaReader
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
MOST_FETCHERS = 16
"""Threads that ask other hosts for media."""
MOST_LOOKERS = 4
"""Threads that decode media and wait until the engine has encoded them."""
END = object()
LETTERS = string.ascii_letters + string.digits


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
        media: MediaReader | None = None,
    ) -> None:
        self.engine = engine
        self.model = model
        self.vocab = vocab
        self.settings = settings
        self.template = template
        self.tool_template = tool_template or template
        self.media = media
        self.keys = KeyRing(settings.api_keys)
        self.started = int(time.time())
        self._mail: Mail | None = None
        self._makers = ThreadPoolExecutor(MOST_MAKERS, "samplers")
        self._fetchers = ThreadPoolExecutor(MOST_FETCHERS, "fetchers")
        self._lookers = ThreadPoolExecutor(MOST_LOOKERS, "media")

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

    def chat_media(self) -> ChatMedia:
        """What collects the pictures and sounds of a conversation."""
        return ChatMedia(self.takes)

    @property
    def takes(self) -> dict[str, bool]:
        """Whether there is a projector for each kind of `Media.what`."""
        return NO_KINDS if self.media is None else self.media.takes

    async def seen(self, prompt: Prompt, request: Request, *, may_exceed: bool = False) -> Prompt:
        """A prompt with the tokens of its media, which are encoded in the engine thread. Raises ApiError, and
        ClientGoneError if the client, whose body must have been read, goes away.

        may_exceed: also if it cannot fit a slot; otherwise nothing of it is encoded where that is known before.
        """
        return await unless_gone(request, self._seen(prompt, may_exceed=may_exceed)) if prompt.parts else prompt

    async def _seen(self, prompt: Prompt, *, may_exceed: bool) -> Prompt:
        if self.media is None:
            raise bad_request(NO_PROJECTOR)
        self.engine.check_room()
        rules = MediaRules(self.settings.media_path, self.settings.downloads)
        files = await asyncio.get_running_loop().run_in_executor(self._fetchers, fetched, prompt.parts, rules)
        given_up = threading.Event()
        try:
            look = partial(self._look, self.media, files, given_up.is_set, may_exceed=may_exceed)
            tokens, media = await asyncio.get_running_loop().run_in_executor(self._lookers, look)
        finally:
            given_up.set()
        return replace(prompt, tokens=tokens, parts=(), media=media)

    def _look(
        self,
        reader: MediaReader,
        files: Sequence[str | bytes],
        given_up: Callable[[], bool],
        *,
        may_exceed: bool = False,
    ) -> tuple[list[int], tuple[Media, ...]]:
        """Tokens and media, of which few are decoded at a time: those of the threads that do this."""
        parts = decoded(files, reader.takes)
        media = tuple(part for part in parts if isinstance(part, Media))
        began = time.perf_counter()
        if not may_exceed:
            self._check_fits(self.engine.call(partial(reader.least, parts)).result())
        for sound in media:
            if isinstance(sound, Sound):
                self._listen(reader, sound, given_up)

        def encode() -> list[int]:
            return [] if given_up() else reader.tokens(parts, self.engine.context.n_ubatch)

        tokens = self.engine.call(encode).result()
        ms = round(1e3 * (time.perf_counter() - began), 1)
        self.engine.log.event("look", "media encoded", n_media=len(media), n_tokens=len(tokens), ms=ms)
        return tokens, media

    def _check_fits(self, n_least: int) -> None:
        """ApiError 400 if a prompt of so many tokens or more, which must stay whole, does not fit a slot."""
        n_ctx = self.engine.slots[0].fit.n_ctx
        if n_least >= n_ctx:
            raise prompt_too_long(TOO_LONG, n_least, n_ctx)

    def _listen(self, reader: MediaReader, sound: Sound, given_up: Callable[[], bool]) -> None:
        """Encodes a sound; running answers get a token between two pieces."""
        steps: Iterator[None] | None = None

        def goes_on() -> bool:
            """Whether there may be more steps behind this one."""
            nonlocal steps
            steps = reader.steps(sound) if steps is None else steps
            return not given_up() and next(steps, END) is not END

        while self.engine.call(goes_on).result():
            pass

    def text_of(self, tokens: Sequence[int]) -> str:
        """Text of tokens, with a marker for every picture and sound."""
        return self.vocab.detokenize(tokens) if self.media is None else self.media.text(tokens)

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
            out.append(shown | status(slot) | {"params": shown})
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
            wanted = longest if params.limit < 0 else params.limit
            longest = max(1, min(wanted, (MOST_PROBABILITIES - n_scored) // n_each))
            params = replace(params, limit=longest)
        check_probabilities(n_scored + n_each * longest)
        return params

    def _fitting(self, prompt: Prompt, params: GenerationParams) -> list[int]:
        """Tokens of a prompt as far as a slot needs them. Raises ApiError 400 for one that cannot fit."""
        fit = self.engine.slots[0].fit
        n = len(prompt.tokens)
        try:
            tokens = fit.shortened(prompt.tokens, params, whole=bool(prompt.media))
        except RequestError as error:
            raise prompt_too_long(str(error), n, fit.n_ctx) from None
        if n >= fit.n_ctx:
            message = "the prompt does not fit the context, its middle is left out"
            self.engine.log.caution("truncate_prompt", message, n_prompt_tokens=n, n_ctx=fit.n_ctx)
        return tokens

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
                        tokens,
                        generation.sink,
                        len(tasks),
                        prompt.shown,
                        media=prompt.media,
                        params=own,
                        sampler=self.sampler(own),
                    )
                )
        return tasks
