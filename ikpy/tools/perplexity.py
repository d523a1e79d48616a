"""Perplexity of a model over a text: the chunked estimate and the strided one.

Formulas and printed text are those of llama-perplexity (perplexity.md#perplexity).
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TextIO

import numpy as np
from numpy.typing import NDArray

from ikpy.engine.batch import Batch
from ikpy.engine.kv_cache import MAX_SEQUENCES
from ikpy.engine.sampling import NotANumberError
from ikpy.errors import UnsupportedError, UsageError
from ikpy.tools.logprobs import exponential, token_log_probs

Logits = NDArray[np.float32]
Tokens = NDArray[np.int32]


LEAST_CHUNK = 3
"""Tokens of the smallest chunk that has a scored token: those in the second half but the last."""


class KVCells(Protocol):
    """The part of the KV cache the tools use."""

    def clear(self) -> None: ...


class DecodeContext(Protocol):
    """The part of :class:`ikpy.engine.context.Context` the tools use."""

    @property
    def n_ctx(self) -> int: ...

    @property
    def n_batch(self) -> int: ...

    @property
    def kv(self) -> KVCells: ...

    @property
    def token_states(self) -> NDArray[np.float32] | None: ...

    def decode(self, batch: Batch) -> Logits: ...


class Tokenizer(Protocol):
    """The part of :class:`ikpy.vocab.Vocab` the tools use."""

    @property
    def bos(self) -> int | None: ...

    @property
    def add_bos(self) -> bool: ...

    @property
    def add_eos(self) -> bool: ...

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]: ...


@dataclass(frozen=True)
class Plan:
    """Context sizes a perplexity run needs."""

    chunk: int
    n_ctx: int
    n_batch: int
    n_seq: int


def plan_perplexity(chunk: int, n_batch: int, stride: int = 0) -> Plan:
    """Sequences per batch, total context and batch size for chunks of ``chunk`` tokens."""
    if chunk <= 0:
        raise UsageError("perplexity tool requires '--ctx-size' > 0")
    if chunk < LEAST_CHUNK:
        raise UsageError(f"a context of {chunk} tokens leaves nothing to score; -c {LEAST_CHUNK} is the least")
    n_seq = max(1, min(n_batch // chunk, MAX_SEQUENCES))
    total = n_seq * chunk
    n_batch = min(n_batch, total)
    if n_batch > chunk and n_batch % chunk:
        raise UsageError(f"batch size {n_batch} is neither below nor a multiple of the context size {chunk}")
    if stride > 0:
        total += stride // 2
    return Plan(chunk, total, n_batch, n_seq)


@dataclass
class LossSums:
    """Running sums of token losses; ``running`` holds the perplexity after every chunk."""

    nll: float = 0.0
    nll2: float = 0.0
    count: int = 0
    running: list[float] = field(default_factory=list)

    def add(self, losses: NDArray[np.float64]) -> None:
        """Adds the losses of one chunk."""
        self.nll += float(losses.sum())
        self.nll2 += float(np.square(losses).sum())
        self.count += len(losses)
        self.running.append(self.ppl)

    @property
    def mean(self) -> float:
        """Mean loss per token, in nats."""
        return self.nll / self.count

    @property
    def ppl(self) -> float:
        """``exp(mean)``."""
        return exponential(self.mean)

    @property
    def mean_error(self) -> float | None:
        """Standard error of the mean loss, or None where the variance is not positive."""
        variance = self.nll2 / self.count - self.mean**2
        return math.sqrt(variance / (self.count - 1)) if variance > 0 and self.count > 1 else None


@dataclass(frozen=True)
class PerplexityResult:
    """Outcome of a run: estimate, its uncertainty (None if not computable), the value after every chunk."""

    ppl: float
    error: float | None
    running: list[float]
    n_tokens: int
    n_chunks: int


@dataclass
class Progress:
    """Prints the time per pass and the remaining time once, after the first pass."""

    name: str
    log: TextIO
    passes: float
    done: bool = False

    def report(self, seconds: float) -> None:
        """``seconds``: duration of the pass that just ended."""
        if self.done:
            return
        self.done = True
        remaining = int(seconds * self.passes)
        text = f"{self.name}: {seconds:.2f} seconds per pass - ETA "
        if remaining >= 3600:
            text += f"{remaining // 3600} hours "
            remaining %= 3600
        print(f"{text}{remaining / 60.0:.2f} minutes", file=self.log, flush=True)


def tokenize_text(vocab: Tokenizer, text: str, name: str, log: TextIO) -> Tokens:
    """Tokenizes the whole text with the model's own prefix rule and logs the time taken."""
    if vocab.add_eos:
        raise UnsupportedError("perplexity is not defined for a model whose tokenizer appends an end token")
    print(f"{name}: tokenizing the input ..", file=log, flush=True)
    start = time.perf_counter()
    tokens = np.asarray(vocab.tokenize(text, add_special=True, parse_special=False), dtype=np.int32)
    elapsed = (time.perf_counter() - start) * 1000
    if name == "perplexity":
        print(f"{name}: tokenization took {elapsed:g} ms", file=log, flush=True)
    return tokens


