"""HellaSwag, Winogrande and TruthfulQA-style multiple choice scores (perplexity.md#tasks)."""

from __future__ import annotations

import csv
import math
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

import numpy as np

from ikpy.errors import FileFormatError, UsageError
from ikpy.tools.perplexity import DecodeContext, Tokenizer
from ikpy.tools.sequence_scores import Alternatives, common_prefix, score_all

MOST_ANSWERS = 100
WINOGRANDE_LINE = "index,sentence with one _,choice1,choice2,answer"
NAMED_LINES = 10


@dataclass(frozen=True)
class ChoiceTask:
    """A question as full texts, one per answer; ``labels[k]`` is 1 for a correct answer."""

    texts: list[str]
    labels: list[int]


@dataclass(frozen=True)
class WinograndeTask:
    """``before + choice + after`` for two choices; ``answer`` is 1 or 2."""

    before: str
    after: str
    choices: tuple[str, str]
    answer: int


@dataclass(frozen=True)
class ScoreResult:
    """Share of tasks answered correctly (0..1), its standard error, and the number of tasks."""

    accuracy: float
    error: float
    n_tasks: int


def _error(share: float, n: int) -> float:
    return math.sqrt(share * (1 - share) / (n - 1)) if n > 1 else 0.0


def _score_result(correct: int, n: int) -> ScoreResult:
    return ScoreResult(correct / n, _error(correct / n, n), n)


class _MersenneTwister:
    """The 32-bit generator mt19937 seeded with 1, as raw 32-bit words."""

    def __init__(self) -> None:
        self._state = np.random.RandomState(1)

    def word(self) -> int:
        """Next 32 random bits."""
        return int(self._state.randint(0, 2**32, dtype=np.uint32))

    def below(self, n: int) -> int:
        """Uniform integer in [0, n): high half of a 32x32 bit product, with rejection."""
        product = self.word() * n
        if (product & 0xFFFFFFFF) < n:
            threshold = (2**32 - n) % n
            while (product & 0xFFFFFFFF) < threshold:
                product = self.word() * n
        return product >> 32


def hellaswag_order(available: int, wanted: int) -> list[int]:
    """Indices of the selected HellaSwag tasks: drawn without replacement, later ones shifting down."""
    random = _MersenneTwister()
    remaining = list(range(available))
    return [remaining.pop(random.below(len(remaining))) for _ in range(min(wanted, available))]


def selection_order(available: int, wanted: int) -> list[int]:
    """Indices of the selected tasks of the other tests; all in file order unless 0 < wanted < available."""
    if not 0 < wanted < available:
        return list(range(available))
    random = _MersenneTwister()
    remaining = list(range(available))
    order = []
    for _ in range(wanted):
        scaled = np.float32(2.0**-32) * np.float32(random.word()) * np.float32(len(remaining))
        j = min(int(scaled), len(remaining) - 1)
        order.append(remaining[j])
        remaining[j] = remaining[-1]
        remaining.pop()
    return order


