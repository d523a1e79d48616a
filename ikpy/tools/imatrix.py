"""Collects an importance matrix by running a model over a text, chunk by chunk, with a running perplexity.

Chunks, sums and printed text are those of llama-imatrix (imatrix.md#what-is-collected).
"""

from __future__ import annotations

import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

import numpy as np
from numpy.typing import NDArray

from ikpy.engine.batch import Batch
from ikpy.engine.sampling import NotANumberError
from ikpy.errors import ResourceError, UnsupportedError, UsageError, escaped
from ikpy.tools.imatrix_data import ImatrixData, save
from ikpy.tools.logprobs import token_log_probs
from ikpy.tools.perplexity import DecodeContext, LossSums, Progress, Tokenizer

if TYPE_CHECKING:
    from ikpy.engine.context import Context

Tokens = NDArray[np.int32]
NAME = "compute_imatrix"


class NotEnoughTextError(UsageError):
    """The text is too short; `lines` are the log lines that say so."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("; ".join(line.removeprefix(f"{NAME}: ") for line in lines))
        self.lines = lines


@dataclass
class Settings:
    """How a run is divided and saved. Frequencies are in decode calls, 0 = never; n_chunks -1 = the whole text."""

    output: str
    output_format: str = "dat"
    dataset: str = ""
    n_chunks: int = -1
    from_chunk: int = 0
    n_micro_batch: int = 512
    output_frequency: int = 10
    save_frequency: int = 0
    compute_ppl: bool = True
    parse_special: bool = False
    verbosity: int = 1
    n_threads: int = 1


class Run:
    """One pass over a text. The context must have been made with the collector whose entries `data.live` holds, and so
    must those of ``heads``, its prediction layers, for which it must keep token_states.
    """

    def __init__(
        self,
        context: DecodeContext,
        vocab: Tokenizer,
        data: ImatrixData,
        settings: Settings,
        *,
        heads: Sequence[Context] = (),
        out: TextIO | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.context, self.vocab, self.data, self.settings = context, vocab, data, settings
        self.heads = heads
        self.out = out or sys.stdout
        self.log = log or (lambda line: print(line, file=sys.stderr, flush=True))
        self.losses = LossSums()
        self.n_done = self.n_chunks = 0
        self._last_call = 0
        self._last_saved = 0
        self._calls_before_chunk = 0
        self._last_state: NDArray[np.float32] | None = None

    def run(self, text: str) -> LossSums:
        """Processes the text and saves at the end, also when it is interrupted.

        Raises:
            NotEnoughTextError: fewer than two chunks, or nothing left of a text that loaded data began.
            KeyboardInterrupt: after saving what was collected.
        """
        chunks = self._chunks(self._tokenize(text))
        self.n_chunks = len(chunks)
        self.data.chunk_size = min(self.settings.n_micro_batch, self.context.n_ctx)
        self.data.add_datasets([self.settings.dataset])
        n_batch = min(self.context.n_batch, self.context.n_ctx)
        self.log(f"{NAME}: computing over {len(chunks)} chunks with batch_size {n_batch}")
        progress = _Progress(self.log, len(chunks))
        try:
            for chunk in chunks:
                start = time.perf_counter()
                self._chunk(chunk)
                progress.report(time.perf_counter() - start)
                self._print_ppl()
            print(file=self.out, flush=True)
            self._finish()
            self._save_last()
        except KeyboardInterrupt:
            self._save_interrupted()
            raise
        return self.losses

    # text

    def _tokenize(self, text: str) -> Tokens:
        if self.vocab.add_eos:
            raise UnsupportedError("an importance matrix cannot be made with a tokenizer that appends an end token")
        self.log(f"{NAME}: tokenizing the input ..")
        start = time.perf_counter()
        ids = self.vocab.tokenize(text, add_special=True, parse_special=self.settings.parse_special)
        self.log(f"{NAME}: tokenization took {(time.perf_counter() - start) * 1000:g} ms")
        return np.asarray(ids, dtype=np.int32)

    def _chunks(self, tokens: Tokens) -> Tokens:
        """Chunks [n, n_ctx] to process."""
        size, skip, wanted = self.context.n_ctx, self.settings.from_chunk, self.settings.n_chunks
        if wanted == 0:
            raise UsageError("--chunks 0 leaves nothing to process; give a positive number, or -1 for the whole text")
        # Of a text that an interrupted run began, a single chunk may be all that is left.
        goes_on = skip > 0 and bool(self.data.loaded)
        if skip > 0:
            left = len(tokens) - skip * size
            if left < size or (left <= 2 * size and not goes_on):
                raise NotEnoughTextError([f"{NAME}: there will be not enough tokens left after removing {skip} chunks"])
            self.log(f"{NAME}: removing initial {skip} chunks ({skip * size} tokens)")
            tokens = tokens[skip * size :]
        if len(tokens) < 2 * size and not goes_on:
            raise NotEnoughTextError(
                [
                    f"{NAME}: you need at least {2 * size} tokens for a context of {size} tokens",
                    f"{NAME}: the data file you provided tokenizes to only {len(tokens)} tokens",
                ]
            )
        available = len(tokens) // size
        n = available if wanted < 0 else min(wanted, available)
        return tokens[: n * size].reshape(n, size)

    # decoding

    def _chunk(self, chunk: Tokens) -> None:
        """Decodes a chunk with logits of every token: the statistics of the last layer need them all."""
        ids = chunk.copy()
        if self.vocab.add_bos and self.vocab.bos is not None:
            ids[0] = self.vocab.bos
        self.context.kv.clear()
        self._calls_before_chunk = self.data.last_call
        size, first = len(ids), len(ids) // 2
        losses = []
        for start in range(0, size, self.settings.n_micro_batch):
            stop = min(start + self.settings.n_micro_batch, size)
            logits = self.context.decode(Batch.single(ids[start:stop].tolist(), start, logits="all"))
            self._predict(ids, start, stop)
            self._after_call(stop - start)
            low, high = max(first, start), min(size - 1, stop)
            if self.settings.compute_ppl and low < high:
                targets = chunk[low + 1 : high + 1]
                losses.append(self._losses(logits[low - start : high - start], targets, ids))
        if losses:
            self.losses.add(np.concatenate(losses))
        # Nothing is called between the two: Ctrl-C comes before or behind both.
        self.n_done, self._calls_before_chunk = self.n_done + 1, self.data.last_call

    def _predict(self, ids: Tokens, start: int, stop: int) -> None:
        """Lets the prediction layers read the states behind the tokens start .. stop - 1 of a chunk."""
        states = self.context.token_states if self.heads else None
        if states is None:
            return
        first = start
        if start and self._last_state is not None:
            first, states = start - 1, np.concatenate([self._last_state, states])
        self._last_state = states[-1:]
        for head in self.heads:
            if not start:
                head.kv.clear()
            if stop - first > 1:
                head.decode(Batch.single(ids[first + 1 : stop].tolist(), first, logits="all"), states[:-1])

    def _losses(self, logits: NDArray[np.float32], targets: Tokens, chunk: Tokens) -> NDArray[np.float64]:
        """Losses of the next tokens.

        Raises FileFormatError naming the first weight whose inputs are no numbers, or else NotANumberError.
        """
        try:
            return -token_log_probs(logits, targets, self.settings.n_threads)
        except NotANumberError:
            deque(self.data.entries(), maxlen=0)
            raise NotANumberError(chunk.tolist()) from None

    def _after_call(self, n_tokens: int) -> None:
        """Saves when the count of calls has passed a multiple of a frequency."""
        before, now = self._last_call, self.data.last_call
        if self.settings.verbosity > 1:
            self._print_operations(before, now, n_tokens)
        self._last_call = now
        before = before or now - 1  # calls of files that were loaded are none of this run
        if _passed(before, now, self.settings.output_frequency):
            self._try_save(self.settings.output)
        if _passed(before, now, self.settings.save_frequency):
            self._try_save(f"{self.settings.output}.at_{now}")

    def _try_save(self, path: str) -> None:
        """Saves on the way. A disk that has become full may have room again later; one that never had ends the run."""
        try:
            self.save(path)
        except ResourceError as error:
            if not self._last_saved:
                raise
            self.log(f"\nsave_imatrix: warning: {error}; going on, {self._kept()}")

    def _print_operations(self, before: int, now: int, n_tokens: int) -> None:
        """A line per weight; the first one still shows the count of calls before this one."""
        calls = before
        for name, sums in self.data.live.items():
            if sums.calls:
                shape = f"{sums.n_inputs:5d} x {n_tokens:5d}"
                print(f"collect_imatrix[{calls}]: {escaped(name):>32}, {sums.op}, {shape}, 0", file=self.out)
                calls = now

    # results

    def save(self, path: str | None = None, output_format: str | None = None) -> None:
        """Writes the file as it is now; another one, or in another form, if named."""
        settings, path = self.settings, path or self.settings.output
        chunks, form = self._last_call, output_format or self.settings.output_format
        save(self.data, path, form, chunks=chunks, dataset=settings.dataset, log=self.log)
        self._last_saved = chunks if path == settings.output else self._last_saved
        if settings.verbosity > 0:
            self.log(f"\nsave_imatrix: stored collected data after {chunks} chunks in {path}")

    def _save_last(self) -> None:
        try:
            self.save()
        except ResourceError as error:
            if not self._last_saved:
                raise
            raise ResourceError(f"{error}; {self._kept()}") from error

    def _kept(self) -> str:
        return f"{self.settings.output} holds the data of {self._last_saved} calls"

    def _save_interrupted(self) -> None:
        print(file=self.out, flush=True)
        self._last_call = self.data.last_call
        if not self._last_call:
            self.log(f"{NAME}: interrupted before the first chunk; nothing was collected")
            return
        self.save()
        settings = self.settings
        kept = settings.output
        if settings.output_format != "gguf":
            # The legacy form holds no numbers of tokens: the rest of the text would outweigh what was collected.
            kept += ".gguf"
            self.save(kept, "gguf")
        # A chunk of which a part was collected shall not be counted twice.
        n = self.n_done + (self.data.last_call > self._calls_before_chunk)
        if n == self.n_chunks:
            self.log(f"{NAME}: interrupted in the last of {n} chunks: nothing is left to go on with")
            return
        left = f" --chunks {self.n_chunks - n}" if settings.n_chunks > 0 else ""
        self.log(
            f"{NAME}: interrupted after {n} chunks; to go on: "
            f"--in-file {shlex.quote(kept)} --from-chunk {settings.from_chunk + n}{left}"
        )

    def _print_ppl(self) -> None:
        if self.settings.compute_ppl:
            print(f"[{self.n_done}]{self.losses.ppl:.4f},", end="", file=self.out, flush=True)

    def _finish(self) -> None:
        if not self.settings.compute_ppl:
            return
        error, ppl = self.losses.mean_error, self.losses.ppl
        if error is None:
            print("Unexpected negative standard deviation of log(prob)", file=self.out, flush=True)
        else:
            print(f"Final estimate: PPL = {ppl:.4f} +/- {error * ppl:.5f}", file=self.out, flush=True)


def _passed(before: int, now: int, frequency: int) -> bool:
    return frequency > 0 and now // frequency > before // frequency


class _Progress(Progress):
    """The line of the perplexity tool, through the tool's own log."""

    def __init__(self, log: Callable[[str], None], passes: float) -> None:
        super().__init__(NAME, _LineLog(log), passes)  # type: ignore[arg-type]


class _LineLog:
    """A text stream whose lines go to a log function."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log

    def write(self, text: str) -> int:
        if text != "\n":
            self._log(text.removesuffix("\n"))
        return len(text)

    def flush(self) -> None:
        """Lines are passed on at once."""
