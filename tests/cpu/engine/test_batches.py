"""Native batches, cells and inputs against plain Python, and both ways of decoding against each other."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ikpy import Batch, Context, ContextParams, Model
from ikpy._native.cells import CellTable
from ikpy._native.inputs import InputArrays
from ikpy._native.steps import Ready, Steps
from ikpy._native.tables import CellTables, Taken
from ikpy.errors import UsageError
from tests.cpu.engine.reference_cells import ReferenceCells
from tests.cpu.models.test_zoo_holdouts import gpt_oss
from tests.shared import DATA

LLAMA = DATA / "zoo" / "llama-ropefreqs.gguf"
N_SEQ = 5


def take(tables: list[CellTable], batch: Batch) -> Taken:
    return CellTables(tables).place(batch)


def random_tokens(rng: np.random.Generator, n: int) -> tuple[list[int], list[int], list[tuple[int, ...]], list[bool]]:
    """Tokens, positions, sequences and what is wanted; half of the time one sequence each, as in generation."""
    if rng.random() < 0.5:
        ids = [(int(seq),) for seq in rng.permutation(N_SEQ)[:n]]
    else:
        ids = [tuple(rng.permutation(N_SEQ)[: rng.integers(1, 3)].tolist()) for _ in range(n)]
    n = len(ids)
    return rng.integers(0, 99, n).tolist(), rng.integers(0, 400, n).tolist(), ids, (rng.random(n) < 0.5).tolist()


@pytest.mark.parametrize("seed", range(6))
def test_cells_and_inputs_are_those_of_the_reference(seed: int) -> None:
    """Tables of several sizes through random batches and removals, until they are full and empty again."""
    rng = np.random.default_rng(seed)
    sizes = [[150], [1024], [256, 100], [700, 300, 420]][seed % 4]
    tables, references = [CellTable(n) for n in sizes], [ReferenceCells(n) for n in sizes]
    arrays = InputArrays(70, [1] * len(sizes), 2)
    arrays.scales_by_sequence[:] = rng.random(arrays.scales_by_sequence.shape)
    n_full = 0
    for _ in range(300):
        tokens, pos, ids, wanted = random_tokens(rng, int(rng.integers(1, 70)))
        batch, masks = Batch(tokens, pos, ids, wanted), [sum(1 << seq for seq in own) for own in ids]
        expected = [reference.find(masks) for reference in references]
        assert [table.find(masks) for table in tables] == expected
        taken = take(tables, batch)
        too_few = next((i for i, cells in enumerate(expected) if len(cells) < len(ids)), -1)
        assert taken.full == too_few
        if too_few < 0:
            for reference, cells in zip(references, expected, strict=True):
                reference.fill(cells, pos, masks)
            n = len(tokens)
            n_outputs = arrays.write(batch, taken)
            rows = [tokens, pos, [own[0] for own in ids], np.flatnonzero(wanted), *expected]
            for found, row in zip(arrays.arrays, rows, strict=True):
                np.testing.assert_array_equal(found[: len(row)], row)
            assert n_outputs == sum(wanted)
            np.testing.assert_array_equal(arrays.scales[:, :n], arrays.scales_by_sequence[rows[2]].T)
        n_full += too_few >= 0
        for table, reference in zip(tables, references, strict=True):
            if too_few >= 0 or rng.random() < 0.02:
                cells = np.flatnonzero(rng.random(len(reference.pos)) < rng.choice([0.02, 0.3, 1.0])).tolist()
                table.empty(cells)
                reference.empty(cells)
            np.testing.assert_array_equal(table.pos, reference.pos)
            np.testing.assert_array_equal(table.seq, reference.seq)
            assert (table.used, table.end) == (reference.used, reference.end)
    assert n_full, "every size is too small at some time"


def test_a_batch_gives_back_what_it_was_made_of() -> None:
    rng = np.random.default_rng(1)
    tokens, pos, ids, wanted = random_tokens(rng, 40)
    batch = Batch(np.array(tokens, np.int32), pos, ids, np.array(wanted))
    np.testing.assert_array_equal(batch.tokens, tokens)
    np.testing.assert_array_equal(batch.pos, pos)
    np.testing.assert_array_equal(batch.logits, wanted)
    assert [own[0] for own in batch.seq_ids] == [own[0] for own in ids]
    assert list(map(set, batch.seq_ids)) == list(map(set, ids))
    pieces = batch.pieces(16)
    assert sum(map(len, pieces)) == len(batch) and all(len(piece) == 16 for piece in pieces[:-1])
    for name in ("tokens", "pos", "logits", "masks"):
        joined = np.concatenate([getattr(piece, name) for piece in pieces])
        np.testing.assert_array_equal(joined, getattr(batch, name))


def test_a_batch_grows_by_texts_of_one_sequence() -> None:
    batch = Batch.single([3, 4], 10, 2)
    batch.add([5], 7, 1, "none")
    batch.add([6, 8], 0, 63, "all")
    wanted = Batch([3, 4, 5, 6, 8], [10, 11, 7, 0, 1], [2, 2, 1, 63, 63], [False, True, False, True, True])
    for name in ("tokens", "pos", "logits", "masks"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(wanted, name))
    assert batch.seq_ids == wanted.seq_ids
    one, single = Batch.one(9, 4, 3), Batch.single([9], 4, 3)
    assert (one.tokens, one.pos, one.seq_ids, one.logits) == (single.tokens, single.pos, single.seq_ids, single.logits)


def test_cells_and_arrays_are_not_left() -> None:
    table, arrays = CellTable(10), InputArrays(4, [1], 0)
    for cell in (-1, 10):
        with pytest.raises(IndexError, match=f"cell {cell} of 10"):
            table.empty([3, cell])
        with pytest.raises(IndexError, match=f"cell {cell} of 10"):
            table.fill([3, cell], [0, 1], [1, 1])
    assert (table.used, table.end) == (0, 0)
    with pytest.raises(ValueError, match="does not fit"):
        arrays.write(batch := Batch.single(range(5)), take([table], batch))
    with pytest.raises(ValueError, match="does not fit"):
        arrays.write(batch := Batch.one(1, 1), take([table, CellTable(9)], batch))
    with pytest.raises(UsageError, match="too large"):
        Batch.one(1 << 70, 0)


@pytest.mark.parametrize("windows", [False, True])
def test_both_ways_of_decoding_are_one(windows: bool, tmp_path: Path) -> None:
    """Batches of one token of some sequences, as they come and with everything made ready by hand: equal logits and
    cells, while sequences are shortened, copied and shifted."""
    model = Model.load(gpt_oss()[0].write(tmp_path / "model.gguf") if windows else LLAMA)
    n_vocab = model.hparams.n_vocab
    params = ContextParams(n_ctx=1024, n_ubatch=16, n_threads=1, n_seq_max=4, token_states=True, embeddings=True)
    ctx, other = Context(model, params), Context(model, params)
    rng = np.random.default_rng(2)
    ends = [80] * 4
    for context in (ctx, other):
        for seq in range(4):
            context.decode(Batch.single(range(80), 0, seq))
    n_common = n_lost = 0
    for step in range(120):
        chosen = rng.permutation(4)[: rng.integers(1, 5)].tolist()
        wanted = (rng.random(len(chosen)) < 0.8).tolist()
        batch = Batch(rng.integers(0, n_vocab, len(chosen)), [ends[seq] for seq in chosen], chosen, wanted)
        n_common += ctx._steps.get(len(batch), sum(wanted)) is not None and not ctx.kv.shifted
        found, expected = ctx.decode(batch), other._decode_in_pieces(batch, None, True)
        np.testing.assert_array_equal(found, expected)
        assert ctx.token_states is not None and other.token_states is not None
        np.testing.assert_array_equal(ctx.token_states, other.token_states)
        for ours, theirs in zip(ctx.kv.cells.values(), other.kv.cells.values(), strict=True):
            np.testing.assert_array_equal(ours.pos, theirs.pos)
            np.testing.assert_array_equal(ours.seq, theirs.seq)
        for seq in chosen:
            ends[seq] += 1
        n_lost += any(cells.lost.any() for cells in ctx.kv.windows.values())
        if step % 10 == 9:
            change_one(ctx, other, ends, rng)
    assert n_common > 60
    assert n_lost > 60 or not windows, "no window was full"


def change_one(ctx: Context, other: Context, ends: list[int], rng: np.random.Generator) -> None:
    """Shortens, copies or shifts a sequence of both contexts."""
    a, b = rng.permutation(4)[:2].tolist()
    n = ends[a] // 2
    what = int(rng.integers(3))
    for context in (ctx, other):
        if what == 0:
            context.kv.seq_rm(a, n, -1)
        elif what == 1:
            context.kv.seq_rm(b, -1, -1)
            context.kv.seq_cp(a, b)
        else:
            context.kv.seq_rm(a, 0, n)
            context.kv.seq_add(a, n, -1, -n)
    if what == 1:
        ends[b] = ends[a]
    else:
        ends[a] = n if what == 0 else ends[a] - n


@pytest.fixture
def heeds_interrupts() -> Iterator[None]:
    """Processes that shells start in the background ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_interrupts")
