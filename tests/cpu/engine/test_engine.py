"""Contexts: sequences, cache operations, batching, shifts, errors."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from ikpy import Batch, Context, ContextParams, KVCacheFullError, Model, ModelParams, default_model_path
from ikpy.engine.kv_cache import KVCache
from ikpy.errors import FileFormatError, ResourceError, UnsupportedError, UsageError
from ikpy.gguf.reader import GGUFFile
from ikpy.gguf.types import GGUFValueType
from ikpy.gguf.writer import GGUFWriter
from ikpy.graph.plan import CompiledPlan
from ikpy.quants import registry
from ikpy.tools.generation import GrowingSequence
from tests.shared import DATA

LLAMA = DATA / "zoo" / "llama-ropefreqs.gguf"
LATENT = DATA / "zoo" / "deepseek2-v3-mla.gguf"
# Other orders of summation move keys across F16 rounding borders, which shows as a few 1e-4 in logits of about 1.
TOLERANCE = 2e-3
QWEN = DATA / "zoo" / "qwen3moe.gguf"


def context(path: Path, **params: object) -> Context:
    """A small context with two threads unless said otherwise."""
    settings = {"n_ctx": 256, "n_threads": 2, **params}
    return Context(Model.load(path), ContextParams(**settings))  # type: ignore[arg-type]


def tokens(n: int, seed: int = 0) -> np.ndarray:
    """Random token ids of the 1024-token vocabulary of the zoo."""
    return np.random.default_rng(seed).integers(3, 1000, n)


def assert_close(ours: np.ndarray, wanted: np.ndarray, tolerance: float) -> None:
    """Largest difference of two logit arrays, with its place."""
    error = np.abs(ours - wanted)
    worst = np.unravel_index(error.argmax(), error.shape)
    assert error[worst] <= tolerance, f"off by {error[worst]:.6f} at {worst}: {ours[worst]} instead of {wanted[worst]}"


@pytest.mark.parametrize("path", [LLAMA, LATENT, QWEN], ids=lambda p: p.stem)
@pytest.mark.parametrize("flash", [True, False])
def test_interleaved_sequences_equal_separate_runs(path: Path, flash: bool) -> None:
    a, b = tokens(23, 1), tokens(17, 2)
    ctx = context(path, flash_attn=flash)
    alone = []
    for ids in (a, b):
        ctx.kv.clear()
        alone.append(ctx.decode(Batch.single(ids, logits="all")))
    order = [(0, i) for i in range(23)] + [(1, i) for i in range(17)]
    np.random.default_rng(3).shuffle(order)
    order.sort(key=lambda item: item[1])
    mixed = Batch(
        np.array([(a, b)[s][i] for s, i in order]),
        np.array([i for _, i in order]),
        [(s,) for s, _ in order],
        np.ones(len(order), bool),
    )
    ctx.kv.clear()
    together = ctx.decode(mixed)
    for s in (0, 1):
        rows = [k for k, (seq, _) in enumerate(order) if seq == s]
        assert_close(together[rows], alone[s], TOLERANCE)


@pytest.mark.parametrize("path", [LLAMA, LATENT], ids=lambda p: p.stem)
def test_shared_prefix_is_stored_once(path: Path) -> None:
    prefix, ends = tokens(30, 4), [tokens(5, 5), tokens(5, 6)]
    ctx = context(path)
    wanted = []
    for end in ends:
        ctx.kv.clear()
        wanted.append(ctx.decode(Batch.single(np.concatenate([prefix, end]))))
    ctx.kv.clear()
    ctx.decode(Batch.single(prefix))
    ctx.kv.seq_cp(0, 1)
    assert ctx.kv.used_cells == 30
    for s in (0, 1):
        assert_close(ctx.decode(Batch.single(ends[s], 30, seq_id=s)), wanted[s], TOLERANCE)
    assert ctx.kv.used_cells == 40


def test_token_of_several_sequences() -> None:
    prefix, end = tokens(12, 7), tokens(4, 8)
    ctx = context(LLAMA)
    both = Batch(prefix, np.arange(12), [(0, 1)] * 12, np.zeros(12, bool))
    ctx.decode(both)
    first = ctx.decode(Batch.single(end, 12, seq_id=0))
    second = ctx.decode(Batch.single(end, 12, seq_id=1))
    assert_close(second, first, TOLERANCE)


@pytest.mark.parametrize("n_ubatch", [16, 33, 64])
@pytest.mark.parametrize("path", [LLAMA, LATENT, QWEN], ids=lambda p: p.stem)
def test_micro_batch_size_does_not_matter(path: Path, n_ubatch: int) -> None:
    ids = tokens(100, 9)
    whole = context(path).decode(Batch.single(ids, logits="all"))
    parts = context(path, n_ubatch=n_ubatch, n_threads=1).decode(Batch.single(ids, logits="all"))
    assert_close(parts, whole, TOLERANCE)


def test_holes_in_the_cache_are_used() -> None:
    ids = tokens(200, 10)
    ctx = context(LLAMA)
    ctx.decode(Batch.single(ids[:200], seq_id=0))
    ctx.decode(Batch.single(ids[:50], seq_id=1))
    ctx.kv.seq_rm(0, 20, 180)
    fresh = context(LLAMA).decode(Batch.single(ids[:120]))
    assert_close(ctx.decode(Batch.single(ids[:120], seq_id=2)), fresh, TOLERANCE)


def test_full_cache_is_an_error_and_leaves_the_cache_as_it_was() -> None:
    ctx = context(LLAMA, n_batch=256, n_ubatch=256)
    ctx.decode(Batch.single(tokens(200)))
    with pytest.raises(KVCacheFullError, match="57 tokens need a place and 56 of 256 cells"):
        ctx.decode(Batch.single(tokens(57), 200))
    assert ctx.kv.used_cells == 200
    ctx.decode(Batch.single(tokens(56), 200))


@pytest.mark.parametrize("failing", ["run", "plan"])
def test_nothing_of_an_interrupted_batch_stays(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = context(LLAMA, n_batch=64, n_ubatch=16)
    sequence, ids, others = GrowingSequence(ctx), tokens(60, 1).tolist(), tokens(40, 2).tolist()
    sequence.feed(others)
    plan, calls = ctx._plans.get, iter(range(4))

    def interrupted(*shape: int) -> object:
        if next(calls) < 2:
            return plan(*shape)
        if failing == "plan":
            raise MemoryError
        return SimpleNamespace(plan=SimpleNamespace(run=Mock(side_effect=KeyboardInterrupt)), n_threads=1)

    with monkeypatch.context() as patch:
        patch.setattr(ctx._plans, "get", interrupted)
        with pytest.raises((KeyboardInterrupt, MemoryError)):
            sequence.feed(ids)
    assert sequence.tokens == others and ctx.kv.used_cells == 40
    fresh = context(LLAMA, n_batch=64, n_ubatch=16).decode(Batch.single([*others, *ids]))
    assert_close(sequence.feed(ids), fresh[0], TOLERANCE)


def test_rewinding_drops_cells_that_no_token_stands_for() -> None:
    ctx = context(LLAMA)
    ctx.decode(Batch.single(tokens(20)))  # as an interruption leaves them between the evaluation and its record
    sequence, ids = GrowingSequence(ctx), tokens(30, 3).tolist()
    assert sequence.rewind(ids) == 0 and ctx.kv.used_cells == 0


def test_interrupted_shifts_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while keys are rotated."""
    ctx, other = context(LLAMA, type_k="f32"), context(LLAMA, type_k="f32")
    for c in (ctx, other):
        c.decode(Batch.single(tokens(60)))
        c.kv.seq_rm(0, 5, 25)
        c.kv.seq_add(0, 25, -1, -20)
    run = CompiledPlan.run

    def interrupted(plan: CompiledPlan, *args: object) -> None:
        run(plan, *args)  # type: ignore[arg-type]
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(CompiledPlan, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ctx.decode(Batch.one(7, 40))
    assert not ctx.kv.shifted and ctx.kv.used_cells == 40
    assert_close(ctx.decode(Batch.one(7, 40))[0], other.decode(Batch.one(7, 40))[0], TOLERANCE)


def test_a_file_without_a_context_length() -> None:
    model = Model.load(LLAMA, ModelParams(kv_overrides={"llama.context_length": 0}))
    with pytest.raises(UsageError, match=r"context length \(llama.context_length\) is 0: give one \(-c\)"):
        Context(model, ContextParams(n_threads=1))
    assert Context(model, ContextParams(n_ctx=10, n_threads=1)).n_ctx == 256


def test_rewinding_keeps_no_more_than_there_is() -> None:
    ctx, ids = context(LLAMA), tokens(30).tolist()
    sequence = GrowingSequence(ctx)
    sequence.feed(ids)
    ctx.kv.seq_rm(0, 10, -1)  # as an interruption leaves it between the cells and their record
    assert sequence.rewind(ids) == 10 == len(sequence.tokens)
    assert ctx.kv.rewind(0, -5) == 0 == ctx.kv.used_cells


def test_an_interrupted_context_shift_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C where dropped tokens have gone and the others have not moved yet."""
    ctx, ids = context(LLAMA), tokens(250).tolist()
    sequence, remove = GrowingSequence(ctx, n_keep=2), KVCache.seq_rm
    sequence.feed(ids)

    def interrupted(kv: KVCache, *args: int) -> None:
        remove(kv, *args)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "seq_rm", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sequence.feed(ids[:10])
    assert sequence.tokens == ids[:2] + ids[126:]
    assert sorted(ctx.kv.pos[ctx.kv.pos >= 0].tolist()) == list(range(126))


@pytest.mark.parametrize("path", [LLAMA, QWEN], ids=lambda p: p.stem)
@pytest.mark.parametrize("type_k", ["f16", "q8_0"])
def test_shifting_all_positions_changes_nothing(path: Path, type_k: str) -> None:
    """RoPE scores depend on distances only, so a common shift of all positions leaves the logits."""
    ids = tokens(60, 11)
    wanted = context(path, type_k=type_k).decode(Batch.single(ids))
    ctx = context(path, type_k=type_k)
    ctx.decode(Batch.single(ids[:59], logits="none"))
    ctx.kv.seq_add(0, -1, -1, 13)
    assert ctx.kv.seq_pos_max(0) == 71
    assert ctx.kv.seq_pos_min(0) == 13
    assert_close(ctx.decode(Batch.single(ids[59:], 72)), wanted, 0.02 if type_k == "f16" else 0.2)


@pytest.mark.parametrize("path", [LLAMA, QWEN], ids=lambda p: p.stem)
@pytest.mark.parametrize("type_k", registry.CACHE_TYPES[1:])
def test_shifted_keys_are_as_good_as_stored_ones(path: Path, type_k: str) -> None:
    """Keys that are decoded, rotated and encoded again move logits about as much as being encoded once does."""
    ids = tokens(60, 11)
    exact, stored = (context(path, type_k=name).decode(Batch.single(ids)) for name in ("f32", type_k))
    ctx = context(path, type_k=type_k)
    ctx.decode(Batch.single(ids[:59], logits="none"))
    ctx.kv.seq_add(0, -1, -1, 13)
    shifted = ctx.decode(Batch.single(ids[59:], 72))
    moved, cost = (float(np.sqrt(np.square(a - b).mean())) for a, b in ((shifted, stored), (stored, exact)))
    assert 0 < moved < 2 * cost, f"a shift moves logits by {moved:.4f}, storing by {cost:.4f}"


def test_cache_operations() -> None:
    ctx = context(LLAMA)
    kv = ctx.kv
    ctx.decode(Batch.single(tokens(40)))
    kv.seq_cp(0, 3, 10, 20)
    kv.seq_rm(0, 5, 15)
    assert (kv.seq_pos_min(0), kv.seq_pos_max(0)) == (0, 39)
    assert (kv.seq_pos_min(3), kv.seq_pos_max(3)) == (10, 19)
    assert kv.used_cells == 35
    kv.seq_rm(0)
    assert kv.used_cells == 10
    kv.seq_add(3, -1, -1, -12)
    assert kv.used_cells == 8  # positions -2 and -1 fell out
    kv.seq_rm(-1)
    assert kv.used_cells == 0
    assert kv.seq_pos_max(0) == -1


def test_latent_cache_refuses_shifts() -> None:
    ctx = context(LATENT)
    ctx.decode(Batch.single(tokens(8)))
    with pytest.raises(ResourceError, match="cannot be shifted"):
        ctx.kv.seq_add(0, 0, -1, 1)


def test_expert_reduction_never_drops_the_best() -> None:
    """Keeping no expert in any case is keeping the best one: nothing is below a share of itself."""
    batch = Batch.single(tokens(20, 12))
    none, one = (context(QWEN, smart_expert_reduction=(k, 0.9)).decode(batch) for k in (0, 1))
    np.testing.assert_array_equal(none, one)
    assert np.abs(context(QWEN).decode(batch) - none).max() > 0.01


def test_expert_reduction_works_at_any_prompt_length() -> None:
    """With threshold 1 only the best expert survives; a long prompt must equal the same tokens one by one."""
    ids = tokens(200, 12)
    batch = context(QWEN, smart_expert_reduction=(1, 1.0)).decode(Batch.single(ids))
    ctx = context(QWEN, smart_expert_reduction=(1, 1.0))
    single = None
    for i, token in enumerate(ids):
        single = ctx.decode(Batch.single([token], i))
    assert single is not None
    assert_close(single, batch, 2e-3)
    assert np.abs(context(QWEN).decode(Batch.single(ids)) - batch).max() > 0.05


def test_embeddings_are_the_normed_states() -> None:
    ctx = context(LLAMA, embeddings=True)
    ctx.decode(Batch.single(tokens(9), logits="all"))
    assert ctx.embeddings is not None
    assert ctx.embeddings.shape == (9, ctx.model.hparams.n_embd)
    assert np.isfinite(ctx.embeddings).all()
    assert np.abs(ctx.embeddings).max() > 0.1


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"type_k": "q3_K"}, "unsupported cache type"),
        ({"type_v": "q8_0", "flash_attn": False}, "requires flash_attn"),
        ({"n_seq_max": 65}, "parallel sequences"),
        ({"n_batch": 0}, "batch"),
        ({"rope_scaling": "longrope"}, "--rope-scaling longrope: possible are none, linear, yarn"),
    ],
)
def test_context_parameter_errors(params: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        context(LLAMA, **params)


@pytest.mark.parametrize("n_ubatch", [512, 4])
def test_uncopied_logits(n_ubatch: int) -> None:
    """They equal copied ones; what was copied stays as it is when the context goes on."""
    ctx, plain = context(LLAMA, n_ubatch=n_ubatch), context(LLAMA, n_ubatch=n_ubatch)
    ids = tokens(12)
    kept = [plain.decode(Batch.single(ids[:10], logits="all")), plain.decode(Batch.single(ids[10:11], 10))]
    before = [rows.copy() for rows in kept]
    assert np.array_equal(ctx.decode(Batch.single(ids[:10], logits="all"), copy=False), kept[0])
    rows = ctx.decode(Batch.single(ids[10:11], 10), copy=False)
    assert np.array_equal(rows, kept[1])
    assert np.shares_memory(rows, ctx.decode(Batch.single(ids[11:], 11), copy=False)), "nothing is allocated"
    plain.decode(Batch.single(ids[11:], 11))
    assert all(map(np.array_equal, kept, before))


def test_bad_batches() -> None:
    ctx = context(LLAMA)
    with pytest.raises(UsageError, match="token 1024 at index 1"):
        ctx.decode(Batch.single([5, 1024]))
    for ids, message in (
        (64, "sequence id 64"),
        (-1, "sequence id -1"),
        ((3, 64), "sequence id 64"),
        ((), "no sequence"),
    ):
        with pytest.raises(UsageError, match=message):
            Batch([5], [0], [ids], [True])
    with pytest.raises(UsageError, match="empty batch"):
        ctx.decode(Batch.single([]))
    with pytest.raises(UsageError, match="position -2"):
        ctx.decode(Batch.single([5, 6, 7], -2))
    with pytest.raises(UsageError, match=f"token {5 + (1 << 32)} at index 0"):
        ctx.decode(Batch(np.array([5 + (1 << 32)]), [0], [0], [True]))
    with pytest.raises(UsageError, match=f"position {1 << 40} is too large"):
        ctx.decode(Batch([5], [1 << 40], [0], [True]))
    last = (1 << 63) - 1
    for n in (1, 2):
        assert Batch.single([5] * n, last).pos.tolist() == [last] * n, "positions do not wrap around"
    with pytest.raises(TypeError):
        Batch([1.5], [0], [0], [True])
    with pytest.raises(ValueError, match="differ in length"):
        Batch([5, 6], [0, 1], [0, 0], [True])
    assert ctx.kv.used_cells == 0
    ctx.decode(Batch([5], [0], [(1, 1, 0)], [True]))
    assert ctx.kv.seq[0] == 0b11, "a sequence named twice"


def _rewrite(source: Path, target: Path, *, drop: str = "", rename: tuple[str, str] = ("", ""), arch: str = "") -> None:
    """Copies a model, leaving out or renaming a tensor, or with another architecture name."""
    with GGUFFile.open(source) as file, GGUFWriter(target) as writer:
        writer.copy_metadata(file, skip={"general.architecture"})
        writer.add("general.architecture", GGUFValueType.STRING, arch or file.metadata["general.architecture"])
        kept = [t for t in file.tensors.values() if t.name != drop]
        names = {t.name: rename[1] if t.name == rename[0] else t.name for t in kept}
        for info in kept:
            writer.add_tensor(names[info.name], info.shape, info.type_id)
        for info in kept:
            writer.write(names[info.name], file.data(info))


def test_incomplete_and_foreign_models(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    _rewrite(LLAMA, path, drop="blk.1.ffn_up.weight")
    with pytest.raises(FileFormatError, match=r"tensor 'blk\.1\.ffn_up\.weight' not found"):
        Model.load(path)
    _rewrite(LLAMA, path, rename=("rope_freqs.weight", "extra.weight"))
    with pytest.raises(FileFormatError, match=r"wrong number of tensors; expected \d+, got \d+ \(not used: extra"):
        Model.load(path)
    _rewrite(LLAMA, path, arch="rwkv5")
    with pytest.raises(UnsupportedError, match=r"architecture: 'rwkv5' \(.*; similar: .*rwkv[67].*\)") as error:
        Model.load(path)
    assert len(str(error.value)) < 300


def test_wrong_shape_names_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with GGUFFile.open(LLAMA) as file, GGUFWriter(path) as writer:
        writer.copy_metadata(file, skip={"llama.feed_forward_length"})
        writer.add("llama.feed_forward_length", GGUFValueType.UINT32, 160)
        for info in file.tensors.values():
            writer.add_tensor(info.name, info.shape, info.type_id)
        for info in file.tensors.values():
            writer.write(info.name, file.data(info))
    with pytest.raises(FileFormatError, match=r"tensor 'blk\.0\.ffn_gate\.weight' has wrong shape; expected \d+, 160"):
        Model.load(path)


def test_overrides_are_typed() -> None:
    model = Model.load(LLAMA, ModelParams(kv_overrides={"llama.rope.freq_base": 50000.0}))
    assert model.hparams.rope_freq_base == 50000.0
    with pytest.raises(UsageError, match="not of the key's type"):
        Model.load(LLAMA, ModelParams(kv_overrides={"llama.rope.freq_base": "x"}))


@pytest.mark.parametrize("value", [-1, 2**32])
def test_overrides_are_in_the_range_of_their_keys(value: int) -> None:
    message = rf"--override-kv qwen3moe\.expert_used_count: {value} is not in the range of the key, 0 to 4294967295"
    with pytest.raises(UsageError, match=message):
        Model.load(QWEN, ModelParams(kv_overrides={"qwen3moe.expert_used_count": value}))


def test_check_tensors_finds_bad_values(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    _rewrite(LLAMA, path)
    with GGUFFile.open(path) as file:
        info = file.tensors["blk.0.ffn_down.weight"]
        offset = info.offset
    with path.open("r+b") as raw:
        raw.seek(offset + 2 * info.shape[0] + 6)
        raw.write(b"\x00\x7c")  # F16 infinity
    with pytest.raises(FileFormatError, match=r"'blk\.0\.ffn_down\.weight' has invalid data at row 1, column 3"):
        Model.load(path, ModelParams(check_tensors=True))


def test_bundled_model_loads() -> None:
    model = Model.load(default_model_path())
    assert model.hparams.arch == "deepseek2"
    assert 12_000_000 < model.n_params < 13_000_000
    assert model.size_bytes < os.path.getsize(default_model_path())
