"""DeepSeek V4: logits do not depend on how tokens come; sequences share, go back and are saved; damaged files end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.engine.sequence_state import load_sequence, save_sequence, unshare_sequence
from ikpy.errors import IkpyError, UsageError
from ikpy.gguf.reader import GGUFFile
from ikpy.gguf.types import GGUFValueType
from ikpy.gguf.writer import GGUFWriter
from ikpy.graph.ir import F32
from ikpy.models.batch import EVERY
from ikpy.models.keys import Keys
from tests.cpu.convert import deepseek4_checkpoints as tiny
from tests.cpu.convert.checkpoints import convert

TOLERANCE = 5e-4
EXACT: dict[str, Any] = {"type_k": "f32", "type_indexer": "f32"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint in F32: layers of every kind, indexers that choose 4 cells."""
    folder = tmp_path_factory.mktemp("deepseek4")
    return Path(convert(tiny.write(folder / "checkpoint"), folder, outtype="f32").path)


@pytest.fixture(scope="module")
def golden() -> Any:
    return np.load(tiny.GOLDEN)


def context_of(path: Path, overrides: dict[str, Any] | None = None, **settings: Any) -> Context:
    model = Model.load(path, ModelParams(kv_overrides=overrides or {}))
    return Context(model, ContextParams(**{"n_ctx": 256, "n_threads": 2, **EXACT, **settings}))


def logits(context: Context, tokens: np.ndarray, first: int = 0, seq_id: int = 0) -> np.ndarray:
    """Of all tokens [T, V], in one batch."""
    return context.decode(Batch.single(tokens, first, seq_id, logits="all")).copy()


def one_by_one(context: Context, tokens: np.ndarray, first: int = 0) -> np.ndarray:
    return np.concatenate([logits(context, tokens[i : i + 1], first + i) for i in range(len(tokens))])


def assert_close(got: np.ndarray, expected: np.ndarray, tolerance: float = TOLERANCE) -> None:
    """With the worst token."""
    errors = np.abs(got - expected).max(1)
    assert errors.max() <= tolerance, f"row {errors.argmax()} differs by {errors.max()}"


@pytest.mark.parametrize("n_ubatch", [1, 3, 8, 33, 128, 256])
@pytest.mark.parametrize("flash", [True, False])
def test_logits_are_those_of_transformers(n_ubatch: int, flash: bool, path: Path, golden: Any) -> None:
    """However prompts are cut: up to 8 tokens attend to lists of chosen cells, more by a mask."""
    context = context_of(path, n_ubatch=n_ubatch, flash_attn=flash)
    got = logits(context, golden["tokens"])
    assert_close(got[golden["rows"]], golden["logits"])


def test_single_tokens_behind_a_prompt(path: Path, golden: Any) -> None:
    context = context_of(path)
    whole = logits(context, golden["tokens"])
    context.kv.clear()
    got = logits(context, golden["tokens"][:37])
    assert_close(np.concatenate([got, one_by_one(context, golden["tokens"][37:], 37)]), whole)


@pytest.mark.parametrize("n_sequences", [1, 3])
def test_sequences_do_not_see_each_other(n_sequences: int, path: Path, golden: Any) -> None:
    """Tokens of several sequences in a batch, each at another place of its stretch."""
    context = context_of(path, n_ctx=512, n_seq_max=n_sequences)
    tokens, lengths = golden["tokens"], [101, 64, 7][:n_sequences]
    alone = []
    for n in lengths:
        context.kv.clear()
        alone.append(np.concatenate([logits(context, tokens[:n]), one_by_one(context, tokens[n : n + 9], n)]))
    context.kv.clear()
    batch = Batch()
    for seq, n in enumerate(lengths):
        batch.add(tokens[:n], 0, seq, logits="all")
    got = np.split(context.decode(batch).copy(), np.cumsum(lengths)[:-1])
    for step in range(9):
        batch = Batch()
        for seq, n in enumerate(lengths):
            batch.add(tokens[n + step : n + step + 1], n + step, seq)
        rows = context.decode(batch)
        got = [np.concatenate([rows_so_far, row[None]]) for rows_so_far, row in zip(got, rows, strict=True)]
    for ours, expected in zip(got, alone, strict=True):
        assert_close(ours, expected)