def chunk_count(n_tokens: int, n_ctx: int, n_chunks: int) -> int:
    """Chunks to evaluate; raises UsageError if the text has fewer than two chunks."""
    if n_tokens < 2 * n_ctx:
        raise UsageError(
            f"you need at least {2 * n_ctx} tokens to evaluate perplexity with a context of {n_ctx}; "
            f"the data file you provided tokenizes to only {n_tokens} tokens"
        )
    check_chunks(n_chunks)
    available = n_tokens // n_ctx
    return available if n_chunks < 0 else min(n_chunks, available)


def check_chunks(n_chunks: int) -> None:
    """Raises UsageError for a number of chunks that leaves nothing."""
    if n_chunks == 0:
        raise UsageError("--chunks 0 leaves nothing to evaluate; give a positive number, or -1 for the whole text")


def group_batch(tokens: Tokens, first_scored: int, bos: int | None) -> Batch:
    """Batch of whole chunks [n_seq, n_ctx], one sequence each; outputs at first_scored .. n_ctx-2."""
    n_seq, n_ctx = tokens.shape
    ids = tokens.copy()
    if bos is not None:
        ids[:, 0] = bos
    position = np.arange(n_ctx, dtype=np.int32)
    wanted = (position >= first_scored) & (position < n_ctx - 1)
    sequence = [(seq,) for seq in range(n_seq) for _ in range(n_ctx)]
    return Batch(ids.reshape(-1), np.tile(position, n_seq), sequence, np.tile(wanted, n_seq))


def decode_window(
    ctx: DecodeContext, tokens: Tokens, first: int, last: int, n_batch: int
) -> Iterator[tuple[int, Logits]]:
    """Evaluates a sequence in pieces of ``n_batch``; yields (position, logits) of outputs first .. last-1."""
    for start in range(0, len(tokens), n_batch):
        piece = tokens[start : start + n_batch]
        position = np.arange(start, start + len(piece), dtype=np.int32)
        wanted = (position >= first) & (position < last)
        logits = ctx.decode(Batch(piece, position, [(0,)] * len(piece), wanted))
        if wanted.any():
            yield max(first, start), logits


RowSink = Callable[[Logits], None]


def perplexity(
    ctx: DecodeContext,
    vocab: Tokenizer,
    text: str,
    plan: Plan,
    *,
    n_chunks: int = -1,
    output_type: int = 0,
    n_threads: int = 1,
    base_writer: Callable[[Tokens], RowSink] | None = None,
    out: TextIO | None = None,
    log: TextIO | None = None,
) -> PerplexityResult:
    """Chunked perplexity (perplexity.md#perplexity).

    ``base_writer`` is called once with the tokens [n_chunk, n_ctx] before the first chunk and returns a
    function that receives every block of scored logits in chunk order. Raises NotANumberError with the tokens of the
    chunk whose logits are none.
    """
    out, log = out or sys.stdout, log or sys.stderr
    tokens = tokenize_text(vocab, text, "perplexity", log)
    n_ctx, n_seq = plan.chunk, plan.n_seq
    n_chunk = chunk_count(len(tokens), n_ctx, n_chunks)
    print(
        f"perplexity: calculating perplexity over {n_chunk} chunks, n_ctx={n_ctx}, "
        f"batch_size={plan.n_batch}, n_seq={n_seq}",
        file=log,
        flush=True,
    )
    chunks = tokens[: n_chunk * n_ctx].reshape(n_chunk, n_ctx)
    sink = base_writer(chunks) if base_writer else None
    bos = vocab.bos if vocab.add_bos else None
    first = n_ctx // 2
    sums = LossSums()
    progress = Progress("perplexity", log, n_chunk / n_seq)
    for group in range(0, n_chunk, n_seq):
        start = time.perf_counter()
        members = chunks[group : group + n_seq]
        for chunk, blocks in _group_logits(ctx, members, first, bos, plan):
            with named_tokens(with_bos(chunk, bos), out, len(sums.running)):
                losses = []
                for offset, logits in blocks:
                    targets = chunk[offset + 1 : offset + 1 + len(logits)]
                    losses.append(-token_log_probs(logits, targets, n_threads))
                    if sink:
                        sink(logits)
            sums.add(np.concatenate(losses))
            if len(sums.running) == group + 1:
                progress.report(time.perf_counter() - start)
            _print_chunk(out, sums, output_type, group * n_ctx)
    print(file=out)
    return _finish(sums, n_chunk, n_ctx, out)


