"""Caches of window size: the same logits as full caches, in less memory, through everything a cache goes through."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from ikpy.engine.batch import Batch
from ikpy.engine.cells import WindowCells
from ikpy.engine.context import Context
from ikpy.engine.kv_cache import KVCache, KVCacheFullError
from ikpy.engine.model import Model
from ikpy.engine.model_draft import ModelDraft
from ikpy.engine.params import ContextParams
from ikpy.engine.sequence_state import load_sequence, save_sequence, unshare_sequence
from ikpy.engine.session import PREFIX, load_session, put_state, save_session, take_state
from ikpy.errors import FileFormatError
from ikpy.graph.ir import F32
from ikpy.models import llama4
from ikpy.models.batch import CacheSpec
from ikpy.tools.generation import GrowingSequence
from tests.cpu.engine.reference_cells import dropped_tokens
from tests.cpu.models.reference_models import N_VOCAB, RandomModel
from tests.cpu.models.test_arch_afmoe import afmoe
from tests.cpu.models.test_arch_cohere2moe import cohere2moe
from tests.cpu.models.test_arch_exaone import exaone_moe
from tests.cpu.models.test_arch_granite_swa import granite_swa
from tests.cpu.models.test_arch_laguna import laguna
from tests.cpu.models.test_arch_mellum import mellum
from tests.cpu.models.test_arch_mimo2 import mimo2
from tests.cpu.models.test_arch_step35 import step35
from tests.cpu.models.test_zoo_holdouts import gemma2_27b, gpt_oss, llama4_two_experts
from tests.shared import SHARED

N = 400
TOKENS = np.random.default_rng(5).integers(0, N_VOCAB, N).astype(np.int32)
BOUND = 1e-4
"""Relative to the largest logit: cells are added up in another order."""


def contexts(path: Path, **settings: object) -> tuple[Context, Context]:
    """The same context with window caches and with full ones."""
    values = {"n_ctx": 512, "n_batch": 128, "n_ubatch": 32, "n_threads": 2, "type_k": "f32", "type_v": "f32"}
    model = Model.load(path)
    made = [Context(model, ContextParams(**(values | settings), swa_full=full)) for full in (False, True)]  # type: ignore[arg-type]
    return made[0], made[1]


def same(ours: np.ndarray, full: np.ndarray, what: str) -> None:
    error = np.abs(ours - full).max(axis=-1) / np.abs(full).max()
    worst = int(np.argmax(error))
    assert error.max() < BOUND, f"{what}: row {worst} off by {error.max():.1e} relative"


def run(context: Context, tokens: np.ndarray, start: int = 0, seq_id: int = 0) -> np.ndarray:
    pieces = range(0, len(tokens), context.n_batch)
    parts = [tokens[i : i + context.n_batch] for i in pieces]
    return np.concatenate(
        [context.decode(Batch.single(part, start + i, seq_id, "all")) for i, part in zip(pieces, parts, strict=True)]
    )


ARCHITECTURES = [
    gpt_oss,
    gemma2_27b,
    llama4_two_experts,
    exaone_moe,
    afmoe,
    cohere2moe,
    granite_swa,
    laguna,
    mellum,
    mimo2,
    step35,
]


@pytest.mark.parametrize("make", ARCHITECTURES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("flash", [True, False])
def test_logits_equal_those_of_full_caches(
    make: Callable[[], tuple[RandomModel, np.ndarray]], flash: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama4, "CHUNK", 50)
    windowed, full = contexts(make()[0].write(tmp_path / "model.gguf"), flash_attn=flash)
    assert windowed.kv.windows and not full.kv.windows
    assert windowed.kv.nbytes() < full.kv.nbytes()
    same(run(windowed, TOKENS), run(full, TOKENS), "prompt")
    for i in range(3):
        token = TOKENS[i : i + 1]
        same(windowed.decode(Batch.single(token, N + i)), full.decode(Batch.single(token, N + i)), f"step {i}")
    cells = next(iter(windowed.kv.windows.values()))
    assert cells.lost[0] > 0, "the sequence was too short to drop anything"


def test_sizes_follow_the_window(tmp_path: Path) -> None:
    path = gpt_oss()[0].write(tmp_path / "model.gguf")
    windowed, full = contexts(path, n_ctx=4096, flash_attn=False)
    # Window 7 and 32 tokens of a micro-batch, in units of 32 cells.
    assert {w: c.n_cells for w, c in windowed.kv.windows.items()} == {("sliding", 7): 64}
    assert windowed.kv.nbytes() == full.kv.nbytes() * (64 + 4096) // (2 * 4096)
    parallel, _ = contexts(path, n_ctx=4096, flash_attn=False, n_seq_max=4)
    assert parallel.kv.windows["sliding", 7].n_cells == 64  # 4 * 7 + 32
    small, _ = contexts(path, n_ctx=64, n_ubatch=64, flash_attn=False)
    assert not small.kv.windows, "no smaller cache than the context"


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "cohere2", "gpt-oss"])
def test_captured_models(name: str) -> None:
    path = SHARED / "golden" / "zoo" / f"{name}.gguf"
    if not path.exists():
        pytest.skip("golden/zoo is not present beside the checkout")
    tokens = np.load(path.with_suffix(".npz"))["tokens"]
    tokens = np.resize(tokens, 300)
    windowed, full = contexts(path, flash_attn=False)
    assert windowed.kv.windows
    same(run(windowed, tokens), run(full, tokens), name)


def test_several_sequences_share_the_cells(tmp_path: Path) -> None:
    windowed, full = contexts(gpt_oss()[0].write(tmp_path / "model.gguf"), n_seq_max=3, flash_attn=False)
    rng = np.random.default_rng(1)
    lengths = [0, 0, 0]
    for _ in range(40):
        seq_id, n = int(rng.integers(3)), int(rng.integers(1, 12))
        if lengths[seq_id] + n > 150:
            continue
        tokens = rng.integers(0, N_VOCAB, n)
        same(
            run(windowed, tokens, lengths[seq_id], seq_id),
            run(full, tokens, lengths[seq_id], seq_id),
            f"sequence {seq_id}",
        )
        lengths[seq_id] += n
    for context in (windowed, full):
        context.kv.seq_cp(0, 2)
        context.kv.seq_rm(1)
    same(run(windowed, TOKENS[:5], lengths[0], 0), run(full, TOKENS[:5], lengths[0], 0), "after a copy")


def test_sequences_can_be_taken_back_as_far_as_the_window_is_there(tmp_path: Path) -> None:
    windowed, full = contexts(gpt_oss()[0].write(tmp_path / "model.gguf"), flash_attn=False)
    for context in (windowed, full):
        run(context, TOKENS[:100])
    for context in (windowed, full):
        assert context.kv.rewind(0, 95) == 95
    same(run(windowed, TOKENS[200:210], 95), run(full, TOKENS[200:210], 95), "taken back by 5")
    assert full.kv.rewind(0, 10) == 10
    assert windowed.kv.rewind(0, 10) == 0, "the window before position 10 is gone"
    assert windowed.kv.used_cells == 0


def test_a_batch_without_room_leaves_windows_whole(tmp_path: Path) -> None:
    """Nothing runs of a batch whose end has no place, so its beginning pushes no tokens out of their windows."""
    windowed, full = contexts(gpt_oss()[0].write(tmp_path / "model.gguf"), n_batch=512, n_ubatch=16, flash_attn=False)
    for context in (windowed, full):
        run(context, TOKENS[:150])
        with pytest.raises(KVCacheFullError, match="363 tokens need a place and 362 of 512 cells"):
            context.decode(Batch.single(TOKENS[:363], 150))
        assert context.kv.reusable(0, 150) == context.kv.used_cells == 150
    same(run(windowed, TOKENS[150:151], 150), run(full, TOKENS[150:151], 150), "behind the batch that failed")


def test_growing_sequences_evaluate_again_what_is_lost(tmp_path: Path) -> None:
    windowed, full = contexts(gpt_oss()[0].write(tmp_path / "model.gguf"), flash_attn=False)
    results = []
    for context in (windowed, full):
        sequence = GrowingSequence(context)
        sequence.feed(TOKENS[:100].tolist())
        prompt = [*TOKENS[:20].tolist(), *TOKENS[300:310].tolist()]
        kept = sequence.rewind(prompt)
        results.append((kept, sequence.feed(prompt[kept:])))
    assert [kept for kept, _ in results] == [0, 20]
    same(results[0][1], results[1][1], "second prompt")


def test_draft_models_evaluate_again_what_is_lost(tmp_path: Path) -> None:
    rows = []
    for context in contexts(gpt_oss()[0].write(tmp_path / "model.gguf"), flash_attn=False):
        drafter = ModelDraft(context, p_min=0.0, n_vocab=N_VOCAB, n_ctx=512)
        drafter.draft(TOKENS[:200].tolist(), 4)
        rows.append(drafter._follow([*TOKENS[:40].tolist(), TOKENS[300]], 4))
    same(rows[0][None], rows[1][None], "behind a text that begins like the last one")


def test_shifted_positions(tmp_path: Path) -> None:
    windowed, full = contexts(gpt_oss()[0].write(tmp_path / "model.gguf"), flash_attn=False)
    for context in (windowed, full):
        run(context, TOKENS[:200])
        context.kv.seq_rm(0, 4, 104)
        context.kv.seq_add(0, 104, -1, -100)
    same(run(windowed, TOKENS[200:240], 100), run(full, TOKENS[200:240], 100), "after the shift")
    cells = windowed.kv.windows["sliding", 7]
    assert windowed.kv.rewind(0, 139) == 139 and cells.lost[0] <= 139


@pytest.fixture
def chunk_contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Context, Context]:
    """Of a model with chunks of 48 tokens, whose window caches have room for three sequences and nothing more."""
    monkeypatch.setattr(llama4, "CHUNK", 48)
    path = llama4_two_experts()[0].write(tmp_path / "model.gguf")
    windowed, full = contexts(path, flash_attn=False, n_ctx=1024, n_seq_max=3, n_ubatch=16)
    assert {window: cells.n_cells for window, cells in windowed.kv.windows.items()} == {("chunked", 48): 160}
    return windowed, full


def shift(context: Context, keep: int, drop: int) -> None:
    """A context shift of the first sequence."""
    context.kv.seq_rm(0, keep, keep + drop)
    context.kv.seq_add(0, keep + drop, -1, -drop)


@pytest.mark.parametrize(("keep", "drop"), [(4, 6), (4, 30), (0, 60)])
def test_chunks_are_whole_after_a_shift(chunk_contexts: tuple[Context, Context], keep: int, drop: int) -> None:
    """Tokens that were in the chunk before are seen again, whatever room other sequences needed meanwhile."""
    windowed, full = chunk_contexts
    for context in chunk_contexts:
        run(context, TOKENS[:97])
        for seq_id in (1, 2):
            run(context, TOKENS[:191], seq_id=seq_id)
    assert windowed.kv.windows["chunked", 48].lost[0] > 0
    for context in chunk_contexts:
        shift(context, keep, drop)
    same(run(windowed, TOKENS[200:240], 97 - drop), run(full, TOKENS[200:240], 97 - drop), f"behind a shift by {drop}")


@pytest.mark.parametrize("drop", [6, 30])
def test_chunks_of_a_restored_text_are_whole_after_a_shift(
    chunk_contexts: tuple[Context, Context], drop: int, tmp_path: Path
) -> None:
    windowed, full = chunk_contexts
    for context in chunk_contexts:
        run(context, TOKENS[:97])
    save_sequence(tmp_path / "state", windowed, 0, TOKENS[:97].tolist())
    state = take_state(windowed, 0, TOKENS[:97].tolist())
    shift(full, 4, drop)
    expected = run(full, TOKENS[200:240], 97 - drop)
    load_sequence(tmp_path / "state", windowed, 0, 512)
    shift(windowed, 4, drop)
    same(run(windowed, TOKENS[200:240], 97 - drop), expected, "behind a slot file")
    put_state(windowed, 0, state)
    shift(windowed, 4, drop)
    same(run(windowed, TOKENS[200:240], 97 - drop), expected, "behind a saved text")


def test_a_state_saved_between_two_chunks_cannot_be_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next token sees nothing of the chunk before, but one token earlier all is seen, of which the first token is
    not saved."""
    monkeypatch.setattr(llama4, "CHUNK", 50)
    path = llama4_two_experts()[0].write(tmp_path / "model.gguf")
    (windowed, full), (restored, _) = contexts(path), contexts(path)
    for context in (windowed, full):
        run(context, TOKENS[:100])
    save_sequence(tmp_path / "state", windowed, 0, TOKENS[:100].tolist())
    load_sequence(tmp_path / "state", restored, 0, 512)
    assert restored.kv.reusable(0, 100) == 100 and restored.kv.reusable(0, 99) == 0
    same(run(restored, TOKENS[100:130], 100), run(full, TOKENS[100:130], 100), "behind the restored text")


