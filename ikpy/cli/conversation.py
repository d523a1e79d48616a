"""Conversation mode of the chat program: messages through the chat template."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ikpy.cli.text_run import RESERVE
from ikpy.engine.encoded_texts import prompt_of
from ikpy.errors import IkpyError, UsageError
from ikpy.tools.media import Media
from ikpy.tools.media_files import read_media
from ikpy.tools.media_marks import Marks, divided, with_markers
from ikpy.vocab.templates import ChatTemplate

if TYPE_CHECKING:
    from ikpy.cli.session import Session
    from ikpy.cli.text_run import TextRun


class MessageTooLongError(UsageError):
    """A message that the context cannot hold."""


class Conversation:
    """System message, turns of user and assistant, and the prompt they make.

    The prompt is rendered afresh for every turn; what the cache already holds of it is not evaluated again. When it
    no longer fits, the oldest turns are left out.
    """

    def __init__(self, session: Session) -> None:
        params = session.params
        self.vocab = session.vocab
        bos, eos = (self.vocab.special_text(token) for token in (self.vocab.bos, self.vocab.eos))
        prompt = params.prompt
        source = prompt.chat_template
        if source is None:
            self.template = ChatTemplate.from_metadata(session.model.metadata, self.vocab)
        else:
            self.template = ChatTemplate.from_argument(source, bos, eos)
        self.variables = dict(prompt.chat_template_kwargs)
        is_message = prompt.single_turn or prompt.system is not None
        system, self.first = (prompt.system, prompt.text) if is_message else (prompt.text, "")
        self.system = [{"role": "system", "content": system}] if system else []
        self.single = prompt.single_turn
        self.media = session.media
        self.marks: Marks[Media] = Marks()
        self.waiting = [read_media(path) for path in params.media.files]
        """Pictures and sounds of the next message."""
        self.turns: list[dict[str, str]] = []
        self.unsaved = True
        """Whether the prompt cache is still to be written: once, with the first message."""

    def example(self) -> str:
        """A short conversation as the template writes it."""
        messages = [
            {"role": "system", "content": "You are a helpful assistant"},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hi there"},
            {"role": "user", "content": "How are you?"},
        ]
        try:
            return self.template.render(messages, drop_bos=True, **self.variables)
        except UsageError:
            return self.template.render(messages[1:], drop_bos=True, **self.variables)

    def tokens(self, n_ubatch: int) -> list[int]:
        """The conversation so far, open for the assistant's answer."""
        text = self.template.render([*self.system, *self.turns], drop_bos=self.vocab.add_bos, **self.variables)
        parts = self.marks.parts(text)
        if len(parts) > 1 and self.media is not None:
            tokens = self.media.tokens(parts, n_ubatch)
            self.media.refresh([part for part in parts if isinstance(part, Media)])
            return tokens
        return self.vocab.tokenize(text, add_special=True, parse_special=True)

    def prepare(self, run: TextRun) -> None:
        """Checks that the system message leaves room, and keeps it through context shifts."""
        run.load_state()
        text = self.system[0]["content"] if self.system else ""
        run.set_prompt(self.vocab.tokenize(text, add_special=True))

    def fitting_tokens(self, n_ctx: int, n_ubatch: int) -> list[int]:
        """Prompt of the conversation without the oldest turns that do not fit; half the context is for the answer.

        Raises:
            MessageTooLongError: the last message alone does not fit; the conversation is as before it.
        """
        before = self.turns[:-1]
        tokens = self.tokens(n_ubatch)
        while len(tokens) > n_ctx // 2 and len(self.turns) > 1:
            del self.turns[: 2 if len(self.turns) > 2 else 1]
            tokens = self.tokens(n_ubatch)
        if len(tokens) > n_ctx - RESERVE:
            self.turns = before
            raise MessageTooLongError(
                f"message is too long ({len(tokens)} tokens, max {n_ctx - RESERVE}); raise the context with -c"
            )
        return tokens

    def run(self, run: TextRun) -> bool:
        """Turns until the end of the input; returns whether the user interrupted."""
        while True:
            try:
                line = self.message(run)
            except KeyboardInterrupt:
                return True
            if line is None:
                return False
            if line.strip() == "/exit":
                return False
            if not self.add_turn(line, run):
                continue
            try:
                with run.interrupt.watched():
                    self.answer(run)
            except MessageTooLongError as error:
                if self.single:
                    raise
                print(f"error: {error}", file=sys.stderr, flush=True)
            if self.single:
                return run.interrupt.pressed

    def add_turn(self, line: str, run: TextRun) -> bool:
        """Takes a message or one of llama-cli's commands; returns whether an answer is due."""
        command = line.strip()
        if command == "/clear":
            self.turns = []
            run.console.text("The conversation starts anew.\n")
            return False
        if command == "/regen":
            del self.turns[-1:]
            return bool(self.turns)
        name, _, path = command.partition(" ")
        if name in ("/image", "/audio"):
            self.add_media(name, path.strip(), run)
            return False
        if command:
            self.turns.append({"role": "user", "content": self.with_media(line.rstrip("\n"))})
        return bool(command)

    def add_media(self, name: str, path: str, run: TextRun) -> None:
        """Reads a picture or a sound for the next message; what is wrong with it is said on standard error."""
        try:
            if self.media is None or self.media.store.holds_texts:
                raise UsageError(f"{name} needs a projector: start with --mmproj")
            media = read_media(path)
            self.media.check(media)
            self.waiting.append(media)
        except IkpyError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            run.console.text(f"{path} loaded\n")

    def with_media(self, text: str) -> str:
        """The text of a message with the media that wait for it: in place of its markers, or in front."""
        if not self.waiting:
            return text
        media, self.waiting = self.waiting, []
        parts = divided(with_markers(text, len(media)), media)
        return "".join(part if isinstance(part, str) else self.marks.add(part) for part in parts)

    def message(self, run: TextRun) -> str | None:
        """The next message: the one of the command line, then those of the user; None at the end of the input."""
        if self.first.strip():
            line, self.first = self.first, ""
            if run.params.prompt.display_prompt:
                run.console.text(f"\n> {line}\n")
            return line
        run.console.text("\n")
        return run.console.read("> ")

    def answer(self, run: TextRun) -> None:
        """Evaluates what is new and writes the answer."""
        tokens = prompt_of(run.context, self.fitting_tokens(run.context.n_ctx_seq, run.context.n_ubatch))
        kept = run.sequence.rewind(tokens)
        run.pending = []
        run.sampler.restart_grammar()
        if self.unsaved:
            run.report_state(kept, len(tokens))
        run.feed(tokens[kept:])
        if self.unsaved:
            run.save_prompt()
            self.unsaved = False
        text = run.generate()
        self.turns.append({"role": "assistant", "content": text})
        run.console.text("\n" if run.ended or self.single else "")
