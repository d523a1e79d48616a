"""Sounds from their files, and projector files of sound that are damaged or odd."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path

import numpy as np
import pytest

from ikpy.errors import FileFormatError, IkpyError, ResourceError, UnsupportedError, UsageError
from ikpy.gguf.reader import GGUFFile
from ikpy.sound import samples as module
from ikpy.sound.projector import known_encoders, open_sound_projector
from ikpy.sound.samples import SAMPLE_RATE, decode_sound, is_sound
from ikpy.tools.sounds import sound_from
from tests.cpu.media.projector_files import write_in_type
from tests.cpu.media.sound_kinds import GOLDENS, TOWERS
from tests.picture_models import png
from tests.sound_models import tone, wav


def loudest(samples: np.ndarray) -> float:
    """Frequency of the strongest part of a sound."""
    found = np.abs(np.fft.rfft(samples))
    return float(found.argmax() * SAMPLE_RATE / len(samples))


def test_samples_of_16_bits_stay() -> None:
    samples = tone(0.3)
    assert np.abs(decode_sound(wav(samples)) - samples).max() < 1e-4


def test_channels_are_mixed() -> None:
    left, right = tone(0.2, 1), tone(0.2, 2)
    assert np.abs(decode_sound(wav(np.stack([left, right], 1))) - (left + right) / 2).max() < 1e-4


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000])
def test_other_rates_become_16000(rate: int) -> None:
    """A tone stays where it is."""
    t = np.arange(rate) / rate
    found = decode_sound(wav(np.sin(2 * np.pi * 1000 * t).astype(np.float32), rate))
    assert abs(len(found) - SAMPLE_RATE) <= 2 and abs(loudest(found) - 1000) < 2


@pytest.mark.parametrize(("name", "seconds", "peak"), [("tone.mp3", 0.25, 0.5), ("tone.flac", 2000 / 22050, 0.25)])
def test_compressed_files(name: str, seconds: float, peak: float) -> None:
    """A tone of 1000 Hz, in FLAC in one of two channels."""
    data = (GOLDENS / name).read_bytes()
    found = decode_sound(data)
    assert is_sound(data) and abs(len(found) / SAMPLE_RATE - seconds) < 0.1
    assert abs(loudest(found) - 1000) < 15 and abs(np.abs(found).max() - peak) < 0.1


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (b"", UsageError, "x is empty: give a sound"),
        (b"hello", FileFormatError, "x is no sound of a known format"),
        (png(1), FileFormatError, "x is no sound of a known format"),
        (b"RIFF\0\0\0\0AVI ", FileFormatError, "x is no sound of a known format"),
        (b"RIFF\0\0\0\0WAVE", FileFormatError, "x cannot be decoded"),
        (wav(tone(0.1))[:44], FileFormatError, "x has no samples"),
        (b"fLaC" + bytes(100), FileFormatError, "x cannot be decoded"),
        (b"ID3\4\0\0\0\0\0\0", FileFormatError, "x cannot be decoded"),
        (b"\xff\xfb\x90\x00" + bytes(20), FileFormatError, "x "),
        (b"\xff\xf1\x50\x80" + bytes(20), FileFormatError, "x is no sound of a known format"),
    ],
)
def test_files_that_are_no_sound(data: bytes, error: type[IkpyError], message: str) -> None:
    with pytest.raises(error) as caught:
        decode_sound(data, "x")
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_damaged_files_end_in_one_line() -> None:
    """Whatever bytes change: an error of one line or some sound."""
    random = np.random.default_rng(1)
    for data in (wav(tone(0.05)), *((GOLDENS / name).read_bytes() for name in ("tone.mp3", "tone.flac"))):
        for _ in range(150):
            changed = bytearray(data[: random.integers(12, len(data))] if random.random() < 0.3 else data)
            for place in random.integers(4, len(changed), 4):
                changed[place] = random.integers(256)
            try:
                found = decode_sound(bytes(changed), "x")
            except IkpyError as error:
                assert "\n" not in str(error)
            else:
                assert found.dtype == np.float32 and np.isfinite(found).all()


def riff(body: bytes, kind: int, bits: int, *, channels: int = 1, block: int | None = None, more: bytes = b"") -> bytes:
    """A WAV file of any format, 16000 samples a second."""
    block = channels * bits // 8 if block is None else block
    head = struct.pack("<HHIIHH", kind, channels, SAMPLE_RATE, SAMPLE_RATE * block, block, bits) + more
    chunks = b"fmt " + struct.pack("<I", len(head)) + head + b"data" + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30, -3e38])
def test_floats_that_are_no_numbers(value: float) -> None:
    """WAV files may hold floats; powers of large ones would be none."""
    body = np.array([0.5, value], "<f4").tobytes()
    with pytest.raises(FileFormatError, match="samples that are no numbers or above"):
        decode_sound(riff(body, 3, 32), "x")
    with pytest.raises(UsageError, match="a sound is a file"):
        sound_from(np.array([0.5, value]))


@pytest.mark.parametrize(("channels", "bits"), [(0, 16), (1, 0), (1, 1), (255, 16)])
def test_damaged_files_are_not_taken_for_mp3(channels: int, bits: int) -> None:
    """These bytes hold what passes for a frame of MP3."""
    body = np.rint(16383 * np.sin(2 * np.pi * 440 * np.arange(1600) / SAMPLE_RATE)).astype("<i2").tobytes()
    with pytest.raises(FileFormatError, match="x cannot be decoded"):
        decode_sound(riff(body, 1, bits, channels=channels), "x")


def test_formats_of_wav() -> None:
    """Those for which miniaudio has a name, and those for which it has none."""
    samples = tone(0.1)
    for kind, kept in ((3, "<f4"), (3, "<f8"), (1, "<i4"), (1, "<i8")):
        scale = 1.0 if kind == 3 else float(np.iinfo(kept).max) - 512
        data = riff((samples * scale).astype(kept).tobytes(), kind, 8 * np.dtype(kept).itemsize)
        assert np.abs(decode_sound(data) - samples).max() < 1e-4, (kind, kept)
    adpcm = riff(bytes(512), 17, 4, block=256, more=struct.pack("<HH", 2, 505))  # IMA: blocks of 505 samples
    assert len(decode_sound(adpcm)) == 1010


def test_long_sounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding stops where a sound is too long."""
    monkeypatch.setattr(module, "MAX_SECONDS", 1)
    monkeypatch.setattr(module, "STEP", 1600)
    assert len(decode_sound(wav(tone(1)))) == SAMPLE_RATE
    with pytest.raises(ResourceError, match="x is longer than 1 seconds"):
        decode_sound(wav(tone(1.2)), "x")


