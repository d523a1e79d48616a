"""One run of the chat program: prompt, generation, interactive turns, prompt cache, times."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ikpy.cli.console import YELLOW, Console, Interrupt
from ikpy.engine.encoded_texts import prompt_of
from ikpy.engine.sampling import NotANumberError
from ikpy.engine.session import load_session, save_session
from ikpy.errors import UsageError
from ikpy.tools.decoder import TimedContext
from ikpy.tools.generation import ContextFullError, GrowingSequence
from ikpy.tools.media_files import read_media
from ikpy.tools.media_marks import divided, with_markers
from ikpy.tools.stop_strings import ends_in

if TYPE_CHECKING:
    from ikpy.cli.session import Session
    from ikpy.engine.context import Context
    from ikpy.engine.sampling import Sampler
    from ikpy.engine.speculative import Speculator


RESERVE = 4
"""Tokens of the context that a prompt leaves free."""


@dataclass
class RunTimes:
    """Seconds and tokens of prompt evaluation and generation."""

    prompt: float = 0.0
    n_prompt: int = 0
    generation: float = 0.0
    n_generated: int = 0

    def lines(self) -> list[str]:
        """The three lines printed at the end."""
        n = self.n_prompt + self.n_generated
        return [
            f"main: prompt eval time = {_rate(self.prompt, self.n_prompt)}",
            f"main:        eval time = {_rate(self.generation, self.n_generated)}",
            f"main:       total time = {(self.prompt + self.generation) * 1e3:10.2f} ms / {n:5d} tokens",
        ]


def _rate(seconds: float, n: int) -> str:
    per_token = seconds * 1e3 / n if n else 0.0
    per_second = n / seconds if seconds > 0 and n else 0.0
    return (
        f"{seconds * 1e3:10.2f} ms / {n:5d} tokens ({per_token:8.2f} ms per token, {per_second:8.2f} tokens per second)"
    )


class TextRun:
    """A sequence with sampler, console and stop rules."""

    def __init__(
        self,
        session: Session,
        context: Context,
        sampler: Sampler,
        console: Console | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        self.session = session
        self.params = session.params
        self.vocab = session.vocab
        self.context = context
        self.sampler = sampler
        prompt = self.params.prompt
        self.console = console or Console(
            self.vocab,
            special=prompt.special,
            color=prompt.color,
            multiline=prompt.multiline_input,
            simple=prompt.simple_io,
        )
        self.media = session.media
        self.sequence = GrowingSequence(
            TimedContext(context, session.timings),
            shift=self.params.server.context_shift,
            speculator=speculator,
            media=context.params.media,
        )
        self.interrupt = Interrupt()
        self.times = RunTimes()
        self.prompt_tokens: list[int] = []
        self.logits: NDArray[np.float32] = np.empty(0, np.float32)
        self.pending: list[int] = []
        """The last generated token: it is evaluated with what follows."""
        self.ended = False
        """Whether the last answer ended by itself."""

    def set_prompt(self, tokens: list[int]) -> None:
        """Stores the prompt, which the context must be able to hold, and what of it survives a context shift."""
        n_ctx = self.context.n_ctx_seq
        if len(tokens) > n_ctx - RESERVE:
            most = n_ctx - RESERVE
            raise UsageError(f"prompt is too long ({len(tokens)} tokens, max {most}); raise the context with -c")
        self.prompt_tokens = tokens
        keep = self.params.prompt.n_keep
        begin = int(self.vocab.add_bos)
        self.sequence.n_keep = len(tokens) if keep < 0 or keep + begin > len(tokens) else keep + begin

    @property
    def room(self) -> int:
        """Most tokens of the user's next text; some are left for what is generated behind it."""
        sequence = self.sequence
        kept = len(sequence.tokens) + len(self.pending) if sequence.obstacle else sequence.n_keep
        return self.context.n_ctx_seq - kept - RESERVE

    def feed(self, tokens: list[int]) -> None:
        """Evaluates tokens that were not generated, behind a generated one that is still to be evaluated."""
        began = time.perf_counter()
        self.logits = self.sequence.feed([*self.pending, *tokens])
        self.times.prompt += time.perf_counter() - began
        self.times.n_prompt += len(self.pending) + len(tokens)
        self.pending = []
        self.accept(tokens)

    def accept(self, tokens: Sequence[int]) -> None:
        """Tells the sampler tokens that were not drawn; it knows nothing of media."""
        for token in tokens:
            if self.media is None or not self.media.store.is_media(token):
                self.sampler.accept(token, grammar=False)

    def text_of(self, tokens: Sequence[int]) -> str:
        """Text of tokens, with markers for media."""
        return self.vocab.detokenize(tokens) if self.media is None else self.media.text(tokens)

    def generate(self) -> str:
        """Writes tokens until a stop rule holds; returns the text.

        Stops at an end token (``ended``), a reverse prompt, the token limit, Ctrl-C or a full context.
        """
        prompt = self.params.prompt
        limit = prompt.n_predict
        text = ""
        self.ended = False
        began = time.perf_counter()
        count = 0
        try:
            if self.pending:
                self.logits = self.sequence.feed(self.pending)
            for token in self.sequence.generate(self.sampler, self.logits, self.vocab.eog):
                count += 1
                self.pending = [token]
                if token in self.vocab.eog:
                    self.ended = True
                    break
                piece = self.console.token(token)
                text += piece
                self._report_count()
                # The whole token is written, also where a reverse prompt ends within it.
                if count == limit or self.interrupt.pressed or ends_in(text, len(piece), prompt.reverse_prompts):
                    break
                if limit == -2 and len(self.sequence.tokens) + 1 >= self.context.n_ctx_seq:
                    break
        except ContextFullError as error:
            self.session.log(["", f"main: {error}"])
        except NotANumberError:
            raise NotANumberError(where=self.context.first_not_a_number(self.sequence.tokens)) from None
        finally:
            self.times.generation += time.perf_counter() - began
            self.times.n_generated += count
        return text + self.console.end()

    def _report_count(self) -> None:
        every = self.params.prompt.print_token_count
        if every > 0 and (len(self.sequence.tokens) + 1) % every == 0:
            used = len(self.sequence.tokens) + 1
            self.session.log(["", f"Tokens consumed so far = {used} / {self.context.n_ctx}"])

    def load_state(self) -> None:
        """Reads the prompt cache, if one is named and exists."""
        path = self.params.prompt.prompt_cache
        if not path:
            return
        self.session.log([f"main: attempting to load saved session from '{path}'"])
        if not Path(path).exists():
            self.session.log(["main: session file does not exist, will create."])
            return
        self.sequence.tokens = load_session(path, self.context)
        self.session.log([f"main: loaded a session with prompt size of {len(self.sequence.tokens)} tokens"])

    def report_state(self, kept: int, n: int) -> None:
        """Logs how much of a prompt of ``n`` tokens the prompt cache covers."""
        if not self.params.prompt.prompt_cache or not kept:
            return
        if kept >= n - 1:
            line = "session file has exact match for prompt!"
        elif kept < n / 2:
            line = f"session file has low similarity to prompt ({kept} / {n} tokens); will mostly be reevaluated"
        else:
            line = f"session file matches {kept} / {n} tokens of prompt"
        self.session.log([f"main: {line}"])
        if self.sequence.speculator is not None and self.sequence.speculator.needs_states:
            self.session.log(
                ["main: the prediction layer does not know this text: fewer of its drafts will be accepted"]
            )

    def save_prompt(self) -> None:
        """Writes the prompt cache once the prompt is evaluated."""
        prompt = self.params.prompt
        if prompt.prompt_cache and not prompt.prompt_cache_ro:
            save_session(prompt.prompt_cache, self.context, self.sequence.tokens)

    def save_state(self) -> None:
        """Writes the prompt cache with the generated text, if that was asked for."""
        prompt = self.params.prompt
        if prompt.prompt_cache and prompt.prompt_cache_all and not prompt.prompt_cache_ro:
            self.session.log([f"main: saving final output to session file '{prompt.prompt_cache}'"])
            save_session(prompt.prompt_cache, self.context, self.sequence.tokens)