@pytest.mark.parametrize("make", [gpt_oss, llama4_two_experts], ids=lambda f: f.__name__)
def test_saved_texts_say_what_of_them_can_be_gone_on_from(
    make: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the context does that they are loaded into."""
    monkeypatch.setattr(llama4, "CHUNK", 50)
    for context in contexts(make()[0].write(tmp_path / "model.gguf")):
        run(context, TOKENS[:110])
        saved = take_state(context, 0, TOKENS[:110].tolist())
        put_state(context, 0, saved)
        lengths = range(1, 111)
        assert [saved.reusable(n) for n in lengths] == [context.kv.reusable(0, n) for n in lengths]
        assert saved.reusable(110) == 110


@pytest.mark.parametrize(
    "positions", [range(94, 100), range(92, 98), [95, 95, 96, 97, 98, 99], [99, 98, 97, 96, 95, 94], [94, 97, 101]]
)
def test_states_whose_window_is_none_of_their_text(positions: Sequence[int], tmp_path: Path) -> None:
    """With a checksum that is right; the first of them is the window of 7 as it was saved."""
    context, _ = contexts(gpt_oss()[0].write(tmp_path / "model.gguf"))
    run(context, TOKENS[:100])
    save_session(tmp_path / "state", context, TOKENS[:100].tolist())
    data = (tmp_path / "state").read_bytes()
    magic, version, _, length = PREFIX.unpack_from(data)
    header = json.loads(data[PREFIX.size : PREFIX.size + length])
    header["cells"][1][2:] = list(positions), [0] * len(positions)
    content = json.dumps(header).encode() + data[PREFIX.size + length :]
    prefix = PREFIX.pack(magic, version, zlib.crc32(content), len(json.dumps(header)))
    (tmp_path / "state").write_bytes(prefix + content)
    if positions == range(94, 100):
        assert load_session(tmp_path / "state", context) == TOKENS[:100].tolist()
        return
    with pytest.raises(FileFormatError, match="is damaged"):
        load_session(tmp_path / "state", context)
    assert context.kv.used_cells == 100


def test_emptied_sequences_lack_nothing() -> None:
    cells = WindowCells(64, "sliding", 8)
    cells.fill(range(10), range(40, 50), [1] * 10)
    cells.lost[:3] = 40, 60, 70
    cells.remove(1, -1, -1)
    assert cells.lost.tolist() == [40, 0, 70] + [0] * 61 and cells.used == 10


def test_a_restored_window_knows_its_gap() -> None:
    """Tokens of a beginning that another sequence shares outlive those behind them, which a shift may bring near."""
    window = "sliding", 64
    specs = [[CacheSpec("k", F32, 4, 1), CacheSpec("k", F32, 4, 1, window=window)]]
    cache = KVCache(512, specs, can_shift=True, windows={window: 160})
    cache.place(Batch.single([0] * 6, 0, 0))
    cache.seq_cp(0, 1)
    for start in range(6, 126, 20):
        cache.place(Batch.single([0] * 20, start, 0))
    cache.place(Batch.single([0] * 90, 6, 1))
    cache.seq_rm(1, 6, -1)  # what was in the way of the first sequence's tokens is gone
    cells = cache.windows[window]
    lost = int(cells.lost[0])
    assert 6 < lost < 126
    cache.seq_rm(0, 20, 110)
    cache.seq_add(0, 110, 126, -90)
    kept = {w: np.sort(c.pos[c.matching(0, -1, -1)]) for w, c in cache.cells.items()}
    assert kept[window].tolist() == [*range(6), *range(20, 36)] and cache.reusable(0, 36) == 0
    cache.seq_rm(0)
    cache.restore(0, kept)
    assert cells.lost[0] == 20 and cache.reusable(0, 36) == 0 and cache.reusable(0, 30) == 0


def test_shared_beginnings_get_cells_of_their_own_in_a_full_window(tmp_path: Path) -> None:
    """64 cells of which a common text takes 60: copies fit when tokens go that no query sees."""
    windowed, full = contexts(gpt_oss()[0].write(tmp_path / "model.gguf"), flash_attn=False, n_seq_max=2)
    cells = windowed.kv.windows["sliding", 7]
    assert cells.n_cells == 64
    for context in (windowed, full):
        run(context, TOKENS[:60])
        context.kv.seq_cp(0, 1)
        assert unshare_sequence(context, 1) == 60
    assert not len(cells.shared(0)) and cells.holds_window(1, 60) and cells.holds_window(0, 60)
    for seq_id in (0, 1):
        same(run(windowed, TOKENS[60:80], 60, seq_id), run(full, TOKENS[60:80], 60, seq_id), f"sequence {seq_id}")


def test_a_shift_closes_the_gap_of_dropped_tokens() -> None:
    cells = WindowCells(64, "sliding", 8)
    cells.lost[0] = 40
    cells.note_move(0, 60, -1, -50)  # 10..59 were removed: 60 and all behind it come to lie at 10
    assert cells.lost[0] == 10 and cells.holds_window(0, 17) and not cells.holds_window(0, 16)
    cells.lost[0] = 70
    cells.note_move(0, 60, -1, -50)
    assert cells.lost[0] == 20
    cells.note_move(0, 30, -1, 5)
    assert cells.lost[0] == 20


def test_states_hold_what_the_next_token_needs(tmp_path: Path) -> None:
    path = gpt_oss()[0].write(tmp_path / "model.gguf")
    windowed, full = contexts(path, flash_attn=False)
    for context in (windowed, full):
        run(context, TOKENS[:150])
    save_session(tmp_path / "session", windowed, TOKENS[:150].tolist())
    save_sequence(tmp_path / "slot", windowed, 0, TOKENS[:150].tolist())
    expected = full.decode(Batch.single(TOKENS[150:160], 150))
    for other_ubatch in (32, 64):
        fresh, _ = contexts(path, flash_attn=False, n_ubatch=other_ubatch)
        assert load_session(tmp_path / "session", fresh) == TOKENS[:150].tolist()
        same(fresh.decode(Batch.single(TOKENS[150:160], 150)), expected, "session file")
    fresh, _ = contexts(path, flash_attn=False)
    run(fresh, TOKENS[:60], seq_id=1)
    assert load_sequence(tmp_path / "slot", fresh, 0, 512)[0] == TOKENS[:150].tolist()
    same(fresh.decode(Batch.single(TOKENS[150:160], 150)), expected, "state of a slot")
    assert fresh.kv.rewind(0, 100) == 0, "tokens that were not saved cannot be gone back to"


def test_room_is_made_only_as_needed_and_never_in_a_window() -> None:
    cells = WindowCells(10, "sliding", 4)
    cells.fill(range(8), range(8), [1] * 8)
    cells.make_room(4, {0: 8})
    assert sorted(cells.pos[cells.pos >= 0]) == [2, 3, 4, 5, 6, 7] and cells.lost[0] == 2
    cells.make_room(10, {0: 8})
    assert sorted(cells.pos[cells.pos >= 0]) == [5, 6, 7], "positions 5 to 7 are seen from position 8"
    chunked = WindowCells(8, "chunked", 4)
    chunked.fill(range(6), range(6), [1] * 6)
    chunked.make_room(8, {0: 6})
    assert sorted(chunked.pos[chunked.pos >= 0]) == [3, 4, 5], "a shift by 3 makes a chunk of positions 3 to 6"
    assert chunked.holds_window(0, 7) and not chunked.holds_window(0, 3)


@pytest.mark.parametrize("kind", ["sliding", "chunked"])
def test_room_is_made_as_the_reference_does(kind: str) -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        n, size = int(rng.integers(8, 200)), int(rng.integers(1, 40))
        cells = WindowCells(n, kind, size)
        used = np.flatnonzero(rng.random(n) < 0.9)
        cells.fill(used.tolist(), rng.integers(0, 100, len(used)).tolist(), rng.integers(1, 16, len(used)).tolist())
        following = {seq_id: int(rng.integers(0, 130)) for seq_id in range(4) if rng.random() < 0.8}
        wanted = int(rng.integers(1, n))
        dropped, lost = dropped_tokens(cells, wanted, following)
        expected = np.delete(np.arange(n), dropped)
        expected = expected[cells.pos[expected] >= 0]
        cells.make_room(wanted, following)
        np.testing.assert_array_equal(np.flatnonzero(cells.pos >= 0), expected)
        assert cells.used == len(expected)
        np.testing.assert_array_equal(cells.lost[:4], lost)


@pytest.mark.parametrize("n_sequences", [1, 3])
def test_room_is_made_for_token_after_token(n_sequences: int) -> None:
    """Sequences grow and are taken back: no more goes than must, nothing that is seen, of one sequence the oldest."""
    rng = np.random.default_rng(4)
    cells = WindowCells(120, "sliding", 20)
    ends = [0] * n_sequences
    n_dropped = 0
    for _ in range(1500):
        seq_id, n = int(rng.integers(n_sequences)), int(rng.choice([1, 1, 1, 8]))
        if rng.random() < 0.05 and cells.holds_window(seq_id, max(0, ends[seq_id] - 9)):
            ends[seq_id] = max(0, ends[seq_id] - 9)
            cells.remove(seq_id, ends[seq_id], -1)
        following = dict(enumerate(ends))
        outdated, _ = dropped_tokens(cells, cells.n_cells, following)
        oldest, _ = dropped_tokens(cells, n, following)
        before = cells.pos >= 0
        cells.make_room(n, following)
        dropped = np.flatnonzero(before & (cells.pos < 0))
        assert len(dropped) == len(oldest) and set(dropped) <= set(outdated)
        if n_sequences == 1:
            assert set(dropped) == set(oldest)
        n_dropped += len(dropped)
        found = cells.find([1 << seq_id] * n)
        cells.fill(found, range(ends[seq_id], ends[seq_id] + n), [1 << seq_id] * n)
        ends[seq_id] += n
        assert all(cells.holds_window(i, end) for i, end in enumerate(ends))
    assert n_dropped > 1000


def test_too_many_sequences_are_an_error_and_leave_the_cache_as_it_was(tmp_path: Path) -> None:
    windowed, _ = contexts(gpt_oss()[0].write(tmp_path / "model.gguf"), flash_attn=False)
    with pytest.raises(KVCacheFullError, match="window of 7"):
        for seq_id in range(30):
            run(windowed, TOKENS[:7], seq_id=seq_id)
    assert windowed.kv.used_cells % 7 == 0
    windowed.kv.clear()
    assert len(run(windowed, TOKENS[:50])) == 50


def change_something(cache: KVCache, rng: np.random.Generator) -> None:
    """One of all the things that can happen to a cache."""
    a, b = rng.integers(0, 4, 2).tolist()
    n, at = int(rng.integers(1, 12)), cache.seq_pos_max(a) + 1
    shared = Batch([0] * n, range(at, at + n), [(a, b)] * n, [False] * n)
    changes: list[tuple[int, Callable[[], object]]] = [
        (40, lambda: cache.place(shared)),
        (5, lambda: cache.release(cache.place(Batch.single([0] * n, at, a)))),
        (10, lambda: cache.rewind(a, max(0, at - n))),
        (5, lambda: cache.seq_rm(a, n, -1)),
        (2, lambda: cache.seq_rm(-1, 2 * n, -1)),
        (5, lambda: cache.seq_cp(a, b, -1, n)),
        (5, lambda: cache.seq_add(a, n, -1, -n)),
        (1, cache.clear),
    ]
    odds = np.array([weight for weight, _ in changes], float)
    with contextlib.suppress(KVCacheFullError):
        changes[rng.choice(len(changes), p=odds / odds.sum())][1]()


def test_ends_of_sequences_follow_every_change() -> None:
    """Random changes of a cache: what is known without a search is what a search finds."""
    rng = np.random.default_rng(6)
    specs = [[CacheSpec("k", F32, 4, 1), CacheSpec("k", F32, 4, 1, window=("sliding", 8))]]
    cache = KVCache(256, specs, can_shift=True, windows={("sliding", 8): 256})
    for _ in range(600):
        change_something(cache, rng)
        found = cache.tables.next_positions()
        assert found == {s: cache.seq_pos_max(s) + 1 for s in range(4) if cache.seq_pos_max(s) >= 0}


def test_idle_sequences_cost_no_search() -> None:
    """A token of one sequence beside others that do nothing: no cell is looked at to find where they end."""
    specs = [[CacheSpec("k", F32, 4, 1), CacheSpec("k", F32, 4, 1, window=("sliding", 8))]]
    cache = KVCache(512, specs, can_shift=True, windows={("sliding", 8): 128})
    for seq_id in range(4):
        cache.place(Batch.single(range(10), 0, seq_id))
    cache.tables.next_positions()
    for seq_id in range(1, 4):
        cache.pos[cache.full.matching(seq_id, -1, -1)] += 100  # unnoticed, since the cache was not asked to
    for i in range(5):
        cache.place(Batch.one(0, 10 + i))
    assert cache.tables.next_positions(Batch.one(0, 15)) == {0: 15, 1: 10, 2: 10, 3: 10}
    cache.tables.forget(2)
    assert cache.tables.next_positions() == {0: 15, 1: 10, 2: 110, 3: 10}
