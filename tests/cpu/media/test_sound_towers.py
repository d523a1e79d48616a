"""Encoders of sound beside their definitions in float64, transformers and llama.cpp."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from ikpy.sound.projector import SoundProjector, open_sound_projector
from ikpy.sound.spectrogram import whisper_spectrogram
from ikpy.vision.rows import MediaRows
from tests.cpu.media import reference_conformers as conformers
from tests.cpu.media import reference_sound as reference
from tests.cpu.media.sound_kinds import (
    GOLDEN_ROWS,
    GOLDENS,
    IN_TRANSFORMERS,
    IN_TRANSFORMERS_TOO,
    LIKE_LLAMA_CPP,
    PEER_COLUMNS,
    PEER_ROWS,
    TEXT_AROUND,
    TOWERS,
    golden_sound,
    peer_sounds,
    sounds,
)
from tests.cpu.media.sound_towers import SoundTower
from tests.sound_models import tone

PEER_BOUND = 2e-3
"""llama.cpp convolves in F16."""
PEER_BOUNDS = {"gemma4a": 1e-2}
"""Faint pitches are raised to a least strength there, to which the model adds."""


def opened(folder: Path, tower: SoundTower, type_name: str = "f32") -> SoundProjector:
    """The projector of a file."""
    path = tower.write(folder / "mmproj.gguf", tower.weights(), type_name)
    return open_sound_projector(str(path), n_embd=tower.text, n_threads=1, log=print)


def rows_of(pieces: list[str | MediaRows]) -> list[np.ndarray]:
    return [piece.values for piece in pieces if not isinstance(piece, str)]


def error_of(name: str, found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference of a row, as a share of the largest value; its row is printed."""
    errors = np.abs(found - wanted).max(axis=1) / np.abs(wanted).max()
    print(f"{name}: {errors.max():.1e} in row {errors.argmax()} of {len(errors)}")
    return float(errors.max())


@pytest.mark.parametrize(("n_mel", "n"), [(80, 1), (80, 160 * 40), (128, 5003), (37, 399)])
def test_spectrograms_are_their_definition(n_mel: int, n: int) -> None:
    """Of sounds shorter than a window, of whole ones, and with silence behind them."""
    samples = tone(1)[:n]
    found, wanted = whisper_spectrogram(samples, n_mel, 60), reference.spectrogram(samples, n_mel, 60)
    assert np.abs(found - wanted).max() < 2e-5, np.abs(found - wanted).max(axis=1).argmax()


def test_long_spectrograms_are_made_in_blocks() -> None:
    samples = tone(31)
    found, wanted = whisper_spectrogram(samples, 20, 3003), reference.spectrogram(samples, 20, 3003)
    assert np.abs(found - wanted).max() < 2e-5


@pytest.mark.parametrize("name", TOWERS)
def test_rows_are_their_definition(name: str, tmp_path: Path) -> None:
    tower = TOWERS[name]
    projector = opened(tmp_path, tower)
    for samples in sounds():
        found = projector.encode(samples)
        begin, end = TEXT_AROUND[name]
        assert [piece for piece in found if isinstance(piece, str)] == [text for text in (begin, end) if text]
        assert isinstance(found[0], str) == bool(begin) and isinstance(found[-1], str) == bool(end)
        for mine, wanted in zip(rows_of(found), conformers.pieces(tower, tower.weights(), samples), strict=True):
            assert error_of(name, mine, wanted) < 1e-5


@pytest.mark.parametrize(("type_name", "bound"), [("f16", 5e-3), ("bf16", 2e-2), ("q8_0", 3e-2)])
def test_types_of_matrices(type_name: str, bound: float, tmp_path: Path) -> None:
    tower = TOWERS["qwen2a"]
    weights = tower.weights()
    path = tower.write(tmp_path / "mmproj.gguf", weights, type_name)
    projector = open_sound_projector(str(path), n_embd=tower.text, n_threads=1, log=print)
    (mine,), (wanted,) = rows_of(projector.encode(tone(1))), reference.pieces(tower, weights, tone(1))
    assert error_of(type_name, mine, wanted) < bound


@pytest.mark.parametrize("name", [*IN_TRANSFORMERS, *IN_TRANSFORMERS_TOO])
def test_rows_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Recorded from samples on by scripts/make_sound_golden.py and make_conformer_golden.py."""
    with np.load(GOLDENS / f"{name}.npz") as golden:
        found = np.concatenate(rows_of(opened(tmp_path, TOWERS[name]).encode(golden_sound(name))))
        assert len(found) == golden["n"]
        assert error_of(name, found[list(GOLDEN_ROWS)], golden["rows"]) < 1e-5


@pytest.mark.parametrize("name", LIKE_LLAMA_CPP)
def test_pieces_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    """Marks, numbers of rows and rows (scripts/make_peer_sounds.py)."""
    projector = opened(tmp_path, TOWERS[name])
    with np.load(GOLDENS / f"peer_{name}.npz") as golden:
        expected, rows, peaks = json.loads(str(golden["pieces"])), golden["rows"], golden["peaks"]
    found = [projector.encode(samples) for samples in peer_sounds(name)]
    assert [[p if isinstance(p, str) else len(p) for p in pieces] for pieces in found] == expected
    mine = [values for pieces in found for values in rows_of(pieces)]
    for values, wanted, peak in zip(mine, rows, peaks, strict=True):
        error = np.abs(values[list(PEER_ROWS), :PEER_COLUMNS] - wanted).max() / float(peak)
        print(f"{name}: {error:.1e}")
        assert error < PEER_BOUNDS.get(name, PEER_BOUND)


@pytest.mark.parametrize("name", TOWERS)
def test_numbers_of_rows_are_known_before(name: str, tmp_path: Path) -> None:
    """Of sounds around the edges of frames, windows and pieces."""
    projector = opened(tmp_path, TOWERS[name])
    seconds = (30, 60.02) if name in ("gemma4a", "qwen2.5o") else (30,)
    lengths = {
        1,
        159,
        160,
        161,
        481,
        3199,
        3200,
        16001,
        32160,
        127999,
        128001,
        *(int(16000 * s) + 200 for s in seconds),
    }
    for n in sorted(lengths):
        rows = rows_of(projector.encode(np.zeros(n, np.float32)))
        assert projector.n_rows(n) == sum(map(len, rows)), n


def test_numbers_of_pieces(tmp_path: Path) -> None:
    """As llama.cpp counts them: a sound of 29.99 seconds fills more than one, and silence is heard behind each."""
    projector = opened(tmp_path, TOWERS["qwen2a"])
    lengths = {1: 1, 16000: 1, 479839: 1, 479840: 2, 496000: 2, 960000: 3}
    assert {n: len(list(projector.pieces(np.zeros(n, np.float32)))) for n in lengths} == lengths


def test_half_a_minute_with_as_many_pitches_as_published_models(tmp_path: Path) -> None:
    """Fits what an encoder may have."""
    tower = dataclasses.replace(TOWERS["gemma4a"], mel=128, layers=1)
    assert [len(rows) for rows in rows_of(opened(tmp_path, tower).encode(tone(30)))] == [750]
