"""Log-probabilities of alternative continuations: sequences with a common beginning, evaluated together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ikpy.engine.batch import Batch
from ikpy.engine.sampling import NotANumberError
from ikpy.errors import UsageError
from ikpy.tools.logprobs import token_log_probs
from ikpy.tools.perplexity import DecodeContext


def common_prefix(sequences: Sequence[Sequence[int]]) -> int:
    """Number of leading tokens that all sequences share."""
    length = min(len(sequence) for sequence in sequences)
    for i in range(length):
        if any(sequence[i] != sequences[0][i] for sequence in sequences):
            return i
    return length


@dataclass
class Alternatives:
    """Token sequences of one task; ``spans[k]`` = tokens [start, stop) of sequence k that are scored."""

    sequences: list[list[int]]
    spans: list[tuple[int, int]]

    def __post_init__(self) -> None:
        self.prefix = min(common_prefix(self.sequences), *(max(1, start) for start, _ in self.spans))
        if self.prefix < 1:
            raise UsageError("the alternatives of a task share no first token; the vocabulary must add a begin token")

    @property
    def tokens(self) -> list[int]:
        """The shared tokens, then what follows them in each sequence."""
        return self.sequences[0][: self.prefix] + [t for sequence in self.sequences for t in sequence[self.prefix :]]

    @property
    def n_tokens(self) -> int:
        """KV cells needed: the shared tokens count once."""
        return self.prefix + sum(len(sequence) - self.prefix for sequence in self.sequences)

    def split(self, most: int) -> list[Alternatives]:
        """The same alternatives in parts of at most ``most`` sequences."""
        return [
            Alternatives(self.sequences[i : i + most], self.spans[i : i + most])
            for i in range(0, len(self.sequences), most)
        ]


class _Rows:
    """Tokens of several tasks laid out as one batch, remembering where every wanted output goes."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.pos: list[int] = []
        self.seq_ids: list[tuple[int, ...]] = []
        self.wanted: list[bool] = []

    def add(self, tokens: Sequence[int], pos0: int, seq_ids: tuple[int, ...]) -> int:
        """Appends consecutive tokens; returns the index of the first."""
        first = len(self.tokens)
        self.tokens += tokens
        self.pos += range(pos0, pos0 + len(tokens))
        self.seq_ids += [seq_ids] * len(tokens)
        self.wanted += [False] * len(tokens)
        return first

    def decode(self, ctx: DecodeContext) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Logits of the wanted tokens, and for every token its row in them."""
        step = ctx.n_batch
        parts = []
        for i in range(0, len(self.tokens), step):
            piece = slice(i, i + step)
            batch = Batch(
                np.asarray(self.tokens[piece], dtype=np.int32),
                np.asarray(self.pos[piece], dtype=np.int32),
                self.seq_ids[piece],
                np.asarray(self.wanted[piece], dtype=np.bool_),
            )
            logits = ctx.decode(batch)
            if batch.logits.any():
                parts.append(logits)
        if not parts:  # alternatives that are all the same text have nothing to score
            parts.append(np.zeros((0, 1), np.float32))
        return np.concatenate(parts), np.cumsum(self.wanted) - 1


def score_tasks(ctx: DecodeContext, tasks: Sequence[Alternatives], n_threads: int = 1) -> list[list[float]]:
    """Mean log-probability of the scored span of every sequence of every task, evaluated in one batch.

    The tasks' sequences together must not exceed the context's sequences nor its KV cells. Raises NotANumberError with
    the tokens of a task whose logits are none.
    """
    ctx.kv.clear()
    rows = _Rows()
    sources: list[int] = []
    targets: list[int] = []
    counts: list[list[int]] = []
    next_seq = 0
    for task in tasks:
        ids = tuple(range(next_seq, next_seq + len(task.sequences)))
        next_seq += len(ids)
        shared_at = rows.add(task.sequences[0][: task.prefix], 0, ids)
        counts.append([])
        for seq, sequence, (start, stop) in zip(ids, task.sequences, task.spans, strict=True):
            own_at = rows.add(sequence[task.prefix :], task.prefix, (seq,)) - task.prefix
            for position in range(start, stop):
                source = position - 1
                index = (shared_at if source < task.prefix else own_at) + source
                rows.wanted[index] = True
                sources.append(index)
                targets.append(sequence[position])
            counts[-1].append(stop - start)
    logits, row_of = rows.decode(ctx)
    scored = row_of[sources]
    try:
        return _mean_scores(logits, scored, np.asarray(targets, dtype=np.int32), counts, n_threads)
    except NotANumberError:
        owners = np.repeat(np.arange(len(tasks)), [sum(task_counts) for task_counts in counts])
        first = int(np.isfinite(logits[scored].max(axis=-1)).argmin())
        raise NotANumberError(tasks[owners[first]].tokens) from None


def _mean_scores(
    logits: NDArray[np.float32],
    rows: NDArray[np.int64],
    targets: NDArray[np.int32],
    counts: list[list[int]],
    n_threads: int,
) -> list[list[float]]:
    log_probs = token_log_probs(logits[rows], targets, n_threads)
    scores: list[list[float]] = []
    at = 0
    for task_counts in counts:
        scores.append([])
        for count in task_counts:
            part = log_probs[at : at + count]
            scores[-1].append(float(part.mean()) if count else -np.inf)
            at += count
    return scores


def score_all(
    ctx: DecodeContext,
    tasks: Iterable[Alternatives],
    n_seq_max: int,
    most_tasks: int = 32,
    n_threads: int = 1,
) -> Iterator[list[float]]:
    """Scores tasks in order, as many per batch as fit; yields one list of scores per task.

    A task with more sequences than the context has is evaluated in parts. Raises UsageError for a task that
    does not fit the context.
    """
    pending: list[Alternatives] = []
    cells = sequences = 0
    for task in tasks:
        if len(task.sequences) > n_seq_max or task.n_tokens > ctx.n_ctx:
            yield from score_tasks(ctx, pending, n_threads) if pending else []
            pending, cells, sequences = [], 0, 0
            yield _score_large(ctx, task, n_seq_max, n_threads)
            continue
        full = cells + task.n_tokens > ctx.n_ctx or sequences + len(task.sequences) > n_seq_max
        if pending and (full or len(pending) == most_tasks):
            yield from score_tasks(ctx, pending, n_threads)
            pending, cells, sequences = [], 0, 0
        pending.append(task)
        cells += task.n_tokens
        sequences += len(task.sequences)
    if pending:
        yield from score_tasks(ctx, pending, n_threads)


def _score_large(ctx: DecodeContext, task: Alternatives, n_seq_max: int, n_threads: int) -> list[float]:
    scores: list[float] = []
    most = min(n_seq_max, len(task.sequences))
    while most > 1 and any(part.n_tokens > ctx.n_ctx for part in task.split(most)):
        most -= 1
    for part in task.split(most):
        if part.n_tokens > ctx.n_ctx:
            raise UsageError(
                f"a task needs {part.n_tokens} tokens but the context has {ctx.n_ctx}; increase it with -c"
            )
        scores += score_tasks(ctx, [part], n_threads)[0]
    return scores
