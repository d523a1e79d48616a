"""KL divergence: file format byte by byte, statistics against direct formulas, printed text."""

from __future__ import annotations

import io
import math
import os
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ikpy.errors import FileFormatError, ResourceError, UsageError
from ikpy.tools.kl_divergence import (
    BaseFile,
    BaseWriter,
    base_file_size,
    decode_rows,
    encode_rows,
    kl_divergence,
    row_words,
)
from ikpy.tools.kl_statistics import ChunkStatistics, KLStatistics, Moments, covariance, percentile
from ikpy.tools.perplexity import perplexity, plan_perplexity
from tests.cpu.models.bigram_model import BigramContext, ByteVocab, random_table

TEXT = "".join(chr(97 + (i * i + 3 * i) % 26) for i in range(900))
GOLDEN = Path(__file__).parents[2] / "data" / "kl_divergence_iq2_k.txt"


def write_base(path: Path, table: np.ndarray, n_ctx: int = 64, n_batch: int = 64, n_chunks: int = 6) -> np.ndarray:
    plan = plan_perplexity(n_ctx, n_batch)
    ctx = BigramContext(table, n_ctx=plan.n_ctx, n_batch=plan.n_batch)
    with BaseWriter(path, n_ctx, table.shape[1]) as writer:
        perplexity(
            ctx,
            ByteVocab(),
            TEXT,
            plan,
            n_chunks=n_chunks,
            base_writer=writer.start,
            out=io.StringIO(),
            log=io.StringIO(),
        )
    return np.array(ByteVocab().tokenize(TEXT)[: n_chunks * n_ctx]).reshape(n_chunks, n_ctx)


def direct_row(logits: np.ndarray) -> bytes:
    """One row from the definition, value by value."""
    top, low = np.float32(logits.max()), np.float32(max(logits.min(), logits.max() - np.float32(24)))
    total = sum(float(np.exp(np.float32(x - top))) for x in logits)
    scale = np.float32((top - low) / np.float32(65535))
    smallest = np.float32(low - top - np.float32(math.log(total)))
    words = [0 if x <= low else round(float(np.float32(x - low) / scale)) for x in logits]
    words += [0] * (len(words) % 2)
    return struct.pack(f"<2f{len(words)}H", scale, smallest, *words)


@pytest.mark.parametrize("n_vocab", [512, 511, 37])
def test_rows_byte_by_byte(n_vocab: int) -> None:
    logits = np.random.default_rng(2).normal(0, 9, (40, n_vocab)).astype(np.float32)
    words = encode_rows(logits, n_threads=2)
    assert words.shape == (40, row_words(n_vocab)) and words.nbytes == 40 * (8 + 2 * (n_vocab + n_vocab % 2))
    for i, row in enumerate(logits):
        wanted = np.frombuffer(direct_row(row), np.uint16).astype(int)
        found = words[i].astype(int)
        assert (found[[1, 3]] == wanted[[1, 3]]).all(), f"row {i}: scale or offset differs"
        assert abs(found[4:] - wanted[4:]).max() <= 1, f"row {i}: word {abs(found[4:] - wanted[4:]).argmax()} differs"
        assert (found[4:] != wanted[4:]).mean() < 0.01
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=-1, keepdims=True))
    stored = decode_rows(words, n_vocab)
    kept = exact > exact.max(axis=-1, keepdims=True) - 24
    assert np.abs(stored - exact)[kept].max() < 24 / 65535
    equal = encode_rows(np.full((2, 8), 3.0, np.float32))
    np.testing.assert_allclose(decode_rows(equal, 8), -math.log(8), rtol=1e-6)