def read_hellaswag(text: str) -> list[ChoiceTask]:
    """Tasks of six lines each: context, index of the right ending, four endings."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    if lines and not lines[-1]:
        lines.pop()
    if not lines or len(lines) % 6:
        raise FileFormatError(f"number of lines in prompt not a multiple of 6. ({len(lines)} lines)")
    tasks = []
    for i in range(0, len(lines), 6):
        context, gold, *endings = lines[i : i + 6]
        if gold.strip() not in {"0", "1", "2", "3"}:
            raise FileFormatError(f"line {i + 2}: index of the right ending must be 0 to 3, not {gold[:20]!r}")
        labels = [int(k == int(gold)) for k in range(4)]
        tasks.append(ChoiceTask([f"{context} {ending}" for ending in endings], labels))
    return tasks


def read_winogrande(text: str, log: TextIO) -> list[WinograndeTask]:
    """Tasks of a CSV file ``index,sentence,choice1,choice2,answer``; bad lines are skipped, the first ones named.

    Raises FileFormatError if no line is one.
    """
    tasks = []
    n_skipped = 0
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip("\r"):
            continue
        try:
            task = _winogrande_task(next(csv.reader([line]), []))
        except csv.Error:  # such as a field that is too long
            task = None
        if task is not None:
            tasks.append(task)
            continue
        n_skipped += 1
        if n_skipped <= NAMED_LINES:
            print(f"winogrande: skipping line {number}, not {WINOGRANDE_LINE}", file=log)
    if n_skipped > NAMED_LINES:
        print(f"winogrande: skipped {n_skipped} lines in all", file=log)
    if not tasks:
        raise FileFormatError(f"no Winogrande tasks found in the text: none of its lines is {WINOGRANDE_LINE}")
    return tasks


def _winogrande_task(fields: Sequence[str]) -> WinograndeTask | None:
    if len(fields) != 5 or fields[1].count("_") != 1 or fields[4].strip() not in {"1", "2"}:
        return None
    before, after = fields[1].split("_")
    return WinograndeTask(before, after, (fields[2], fields[3]), int(fields[4]))


def read_multiple_choice(data: bytes) -> list[ChoiceTask]:
    """Tasks of a binary multiple-choice file; only the first answer set of each is used."""
    if len(data) < 4:
        raise FileFormatError("multiple-choice file is too short for a task count")
    (n_task,) = struct.unpack_from("<I", data)
    if n_task == 0 or 4 + 4 * n_task > len(data):
        raise FileFormatError(f"multiple-choice file of {len(data)} bytes cannot hold {n_task} tasks")
    offsets = struct.unpack_from(f"<{n_task}I", data, 4)
    try:
        return [_choice_task(data, offset) for offset in offsets]
    except struct.error:
        raise FileFormatError(f"multiple-choice file is malformed: a task runs past its {len(data)} bytes") from None
    except UnicodeDecodeError:
        raise FileFormatError("multiple-choice file is malformed: a text is not UTF-8") from None


def _read_string(data: bytes, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<I", data, at)
    if at + 4 + length > len(data):
        raise FileFormatError(f"multiple-choice file: string of {length} bytes at {at} passes the end")
    return data[at + 4 : at + 4 + length].decode("utf-8"), at + 4 + length


def _choice_task(data: bytes, at: int) -> ChoiceTask:
    question, at = _read_string(data, at)
    (n,) = struct.unpack_from("<I", data, at)
    if not 0 < n <= MOST_ANSWERS:
        raise FileFormatError(f"multiple-choice file: {n} answers at {at}; 1 to {MOST_ANSWERS} are allowed")
    at += 4
    texts = []
    for _ in range(n):
        answer, at = _read_string(data, at)
        texts.append(f"{question} {answer}")
    return ChoiceTask(texts, list(struct.unpack_from(f"<{n}i", data, at)))


def _alternatives(vocab: Tokenizer, task: ChoiceTask) -> Alternatives:
    sequences = [vocab.tokenize(text, add_special=True) for text in task.texts]
    prefix = max(1, common_prefix(sequences))
    return Alternatives(sequences, [(prefix, len(sequence)) for sequence in sequences])


def hellaswag(
    ctx: DecodeContext,
    vocab: Tokenizer,
    text: str,
    *,
    n_tasks: int = 400,
    n_seq_max: int = 4,
    n_threads: int = 1,
    out: TextIO | None = None,
    log: TextIO | None = None,
) -> ScoreResult:
    """HellaSwag accuracy, normalised by ending length; prints the cumulative percentage after every task."""
    out, log = out or sys.stdout, log or sys.stderr
    tasks = read_hellaswag(text)
    print(f"hellaswag_score : loaded {len(tasks)} tasks from prompt.", file=log)
    order = hellaswag_order(len(tasks), n_tasks)
    if not order:
        raise UsageError(f"--hellaswag-tasks {n_tasks} leaves nothing to evaluate")
    print(f"hellaswag_score : selecting {len(order)} randomized tasks.", file=log)
    print("hellaswag_score : calculating hellaswag score over selected tasks.", file=log, flush=True)
    print("\ntask\tacc_norm", file=out, flush=True)
    chosen = [tasks[i] for i in order]
    correct = 0
    work = (_alternatives(vocab, task) for task in chosen)
    for i, scores in enumerate(score_all(ctx, work, n_seq_max, min(32, n_seq_max // 4 or 1), n_threads)):
        correct += chosen[i].labels[int(np.argmax(scores))]
        print(f"{i + 1}\t{100.0 * correct / (i + 1):.8f}", file=out, flush=True)
    print(file=out)
    return _score_result(correct, len(chosen))


def _winogrande_alternatives(vocab: Tokenizer, task: WinograndeTask) -> Alternatives:
    sequences = [vocab.tokenize(task.before + c + task.after, add_special=True) for c in task.choices]
    prefix = max(1, common_prefix(sequences))
    starts = [prefix, prefix]
    if all(len(sequence) - prefix > 3 for sequence in sequences):
        starts = [len(vocab.tokenize(task.before + c, add_special=True)) for c in task.choices]
    spans = []
    for sequence, first in zip(sequences, starts, strict=True):
        start = min(first, len(sequence) - 1)
        stop = len(sequence) - 1 if len(sequence) - start > 1 else len(sequence)
        spans.append((start, stop))
    return Alternatives(sequences, spans)


def winogrande(
    ctx: DecodeContext,
    vocab: Tokenizer,
    text: str,
    *,
    n_tasks: int = 0,
    n_seq_max: int = 4,
    n_threads: int = 1,
    out: TextIO | None = None,
    log: TextIO | None = None,
) -> ScoreResult:
    """Winogrande accuracy; prints per task: index, cumulative %, both scores, prediction, answer."""
    out, log = out or sys.stdout, log or sys.stderr
    available = read_winogrande(text, log)
    tasks = [available[i] for i in selection_order(len(available), n_tasks)]
    print(f"winogrande_score : loaded {len(available)} tasks from prompt.", file=log)
    print(f"winogrande_score : calculating winogrande score over {len(tasks)} tasks.", file=log, flush=True)
    correct = 0
    work = (_winogrande_alternatives(vocab, task) for task in tasks)
    for i, (first, second) in enumerate(score_all(ctx, work, n_seq_max, 32, n_threads)):
        answer = 1 if first > second else 2
        correct += answer == tasks[i].answer
        percent = 100.0 * correct / (i + 1)
        print(
            f"{i + 1}\t{percent:.4f}\t{first:10.6f}  {second:10.6f}  {answer}  {tasks[i].answer}",
            file=out,
            flush=True,
        )
    print(file=out)
    result = _score_result(correct, len(tasks))
    if result.n_tasks >= 100:
        print(
            f"Final Winogrande score({result.n_tasks} tasks): {100 * result.accuracy:.4f} +/- {100 * result.error:.4f}",
            file=out,
        )
    return result


def multiple_choice(
    ctx: DecodeContext,
    vocab: Tokenizer,
    data: bytes,
    *,
    n_tasks: int = 0,
    n_seq_max: int = 4,
    n_threads: int = 1,
    out: TextIO | None = None,
) -> ScoreResult:
    """Share of questions whose most likely answer is labelled correct."""
    out = out or sys.stdout
    available = read_multiple_choice(data)
    print(f"there are {len(available)} tasks in prompt", file=out)
    tasks = [available[i] for i in selection_order(len(available), n_tasks)]
    print("preparing task data", end="", file=out)
    prepared = [_alternatives(vocab, task) for task in tasks]
    print("...done", file=out)
    print(f"calculating TruthfulQA score over {len(tasks)} tasks.", file=out)
    print("\ntask\tacc_norm", file=out, flush=True)
    correct = 0
    for i, scores in enumerate(score_all(ctx, prepared, n_seq_max, 32, n_threads)):
        correct += tasks[i].labels[int(np.argmax(scores))] == 1
        print(f"{i + 1}\t{100.0 * correct / (i + 1):.8f}", file=out, flush=True)
    result = _score_result(correct, len(tasks))
    chance = len(tasks) / sum(len(task.texts) for task in tasks)
    print(f"\n Final result: {100 * result.accuracy:.4f} +/- {100 * result.error:.4f}", file=out)
    print(f"Random chance: {100 * chance:.4f} +/- {100 * _error(chance, len(tasks)):.4f}", file=out)
    return result