@pytest.mark.parametrize("back_to", [0, 3, 4, 65, 98])
def test_going_back(back_to: int, path: Path, golden: Any) -> None:
    """Compressed cells of removed tokens go with them; other tokens follow."""
    context = context_of(path)
    tokens = golden["tokens"]
    logits(context, tokens[:99])
    assert context.kv.rewind(0, back_to) == back_to
    other = np.concatenate([tokens[:back_to], tokens[::-1][: 120 - back_to]])
    got = logits(context, other[back_to:], back_to)
    fresh = logits(context_of(path), other)
    assert_close(got, fresh[back_to:])


def test_a_sequence_that_is_copied_goes_on_alone(path: Path, golden: Any) -> None:
    context = context_of(path, n_ctx=512, n_seq_max=2)
    tokens = golden["tokens"]
    logits(context, tokens[:50])
    context.kv.seq_cp(0, 1, -1, 47)
    context.kv.seq_rm(1, 47, -1)
    got = logits(context, tokens[60:90], 47, seq_id=1)
    first = logits(context, tokens[50:80], 50)
    unshare_sequence(context, 1)
    assert_close(got, logits(context_of(path), np.concatenate([tokens[:47], tokens[60:90]]))[47:])
    assert_close(first, logits(context_of(path), tokens[:80])[50:])


def test_saved_sequences(path: Path, golden: Any, tmp_path: Path) -> None:
    """Cells, compressed ones and what the next ones are made of come back; other cells than the tokens' are refused."""
    context = context_of(path)
    tokens = golden["tokens"]
    logits(context, tokens[:70])
    save_sequence(tmp_path / "state", context, 0, tokens[:70].tolist())
    expected = logits(context, tokens[70:], 70)
    restored = context_of(path, n_ctx=512, n_seq_max=3)
    found, _ = load_sequence(tmp_path / "state", restored, 2, 256)
    assert found == tokens[:70].tolist()
    assert_close(logits(restored, tokens[70:], 70, seq_id=2), expected)
    with pytest.raises(IkpyError, match="another cache type"):
        load_sequence(tmp_path / "state", context_of(path, type_k="f16"), 0, 256)


@pytest.mark.parametrize(("kind", "tolerance"), [("f16", 0.02), ("bf16", 0.1), ("q8_0", 0.2), ("q4_0", 3.0)])
def test_cache_types(kind: str, tolerance: float, path: Path, golden: Any) -> None:
    """With all cells attended to: a choice may fall on others where scores are close. Single tokens agree with it."""
    exact = logits(context_of(path, sparse_top_k=0), golden["tokens"])
    context = context_of(path, sparse_top_k=0, type_k=kind)
    got = logits(context, golden["tokens"])
    difference = np.sqrt(np.mean((got - exact) ** 2)) / exact.std()
    assert 0 < difference < tolerance, difference
    context.kv.clear()
    single = one_by_one(context, golden["tokens"])
    assert np.sqrt(np.mean((single - got) ** 2)) / exact.std() < max(tolerance, 2e-3)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_hadamard_transforms(kind: str, path: Path, golden: Any) -> None:
    """Cached rows are transformed, and sums of them back; 4 bits lose less so."""
    exact = logits(context_of(path, sparse_top_k=0), golden["tokens"])

    def difference(**settings: Any) -> float:
        got = logits(context_of(path, sparse_top_k=0, type_k=kind, **settings), golden["tokens"])
        return float(np.sqrt(np.mean((got - exact) ** 2)) / exact.std())

    assert 0 < difference(k_hadamard=True) < 1.5 * difference()