def test_file_layout(tmp_path: Path) -> None:
    path = tmp_path / "base.kld"
    table = random_table(4)
    tokens = write_base(path, table)
    data = path.read_bytes()
    assert data[:8] == b"_logits_" and struct.unpack("<3i", data[8:20]) == (64, 258, 6)
    stored = np.frombuffer(data, "<i4", 384, 20)
    assert (stored == tokens.reshape(-1)).all(), "tokens must be those of the text, begin token not substituted"
    row_bytes = 2 * (258 + 4)
    assert len(data) == 20 + 4 * 384 + 6 * 31 * row_bytes
    for chunk, j in ((0, 0), (3, 17), (5, 30)):
        at = 20 + 4 * 384 + (chunk * 31 + j) * row_bytes
        assert data[at : at + row_bytes] == encode_rows(table[tokens[chunk, 32 + j]][None]).tobytes()
    assert [p.name for p in tmp_path.iterdir()] == ["base.kld"]


def test_size_of_the_documented_example(tmp_path: Path) -> None:
    path = tmp_path / "base.kld"
    with BaseWriter(path, 128, 512) as writer:
        writer.start(np.zeros((4, 128), np.int32))
        writer.write(np.zeros((4 * 63, 512), np.float32))
    assert path.stat().st_size == 262132


def test_same_file_for_every_batch_size(tmp_path: Path) -> None:
    table = random_table(4)
    files = []
    for n_batch in (20, 64, 192):
        write_base(tmp_path / f"{n_batch}", table, n_batch=n_batch)
        files.append((tmp_path / f"{n_batch}").read_bytes())
    assert files[0] == files[1] == files[2]


def test_statistics_against_direct_formulas(tmp_path: Path) -> None:
    base_table = random_table(4)
    table = (base_table + np.random.default_rng(9).normal(0, 0.3, base_table.shape)).astype(np.float32)
    tokens = write_base(tmp_path / "base", base_table)
    ctx = BigramContext(table, n_ctx=64, n_batch=64)
    out, log = io.StringIO(), io.StringIO()
    result = kl_divergence(ctx, ByteVocab(), 258, BaseFile(tmp_path / "base"), 64, out=out, log=log)

    def log_softmax(x: np.ndarray) -> np.ndarray:
        return x - np.log(np.exp(x.astype(np.float64)).sum(axis=-1, keepdims=True))

    last = tokens[:, 32:63].reshape(-1)
    target = tokens[:, 33:64].reshape(-1)
    lp, lb = log_softmax(table)[last], log_softmax(base_table)[last]
    at = np.arange(len(last))
    n = len(last)
    kld = np.where(lb > -16, np.exp(lb) * (lb - lp), 0).sum(axis=-1)
    nll, nll_base = -lp[at, target], -lb[at, target]
    dp = np.exp(lp[at, target]) - np.exp(lb[at, target])
    assert result.n_tokens == n == 6 * 31
    assert result.kld.value == pytest.approx(kld.mean(), abs=2e-5)
    assert result.kld.error == pytest.approx(kld.std() / math.sqrt(n - 1), rel=1e-3)
    assert result.loss.value == pytest.approx(nll.mean(), rel=1e-6)
    assert result.base_loss.value == pytest.approx(nll_base.mean(), abs=3e-4)
    joint = np.cov(nll, nll_base, ddof=0)[0, 1] / (n - 1)
    spread = math.sqrt(nll.var() / (n - 1) + nll_base.var() / (n - 1) - 2 * joint)
    assert result.log_ratio.error == pytest.approx(spread, rel=1e-2)
    assert result.rms_p_diff.value == pytest.approx(math.sqrt((dp**2).mean()), rel=1e-3)
    assert result.same_top.value == pytest.approx((table[last].argmax(-1) == base_table[last].argmax(-1)).mean())
    lines = out.getvalue().splitlines()
    assert lines[0] == "" and lines[1] == KLStatistics.heading and len(lines) == 48
    assert lines[7].startswith("   6") and lines[7].endswith(" %")
    assert f"Maximum KLD: {result.all.kld.max():10.6f}" in lines
    assert "kl_divergence: " in log.getvalue() and " seconds per pass - ETA 0.00 minutes" in log.getvalue()


