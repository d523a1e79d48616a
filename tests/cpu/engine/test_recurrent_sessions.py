"""Session files and saved states of a model with recurrent layers."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from ikpy.engine.batch import Batch
from ikpy.engine.sequence_state import load_sequence, save_sequence
from ikpy.engine.session import PREFIX, load_session, put_state, save_session, sequence_nbytes, take_state
from ikpy.errors import FileFormatError, ResourceError
from tests.cpu.models.recurrent_model import MODELS, expected, hold, new_context, text, write_model


@pytest.fixture(scope="module", params=MODELS)
def path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), arch=request.param)


@pytest.mark.parametrize("type_k", ["f32", "q8_0"])
def test_a_session_goes_on_as_if_it_had_never_ended(path: Path, tmp_path: Path, type_k: str) -> None:
    tokens, more = text(21, 30), text(22, 6)
    writer, reader = (new_context(path, 1, type_k=type_k, flash_attn=True) for _ in range(2))
    writer.decode(Batch.single(tokens))
    save_session(tmp_path / "session", writer, tokens)
    assert load_session(tmp_path / "session", reader) == tokens
    logits = [context.decode(Batch.single(more, 30, logits="all")) for context in (writer, reader)]
    np.testing.assert_array_equal(*logits)


def test_a_session_goes_on_among_any_number_of_sequences(path: Path, tmp_path: Path) -> None:
    tokens, more = text(21, 30), text(22, 3)
    writer = new_context(path, 2)
    writer.decode(Batch.single(tokens))
    save_session(tmp_path / "session", writer, tokens)
    truth = expected(path, tokens + more)[30:]
    for n_seq, n_kept in ((1, 0), (3, 0), (2, 4)):
        reader = new_context(path, n_seq, n_kept_states=n_kept)
        assert load_session(tmp_path / "session", reader) == tokens
        hold(f"{n_seq} sequences", reader.decode(Batch.single(more, 30, logits="all")), truth)


def test_an_empty_session(path: Path, tmp_path: Path) -> None:
    writer, reader = new_context(path, 1), new_context(path, 1)
    save_session(tmp_path / "session", writer, [])
    reader.decode(Batch.single(text(23, 5)))
    assert load_session(tmp_path / "session", reader) == []
    hold("afterwards", reader.decode(Batch.single(text(24, 5), logits="all")), expected(path, text(24, 5)))


def test_a_saved_sequence_of_a_context(path: Path, tmp_path: Path) -> None:
    tokens, more = text(25, 20), text(26, 4)
    context = new_context(path, 3)
    context.decode(Batch.single(text(27, 9), 0, 2))
    context.decode(Batch.single(tokens, 0, 1))
    size = save_sequence(tmp_path / "state", context, 1, tokens)
    assert load_sequence(tmp_path / "state", context, 2, 100) == (tokens, size)
    truth = expected(path, tokens + more)[20:]
    for seq in (1, 2):
        hold(f"sequence {seq}", context.decode(Batch.single(more, 20, seq, logits="all")), truth)


def test_states_in_memory_keep_their_checkpoints(path: Path) -> None:
    tokens, other = text(28, 24), text(29, 8)
    context = new_context(path, 2)
    context.decode(Batch.single(tokens[:10]))
    context.kv.keep_checkpoint(0)
    context.decode(Batch.single(tokens[10:], 10))
    saved = take_state(context, 0, tokens)
    placed = sum(map(len, saved.pos.values()))  # of every kind of cells
    assert saved.nbytes == sequence_nbytes(context, 0) + 24 * 8 + placed * (4 + 4)
    assert [saved.reusable(n) for n in (24, 23, 10, 9)] == [24, 10, 10, 0]
    context.kv.seq_rm(0)
    put_state(context, 1, saved)
    assert context.kv.rewind(1, 20) == 10
    logits = context.decode(Batch.single(other, 10, 1, logits="all"))
    hold("rewound", logits, expected(path, tokens[:10] + other)[10:])


def changed(path: Path, place: int, data: bytes) -> None:
    """Overwrites bytes of a state file, counted from its end, and makes its checksum agree."""
    content = bytearray(path.read_bytes())
    content[place : place + len(data) or None] = data
    magic, version, _, length = PREFIX.unpack_from(content)
    PREFIX.pack_into(content, 0, magic, version, zlib.crc32(content[PREFIX.size :]), length)
    path.write_bytes(content)


def test_damaged_states(path: Path, tmp_path: Path) -> None:
    tokens = text(30, 12)
    context = new_context(path, 1)
    context.decode(Batch.single(tokens))
    file = tmp_path / "session"
    save_session(file, context, tokens)
    whole = file.read_bytes()
    changed(file, -4, struct.pack("<f", np.nan))
    with pytest.raises(FileFormatError, match="holds values that are not numbers"):
        load_session(file, context)
    file.write_bytes(whole[:-4])
    changed(file, -1, whole[-5:-4])
    with pytest.raises(FileFormatError, match=f"{len(whole) - 4} bytes, {len(whole)} expected"):
        load_session(file, context)
    hold("unharmed", context.decode(Batch.single([7], 12)), expected(path, [*tokens, 7])[-1:])


def test_a_lost_state_is_not_saved(path: Path, tmp_path: Path) -> None:
    tokens = text(31, 12)
    context = new_context(path, 1)
    context.decode(Batch.single(tokens))
    context.kv.seq_rm(0, 10, -1)
    with pytest.raises(ResourceError, match="the state of sequence 0 was lost and cannot be saved"):
        save_session(tmp_path / "session", context, tokens[:10])
    assert not (tmp_path / "session").exists()