def test_choosing_fewer_cells_changes_later_tokens_only(path: Path, golden: Any) -> None:
    """The file says 4; until 5 stretches have ended every token sees all of them."""
    every = logits(context_of(path, sparse_top_k=0), golden["tokens"])
    chosen = logits(context_of(path), golden["tokens"])
    assert_close(chosen[:19], every[:19], 1e-5)
    assert np.abs(chosen[30:] - every[30:]).max() > 0.01


def test_a_longer_context_than_the_window_keeps(path: Path, golden: Any) -> None:
    """Tokens that fell out of the window make room, compressed cells stay."""
    context = context_of(path, n_ctx=1024, n_ubatch=64)
    tokens = np.tile(golden["tokens"], 5)[:600]
    got = logits(context, tokens)
    full = context_of(path, n_ctx=1024, swa_full=True)
    assert context.kv.cells["sliding", 128].n_cells < 1024 == full.kv.n_ctx
    assert context.kv.cells[EVERY, 4].used == 150 and context.kv.cells[EVERY, 128].used == 4
    assert_close(got, logits(full, tokens))
    assert context.kv.reusable(0, 590) == 590 and context.kv.reusable(0, 300) == 0


def test_memory_is_what_was_planned(path: Path) -> None:
    planned = Context(Model.load(path, ModelParams(header_only=True)), ContextParams(n_ctx=1024, n_seq_max=2))
    real = Context(Model.load(path), ContextParams(n_ctx=1024, n_seq_max=2))
    assert planned.kv.nbytes() == real.kv.nbytes() == real.allocated_bytes["cache"]
    assert planned.compute_bytes == real.compute_bytes


def test_what_does_not_go(path: Path) -> None:
    context = context_of(path)
    with pytest.raises(UsageError, match="control vectors act on one residual stream"):
        context.steer(np.ones((4, tiny.D), np.float32))
        context.decode(Batch.single([1, 2]))
    with pytest.raises(IkpyError, match="cannot be shifted"):
        context_of(path).kv.seq_add(0, 0, -1, 1)
    with pytest.raises(UsageError, match="no layers that predict"):
        Model.load(path).prediction_head()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hyper_connection.count", 9, "9 residual streams"),
        ("hyper_connection.count", 3, "_hc_fn.weight' has wrong shape"),
        ("hyper_connection.sinkhorn_iterations", 0, "0 iterations"),
        ("attention.output_group_count", 3, "4 heads in 3 groups"),
        ("attention.output_group_count", 0, "4 heads in 0 groups"),
        ("attention.sliding_window", 0, "a window of 0"),
        ("attention.indexer.top_k", 0, "chooses 0 cells"),
        ("attention.indexer.key_length", 8, "of 8 elements"),
        ("attention.q_lora_rank", 31, "wrong shape"),
        ("hash_layer_count", 2, "ffn_gate_tid2eid.weight' not found"),
        ("expert_gating_func", 9, "unknown expert_gating_func 9"),
        ("block_count", 5, "for each of 5 layers|not found"),
    ],
)
def test_contradictory_files(key: str, value: int, message: str, path: Path) -> None:
    with pytest.raises(IkpyError, match=message):
        Model.load(path, ModelParams(kv_overrides={f"deepseek4.{key}": value}))


def copy_with(path: Path, target: Path, arrays: dict[str, Any], tensors: tuple[str, ...] = ()) -> None:
    """A copy of the file with other arrays in its metadata, and further tensors of one element."""
    file = GGUFFile.open(path)
    with GGUFWriter(target) as writer:
        writer.copy_metadata(file, skip=arrays)
        for key, (kind, values) in arrays.items():
            writer.add_array(key, kind, values)
        for info in file.tensors.values():
            writer.add_tensor(info.name, info.shape, info.type_id)
        for name in tensors:
            writer.add_tensor(name, (1,), F32)
        for info in file.tensors.values():
            writer.write(info.name, file.data(info))
        for name in tensors:
            writer.write(name, np.zeros(4, np.uint8))