class Completion:
    """Plain continuation of a prompt, with turns of the user in interactive mode."""

    def __init__(self, text_run: TextRun) -> None:
        self.vocab = text_run.vocab

    def prepare(self, run: TextRun) -> None:
        """Tokenizes the prompt and reads the prompt cache."""
        run.load_state()
        text, files = run.params.prompt.text, run.params.media.files
        if files and run.media is not None:
            parts = divided(with_markers(text, len(files)), [read_media(path) for path in files])
            tokens = run.media.tokens(parts, run.context.n_ubatch)
        else:
            tokens = prompt_of(run.context, self.vocab.tokenize(text, add_special=True, parse_special=True))
        if not text and not files and run.sequence.tokens:
            tokens = list(run.sequence.tokens)
            run.session.log(["main: using full prompt from session file"])
        if not tokens:
            raise UsageError("the prompt is empty and the model wants no begin token: give a prompt with -p or -f")
        run.set_prompt(tokens)
        kept = run.sequence.rewind(tokens)
        if not text and not files and run.media is not None and run.media.store.has_media(tokens[kept:]):
            raise UsageError(
                "the pictures and sounds of the session have to be evaluated anew: give the prompt and --image or "
                "--audio again"
            )
        run.report_state(kept, len(tokens))

    def run(self, run: TextRun) -> bool:
        """Generates; returns whether the user interrupted."""
        prompt = run.params.prompt
        with run.interrupt.watched():
            if prompt.display_prompt:
                self.display(run, run.prompt_tokens)
            kept = len(run.sequence.tokens)
            run.accept(run.prompt_tokens[:kept])
            run.feed(run.prompt_tokens[kept:])
            run.save_prompt()
            if not prompt.interactive_first:
                self.generate(run)
        if not prompt.interactive:
            return run.interrupt.pressed
        return self.turns(run)

    def display(self, run: TextRun, tokens: list[int]) -> None:
        """Writes tokens of the prompt."""
        run.console.set_color(YELLOW)
        for token in tokens if run.media is None else run.media.shown(tokens):
            run.console.token(token)
        run.console.set_color("")

    def generate(self, run: TextRun) -> None:
        """One stretch of generated text, with a note if the model ended it."""
        run.generate()
        if run.ended and not run.params.prompt.interactive:
            run.session.log([" [end of text]"])
        elif run.ended:
            run.console.text("\n")

    def turns(self, run: TextRun) -> bool:
        """The user's text and the model's continuation in turn, until the end of the input."""
        prompt = run.params.prompt
        while self.has_room(run):
            if run.ended and prompt.reverse_prompts:
                first = prompt.reverse_prompts[0]
                run.console.text(first)
                run.feed(self.vocab.tokenize(first, add_special=False))
            try:
                line = run.console.read(prompt.in_prefix)
            except KeyboardInterrupt:
                return True
            if line is None:
                return False
            if line.strip("\n"):
                begin = [self.vocab.bos] if prompt.in_prefix_bos and self.vocab.bos is not None else []
                text = prompt.in_prefix + line + prompt.in_suffix
                tokens = [*begin, *self.vocab.tokenize(text, add_special=False)]
                room = run.room
                if len(tokens) > room:
                    error = f"error: input is too long ({len(tokens)} tokens, max {room}); raise the context with -c"
                    print(error, file=sys.stderr, flush=True)
                    continue
                run.console.text(prompt.in_suffix)
                run.feed(tokens)
                run.sampler.restart_grammar()
            with run.interrupt.watched():
                self.generate(run)
        return False

    def has_room(self, run: TextRun) -> bool:
        """Whether another turn fits; logs why not."""
        begin = run.params.prompt.reverse_prompts[:1] if run.ended else []
        n_begin = sum(len(self.vocab.tokenize(text, add_special=False)) for text in begin)
        obstacle = run.sequence.obstacle
        if not obstacle or run.room > n_begin:
            return True
        advice = "raise the context with -c, or chat (-cnv), which leaves out the oldest turns"
        run.session.log(["", f"main: no room for another turn, since {obstacle}: {advice}"])
        return False