def test_an_interrupted_run_gives_its_cells_back() -> None:
    """The run is one of the interpreter's own functions, which acts as Ctrl-C."""
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    interrupt = ctypes.cast(ctypes.pythonapi.PyErr_SetInterrupt, ctypes.c_void_p)
    table, arrays = CellTable(256), InputArrays(8, [1], 0)
    table.fill([0, 1], [0, 1], [1, 1])
    steps = Steps(capsule(interrupt, b"ikpy.run_plan", None), arrays, CellTables([table]), 100, 1000, 32, 2)
    steps.put(Ready(1, 1, 1, None, (), None, object()))
    with pytest.raises(KeyboardInterrupt):
        steps.run(Batch.one(5, 2))
    assert (table.used, table.end) == (2, 2)
    assert arrays.arrays[:, 0].tolist() == [5, 2, 0, 0, 2], "it was about to run"
    for batch in (Batch.one(100, 2), Batch.one(5, 1000), Batch.one(-1, 2), Batch.single([5, 5], 2)):
        assert steps.run(batch) is None


def test_the_plans_used_last_are_kept() -> None:
    model = Model.load(LLAMA)
    ctx = Context(model, ContextParams(n_ctx=256, n_threads=1))
    first = ctx._plans.get(1, 1)
    for n in range(2, 40):
        assert ctx._plans.get(n, 1) is ctx._plans.get(n, 1)
        assert ctx._plans.get(1, 1) is first
    assert ctx._steps.get(2, 1) is None
    assert ctx._steps.get(39, 1) is not None