def test_text_has_the_form_of_the_recorded_output() -> None:
    """Every line of a recorded run, with numbers masked, appears in the same place in ours."""
    statistics = KLStatistics()
    rng = np.random.default_rng(1)
    from ikpy.tools.kl_statistics import ChunkStatistics

    lines = ["", KLStatistics.heading]
    for _ in range(4):
        nll = rng.gamma(2, 2.3, 255)
        statistics.add(
            ChunkStatistics(
                nll,
                nll + rng.normal(0, 0.2, 255),
                rng.gamma(1, 0.1, 255),
                rng.normal(0, 0.05, 255),
                rng.random(255) > 0.2,
            )
        )
        lines.append(statistics.chunk_line())
    lines += ["", *statistics.report()]
    recorded = GOLDEN.read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(recorded)

    def masked(line: str) -> str:
        label, colon, values = line.rpartition(":")
        values = "".join("9" if c in "0123456789- " else c for c in values)
        return label + colon + values if colon else "".join("9" if c in "0123456789- " else c for c in line)

    for i, (ours, theirs) in enumerate(zip(lines, recorded, strict=True)):
        if 1 < i < 6:
            assert len(ours) == len(theirs), f"line {i}: {ours!r} and {theirs!r}"
        assert masked(ours).replace("9", "") == masked(theirs).replace("9", ""), f"line {i}: {ours!r} and {theirs!r}"


def test_small_numbers_of_tokens() -> None:
    values = np.arange(10.0)
    ten, eleven, nine = moments(values), moments(np.arange(11.0)), moments(values[:9])
    assert ten.estimate.error == 0.0 and eleven.estimate.error > 0
    assert covariance(nine, nine, nine.squares) == 0.0
    assert covariance(ten, ten, ten.squares) == pytest.approx(values.var() / 9)
    assert percentile(values, 0.5) == 4.5 and percentile(values, 1.0) == 9.0 and percentile(values, 0.25) == 2.25


def test_errors(tmp_path: Path) -> None:
    table = random_table(4)
    path = tmp_path / "base"
    write_base(path, table)
    data = path.read_bytes()
    small = BigramContext(table, n_ctx=32, n_batch=32)
    with pytest.raises(UsageError, match=r"computed with 64, while the current context is 32\. Increase it with -c"):
        kl_divergence(small, ByteVocab(), 258, BaseFile(path), 32, out=io.StringIO(), log=io.StringIO())
    ctx = BigramContext(table, n_ctx=64, n_batch=64)
    with pytest.raises(UsageError, match=r"inconsistent vocabulary \(258 vs 300\)"):
        kl_divergence(ctx, ByteVocab(), 300, BaseFile(path), 64, out=io.StringIO(), log=io.StringIO())
    with pytest.raises(UsageError, match=r"failed to open .*missing: No such file"):
        BaseFile(tmp_path / "missing")
    for broken, message in (
        (b"GGUF" + data[4:], "does not look like a file containing log-probabilities"),
        (data[:10], "does not look like"),
        (data[:-1], "truncated"),
        (data[:12] + struct.pack("<i", -5) + data[16:], "impossible sizes"),
    ):
        path.write_bytes(broken)
        with pytest.raises(FileFormatError, match=message):
            BaseFile(path)
    path.write_bytes(data[:20] + struct.pack("<i", 999) + data[24:])
    with pytest.raises(FileFormatError, match="token ids outside the vocabulary"):
        kl_divergence(ctx, ByteVocab(), 258, BaseFile(path), 64, out=io.StringIO(), log=io.StringIO())


