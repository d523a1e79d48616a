"""Session files and sequence states: the text goes on as if nothing had happened, for every cache form."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

import numpy as np
import pytest

from ikpy.engine.adapter import LoraAdapter
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.ngram_cache import NgramCache
from ikpy.engine.params import ContextParams
from ikpy.engine.sequence_state import load_sequence, save_sequence
from ikpy.engine.session import PREFIX, load_session, save_session
from ikpy.errors import FileFormatError, UsageError
from ikpy.gguf.reader import GGUFFile
from ikpy.quants import registry
from tests.cpu.models.reference_models import N_VOCAB
from tests.cpu.models.test_adapters import write_adapter
from tests.cpu.models.test_zoo_holdouts import phi3_short_context
from tests.shared import DATA

LLAMA, LATENT, QWEN = (DATA / "zoo" / f"{n}.gguf" for n in ("llama-ropefreqs", "deepseek2-v3-mla", "qwen3moe"))
FORMS = [
    (LLAMA, {}),
    (LLAMA, {"type_k": "q8_0", "type_v": "q4_0"}),
    (LLAMA, {"flash_attn": False, "type_k": "bf16"}),
    (QWEN, {"type_k": "iq4_nl", "type_v": "q6_0"}),
    (LLAMA, {"type_k": "q5_1", "type_v": "q4_1"}),
    (LATENT, {"mla": 3, "type_k": "q5_0"}),
    *((LATENT, {"mla": mla}) for mla in range(4)),
    (LATENT, {"mla": 3, "type_k": "q8_0"}),
]
TOKENS = np.random.default_rng(2).integers(3, 1000, 40).tolist()


def context(path: Path, **params: object) -> Context:
    return Context(Model.load(path), ContextParams(**{"n_ctx": 256, "n_threads": 1, **params}))  # type: ignore[arg-type]


def goes_on(ctx: Context, seq: int) -> np.ndarray:
    """Logits of four further tokens, one at a time."""
    return np.concatenate([ctx.decode(Batch.single([7 + i], 40 + i, seq)) for i in range(4)])


@pytest.mark.parametrize(("path", "params"), FORMS, ids=lambda v: v.stem if isinstance(v, Path) else str(v))
def test_a_sequence_goes_on_in_another_context(path: Path, params: dict, tmp_path: Path) -> None:
    """Saved among others, restored under another number into scattered cells: bit for bit the same logits."""
    ctx = context(path, n_seq_max=3, **params)
    ctx.decode(Batch.single(TOKENS[::-1][:9], 0, 2))
    for start in range(0, 40, 10):  # pieces between those of another sequence
        ctx.decode(Batch.single(TOKENS[start : start + 10], start, 1))
        ctx.decode(Batch.single([5], 9 + start // 10, 2))
    n_bytes = save_sequence(tmp_path / "state", ctx, 1, TOKENS)
    assert n_bytes == (tmp_path / "state").stat().st_size
    alone = context(path, n_seq_max=3, **params)
    assert load_sequence(tmp_path / "state", alone, 1, 256) == (TOKENS, n_bytes)
    other = context(path, n_seq_max=3, **params)
    other.decode(Batch.single(TOKENS[:3], 0, 0))
    other.decode(Batch.single(TOKENS[:20], 0, 1))
    other.kv.seq_rm(0, 1, 2)
    assert load_sequence(tmp_path / "state", other, 0, 256) == (TOKENS, n_bytes)
    wanted = goes_on(ctx, 1)
    for name, found in (("the same number", goes_on(alone, 1)), ("another number", goes_on(other, 0))):
        error = np.abs(found - wanted).max(axis=1)
        # Cells in another order are summed in another order.
        assert error.max() < 2e-3, f"{name}: step {error.argmax()} differs by {error.max()}"
    again = context(path, n_seq_max=3, **params)
    assert load_sequence(tmp_path / "state", again, 1, 256)[0] == TOKENS
    assert (goes_on(again, 1) == goes_on_fresh(path, params, tmp_path)).all(), "restoring is exact"


def goes_on_fresh(path: Path, params: dict, folder: Path) -> np.ndarray:
    ctx = context(path, n_seq_max=3, **params)
    load_sequence(folder / "state", ctx, 1, 256)
    return goes_on(ctx, 1)


@pytest.mark.parametrize(("path", "params"), FORMS, ids=lambda v: v.stem if isinstance(v, Path) else str(v))
def test_a_session_goes_on(path: Path, params: dict, tmp_path: Path) -> None:
    ctx = context(path, **params)
    ctx.decode(Batch.single(TOKENS))
    save_session(tmp_path / "session", ctx, TOKENS)
    other = context(path, **params)
    assert load_session(tmp_path / "session", other) == TOKENS
    assert (goes_on(other, 0) == goes_on(ctx, 0)).all()


def test_pending_shifts_are_saved(tmp_path: Path) -> None:
    """A sequence whose positions moved since the last decode."""
    ctx = context(LLAMA, type_k="f32", type_v="f32")
    ctx.decode(Batch.single(TOKENS))
    ctx.kv.seq_rm(0, 5, 15)
    ctx.kv.seq_add(0, 15, -1, -10)
    kept = TOKENS[:5] + TOKENS[15:]
    save_sequence(tmp_path / "state", ctx, 0, kept)
    save_session(tmp_path / "session", ctx, kept)
    wanted = ctx.decode(Batch.single([9], 30))
    for load in (
        lambda c: load_sequence(tmp_path / "state", c, 0, 256),
        lambda c: load_session(tmp_path / "session", c),
    ):
        other = context(LLAMA, type_k="f32", type_v="f32")
        load(other)
        assert other.kv.delta.any()
        assert np.abs(other.decode(Batch.single([9], 30)) - wanted).max() < 1e-5


def _changed(path: Path, folder: Path) -> Path:
    """The model with one other weight in each tensor, as after a further training."""
    data = bytearray(path.read_bytes())
    with GGUFFile.open(path) as gguf:
        for info in gguf.tensors.values():
            data[info.offset] ^= 1
    (folder / "changed.gguf").write_bytes(data)
    return folder / "changed.gguf"


def test_states_of_another_form_are_refused(tmp_path: Path) -> None:
    ctx = context(LLAMA)
    ctx.decode(Batch.single(TOKENS))
    save_sequence(tmp_path / "state", ctx, 0, TOKENS)
    for other, reason in (
        (context(QWEN), "another model"),
        (context(_changed(LLAMA, tmp_path)), "another model"),
        (context(LLAMA, type_k="q8_0"), "another cache type or -mla mode"),
        (context(LLAMA, rope_freq_base=1e6), "other RoPE parameters, -khad or -vhad"),
    ):
        with pytest.raises(FileFormatError, match=f"saved with {reason}"):
            load_sequence(tmp_path / "state", other, 0, 256)
        save_session(tmp_path / "session", ctx, TOKENS)
        with pytest.raises(FileFormatError, match=f"made with {reason}"):
            load_session(tmp_path / "session", other)
    quantized = {"type_k": "q8_0", "type_v": "q8_0"}
    save_sequence(tmp_path / "plain", context(LLAMA, **quantized), 0, [])
    for option in ("k_hadamard", "v_hadamard"):
        with pytest.raises(FileFormatError, match="-khad or -vhad"):
            load_sequence(tmp_path / "plain", context(LLAMA, **quantized, **{option: True}), 0, 256)
    with pytest.raises(FileFormatError, match="holds 40 tokens, there is room for 39"):
        load_sequence(tmp_path / "state", context(LLAMA), 0, 39)
    data = (tmp_path / "state").read_bytes()
    (tmp_path / "state").write_bytes(data[:-1])
    with pytest.raises(FileFormatError, match="do not agree with its checksum"):
        load_sequence(tmp_path / "state", context(LLAMA), 0, 256)


@pytest.mark.parametrize("n_seq", [1, 2])
def test_keys_rotated_by_the_long_factors_of_longrope_are_others(n_seq: int, tmp_path: Path) -> None:
    """The size of the context, for each sequence, decides which factors rotate."""
    path = phi3_short_context()[0].write(tmp_path / "phi3.gguf")
    sizes = 256, 256 * n_seq, 512 * n_seq
    short, longer, long = (context(path, n_ctx=n, n_seq_max=n_seq, swa_full=True) for n in sizes)
    tokens = [token % N_VOCAB for token in TOKENS]
    for writer, same, other in ((short, longer, long), (long, long, short)):
        writer.kv.clear()
        writer.decode(Batch.single(tokens))
        save_sequence(tmp_path / "state", writer, 0, tokens)
        assert load_sequence(tmp_path / "state", same, 0, 256)[0] == tokens
        with pytest.raises(FileFormatError, match="saved with other RoPE parameters"):
            load_sequence(tmp_path / "state", other, 0, 256)


def test_damage_anywhere_is_one_error_and_changes_nothing(tmp_path: Path) -> None:
    """Shorter, longer and changed files, of sequences and of sessions."""
    ctx = context(LATENT)
    ctx.decode(Batch.single(TOKENS))
    path, random = tmp_path / "state", np.random.default_rng(4)
    for save, load in (
        (lambda: save_sequence(path, ctx, 0, TOKENS), lambda: load_sequence(path, ctx, 0, 256)),
        (lambda: save_session(path, ctx, TOKENS), lambda: load_session(path, ctx)),
    ):
        save()
        data = path.read_bytes()
        damaged = [data[:n] for n in (0, 7, 8, 19, 20, 21, 300, len(data) // 2, len(data) - 1)] + [data + b"x"]
        for place in (0, 8, 12, 16, 20, *random.integers(20, len(data), 40).tolist()):
            damaged.append(data[:place] + bytes([data[place] ^ 1 << random.integers(8)]) + data[place + 1 :])
        for content in damaged:
            path.write_bytes(content)
            with pytest.raises(FileFormatError) as caught:
                load()
            assert "\n" not in str(caught.value)
        assert ctx.kv.used_cells == len(TOKENS)


def test_adapters_belong_to_a_state(tmp_path: Path) -> None:
    """A sequence comes back with the scales it was made with; a session is refused under others."""
    model = Model.load(LLAMA)
    rng = np.random.default_rng(3)

    def adapter(name: str) -> LoraAdapter:
        n_in, n_out = model.weights[f"{name}.weight"].shape[:2]
        pairs = {name: (rng.normal(0, 1, (2, n_in)), rng.normal(0, 1, (n_out, 2)))}
        return LoraAdapter.load(write_adapter(tmp_path / f"{name}.gguf", model.hparams.arch, pairs, 0.0), model)

    one, two = adapter("blk.0.attn_q"), adapter("blk.0.attn_v")

    def new(*adapters: LoraAdapter) -> Context:
        return Context(model, ContextParams(n_ctx=256, n_threads=1, n_seq_max=2, adapters=adapters))

    ctx, state, session = new(one, two), tmp_path / "state", tmp_path / "session"
    ctx.adapter_scales[0] = (0.5, 0)
    ctx.decode(Batch.single(TOKENS))
    save_sequence(state, ctx, 0, TOKENS)
    save_session(session, ctx, TOKENS)
    other = new(two, one)
    assert load_sequence(state, other, 1, 256)[0] == TOKENS
    assert other.adapter_scales[1].tolist() == [0, 0.5] and other.adapter_scales[0].tolist() == [1, 1]
    for scales in ([0, 1], [0.5, 0.5], [0, 0], [0.5, 0]):
        other.adapter_scales[0] = scales
        with pytest.raises(FileFormatError, match="other LoRA adapters or scales"):
            load_session(session, other)
    other.adapter_scales[0] = (0, 0.5)
    assert load_session(session, other) == TOKENS
    for lacking in (new(), new(two)):
        with pytest.raises(FileFormatError, match="other LoRA adapters or scales"):
            load_sequence(state, lacking, 0, 256)
        with pytest.raises(FileFormatError, match="other LoRA adapters or scales"):
            load_session(session, lacking)
    plain = new()
    plain.decode(Batch.single(TOKENS))
    save_sequence(state, plain, 0, TOKENS)
    load_sequence(state, other, 0, 256)
    assert not other.adapter_scales[0].any(), "without adapters is with scales of 0"


def test_control_vectors_belong_to_a_state(tmp_path: Path) -> None:
    ctx = context(LLAMA)
    hp = ctx.model.hparams
    directions = np.ones((hp.n_layer, hp.n_embd), np.float32)
    ctx.steer(directions)
    ctx.decode(Batch.single(TOKENS))
    save_sequence(tmp_path / "state", ctx, 0, TOKENS)
    assert load_sequence(tmp_path / "state", ctx, 0, 256)[0] == TOKENS
    for other in (None, 2 * directions, 0 * directions):
        ctx.steer(other)
        with pytest.raises(FileFormatError, match="other control vectors"):
            load_sequence(tmp_path / "state", ctx, 0, 256)


def test_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    """State files and lookup caches take the place of regular files only; links stay links."""
    ctx = context(LLAMA)
    ctx.decode(Batch.single(TOKENS))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="no regular file"):
        save_session(pipe, ctx, TOKENS)
    with pytest.raises(OSError, match="no regular file"):
        save_sequence(pipe, ctx, 0, TOKENS)
    with pytest.raises(UsageError, match="no regular file"):
        NgramCache().save(pipe)
    assert pipe.is_fifo() and os.listdir(tmp_path) == ["pipe"]
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "state")
    save_session(link, ctx, TOKENS)
    assert link.is_symlink() and (tmp_path / "state").stat().st_size > 1000


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": None},
        {"tokens": [0.5] * 40},
        {"tokens": [10**6] * 40},
        {"cells": 5},
        {"adapters": 1},
        {"adapters": [[1, "2"]]},
        {"adapters": [[1, float("nan")]]},
        {"adapters": [[1, 1e300]]},
        {"adapters": [[1, 10**400]]},
        {"cells": [["none", 0, [-5] * 40, [0] * 40]]},
        {"cells": [["none", 0, [2**40] * 40, [0] * 40]]},
        {"cells": [["none", [0], list(range(40)), [0] * 40]]},
        {"cells": [["none", 0, list(range(40)), [0] * 39]]},
        "[" * 100_000,
        {"cells": [["none", 0, list(range(40)), [1] * 40]]},  # keys of latent attention cannot be shifted
        {"tokens": TOKENS[:39]},
        {"tokens": [*TOKENS, 5]},
        {"cells": [["none", 0, list(range(1, 41)), [0] * 40]]},
        {"cells": [["none", 0, [*range(39), 38], [0] * 40]]},
        {"cells": [["none", 0, list(range(40))[::-1], [0] * 40]]},
        {"cells": [["sliding", 8, list(range(40)), [0] * 40]]},
    ],
    ids=lambda change: str(change)[:60],
)
def test_headers_that_cannot_be(change: dict | str, tmp_path: Path) -> None:
    """With a checksum that is right."""
    ctx = context(LATENT)
    ctx.decode(Batch.single(TOKENS))
    save_sequence(tmp_path / "state", ctx, 0, TOKENS)
    data = (tmp_path / "state").read_bytes()
    magic, version, _, length = PREFIX.unpack_from(data)
    end = PREFIX.size + length
    changed = change if isinstance(change, str) else json.dumps({**json.loads(data[PREFIX.size : end]), **change})
    header = changed.encode()
    checksum = zlib.crc32(header + data[end:])
    (tmp_path / "state").write_bytes(PREFIX.pack(magic, version, checksum, len(header)) + header + data[end:])
    with pytest.raises(FileFormatError, match="the state is damaged"):
        load_sequence(tmp_path / "state", ctx, 0, 256)


@pytest.mark.parametrize(("path", "params"), FORMS, ids=lambda v: v.stem if isinstance(v, Path) else str(v))
def test_cells_that_are_no_numbers_are_the_file_s_fault(path: Path, params: dict, tmp_path: Path) -> None:
    """The first or last value, or scale, of a cache tensor is NaN or infinite; the checksum is right."""
    ctx = context(path, **params)
    ctx.decode(Batch.single(TOKENS))
    save_session(tmp_path / "session", ctx, TOKENS)
    intact = (tmp_path / "session").read_bytes()
    value = next(iter(ctx.kv.tensors.values()))  # the first in the file
    length = PREFIX.unpack_from(intact)[3]
    kind = registry.by_id(value.type_id)
    first = PREFIX.size + length
    last = first + kind.row_nbytes(value.shape[0]) * value.shape[1] * len(TOKENS) - kind.block_bytes
    bad = {"bf16": b"\x80\x7f"}.get(kind.name, b"\x00\x7e")  # bf16 infinity, f16 NaN
    for start in (first, last):
        data = bytearray(intact)
        data[start : start + 2] = bad
        magic, version, _, _ = PREFIX.unpack_from(data)
        data[: PREFIX.size] = PREFIX.pack(magic, version, zlib.crc32(data[PREFIX.size :]), length)
        (tmp_path / "session").write_bytes(data)
        before = goes_on(ctx, 0)
        with pytest.raises(FileFormatError, match=r"session file '.*/session' holds values that are not numbers"):
            load_session(tmp_path / "session", ctx)
        ctx.kv.seq_rm(0, 40, -1)
        assert (goes_on(ctx, 0) == before).all(), f"{kind.name}: the refused state changed the context"
        ctx.kv.seq_rm(0, 40, -1)
    assert ctx.kv.used_cells == len(TOKENS)
