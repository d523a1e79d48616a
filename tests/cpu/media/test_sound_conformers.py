"""Conformers of sound: keys that make no sense, and sounds of several pieces."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from ikpy.errors import FileFormatError
from ikpy.sound import fastconformer, granite, spectrogram
from ikpy.sound.projector import open_sound_projector
from tests.cpu.media import reference_conformers as reference
from tests.cpu.media.projector_files import write_in_type
from tests.cpu.media.sound_kinds import TOWERS
from tests.cpu.media.test_sound_towers import error_of, opened, rows_of
from tests.sound_models import tone


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("granite_speech", "chunk_size", 0, "chunk_size is 0, not 1 to 8192"),
        ("granite_speech", "chunk_size", 41, "chunk_size is 41, above max_pos_emb 40"),
        ("granite_speech", "chunk_size", None, "clip.audio.chunk_size"),
        ("granite_speech", "max_pos_emb", 41, "a.blk.0.attn_rel_pos_emb"),
        ("granite_speech", "conv_kernel_size", 9, "conv_dw.weight' has 7 taps, not 9"),
        ("granite_speech", "num_mel_bins", 63, "num_mel_bins is 63, not even"),
        ("granite_speech", "projector.downsample_rate", 16, "downsample_rate is 16, not 1 to 15"),
        ("granite_speech", "projector.downsample_rate", 3, "a.proj_query"),
        ("granite_speech", "projector.head_count", 3, "head_count 3 of 64 elements"),
        ("granite_speech", "feature_layer", [3], r"feature_layer \[3\] of 3 layers"),
        ("granite_speech", "feature_layer", [0], "a.proj_blk.0.cross_attn_k.weight"),
        ("lfm2a", "embedding_length", 511, "is no multiple of attention.head_count 8"),
        ("lfm2a", "num_mel_bins", 96, "a.pre_encode.out.weight"),
        ("parakeet", "num_mel_bins", 64, "a.pre_encode.out.weight"),
        ("parakeet", "subsampling_factor", 4, "subsampling_factor is 4, not 8 to 8"),
        ("gemma3na", "num_mel_bins", 64, "a.pre_encode.out.weight"),
        ("dots3note_a", "num_mel_bins", 64, "a.conv_out.weight"),
    ],
)
def test_keys_that_make_no_sense(name: str, key: str, value: object, message: str, tmp_path: Path) -> None:
    tower = TOWERS[name]
    keys = {**tower.keys, f"clip.audio.{key}": value}
    kept = {full: each for full, each in keys.items() if each is not None}
    path = write_in_type(tmp_path / "mmproj.gguf", kept, tower.weights())
    with pytest.raises(FileFormatError, match=message) as caught:
        open_sound_projector(str(path), n_embd=tower.text, n_threads=1, log=print)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("dots3note_a", {"a.post_ln.weight": None}, "'a.post_ln.weight' not found"),
        ("granite_speech", {"a.enc_ctc_out.weight": (4097, 64)}, "has 4097 rows, at most 4096 are possible"),
        ("gemma3na", {"a.conv1d.0.weight": (1025, 1, 3, 3)}, "makes 1025 channels, not 1 to 1024"),
    ],
)
def test_tensors_that_make_no_sense(
    name: str, changes: dict[str, tuple[int, ...] | None], message: str, tmp_path: Path
) -> None:
    tower = TOWERS[name]
    weights = tower.weights()
    for full, shape in changes.items():
        weights.pop(full)
        if shape:
            weights[full] = np.zeros(shape, np.float32)
    path = write_in_type(tmp_path / "mmproj.gguf", tower.keys, weights)
    with pytest.raises(FileFormatError, match=message) as caught:
        open_sound_projector(str(path), n_embd=tower.text, n_threads=1, log=print)
    assert "\n" not in str(caught.value)


def test_the_frame_that_is_left_over_may_be_the_loudest(tmp_path: Path) -> None:
    """Of Granite Speech: levels are relative to it, although no state has it."""
    tower, samples = TOWERS["granite_speech"], tone(1.0, 4)[:9999] * np.float32(1e-4)
    samples[-40:] = 0.9
    (found,) = rows_of(opened(tmp_path, tower).encode(samples))
    (wanted,) = reference.granite(tower, tower.weights(), samples)
    assert error_of("loud end", found, wanted) < 1e-5


def test_memory_of_long_sounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Levels, with few windows at a time, take less than three times what they and the sound do."""
    monkeypatch.setattr(spectrogram, "BLOCK", 100)
    samples = np.zeros(120 * 16000, np.float32)
    window, filters = fastconformer.hann(400, periodic=False), fastconformer.mel_filters(128, 512)
    fastconformer.levels(samples[:16000], window, filters)
    tracemalloc.start()
    levels = fastconformer.levels(samples, window, filters)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"{peak / (samples.nbytes + levels.nbytes):.2f} of both")
    assert peak < 3 * (samples.nbytes + levels.nbytes)


def test_fast_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is heard by itself, with the levels of the whole sound."""
    monkeypatch.setattr(fastconformer, "PIECE", 171)
    tower, samples = TOWERS["lfm2a"], tone(4.2, 3)
    weights, projector = tower.weights(), opened(tmp_path, tower)
    found, levels = rows_of(projector.encode(samples)), reference.fast_levels(tower, samples)
    assert [len(rows) for rows in found] == [22, 22, 10]
    assert sum(map(len, found)) == projector.n_rows(len(samples))
    for i, rows in enumerate(found):
        x = reference.fast_layers(tower, weights, reference.fast_front(tower, weights, levels[171 * i : 171 * (i + 1)]))
        x = reference.linear(reference.norm(x, weights, "mm.a.mlp.0", 1e-5), weights, "mm.a.mlp.1")
        assert error_of("piece", rows, reference.linear(reference.gelu(x), weights, "mm.a.mlp.3")) < 1e-5


@pytest.mark.parametrize("name", ["granite_speech", "parakeet"])
def test_numbers_of_rows_of_several_pieces(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(granite, "PIECE", 60)
    monkeypatch.setattr(fastconformer, "PIECE", 171)
    projector = opened(tmp_path, TOWERS[name])
    for n in (19200, 19360, 27360, 27520, 54720, 64000):
        found = rows_of(projector.encode(np.zeros(n, np.float32)))
        assert len(found) > 1 or n < 28000
        assert sum(map(len, found)) == projector.n_rows(n)


@pytest.mark.parametrize("name", ["lfm2a", "parakeet", "gemma3na", "granite_speech", "dots3note_a"])
def test_silence(name: str, tmp_path: Path) -> None:
    """Has rows, as has the shortest of sounds."""
    projector = opened(tmp_path, TOWERS[name])
    for n in (1, 2, 161, 321, 8000):
        assert all(np.isfinite(rows).all() for rows in rows_of(projector.encode(np.zeros(n, np.float32))))