def test_turned_positions() -> None:
    """Every part of a batch has its difference, which pieces keep and inputs add."""
    batch = Batch.single([1, 2], 5, 3, turn=-4)
    batch.add([3], 9, 1, "none", turn=2)
    batch.add([4], 0)
    assert Batch.one(7, 8, turn=-3).turns.tolist() == [-3]
    assert batch.turns.tolist() == [-4, -4, 2, 0]
    parts = batch.cut([1, 3, 4])
    assert [part.tokens.tolist() for part in parts] == [[1], [2, 3], [4]]
    assert [part.turns.tolist() for part in parts] == [[-4], [-4, 2], [0]]
    assert [part.seq_ids for part in parts] == [[(3,)], [(3,), (1,)], [(0,)]]
    assert [part.logits.tolist() for part in parts] == [[False], [True, False], [True]]
    assert batch.cut([4]) == [batch]
    table = CellTable(256)
    for turns, expected in ((True, [1, 2, 11, 0, 0]), (False, [])):
        arrays = InputArrays(5, [1], 0, turns)
        arrays.write(batch, take([table], batch))
        assert arrays.turned.tolist() == expected
        assert arrays.arrays[1].tolist() == [5, 6, 9, 0, 0]
    for turn in (2**30 + 1, -(2**30) - 1, 2**80):
        with pytest.raises(UsageError, match=r"positions turned by|too large"):
            Batch.single([1], turn=turn)