@pytest.mark.parametrize("value", [np.zeros((2, 3), np.float32), np.zeros(3, np.int16), np.zeros(0), [np.nan]])
def test_arrays_that_are_no_sound(value: object) -> None:
    with pytest.raises(UsageError, match="a sound is a file"):
        sound_from(value)


# projector files


def refused(
    folder: Path, name: str, message: str, *, error: type[IkpyError] = FileFormatError, **change: object
) -> None:
    """Opens a projector with other keys (None: without) or tensors, which must end in one line."""
    tower = TOWERS[name]
    keys, weights = tower.keys, tower.weights()
    for key, value in change.items():
        into = weights if isinstance(value, np.ndarray) or key.startswith(("a.", "mm.")) else keys
        into[key] = value
    keys, weights = ({k: v for k, v in each.items() if v is not None} for each in (keys, weights))
    path = write_in_type(folder / "mmproj.gguf", keys, weights)
    with pytest.raises(error, match=message) as caught:
        open_sound_projector(str(path), n_embd=tower.text, n_threads=1, log=print)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip.audio.num_mel_bins": None}, "clip.audio.num_mel_bins"),
        ({"clip.audio.num_mel_bins": 257}, "num_mel_bins is 257, not 1 to 256"),
        ({"clip.audio.attention.head_count": 3}, "is no multiple of attention.head_count 3"),
        ({"clip.audio.attention.layer_norm_epsilon": -1.0}, "is below 0"),
        ({"clip.audio.block_count": 3}, "tensor 'a.blk.2"),
        ({"a.conv1d.1.weight": None}, "a.conv1d.1.weight"),
        ({"a.conv1d.2.weight": np.zeros((64, 64, 5), np.float32)}, "a.conv1d.2.weight"),
        ({"a.position_embd.weight": np.zeros((1499, 64), np.float32)}, "has 1499 positions, not 1500"),
        ({"mm.a.fc.weight": None}, "mm.a.fc.weight"),
        ({"clip.projector_type": None}, "key clip.projector_type not found"),
    ],
)
def test_damaged_projectors(tmp_path: Path, change: dict[str, object], message: str) -> None:
    refused(tmp_path, "qwen2a", message, **change)