@pytest.mark.parametrize(("scale", "low"), [
    (math.nan, -30.0), (-1e-4, -30.0), (1e30, -30.0), (1e-4, math.inf), (1e-4, -math.inf), (1e-4, 5.0), (0.0, -1e30),
])  # fmt: skip
def test_rows_that_are_no_probabilities(tmp_path: Path, scale: float, low: float) -> None:
    table = random_table(4)
    path = tmp_path / "base"
    write_base(path, table)
    data = bytearray(path.read_bytes())
    base = BaseFile(path)
    at = base._rows_at + 2 * row_words(258) * (base.rows_per_chunk + 3)
    data[at : at + 8] = struct.pack("<2f", scale, low)
    path.write_bytes(data)
    ctx = BigramContext(table, n_ctx=64, n_batch=64)
    with pytest.raises(FileFormatError, match="base is damaged: row 3 of chunk 1 has no log-probabilities"):
        kl_divergence(ctx, ByteVocab(), 258, BaseFile(path), 64, out=io.StringIO(), log=io.StringIO())


def test_nothing_is_left_behind_after_a_failure(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), BaseWriter(tmp_path / "base", 8, 4) as writer:
        writer.start(np.zeros((1, 8), np.int32))
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="failed to open"):
        BaseWriter(tmp_path / "no" / "base", 8, 4)


def test_devices_and_pipes_are_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="no regular file"):
        BaseWriter(tmp_path / "pipe", 8, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
    assert (tmp_path / "pipe").is_fifo()


def test_a_full_disk_is_one_error(tmp_path: Path) -> None:
    with (
        pytest.raises(ResourceError, match=r"cannot write .*No space left"),
        BaseWriter(tmp_path / "x", 8, 4) as writer,
    ):
        writer._file.handle.close()
        writer._file.handle = open("/dev/full", "wb")  # noqa: SIM115
        writer.start(np.zeros((1, 8), np.int32))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("n_vocab", [4, 5])
def test_room_is_looked_for_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_vocab: int) -> None:
    path, logits = tmp_path / "x", np.zeros((6, n_vocab), np.float32)
    size = base_file_size(8, n_vocab, 2)
    for free in (size, size - 1):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        with BaseWriter(path, 8, n_vocab) as writer:
            if free < size:
                with pytest.raises(ResourceError, match=rf"the logits of 2 chunks need {size} B .* only {free} B"):
                    writer.start(np.zeros((2, 8), np.int32))
                break
            writer.start(np.zeros((2, 8), np.int32))(logits)
        assert path.stat().st_size == size


def moments(values: np.ndarray) -> Moments:
    found = Moments()
    found.add(values)
    return found


def test_a_chunk_costs_the_same_however_many_came_before() -> None:
    """A line per chunk looks at that chunk only; what it says is what all tokens at once give."""
    rng = np.random.default_rng(5)
    n_tokens, n_chunks = 50, 40
    seen: list[int] = []

    class Watched(np.ndarray):
        def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):  # type: ignore[no-untyped-def]
            inputs = tuple(x.view(np.ndarray) if isinstance(x, Watched) else x for x in inputs)
            seen.extend(x.size for x in inputs if isinstance(x, np.ndarray))
            return getattr(ufunc, method)(*inputs, **kwargs)

        def __array_function__(self, func, types, args, kwargs):  # type: ignore[no-untyped-def]
            raise AssertionError(f"{func} of all chunks")

    statistics = KLStatistics()
    chunks, work = [], []
    for _ in range(n_chunks):
        nll = rng.exponential(2.0, n_tokens)
        base, kld, diff = (
            nll + rng.normal(0, 0.1, n_tokens),
            rng.exponential(0.1, n_tokens),
            rng.normal(0, 0.1, n_tokens),
        )
        top = rng.random(n_tokens) < 0.9
        chunks.append(ChunkStatistics(nll, base, kld, diff, top))
        seen.clear()
        statistics.add(ChunkStatistics(*(x.view(Watched) for x in (nll, base, kld, diff, top))))
        line = statistics.chunk_line()
        work.append(sum(seen))
    assert len(set(work)) == 1
    at_once = KLStatistics()
    at_once.add(ChunkStatistics.join(chunks))
    assert at_once.chunk_line().split(maxsplit=1)[1] == line.split(maxsplit=1)[1]