@pytest.mark.parametrize(("n_counted", "n_predict"), [(0, 1), (0, 2), (1, 1), (2, 2)])
def test_prediction_layers_of_files(n_counted: int, n_predict: int, path: Path, tmp_path: Path) -> None:
    """Counted among the layers or apart: they are left out, and known before the tensors are looked at."""
    n = len(tiny.RATIOS)
    names = tuple(f"blk.{n + i}.nextn.enorm.weight" for i in range(n_predict))
    copy_with(path, tmp_path / "more.gguf", {}, names)
    given = {"deepseek4.block_count": n + n_counted, "deepseek4.nextn_predict_layers": n_predict}
    params = ModelParams(kv_overrides=given)
    model = Model.load(tmp_path / "more.gguf", params)
    assert model.hparams.n_layer == n == model.arch.n_layers(Keys(model.gguf, given))


def test_more_prediction_layers_than_a_file_can_have(path: Path) -> None:
    with pytest.raises(IkpyError, match="4000000000 prediction layers"):
        Model.load(path, ModelParams(kv_overrides={"deepseek4.nextn_predict_layers": 4_000_000_000}))


@pytest.mark.parametrize("pos", [0, 3])
def test_more_sequences_than_the_context_has(pos: int, path: Path) -> None:
    context = context_of(path, n_seq_max=2)
    for step in range(pos):
        batch = Batch()
        for seq in range(2):
            batch.add([step], step, seq)
        context.decode(batch)
    with pytest.raises(UsageError, match=r"sequence 2: the context has 2 \(n_seq_max\)"):
        logits(context, np.arange(4), 0, seq_id=2)


def test_without_a_choice_there_are_no_index_keys(path: Path) -> None:
    """-dsatk 0: all compressed cells are attended to."""
    every, chosen = (context_of(path, sparse_top_k=n).kv.tensors for n in (0, 4))
    assert {name for _, name in chosen} - {name for _, name in every} == {"iv", "ig", "ki"}


@pytest.mark.parametrize(
    ("n_listed", "message"),
    [(4, ""), (5, ""), (3, "must hold a number for each of 4 layers"), (600, "each of 4 layers")],
)
def test_lists_that_count_prediction_layers(n_listed: int, message: str, path: Path, tmp_path: Path) -> None:
    """Numbers behind those of the layers that run are no reason to refuse a file, too few are."""
    lists = {
        "deepseek4.attention.compress_ratios": (GGUFValueType.UINT32, [*tiny.RATIOS, *[0] * 600][:n_listed]),
        "deepseek4.swiglu_clamp_exp": (GGUFValueType.FLOAT32, [1.0] * n_listed),
    }
    copy_with(path, tmp_path / "listed.gguf", lists)
    if not message:
        assert Model.load(tmp_path / "listed.gguf").hparams.n_layer == len(tiny.RATIOS)
        return
    with pytest.raises(IkpyError, match=message):
        Model.load(tmp_path / "listed.gguf")


@pytest.fixture
def rewritten(path: Path, tmp_path: Path) -> Callable[[str, Callable[[bytes], bytes]], Path]:
    """The file with the bytes of one tensor changed."""

    def change(name: str, edit: Callable[[bytes], bytes]) -> Path:
        file = GGUFFile.open(path)
        info = file.tensors[name]
        data = bytearray(path.read_bytes())
        start = bytes(data).index(bytes(file.data(info)))
        data[start : start + info.nbytes] = edit(bytes(file.data(info)))
        changed = tmp_path / "changed.gguf"
        changed.write_bytes(data)
        return changed

    return change


def test_experts_that_do_not_exist(rewritten: Any) -> None:
    """Of a table that sends tokens to them: they are left out, nothing is read beyond the experts."""
    bad = np.full((tiny.V, tiny.USED), 2**31 - 1, np.int32)
    context = context_of(rewritten("blk.0.ffn_gate_tid2eid.weight", lambda _: bad.tobytes()))
    assert np.isfinite(logits(context, np.arange(20))).all()
