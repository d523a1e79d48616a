"""Perplexity tool: chunking, scored region, printed text, against direct sums over a bigram model."""

from __future__ import annotations

import io
import math
import weakref

import numpy as np
import pytest

from ikpy.engine.batch import Batch
from ikpy.errors import FileFormatError, UnsupportedError, UsageError
from ikpy.tools.logprobs import token_log_probs
from ikpy.tools.multiple_choice import (
    hellaswag,
    hellaswag_order,
    multiple_choice,
    read_hellaswag,
    read_multiple_choice,
    read_winogrande,
    selection_order,
    winogrande,
)
from ikpy.tools.perplexity import Progress, perplexity, plan_perplexity, strided_perplexity
from tests.cpu.models.bigram_model import BigramContext, ByteVocab, random_table

TEXT = "".join(chr(97 + (i * i + 3 * i) % 26) for i in range(700))


def log_softmax(table: np.ndarray) -> np.ndarray:
    x = table.astype(np.float64)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def direct_running(tokens: list[int], n_ctx: int, n_chunk: int, bos: int | None) -> tuple[list[float], float]:
    """Perplexity after every chunk and the final standard error of the mean, token by token."""
    log_p = log_softmax(random_table())
    losses: list[float] = []
    running = []
    for i in range(n_chunk):
        chunk = tokens[i * n_ctx : (i + 1) * n_ctx]
        if bos is not None:
            chunk = [bos, *chunk[1:]]
        losses += [-log_p[chunk[j], chunk[j + 1]] for j in range(n_ctx // 2, n_ctx - 1)]
        running.append(math.exp(np.mean(losses)))
    variance = np.mean(np.square(losses)) - np.mean(losses) ** 2
    return running, math.sqrt(variance / (len(losses) - 1))


@pytest.mark.parametrize("n_batch", [8, 13, 32, 64, 100, 512])
@pytest.mark.parametrize("add_bos", [True, False])
def test_running_values_equal_direct_sums(n_batch: int, add_bos: bool) -> None:
    vocab = ByteVocab(add_bos)
    tokens = vocab.tokenize(TEXT)
    if n_batch == 100:
        n_batch = 96
    plan = plan_perplexity(32, n_batch)
    ctx = BigramContext(random_table(), n_ctx=plan.n_ctx, n_batch=plan.n_batch)
    out, log = io.StringIO(), io.StringIO()
    result = perplexity(ctx, vocab, TEXT, plan, n_chunks=7, out=out, log=log)
    running, sigma = direct_running(tokens, 32, 7, 256 if add_bos else None)
    np.testing.assert_allclose(result.running, running, rtol=1e-6)
    assert result.n_tokens == 7 * 15
    assert result.error == pytest.approx(sigma * running[-1], rel=1e-5)
    line = "".join(f"[{i + 1}]{value:.4f}," for i, value in enumerate(result.running))
    final = f"Final estimate: PPL over 7 chunks for n_ctx=32 = {result.ppl:.4f} +/- {result.error:.5f}"
    assert out.getvalue() == f"{line}\n{final}\n"
    n_seq = max(1, n_batch // 32)
    assert f"calculating perplexity over 7 chunks, n_ctx=32, batch_size={plan.n_batch}, n_seq={n_seq}" in log.getvalue()
    assert ctx.kv.clears == math.ceil(7 / n_seq)


def test_begin_token_replaces_the_first_token_of_every_chunk() -> None:
    plan = plan_perplexity(16, 32)
    ctx = BigramContext(random_table(), n_ctx=32, n_batch=32)
    perplexity(ctx, ByteVocab(), TEXT, plan, n_chunks=4, out=io.StringIO(), log=io.StringIO())
    firsts = [int(t) for b in ctx.batches for t, p in zip(b.tokens, b.pos, strict=True) if p == 0]
    assert firsts == [256] * 4


def test_output_type_1_has_index_ppl_mean_and_error() -> None:
    plan = plan_perplexity(32, 64)
    ctx = BigramContext(random_table(), n_ctx=64, n_batch=64)
    out = io.StringIO()
    result = perplexity(ctx, ByteVocab(), TEXT, plan, n_chunks=4, output_type=1, out=out, log=io.StringIO())
    lines = out.getvalue().splitlines()
    assert [int(line.split()[0]) for line in lines[:4]] == [0, 0, 64, 64]
    _, ppl, mean, error = lines[3].split()
    assert ppl == f"{result.ppl:.4f}" and mean == f"{math.log(result.ppl):.6f}"
    assert float(error) * result.ppl == pytest.approx(result.error, abs=1e-3)
    assert lines[4] == "" and lines[5].startswith("Final estimate: PPL over 4 chunks for n_ctx=32 = ")


def test_stride_scores_the_last_tokens_of_every_window() -> None:
    vocab = ByteVocab()
    tokens = vocab.tokenize(TEXT)
    ctx = BigramContext(random_table(), n_ctx=48, n_batch=20)
    plan = plan_perplexity(40, 20, stride=16)
    assert plan.n_ctx == 48
    out, log = io.StringIO(), io.StringIO()
    result = strided_perplexity(ctx, vocab, TEXT, plan, 16, n_chunks=3, out=out, log=log)
    log_p = log_softmax(random_table())
    losses = [-log_p[tokens[i], tokens[i + 1]] for w in range(3) for i in range(w * 16 + 31, w * 16 + 47)]
    assert result.n_tokens == 48
    assert result.ppl == pytest.approx(math.exp(np.mean(losses)), rel=1e-6)
    assert out.getvalue().startswith("[1]") and "Final" not in out.getvalue()
    assert f"have {len(tokens)} tokens. Calculation chunk = 48" in log.getvalue()
    whole = strided_perplexity(ctx, vocab, TEXT, plan, 16, out=io.StringIO(), log=io.StringIO())
    assert whole.n_chunks == (len(tokens) - 48 + 15) // 16


def test_errors() -> None:
    plan = plan_perplexity(64, 64)
    ctx = BigramContext(random_table(), n_ctx=64, n_batch=64)
    with pytest.raises(UsageError, match=r"need at least 128 tokens .* context of 64.* only 6 tokens"):
        perplexity(ctx, ByteVocab(), "short", plan, out=io.StringIO(), log=io.StringIO())
    with pytest.raises(UsageError, match="not enough for a context size of 64 and stride 8"):
        strided_perplexity(ctx, ByteVocab(), "short", plan, 8, out=io.StringIO(), log=io.StringIO())
    with pytest.raises(UsageError, match="requires '--ctx-size' > 0"):
        plan_perplexity(0, 512)
    with pytest.raises(UsageError, match="--chunks 0"):
        perplexity(ctx, ByteVocab(), TEXT, plan, n_chunks=0, out=io.StringIO(), log=io.StringIO())
    with pytest.raises(UsageError, match="--chunks 0"):
        strided_perplexity(ctx, ByteVocab(), TEXT, plan, 8, n_chunks=0, out=io.StringIO(), log=io.StringIO())
    with pytest.raises(UsageError, match="2 tokens leaves nothing to score; -c 3 is the least"):
        plan_perplexity(2, 512)
    vocab = ByteVocab()
    vocab.add_eos = True
    with pytest.raises(UnsupportedError, match="end token"):
        perplexity(ctx, vocab, TEXT, plan, out=io.StringIO(), log=io.StringIO())


@pytest.mark.parametrize(("chunk", "n_batch", "wanted"), [
    (512, 2048, (2048, 2048, 4)),
    (4096, 2048, (4096, 2048, 1)),
    (16, 2048, (1024, 1024, 64)),
])  # fmt: skip
def test_plan(chunk: int, n_batch: int, wanted: tuple[int, int, int]) -> None:
    plan = plan_perplexity(chunk, n_batch)
    assert (plan.n_ctx, plan.n_batch, plan.n_seq) == wanted


@pytest.mark.parametrize(("seconds", "passes", "text"), [
    (1.2, 1, "1.20 seconds per pass - ETA 0.02 minutes"),
    (0.42, 2, "0.42 seconds per pass - ETA 0.00 minutes"),
    (9.98, 1, "9.98 seconds per pass - ETA 0.15 minutes"),
    (10.0, 400, "10.00 seconds per pass - ETA 1 hours 6.67 minutes"),
])  # fmt: skip
def test_remaining_time(seconds: float, passes: float, text: str) -> None:
    log = io.StringIO()
    progress = Progress("perplexity", log, passes)
    progress.report(seconds)
    progress.report(99.0)
    assert log.getvalue() == f"perplexity: {text}\n"


def test_log_probs_with_threads_and_extreme_logits() -> None:
    logits = np.random.default_rng(0).normal(0, 30, (301, 5001)).astype(np.float32)
    logits[7] = -1e30
    logits[7, 5] = 80.0
    targets = np.random.default_rng(1).integers(0, 5001, 301).astype(np.int32)
    targets[7] = 5
    wanted = log_softmax(logits - logits.max(axis=-1, keepdims=True))[np.arange(301), targets]
    for n_threads in (1, 2):
        np.testing.assert_allclose(token_log_probs(logits, targets, n_threads), wanted, rtol=1e-5, atol=2e-5)


HELLASWAG = "".join(
    f"The {word} goes\n{i % 4}\nup to the {word}\ndown\naway from here\nup\n"
    for i, word in enumerate(["cat", "dog", "fox"])
)


def test_hellaswag_scores_each_ending_by_its_mean_log_probability() -> None:
    log_p = log_softmax(random_table())
    vocab = ByteVocab()
    out = io.StringIO()
    ctx = BigramContext(random_table(), n_ctx=512, n_batch=64)
    result = hellaswag(ctx, vocab, HELLASWAG, n_tasks=400, n_seq_max=8, out=out, log=io.StringIO())
    tasks = read_hellaswag(HELLASWAG)
    right = 0
    lines = []
    for i, index in enumerate(hellaswag_order(3, 400)):
        sequences = [vocab.tokenize(text) for text in tasks[index].texts]
        prefix = len(f"The {['cat', 'dog', 'fox'][index]} goes ") + 1
        scores = [np.mean([log_p[s[j - 1], s[j]] for j in range(prefix, len(s))]) for s in sequences]
        right += int(np.argmax(scores)) == index % 4
        lines.append(f"{i + 1}\t{100 * right / (i + 1):.8f}")
    assert out.getvalue() == "\ntask\tacc_norm\n" + "\n".join(lines) + "\n\n"
    assert result.accuracy == right / 3
    with pytest.raises(Exception, match="not a multiple of 6"):
        read_hellaswag(HELLASWAG + "more\n")


def test_endings_that_are_all_the_same() -> None:
    """There is nothing to score: the first one is taken."""
    text = "The cat goes\n0\nup\nup\nup\nup\nThe dog goes\n1\ndown\ndown\ndown\ndown\n"
    for n_seq_max in (4, 8):
        ctx = BigramContext(random_table(), n_ctx=512, n_batch=64)
        result = hellaswag(ctx, ByteVocab(), text, n_tasks=2, n_seq_max=n_seq_max, out=io.StringIO(), log=io.StringIO())
        assert result.accuracy == 0.5


def test_a_broken_model_has_an_infinite_perplexity() -> None:
    table = np.full((256, 256), 2000.0, np.float32)
    table[:, :-1] = 0
    out = io.StringIO()
    ctx = BigramContext(table, n_ctx=64, n_batch=64)
    perplexity(ctx, ByteVocab(), "abcdefgh" * 40, plan_perplexity(64, 64), out=out, log=io.StringIO())
    assert out.getvalue().startswith("[1]inf,[2]inf,")


def test_logits_of_a_long_chunk_are_not_held_at_once() -> None:
    """At most those of two pieces, whatever the number of pieces."""
    alive = most = 0
    ctx = BigramContext(random_table(), n_ctx=512, n_batch=32)
    decode = ctx.decode

    def counted(batch: Batch, *, copy: bool = True) -> np.ndarray:
        nonlocal alive, most
        logits = decode(batch, copy=copy)
        alive += 1
        most = max(most, alive)

        def gone() -> None:
            nonlocal alive
            alive -= 1

        weakref.finalize(logits, gone)
        return logits

    ctx.decode = counted  # type: ignore[method-assign]
    plan = plan_perplexity(512, 32)
    perplexity(ctx, ByteVocab(), "abcdefgh" * 200, plan, out=io.StringIO(), log=io.StringIO())
    assert most <= 3


def test_wrong_lines_are_named_up_to_ten() -> None:
    log = io.StringIO()
    with pytest.raises(FileFormatError, match="no Winogrande tasks found in the text: none of its lines is index,"):
        read_winogrande("no task\r\n\r\n" * 5000, log)
    assert log.getvalue().count("skipping line") == 10
    assert log.getvalue().endswith("winogrande: skipped 5000 lines in all\n")


def test_line_ends_of_windows() -> None:
    text = "context\n2\na\nb\nc\nd\n" * 2
    assert read_hellaswag(text.replace("\n", "\r\n")) == read_hellaswag(text)


def test_winogrande_rules() -> None:
    text = (
        '0,"The cup, it fell because _ was unstable by far.",table,cup,1\n'
        "1,He left _,home,work,2\n"
        "broken line\n"
        "2,No gap here,a,b,1\n"
        f"3,{'long ' * 40000}_,a,b,1\n"
    )
    log_p = log_softmax(random_table())
    vocab = ByteVocab()
    out, log = io.StringIO(), io.StringIO()
    ctx = BigramContext(random_table(), n_ctx=512, n_batch=512)
    winogrande(ctx, vocab, text, n_seq_max=4, out=out, log=log)
    assert log.getvalue().count("skipping line") == 3

    def mean(sentence: str, start: int) -> float:
        ids = vocab.tokenize(sentence)
        return float(np.mean([log_p[ids[j - 1], ids[j]] for j in range(start, len(ids) - 1)]))

    before = "The cup, it fell because "
    after = " was unstable by far."
    scores = [mean(before + c + after, 1 + len(before + c)) for c in ("table", "cup")]
    first = out.getvalue().splitlines()[0].split()
    assert [float(x) for x in first[2:4]] == pytest.approx(scores, abs=2e-6)
    assert first[4:] == ["1" if scores[0] > scores[1] else "2", "1"]


def build_choices(tasks: list[tuple[str, list[str], list[int]]]) -> bytes:
    def string(text: str) -> bytes:
        return len(text.encode()).to_bytes(4, "little") + text.encode()

    def answers(texts: list[str], labels: list[int]) -> bytes:
        ints = b"".join(label.to_bytes(4, "little") for label in labels)
        return len(texts).to_bytes(4, "little") + b"".join(map(string, texts)) + ints

    bodies = [string(q) + answers(a, y) + answers(a, y) for q, a, y in tasks]
    offsets = np.cumsum([4 + 4 * len(tasks)] + [len(b) for b in bodies])[:-1]
    return len(tasks).to_bytes(4, "little") + b"".join(int(o).to_bytes(4, "little") for o in offsets) + b"".join(bodies)


def test_multiple_choice_with_more_answers_than_sequences() -> None:
    tasks = [
        (
            "What is it?",
            ["a cat", "a dog", "an owl", "a very long animal", "nothing", "x"],
            [0, 1, 0, 1, 0, 0],
        ),
        ("Why?", ["because", "no reason"], [1, 0]),
    ]
    data = build_choices(tasks)
    log_p = log_softmax(random_table())
    vocab = ByteVocab()
    out = io.StringIO()
    ctx = BigramContext(random_table(), n_ctx=512, n_batch=50)
    result = multiple_choice(ctx, vocab, data, n_seq_max=4, out=out)
    right = 0
    for question, texts, labels in tasks:
        prefix = len(question) + 2
        while len({text[prefix - len(question) - 2] for text in texts}) == 1:
            prefix += 1
        sequences = [vocab.tokenize(f"{question} {text}") for text in texts]
        scores = [np.mean([log_p[s[j - 1], s[j]] for j in range(prefix, len(s))]) for s in sequences]
        right += labels[int(np.argmax(scores))]
    assert result.accuracy == right / 2
    assert out.getvalue().startswith("there are 2 tasks in prompt\npreparing task data...done\n")
    assert "Random chance: 25.0000 +/- " in out.getvalue()
    for cut in (2, 7, 30, len(data) - 40):
        with pytest.raises(Exception, match="multiple-choice file"):
            read_multiple_choice(data[:cut])


def test_selection_is_the_classic_generator() -> None:
    # First outputs of mt19937 seeded with 1: 1791095845, 4282876139, 3093770124, 4005303368.
    words = [1791095845, 4282876139, 3093770124, 4005303368]
    remaining = list(range(1000))
    assert hellaswag_order(1000, 4) == [remaining.pop(word * len(remaining) >> 32) for word in words]
    assert selection_order(1000, 1)[0] == int(np.float32(words[0]) * np.float32(2**-32) * np.float32(1000))
    assert selection_order(5, 0) == [0, 1, 2, 3, 4] and sorted(selection_order(50, 49))[0] in (0, 1)
    assert len(set(selection_order(50, 49))) == 49
