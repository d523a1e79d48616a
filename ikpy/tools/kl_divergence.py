"""Log-probability files of a base model, and the divergence of another model from them.

File layout and formulas are those of llama-perplexity (perplexity.md#comparing-with-a-base-model).
"""

from __future__ import annotations

import os
import shutil
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import FileFormatError, ResourceError, UsageError
from ikpy.gguf.atomic import AtomicFile
from ikpy.tools.kl_statistics import ChunkStatistics, KLStatistics
from ikpy.tools.logprobs import for_blocks, log_sum_exp
from ikpy.tools.perplexity import (
    LEAST_CHUNK,
    DecodeContext,
    Progress,
    Tokenizer,
    decode_window,
    named_tokens,
    with_bos,
)
from ikpy.tools.sizes import format_size

MAGIC = b"_logits_"
HEADER = struct.Struct("<8s3i")
RANGE = np.float32(24.0)  # log-probabilities further below the largest are stored as this far below
IGNORED_BELOW = np.float32(-16.0)  # base log-probabilities that do not count in the divergence
# Rows beyond these are damage: probabilities are at most 1, but for rounding, the smallest RANGE below the largest.
HIGHEST, LOWEST = np.float32(0.1), np.float32(1000.0)

Words = NDArray[np.uint16]


def row_words(n_vocab: int) -> int:
    """u16 words per row: two float32 (scale, smallest log-probability) and the vocabulary padded to even."""
    return 2 * ((n_vocab + 1) // 2) + 4


def rows_per_chunk(n_ctx: int) -> int:
    """Scored positions of a chunk: those of its second half that have a next token."""
    return n_ctx - 1 - n_ctx // 2


def base_file_size(n_ctx: int, n_vocab: int, n_chunk: int) -> int:
    """Bytes of a base file."""
    return HEADER.size + n_chunk * (4 * n_ctx + 2 * rows_per_chunk(n_ctx) * row_words(n_vocab))


def encode_rows(logits: NDArray[np.float32], n_threads: int = 1) -> Words:
    """Rows of logits [n, n_vocab] in file form, uint16 [n, row_words(n_vocab)]."""
    n, n_vocab = logits.shape
    words = np.zeros((n, row_words(n_vocab)), dtype=np.uint16)

    def work(rows: slice) -> None:
        block = logits[rows]
        top, lse = log_sum_exp(block)
        low = np.maximum(block.min(axis=-1), top - RANGE)
        scale = (top - low) / np.float32(65535.0)
        head = np.stack([scale, low - top - lse.astype(np.float32)], axis=-1).astype("<f4")
        words[rows, :4] = head.view("<u2")
        divisor = np.where(scale > 0, scale, np.float32(1.0))
        steps = block - low[:, None]
        steps /= divisor[:, None]
        np.maximum(steps, 0, out=steps)
        words[rows, 4 : 4 + n_vocab] = np.rint(steps, out=steps)

    for_blocks(n, n_vocab * 4, n_threads, work)
    return words


def decode_rows(words: Words, n_vocab: int) -> NDArray[np.float32]:
    """Log-probabilities float32 [n, n_vocab] of rows in file form."""
    head = np.ascontiguousarray(words[:, :4]).view("<f4")
    log_p = words[:, 4 : 4 + n_vocab].astype(np.float32)
    log_p *= head[:, :1]
    log_p += head[:, 1:2]
    return log_p


class BaseWriter:
    """Writes a base file; the finished file takes its name only on success."""

    def __init__(self, path: str | os.PathLike[str], n_ctx: int, n_vocab: int, n_threads: int = 1) -> None:
        self.path = Path(path)
        self.n_ctx, self.n_vocab, self.n_threads = n_ctx, n_vocab, n_threads
        try:
            self._file = AtomicFile(os.fspath(path))
        except OSError as error:
            raise UsageError(f"failed to open {self.path} for writing: {error.strerror}") from None

    def start(self, chunks: NDArray[np.int32]) -> Callable[[NDArray[np.float32]], None]:
        """Writes the header for token chunks [n_chunk, n_ctx]; returns the function that takes the rows.

        Raises ResourceError when the disk has no room for all rows: they may be hours of work and many gigabytes.
        """
        n_chunk, n_ctx = chunks.shape
        if n_ctx != self.n_ctx:
            raise ValueError(f"chunks of {n_ctx} tokens given to a file of context {self.n_ctx}")
        needed = base_file_size(n_ctx, self.n_vocab, n_chunk)
        free = shutil.disk_usage(os.path.dirname(os.path.realpath(self.path))).free
        if free < needed:
            raise ResourceError(
                f"{self.path}: the logits of {n_chunk} chunks need {format_size(needed)} of disk space but only "
                f"{format_size(free)} are free; take fewer --chunks, make room or write elsewhere"
            )
        self._append(HEADER.pack(MAGIC, n_ctx, self.n_vocab, n_chunk))
        self._append(np.ascontiguousarray(chunks, dtype="<i4").tobytes())
        return self.write

    def write(self, logits: NDArray[np.float32]) -> None:
        """Appends rows of logits [n, n_vocab] of the scored positions. Raises ResourceError."""
        self._append(encode_rows(logits, self.n_threads).astype("<u2", copy=False).tobytes())

    def _append(self, data: bytes) -> None:
        try:
            self._file.handle.write(data)
        except OSError as error:
            raise self._problem(error) from None

    def _problem(self, error: OSError) -> ResourceError:
        return ResourceError(f"cannot write {self.path}: {error.strerror or error}")

    def __enter__(self) -> BaseWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._file.finish()
                self._file.publish()
        except OSError as problem:
            raise self._problem(problem) from None
        finally:
            self._file.discard()


class BaseFile:
    """A base file opened for reading: ``n_ctx``, ``n_vocab``, ``n_chunk``, ``tokens`` [n_chunk, n_ctx]."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            size = self.path.stat().st_size
            with open(self.path, "rb") as file:
                head = file.read(HEADER.size)
        except OSError as error:
            raise UsageError(f"failed to open {self.path}: {error.strerror}") from None
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            raise FileFormatError(f"{self.path} does not look like a file containing log-probabilities")
        _, self.n_ctx, self.n_vocab, self.n_chunk = HEADER.unpack(head)
        if self.n_ctx < LEAST_CHUNK or self.n_vocab < 1 or self.n_chunk < 1:
            raise FileFormatError(
                f"{self.path}: impossible sizes: context {self.n_ctx}, vocabulary {self.n_vocab}, {self.n_chunk} chunks"
            )
        n_tokens = self.n_chunk * self.n_ctx
        self.rows_per_chunk = rows_per_chunk(self.n_ctx)
        self._rows_at = HEADER.size + 4 * n_tokens
        wanted = base_file_size(self.n_ctx, self.n_vocab, self.n_chunk)
        if size < wanted:
            raise FileFormatError(f"{self.path} is truncated: {size} bytes, {wanted} expected")
        flat = np.fromfile(self.path, dtype="<i4", count=n_tokens, offset=HEADER.size)
        self.tokens = flat.astype(np.int32, copy=False).reshape(self.n_chunk, self.n_ctx)

    def chunk_rows(self, chunk: int) -> Words:
        """Rows of one chunk, uint16 [rows_per_chunk, row_words(n_vocab)]; memory-mapped, read when used.

        Raises FileFormatError for rows that cannot be log-probabilities.
        """
        words = row_words(self.n_vocab)
        offset = self._rows_at + 2 * words * self.rows_per_chunk * chunk
        rows = np.memmap(self.path, dtype="<u2", mode="r", offset=offset, shape=(self.rows_per_chunk, words))
        scale, low = np.ascontiguousarray(rows[:, :4]).view("<f4").T
        with np.errstate(all="ignore"):
            possible = (scale >= 0) & (low > -LOWEST) & (low + np.float32(65535) * scale < HIGHEST)
        if not possible.all():
            row = int(possible.argmin())
            raise FileFormatError(
                f"{self.path} is damaged: row {row} of chunk {chunk} has no log-probabilities "
                f"(scale {scale[row]:g}, smallest {low[row]:g})"
            )
        return rows


def compare_rows(
    logits: NDArray[np.float32], base: Words, targets: NDArray[np.int32], n_threads: int = 1
) -> ChunkStatistics:
    """Per-token statistics of logits [n, n_vocab] against base rows in file form, for next tokens [n]."""
    n, n_vocab = logits.shape
    result = ChunkStatistics.empty(n)

    def work(rows: slice) -> None:
        block = logits[rows]
        index = np.arange(len(block))
        top, lse = log_sum_exp(block)
        base_block = base[rows]
        log_base = decode_rows(base_block, n_vocab)
        next_base = log_base[index, targets[rows]].astype(np.float64)
        weight = np.exp(log_base)
        weight *= log_base > IGNORED_BELOW
        log_base -= block
        log_base += (top + lse.astype(np.float32))[:, None]
        result.kld[rows] = np.einsum("ij,ij->i", weight, log_base)
        next_model = (block[index, targets[rows]] - top).astype(np.float64) - lse
        result.nll[rows] = -next_model
        result.nll_base[rows] = -next_base
        result.p_diff[rows] = np.exp(next_model) - np.exp(next_base)
        result.same_top[rows] = block.argmax(axis=-1) == base_block[:, 4 : 4 + n_vocab].argmax(axis=-1)

    for_blocks(n, n_vocab * 4, n_threads, work)
    return result


def kl_divergence(
    ctx: DecodeContext,
    vocab: Tokenizer,
    n_vocab: int,
    base: BaseFile,
    n_batch: int,
    *,
    n_chunks: int = -1,
    n_threads: int = 1,
    out: TextIO | None = None,
    log: TextIO | None = None,
) -> KLStatistics:
    """Evaluates the base file's own tokens and prints the table and the statistics."""
    out, log = out or sys.stdout, log or sys.stderr
    if base.n_ctx > ctx.n_ctx:
        raise UsageError(
            f"{base.path} has been computed with {base.n_ctx}, while the current context is {ctx.n_ctx}. "
            "Increase it with -c and retry"
        )
    if base.n_vocab != n_vocab:
        raise UsageError(f"{base.path}: inconsistent vocabulary ({base.n_vocab} vs {n_vocab})")
    if base.tokens.min() < 0 or base.tokens.max() >= n_vocab:
        raise FileFormatError(f"{base.path}: token ids outside the vocabulary of {n_vocab} tokens")
    n_chunk = base.n_chunk if n_chunks <= 0 else min(n_chunks, base.n_chunk)
    first = base.n_ctx // 2
    statistics = KLStatistics()
    progress = Progress("kl_divergence", log, n_chunk)
    for i in range(n_chunk):
        start = time.perf_counter()
        tokens = base.tokens[i]
        ids = with_bos(tokens, vocab.bos if vocab.add_bos else None)
        rows = base.chunk_rows(i)
        ctx.kv.clear()
        parts = []
        with named_tokens(ids):
            for offset, logits in decode_window(ctx, ids, first, base.n_ctx - 1, n_batch):
                span = slice(offset - first, offset - first + len(logits))
                targets = tokens[offset + 1 : offset + 1 + len(logits)]
                parts.append(compare_rows(logits, rows[span], targets, n_threads))
        progress.report(time.perf_counter() - start)
        statistics.add(ChunkStatistics.join(parts))
        if i == 0:
            print("\n" + statistics.heading, file=out)
        print(statistics.chunk_line(), file=out, flush=True)
    print("\n".join(["", *statistics.report()]), file=out, flush=True)
    return statistics
