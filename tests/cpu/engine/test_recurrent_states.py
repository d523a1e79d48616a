"""States of recurrent layers: sequences side by side, shared beginnings, what is lost, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.kv_cache import KVCacheFullError
from ikpy.engine.recurrent import RecurrentStates
from ikpy.errors import ResourceError, UsageError
from ikpy.models.batch import StateSpec
from tests.cpu.models.recurrent_model import MODELS, expected, hold, new_context, text, write_model


@pytest.fixture(scope="module", params=MODELS)
def path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), arch=request.param)


def go_on(context: Context, tokens: list[int], start: int, seq_id: int = 0) -> np.ndarray:
    """Logits of the tokens from position `start` on."""
    return context.decode(Batch.single(tokens[start:], start, seq_id, logits="all"))


@pytest.mark.parametrize("n_ubatch", [4, 64])
def test_sequences_side_by_side(path: Path, n_ubatch: int) -> None:
    texts = [text(seed, n) for seed, n in ((1, 30), (2, 17), (3, 25))]
    context = new_context(path, n_ubatch=n_ubatch)
    found: dict[int, list[np.ndarray]] = {seq: [] for seq in range(3)}
    steps = np.random.default_rng(4)
    done = [0, 0, 0]
    while any(n < len(tokens) for n, tokens in zip(done, texts, strict=True)):
        batch = Batch()
        order = []
        for seq in steps.permutation(3).tolist():
            piece = texts[seq][done[seq] : done[seq] + int(steps.integers(0, 9))]
            if piece:
                batch.add(piece, done[seq], seq, "all")
                order += [seq] * len(piece)
                done[seq] += len(piece)
        if order:
            for seq, row in zip(order, context.decode(batch), strict=True):
                found[seq].append(row)
    for seq, tokens in enumerate(texts):
        hold(f"sequence {seq}", np.array(found[seq]), expected(path, tokens))


def test_a_beginning_of_several_sequences_is_evaluated_once(path: Path) -> None:
    beginning, ends = text(5, 12), [text(6, 9), text(7, 9)]
    tokens = np.array([*beginning, *ends[0], *ends[1]], np.int32)
    positions = np.array([*range(12), *range(12, 21), *range(12, 21)], np.int32)
    members = [(0, 2)] * 12 + [(0,)] * 9 + [(2,)] * 9
    context = new_context(path)
    logits = context.decode(Batch(tokens, positions, members, np.ones(len(tokens), np.bool_)))
    assert context.kv.used_cells == 12 + 9 + 9
    hold("first", logits[:21], expected(path, beginning + ends[0]))
    hold("second", logits[21:], expected(path, beginning + ends[1])[12:])
    with pytest.raises(UsageError, match=r"sequences \[0, 2\] of a recurrent model have parted"):
        context.decode(Batch(np.array([5], np.int32), np.array([21], np.int32), [(0, 2)], np.array([True])))


def test_positions_follow_each_other(path: Path) -> None:
    context = new_context(path, 2)
    context.decode(Batch.single(text(8, 10)))
    with pytest.raises(UsageError, match="sequence 0 of a recurrent model ends before position 10: it cannot go on at"):
        context.decode(Batch.single([5], 11))
    with pytest.raises(UsageError, match="sequence 2 of a recurrent model: the context has 2"):
        context.decode(Batch.single([5], 0, 2))
    hold("afterwards", go_on(context, text(8, 10) + text(9, 4), 10), expected(path, text(8, 10) + text(9, 4))[10:])


def test_tokens_that_are_taken_back_lose_the_state(path: Path) -> None:
    tokens = text(10, 20)
    context = new_context(path, 2)
    context.decode(Batch.single(tokens))
    context.kv.seq_rm(0, 15, -1)
    with pytest.raises(ResourceError, match="the state of sequence 0 was lost: tokens were taken back"):
        go_on(context, tokens, 15)
    with pytest.raises(ResourceError, match="cannot be saved"):
        assert context.kv.recurrent is not None
        context.kv.recurrent.take(0)
    assert context.kv.rewind(0, 12) == 0, "no checkpoint: all must be evaluated again"
    hold("again", go_on(context, tokens, 0), expected(path, tokens))


def test_a_full_cache_changes_nothing(path: Path) -> None:
    tokens = text(11, 30)
    context = new_context(path, 1, n_ctx=256)
    n = context.n_ctx - 10
    long = text(12, n) + tokens
    context.decode(Batch.single(long[:n]))
    with pytest.raises(KVCacheFullError):
        context.decode(Batch.single(long[n:], n))
    hold("afterwards", go_on(context, long[: n + 5], n), expected(path, long[: n + 5])[n:])


def test_a_batch_that_fails_loses_the_states_of_its_sequences(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = text(13, 12), text(14, 12)
    context = new_context(path, 3, n_ubatch=4)
    for seq, tokens in enumerate(texts):
        context.decode(Batch.single(tokens[:8], 0, seq))
    context.kv.keep_checkpoint(1)
    evaluate = context._evaluate

    def fail_at_last(piece: Batch, *args: Any, **more: Any) -> Any:
        if len(piece) < 4:
            raise RuntimeError("broken")
        return evaluate(piece, *args, **more)

    batch = Batch()
    for seq, tokens in enumerate(texts):
        batch.add(tokens[8:], 8, seq, "all")
    batch.add([5, 6], 0, 2, "last")
    with monkeypatch.context() as patch:
        patch.setattr(context, "_evaluate", fail_at_last)
        with pytest.raises(RuntimeError, match="broken"):
            context.decode(batch)
    assert context.kv.used_cells == 16
    with pytest.raises(ResourceError, match="the state of sequence 0 was lost"):
        go_on(context, texts[0], 8)
    hold("with a checkpoint", go_on(context, texts[1], 8, 1), expected(path, texts[1])[8:])
    hold("without tokens", go_on(context, texts[0], 0, 2), expected(path, texts[0]))


def test_sequences_are_copied_kept_and_cleared(path: Path) -> None:
    tokens, other = text(15, 20), text(16, 10)
    context = new_context(path)
    context.decode(Batch.single(tokens[:12]))
    context.decode(Batch.single(other, 0, 1))
    context.kv.seq_cp(0, 2)
    hold("copy", go_on(context, tokens, 12, 2), expected(path, tokens)[12:])
    hold("source", go_on(context, tokens[:12] + other, 12, 0), expected(path, tokens[:12] + other)[12:])
    context.kv.seq_cp(2, 3, -1, 15)
    with pytest.raises(ResourceError, match="the state of sequence 3 was lost"):
        go_on(context, tokens, 15, 3)
    for removed in (0, 1, 3):
        context.kv.seq_rm(removed)
    assert context.kv.used_cells == 20
    hold("kept", go_on(context, tokens + other, 20, 2), expected(path, tokens + other)[20:])
    hold("emptied", go_on(context, tokens, 0, 1), expected(path, tokens))
    context.kv.clear()
    hold("cleared", go_on(context, tokens, 0, 2), expected(path, tokens))


def test_a_checkpoint_is_gone_back_to(path: Path) -> None:
    tokens, other = text(17, 40), text(18, 10)
    context = new_context(path)
    states = context.kv.recurrent
    assert states is not None
    for end in (10, 20, 30):
        go_on(context, tokens[:end], end - 10)
        states.keep_checkpoint(0, 8)
    go_on(context, tokens, 30)
    context.kv.seq_cp(0, 1)
    context.kv.seq_cp(0, 2, -1, 20)
    assert [context.kv.reusable(0, n) for n in (40, 39, 30, 29, 9)] == [40, 30, 30, 20, 0]
    assert context.kv.rewind(0, 26) == 20
    assert [saved.end for saved in states.checkpoints[0]] == [10, 20]
    hold("rewound", go_on(context, tokens[:20] + other, 20), expected(path, tokens[:20] + other)[20:])
    assert context.kv.rewind(0, 19) == 10, "more than once"
    hold("again", go_on(context, tokens[:10] + other, 10), expected(path, tokens[:10] + other)[10:])
    assert context.kv.rewind(1, 35) == 30
    hold("copied checkpoints", go_on(context, tokens, 30, 1), expected(path, tokens)[30:])
    hold("copied up to a checkpoint", go_on(context, tokens, 20, 2), expected(path, tokens)[20:])


def test_tokens_in_the_middle_take_the_checkpoints_behind_them(path: Path) -> None:
    tokens = text(19, 30)
    context = new_context(path)
    for end in (10, 20, 30):
        go_on(context, tokens[:end], end - 10)
        context.kv.recurrent.keep_checkpoint(0, 8)
    context.kv.seq_rm(0, 15, 18)
    assert context.kv.reusable(0, 30) == 10
    assert context.kv.rewind(0, 30) == 10
    hold("rewound", go_on(context, tokens, 10), expected(path, tokens)[10:])


def test_the_checkpoint_with_the_shortest_gap_goes() -> None:
    states = RecurrentStates([[StateSpec("delta", (2, 2))]], 1)
    kept = []
    for end in (100, 110, 200, 300, 310):
        states.ends[0] = end
        states.keep_checkpoint(0, 3)
        kept.append([saved.end for saved in states.checkpoints[0]])
    assert kept[2:] == [[100, 110, 200], [100, 200, 300], [100, 200, 310]]
    states.keep_checkpoint(0, 3)
    assert [saved.end for saved in states.checkpoints[0]] == [100, 200, 310], "one per end"
    states.ends[0] = 400
    states.keep_checkpoint(0, 1)
    assert [saved.end for saved in states.checkpoints[0]] == [400]
    assert states.nbytes_of(0) == states.slot_nbytes == 16


def test_an_interrupted_removal_does_not_lose_the_sequence(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between the cells and the states of a sequence: it can start anew."""
    context, tokens = new_context(path), text(3, 20)
    context.decode(Batch.single(tokens))
    with monkeypatch.context() as patch:
        patch.setattr(RecurrentStates, "removed", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            context.kv.seq_rm(0)
    assert context.kv.used_cells == 0 and context.kv.rewind(0, 5) == 0
    hold("anew", context.decode(Batch.single(tokens, logits="all")), expected(path, tokens))