def _group_logits(
    ctx: DecodeContext, members: Tokens, first: int, bos: int | None, plan: Plan
) -> Iterator[tuple[Tokens, Iterable[tuple[int, Logits]]]]:
    """(chunk tokens, (position of first row, logits) of its pieces) of every chunk of one group, each to be used up
    before the next: logits of a long chunk are too many to be held at once."""
    n_seq, n_ctx = members.shape
    ctx.kv.clear()
    if plan.n_batch >= n_seq * n_ctx:
        logits = ctx.decode(group_batch(members, first, bos)).reshape(n_seq, n_ctx - 1 - first, -1)
        for chunk, rows in zip(members, logits, strict=True):
            yield chunk, [(first, rows)]
        return
    yield members[0], decode_window(ctx, with_bos(members[0], bos), first, n_ctx - 1, plan.n_batch)


def with_bos(chunk: Tokens, bos: int | None) -> Tokens:
    """A chunk as the model reads it: with the begin-of-text token, if it wants one, in place of the first."""
    ids = chunk.copy()
    if bos is not None:
        ids[0] = bos
    return ids


@contextmanager
def named_tokens(tokens: Tokens, out: TextIO | None = None, n_done: int = 0) -> Iterator[None]:
    """Names a chunk's tokens in NotANumberError; out: where the number of this chunk, behind n_done others, is due."""
    try:
        yield
    except NotANumberError:
        if out is not None:
            print(f"[{n_done + 1}]nan,", file=out, flush=True)
        raise NotANumberError(tokens.tolist()) from None


def _print_chunk(out: TextIO, sums: LossSums, output_type: int, first_token: int) -> None:
    if output_type == 0:
        print(f"[{len(sums.running)}]{sums.ppl:.4f},", end="", file=out, flush=True)
        return
    error = sums.mean_error or 0.0
    print(f"{first_token:8d}  {sums.ppl:.4f}  {sums.mean:4f}  {error:4f}", file=out, flush=True)


def _finish(sums: LossSums, n_chunk: int, n_ctx: int, out: TextIO) -> PerplexityResult:
    error = sums.mean_error
    if error is None:
        print("Unexpected negative standard deviation of log(prob)", file=out, flush=True)
    else:
        error *= sums.ppl
        print(
            f"Final estimate: PPL over {n_chunk} chunks for n_ctx={n_ctx} = {sums.ppl:.4f} +/- {error:.5f}",
            file=out,
            flush=True,
        )
    return PerplexityResult(sums.ppl, error, sums.running, sums.count, n_chunk)


def strided_perplexity(
    ctx: DecodeContext,
    vocab: Tokenizer,
    text: str,
    plan: Plan,
    stride: int,
    *,
    n_chunks: int = -1,
    output_type: int = 0,
    n_threads: int = 1,
    out: TextIO | None = None,
    log: TextIO | None = None,
) -> PerplexityResult:
    """Perplexity over overlapping windows of the whole context, ``stride`` new tokens each (`--ppl-stride`)."""
    out, log = out or sys.stdout, log or sys.stderr
    name = "perplexity_v2"
    tokens = tokenize_text(vocab, text, name, log)
    window = ctx.n_ctx
    check_chunks(n_chunks)
    if stride >= window:
        raise UsageError(f"--ppl-stride {stride} must be below the context size {window}")
    if len(tokens) < window + stride:
        raise UsageError(
            f"there are only {len(tokens)} tokens, this is not enough for a context size of {window} "
            f"and stride {stride}"
        )
    print(f"{name}: have {len(tokens)} tokens. Calculation chunk = {window}", file=log)
    available = (len(tokens) - window + stride - 1) // stride
    n_chunk = available if n_chunks < 0 else min(n_chunks, available)
    print(
        f"{name}: calculating perplexity over {n_chunk} chunks, batch_size={plan.n_batch}",
        file=log,
        flush=True,
    )
    sums = LossSums()
    progress = Progress(name, log, n_chunk)
    first, last = window - stride - 1, window - 1
    for i in range(n_chunk):
        start = time.perf_counter()
        chunk = tokens[i * stride : i * stride + window]
        ctx.kv.clear()
        with named_tokens(chunk, out, i):
            losses = [
                -token_log_probs(logits, chunk[offset + 1 : offset + 1 + len(logits)], n_threads)
                for offset, logits in decode_window(ctx, chunk, first, last, plan.n_batch)
            ]
        sums.add(np.concatenate(losses))
        progress.report(time.perf_counter() - start)
        if output_type == 0:
            print(f"[{i + 1}]{sums.ppl:.4f},", end="", file=out, flush=True)
        else:
            print(f"{i * stride:8d}  {sums.ppl:.4f}", file=out, flush=True)
    print(file=out)
    error = sums.mean_error
    return PerplexityResult(sums.ppl, None if error is None else error * sums.ppl, sums.running, sums.count, n_chunk)
