"""`ikpy convert` of Qwen2.5-Omni and Qwen3-Omni: both encoders in one file, and the text part of the whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import Conversion, ConvertOptions, ProjectorConversion
from ikpy.convert.checkpoint import Checkpoint
from ikpy.convert.config import Config
from ikpy.convert.families import family
from ikpy.errors import FileFormatError
from ikpy.gguf.reader import GGUFFile
from ikpy.sound.projector import known_encoders, open_sound_projector
from ikpy.vision.projector import open_projector
from tests.cpu.convert import omni_checkpoints as omni
from tests.cpu.convert import seeded_checkpoints as tiny
from tests.cpu.convert.checkpoints import Tensors, amend, change_tensors, read_json
from tests.cpu.convert.seeded_checkpoints import Tiny
from tests.cpu.convert.test_convert_projectors import converted, refused
from tests.cpu.convert.tower_checkpoints import write
from tests.cpu.media.tower_parts import GOLDEN_ROWS, TEXT, TowerCheckpoint

every_tower = pytest.mark.parametrize("tower", omni.TOWERS, ids=lambda tower: tower.name)
every_text = pytest.mark.parametrize("kind", omni.CHECKPOINTS, ids=lambda kind: kind.name)
N_POSITIONS = {"qwen2.5-omni": 1500, "qwen3-omni": 13}


def waves(n_positions: int, n: int) -> np.ndarray:
    """Positions by their definition: waves of lengths from 2 pi to 10000 times as long."""
    found = np.empty((n_positions, n))
    for position in range(n_positions):
        for i in range(n // 2):
            angle = position / 10000 ** (i / (n // 2 - 1))
            found[position, i], found[position, n // 2 + i] = np.sin(angle), np.cos(angle)
    return found


@every_tower
def test_both_encoders(tower: TowerCheckpoint, tmp_path: Path) -> None:
    """Rows of a sound are those of transformers (those of pictures: test_convert_projectors.py)."""
    file = converted(write(tower, tmp_path / "checkpoint"))
    assert known_encoders(file) == {"vision", "audio"}
    stored = file.data(file.tensors["a.position_embd.weight"]).view(np.float32)
    n, d = N_POSITIONS[tower.name], omni.SOUND["d_model"]
    assert np.abs(stored.reshape(n, d) - waves(n, d)).max() < 2e-7
    sounds = open_sound_projector(file.path, n_embd=TEXT, n_threads=1, log=print)
    found = [piece.values for piece in sounds.encode(tower.sound()) if not isinstance(piece, str)]
    rows, expected = np.concatenate(found)[list(GOLDEN_ROWS)], np.load(tower.golden)["sound"]
    error = np.abs(rows - expected).max(axis=1) / np.abs(expected).max()
    assert error.max() < 2e-5, f"row {GOLDEN_ROWS[error.argmax()]} is off by {error.max():.1e}"


def test_types_of_projectors(tmp_path: Path) -> None:
    """One for both, or one for each."""
    keys = converted(write(omni.QWEN25_OMNI, tmp_path / "old" / "checkpoint")).metadata
    assert keys["clip.projector_type"] == "qwen2.5o"
    assert "clip.audio.projector_type" not in keys
    assert "clip.use_gelu" not in keys or not keys["clip.use_gelu"]
    keys = converted(write(omni.QWEN3_OMNI, tmp_path / "new" / "checkpoint")).metadata
    assert "clip.projector_type" not in keys
    assert (keys["clip.vision.projector_type"], keys["clip.audio.projector_type"]) == ("qwen3vl_merger", "qwen3a")
    assert keys["clip.audio.projection_dim"] == TEXT
    (note,) = ProjectorConversion(tmp_path / "new" / "checkpoint").notes
    assert "llama.cpp, which leaves them out" in note


@every_tower
def test_projectors_of_whole_models(tower: TowerCheckpoint, tmp_path: Path) -> None:
    """Are those of their thinkers; what speaks is left out."""
    files = []
    for name in ("thinker", "whole"):
        folder = write(tower, tmp_path / name / "checkpoint")
        files.append(converted(omni.make_whole(folder) if name == "whole" else folder))
    assert Path(files[0].path).read_bytes() == Path(files[1].path).read_bytes()
    model = open_projector(files[1].path, n_embd=TEXT, n_threads=1, log=print)
    assert model.n_deep == (len(omni.DEEP) if tower is omni.QWEN3_OMNI else 0)


@every_text
def test_texts_of_whole_models(kind: Tiny, tmp_path: Path) -> None:
    """Are those of their thinkers (logits: test_convert_seeded.py)."""
    files = []
    for name in ("thinker", "whole"):
        (tmp_path / name).mkdir()
        folder = tiny.write(kind, tmp_path / name / "checkpoint")
        folder = omni.make_whole(folder) if name == "whole" else folder
        conversion = Conversion(folder, ConvertOptions(outfile=str(tmp_path / f"{name}.gguf")))
        conversion.write()
        files.append((tmp_path / f"{name}.gguf").read_bytes())
    assert files[0] == files[1]
    assert any("3 tensors of other parts" in note for note in conversion.notes)
    keys = GGUFFile.open(str(tmp_path / "whole.gguf")).metadata
    if kind is omni.QWEN3_OMNI_TEXT:
        assert keys["qwen3vlmoe.n_deepstack_layers"] == 1
        assert keys["qwen3vlmoe.expert_feed_forward_length"] == omni.WIDTH
    else:
        assert list(keys["qwen2vl.rope.dimension_sections"]) == [2, 3, 3, 0]


@pytest.mark.parametrize(
    ("tower", "changes", "message"),
    [
        (omni.QWEN25_OMNI, {"n_window": 50}, "n_window 50"),
        (omni.QWEN25_OMNI, {"output_dim": 96}, "output_dim 96"),
        (omni.QWEN25_OMNI, {"num_mel_bins": 80}, r"has shape \[64, 128, 3\], not \[64, 80, 3\]"),
        (omni.QWEN3_OMNI, {"n_window": 100}, "n_window 100"),
        (omni.QWEN3_OMNI, {"n_window_infer": 400}, "n_window_infer 400"),
        (omni.QWEN3_OMNI, {"downsample_hidden_size": 4}, r"has shape \[5, 1, 3, 3\], not \[4, 1, 3, 3\]"),
        (omni.QWEN3_OMNI, {"d_model": 63}, "2 heads in 63"),
        (omni.QWEN3_OMNI, None, "there is no 'audio_config'"),
    ],
)
def test_other_sound(tower: TowerCheckpoint, changes: dict[str, Any] | None, message: str, tmp_path: Path) -> None:
    folder = write(tower, tmp_path / "checkpoint")
    audio = None if changes is None else read_json(folder / "config.json")["audio_config"] | changes
    amend(folder, audio_config=audio)
    refused(folder, message)


def test_odd_thinkers(tmp_path: Path) -> None:
    """Are no object, or have a text part that is none."""
    folder = omni.make_whole(write(omni.QWEN25_OMNI, tmp_path / "checkpoint"))
    amend(folder, thinker_config=[1])
    refused(folder, "there is no 'vision_config'")
    thinker = {**omni.QWEN25_OMNI.config, "text_config": [3]}
    amend(folder, thinker_config=thinker)
    refused(folder, "'text_config' is not an object")
    with pytest.raises(FileFormatError, match="'text_config' is not an object"):
        Conversion(folder)


# Qwen3-ASR, which has the encoder of sound alone


def asr_checkpoint(folder: Path, *, published: bool) -> Path:
    """One with the weights of the tiny Qwen3-Omni: in the names of its repository, or in those of transformers."""
    write(omni.QWEN3_OMNI, folder)
    config = read_json(folder / "config.json")
    audio, text = config["audio_config"], {**config["text_config"], "max_position_embeddings": 64, "rms_norm_eps": 1e-6}
    parts = {"audio_config": audio, "text_config": {**text, "model_type": "qwen3_asr_text" if published else "qwen3"}}
    whole = {"thinker_config": {**parts, "model_type": "qwen3_asr_thinker"}} if published else parts
    config = {"architectures": ["Qwen3ASRForConditionalGeneration"], "model_type": "qwen3_asr", **whole}
    (folder / "config.json").write_text(json.dumps(config))

    def rename(tensors: Tensors) -> None:
        found = {name: tensor for name, tensor in tensors.items() if name.startswith("audio_tower.")}
        tensors.clear()
        for name, tensor in found.items():
            later = name.replace("audio_tower.proj", "multi_modal_projector.linear_")
            tensors[f"thinker.{name}" if published else f"model.{later}"] = tensor

    change_tensors(folder, rename)
    return folder


@pytest.mark.parametrize("published", [True, False])
def test_qwen3_asr(published: bool, tmp_path: Path) -> None:
    """Rows of a sound; architectures of the text part."""
    folder = asr_checkpoint(tmp_path / "checkpoint", published=published)
    file = converted(folder)
    assert known_encoders(file) == {"audio"} and file.metadata["clip.audio.projector_type"] == "qwen3a"
    sounds = open_sound_projector(file.path, n_embd=TEXT, n_threads=1, log=print)
    tower = omni.QWEN3_OMNI
    found = [piece.values for piece in sounds.encode(tower.sound()) if not isinstance(piece, str)]
    rows, expected = np.concatenate(found)[list(GOLDEN_ROWS)], np.load(tower.golden)["sound"]
    assert np.abs(rows - expected).max() < 2e-5 * np.abs(expected).max()
    config = Config(Checkpoint(folder).config, folder / "config.json")
    made = family(config)
    assert made.arch == ("qwen3vl" if published else "qwen3")
    if published:
        keys = made.keys()
        assert keys["n_deepstack_layers"] == 0 and keys["rope.dimension_sections"] == [4, 6, 6, 0]