def test_stacks(tmp_path: Path) -> None:
    key = "clip.audio.projector.stack_factor"
    refused(tmp_path, "voxtral", "stack_factor", **{key: None})
    refused(tmp_path, "voxtral", "stack_factor is 0, not 1 to 64", **{key: 0})
    refused(tmp_path, "ultravox", "mm.a.norm_pre", **{key: 4})
    odd = np.zeros((97, 640), np.float32)
    refused(tmp_path, "ultravox", "has 97 rows, no two halves", **{"mm.a.mlp.1.weight": odd})


def test_rows_that_are_no_numbers(tmp_path: Path) -> None:
    tower = TOWERS["qwen2a"]
    weights = tower.weights()
    weights["mm.a.fc.bias"][3] = np.nan
    projector = open_sound_projector(
        str(tower.write(tmp_path / "m.gguf", weights)), n_embd=tower.text, n_threads=1, log=print
    )
    with pytest.raises(FileFormatError, match="the rows of a sound are no numbers"):
        projector.encode(tone(0.1))


def test_other_files(tmp_path: Path) -> None:
    refused(
        tmp_path,
        "qwen2a",
        "makes rows of 32 elements",
        error=UsageError,
        **{"mm.a.fc.weight": np.ones((32, 64), "f4")},
        **{"mm.a.fc.bias": np.ones(32, np.float32)},
    )
    refused(
        tmp_path,
        "qwen2a",
        "unknown projector type 'new' of sound",
        error=UnsupportedError,
        **{"clip.projector_type": "new"},
    )
    refused(
        tmp_path, "qwen2a", "holds no encoder of sound", error=UnsupportedError, **{"clip.has_audio_encoder": False}
    )
    for arch in ("llama", [1, 2]):
        refused(tmp_path, "qwen2a", "is no projector file", error=UsageError, **{"general.architecture": arch})


def test_an_unknown_encoder_beside_a_known_one(tmp_path: Path) -> None:
    """Is left out with a warning; a file with none that is known cannot be used."""
    tower = TOWERS["qwen2a"]
    keys = tower.keys | {
        "clip.has_vision_encoder": True,
        "clip.projector_type": "",
        "clip.vision.projector_type": "new",
    }
    lines: list[str] = []
    for kind, known in (("qwen2a", True), ("newer", False)):
        path = write_in_type(tmp_path / f"{kind}.gguf", keys | {"clip.audio.projector_type": kind}, {})
        with GGUFFile.open(str(path), header_only=True) as file:
            if known:
                assert known_encoders(file, lines.append) == {"audio"}
                assert len(lines) == 1 and "unknown projector type 'new' of pictures" in lines[0]
                continue
            with pytest.raises(UnsupportedError, match="unknown projector type 'new' of pictures"):
                known_encoders(file)
    with GGUFFile.open(str(dataclasses.replace(tower).write(tmp_path / "m.gguf", {})), header_only=True) as file:
        assert known_encoders(file) == {"audio"}


OPTIONAL = ("bias", "a.post_ln", "input_m", "output_m", "a.window", "a.mel_filters")
UNREAD = {"glma": ("a.position_embd",), "lfm2a": ("a.position_embd",), "parakeet": ("mm.model.mlp",)}
"""What llama.cpp wants to see in files."""


@pytest.mark.parametrize("name", TOWERS)
def test_tensors_that_are_missing_or_of_another_shape(name: str, tmp_path: Path) -> None:
    """Each of the first layer and of what is outside of layers: one line that names it, or a norm or bias less."""
    tower = TOWERS[name]
    weights = tower.weights()
    for changed in [each for each in weights if ".blk." not in each or ".blk.0." in each]:
        for value in (None, np.zeros(tuple(n + 3 for n in weights[changed].shape), np.float32)):
            others = {k: v for k, v in weights.items() if k != changed} | ({} if value is None else {changed: value})
            path = write_in_type(tmp_path / "mmproj.gguf", tower.keys, others)
            try:
                open_sound_projector(str(path), n_embd=tower.text, n_threads=1, log=print)
            except FileFormatError as error:
                assert "\n" not in str(error) and (
                    changed in str(error) or ".".join(changed.split(".")[:-1]) in str(error)
                )
            except UsageError as error:
                assert "makes rows of" in str(error)
            else:
                is_unread = any(part in changed for part in UNREAD.get(tower.kind, ()))
                assert is_unread or (value is None and any(part in changed for part in OPTIONAL)), changed
