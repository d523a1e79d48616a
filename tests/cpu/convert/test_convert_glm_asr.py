"""`ikpy convert` of GLM-ASR, in both kinds of names its checkpoints have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import ConvertOptions, ProjectorConversion
from ikpy.convert.checkpoint import Checkpoint
from ikpy.convert.config import Config
from ikpy.convert.families import family
from ikpy.gguf.reader import GGUFFile
from ikpy.sound.projector import open_sound_projector
from tests.cpu.convert.checkpoints import amend, read_json
from tests.cpu.convert.glm_asr_checkpoints import ENDS, GLM_ASR, STACK, in_first_names, name_tokens
from tests.cpu.convert.test_convert_projectors import converted, refused
from tests.cpu.convert.tower_checkpoints import weights, write
from tests.cpu.media.tower_parts import GOLDEN_ROWS, TEXT

N_ROWS = 129
"""Of 10.33 seconds; the others are those of silence."""


def checkpoint(folder: Path, *, first: bool = False) -> Path:
    """A checkpoint in the names of transformers, or in the first ones."""
    made = name_tokens(write(GLM_ASR, folder))
    return in_first_names(made) if first else made


def rows_of(file: GGUFFile) -> np.ndarray:
    """Rows of the golden sound, those of both ends too."""
    sounds = open_sound_projector(file.path, n_embd=TEXT, n_threads=1, log=print)
    return np.concatenate([piece.values for piece in sounds.encode(GLM_ASR.sound()) if not isinstance(piece, str)])


@pytest.mark.parametrize("first", [False, True])
def test_rows_of_transformers(first: bool, tmp_path: Path) -> None:
    """Between those of the tokens around a sound."""
    rows = rows_of(converted(checkpoint(tmp_path / "checkpoint", first=first)))
    assert len(rows) == 377
    embedding = weights(GLM_ASR)["language_model.model.embed_tokens.weight"]
    np.testing.assert_array_equal(rows[[0, -1]], embedding[list(ENDS.values())])
    found, expected = rows[1 : 1 + N_ROWS][list(GOLDEN_ROWS)], np.load(GLM_ASR.golden)["sound"]
    error = np.abs(found - expected).max(axis=1) / np.abs(expected).max()
    assert error.max() < 2e-5, f"row {GOLDEN_ROWS[error.argmax()]} is off by {error.max():.1e}"


def test_both_give_one_file(tmp_path: Path) -> None:
    """But for nothing: unused positions of the test are zeros, which take their place where there are none."""
    files = [
        Path(converted(checkpoint(tmp_path / name / "checkpoint", first=name == "first")).path).read_bytes()
        for name in ("first", "later")
    ]
    assert files[0] == files[1]


def test_keys(tmp_path: Path) -> None:
    conversion = ProjectorConversion(checkpoint(tmp_path / "checkpoint"), ConvertOptions(outtype="f16"))
    keys = conversion.metadata
    assert (keys["clip.projector_type"], keys["clip.audio.projector.stack_factor"]) == ("glma", STACK)
    assert "rotating" in conversion.notes[0]
    assert "a.post_ln.weight" not in {tensor.output.name for tensor in conversion.tensors}


@pytest.mark.parametrize("first", [False, True])
def test_text_part_is_llama(first: bool, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint", first=first)
    config = Config(Checkpoint(folder).config, folder / "config.json")
    made = family(config)
    assert (made.arch, config.integer("hidden_size"), config.n_layer) == ("llama", TEXT, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"merge_factor": 65}, "merge_factor 65"),
        ({"mlp_adapter_act": "relu"}, "mlp_adapter_act relu"),
        ({"use_rope": False}, "use_rope False"),
        ({"audio": {"partial_rotary_factor": 1.0}}, "partial_rotary_factor 1"),
        ({"audio": {"rope_parameters": {"rope_theta": 500.0}}}, "rope_theta 500"),
        ({"audio": {"num_key_value_heads": 1}}, "num_key_value_heads 1"),
        ({"audio": {"num_attention_heads": 0}}, "0 heads in 64"),
        ({"audio": {"hidden_act": "silu"}}, "hidden_act silu"),
        ({"audio_config": None}, "there is no 'audio_config'"),
    ],
)
def test_other_configurations(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint")
    inner = changes.pop("audio", None)
    amend(folder, **changes)
    if inner is not None:
        amend(folder, audio_config=read_json(folder / "config.json")["audio_config"] | inner)
    refused(folder, message)


def test_without_special_tokens(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint")
    (folder / "tokenizer.json").unlink()
    refused(folder, r"the tokenizer has no <\|begin_of_audio\|>")
