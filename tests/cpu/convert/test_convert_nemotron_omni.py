"""`ikpy convert` of Nemotron 3 Nano Omni: both encoders in one file, rows of transformers, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import Conversion, ConvertOptions, ProjectorConversion
from ikpy.errors import UnsupportedError
from ikpy.gguf.reader import GGUFFile
from ikpy.sound.projector import known_encoders, open_sound_projector
from ikpy.vision.projector import open_projector
from tests.cpu.convert import nemotron_omni_checkpoints as omni
from tests.cpu.convert import seeded_checkpoints
from tests.cpu.convert.checkpoints import Tensors, amend, change_tensors, read_json
from tests.cpu.convert.nemotron_omni_checkpoints import PATCHES, PICTURES, SOUND, STORED, write
from tests.cpu.convert.seeded_kinds import KINDS as SEEDED
from tests.cpu.convert.test_convert import types
from tests.cpu.convert.test_convert_projectors import converted, refused
from tests.cpu.media.sound_kinds import GOLDEN_ROWS, GOLDENS, golden_sound
from tests.cpu.media.tile_towers import golden_picture

FRONT = "sound_encoder.encoder"
TEXT = next(kind for kind in SEEDED if kind.name.startswith("nemotron"))


def stretched() -> np.ndarray:
    """Positions of the grid of a picture, float64 [grid * grid, D], linear between the middles of those stored."""
    table, n = omni.positions()[0].astype(np.float64).reshape(STORED, STORED, -1), PICTURES.grid
    rows = []
    for place in range(n * n):
        row = np.zeros(PICTURES.d)
        for y, down in neighbours(place // n, n):
            for x, across in neighbours(place % n, n):
                row += down * across * table[y, x]
        rows.append(row)
    return np.stack(rows)


def neighbours(i: int, n: int) -> list[tuple[int, float]]:
    """Stored places around place i of n, and their shares."""
    at = min(max((i + 0.5) * STORED / n - 0.5, 0), STORED - 1)
    low = int(at)
    return [(low, 1 - (at - low)), (min(low + 1, STORED - 1), at - low)]


def expected() -> dict[str, np.ndarray]:
    """Tensors of the file, those of both encoders of the tests."""
    found = {**PICTURES.weights(), **omni.sound_weights(), "v.position_embd.weight": stretched()}
    del found["v.patch_embd.bias"]  # that of the model has none
    return found


def test_the_file_is_those_of_the_tests(tmp_path: Path) -> None:
    file = converted(write(tmp_path / "checkpoint"))
    assert known_encoders(file) == {"vision", "audio"}
    weights = expected()
    assert set(file.tensors) == set(weights)
    for name, values in weights.items():
        info = file.tensors[name]
        assert tuple(info.shape)[: values.ndim] == values.shape[::-1], name
        found = file.data(info).view(np.float32).reshape(values.shape)
        np.testing.assert_allclose(found, values, rtol=0, atol=2e-7 if "position" in name else 0, err_msg=name)
    kinds = {"clip.vision.projector_type": PICTURES.kind, "clip.audio.projector_type": SOUND.kind}
    wanted = {**PICTURES.keys, **SOUND.keys, **kinds}
    del wanted["clip.projector_type"]
    for key, value in wanted.items():
        assert file.metadata[key] == pytest.approx(value), key


def heard(file: GGUFFile) -> np.ndarray:
    """Rows of the sound that transformers heard."""
    pieces = open_sound_projector(file.path, n_embd=SOUND.text, n_threads=1, log=print).encode(golden_sound("parakeet"))
    return np.concatenate([piece.values for piece in pieces if not isinstance(piece, str)])


def test_rows_of_transformers(tmp_path: Path) -> None:
    file = converted(write(tmp_path / "checkpoint"))
    rows = open_projector(file.path, n_embd=SOUND.text, n_threads=1, log=print).rows(golden_picture(PICTURES)).values
    wanted = np.load(omni.GOLDEN)
    assert len(rows) == wanted["n"]
    worst = np.abs(rows[list(omni.GOLDEN_ROWS)] - wanted["rows"]).max(axis=1) / np.abs(wanted["rows"]).max()
    assert worst.max() < 1e-5, f"row {omni.GOLDEN_ROWS[worst.argmax()]} is off by {worst.max():.1e}"
    rows, wanted = heard(file), np.load(GOLDENS / "parakeet.npz")
    assert len(rows) == wanted["n"]
    assert np.abs(rows[list(GOLDEN_ROWS)] - wanted["rows"]).max() < 1e-5 * np.abs(wanted["rows"]).max()


@pytest.mark.parametrize(("outtype", "bound"), [("f16", 5e-3), ("q8_0", 6e-2)])
def test_types(outtype: str, bound: float, tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint")
    rows = []
    for each in (outtype, "f32"):
        file = converted(folder, each)
        found = types(file)
        assert found["v.position_embd.weight"] == found["a.blk.0.conv_dw.weight"] == "f32"
        assert found["a.blk.0.attn_out.weight"] == each  # those of pictures are no multiple of 32 wide
        opened = open_projector(file.path, n_embd=SOUND.text, n_threads=1, log=print)
        rows.append(opened.rows(golden_picture(PICTURES)).values)
    assert np.abs(rows[0] - rows[1]).max() < bound * np.abs(rows[1]).max()


@pytest.mark.parametrize("model_type", ["NemotronH_Nano_VL_V2", "nemotron_h_omni"])
def test_models_without_sound(model_type: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint", model_type=model_type, sound_config=None)
    file = converted(folder)
    assert known_encoders(file) == {"vision"} and file.metadata["clip.projector_type"] == PICTURES.kind
    assert not any(name.startswith(("a.", "mm.a.")) for name in file.tensors)
    assert any("28 x 28 pixels" in note for note in ProjectorConversion(folder).notes)


def test_checkpoints_without_filters(tmp_path: Path) -> None:
    """Of spectrograms: the engine computes them; what it hears is the same."""
    folder = write(tmp_path / "checkpoint")
    names = [f"{FRONT}.feature_extractor.featurizer.{name}" for name in ("fb", "window")]
    change_tensors(folder, lambda tensors: [tensors.pop(name) for name in names])
    assert any("no filters of sound" in note for note in ProjectorConversion(folder).notes)
    file = converted(folder)
    assert not {"a.mel_filters", "a.window"} & file.tensors.keys()
    wanted = np.load(GOLDENS / "parakeet.npz")["rows"]
    assert np.abs(heard(file)[list(GOLDEN_ROWS)] - wanted).max() < 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("", {"force_image_size": 30}, "force_image_size 30"),
        ("", {"downsample_ratio": 0.3}, r"downsample_ratio 0\.3"),
        ("", {"ps_version": "v1"}, "ps_version v1"),
        ("", {"force_image_size": 35}, r"downsample_ratio 0\.5"),
        ("vision_config", {"num_attention_heads": 5}, "5 heads in 48"),
        ("vision_config", {"use_swiglu_ffn": True}, "use_swiglu_ffn True"),
        ("sound_config", {"subsampling_factor": 4}, "subsampling_factor 4"),
        ("sound_config", {"attention_bias": True}, "attention_bias True"),
        ("sound_config", {"conv_kernel_size": 8}, "conv_kernel_size 8"),
        ("sound_config", {"num_mel_bins": 64}, r"fb' has shape \[1, 80, 257\], not \[1, 64, 257\]"),
        ("sound_config", {"num_hidden_layers": 3}, r"layers\.2\.norm_feed_forward1\.weight"),
        ("sound_config", {"num_attention_heads": 5}, "5 heads in 64"),
    ],
)
def test_other_configurations(part: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint")
    amend(folder, **({part: read_json(folder / "config.json")[part] | changes} if part else changes))
    refused(folder, message)


@pytest.mark.parametrize(
    "name",
    [f"{PATCHES}.pos_embed", f"{PATCHES}.cls_token.token", f"{FRONT}.layers.1.conv.norm.running_var", "mlp1.1.weight"],
)
def test_missing_tensors(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint")
    change_tensors(folder, lambda tensors: tensors.pop(name))
    refused(folder, name)


def test_odd_tensors(tmp_path: Path) -> None:
    folder, name = write(tmp_path / "checkpoint"), f"{PATCHES}.pos_embed"
    values = np.zeros((1, 35, PICTURES.d), np.float32)
    change_tensors(folder, lambda tensors: tensors.update({name: ("F32", values.shape, values.tobytes())}))
    refused(folder, "has 35 positions, no square")
    for name in ("mlp1.2.weight", "vision_projector.vision_final_layernorm.weight"):
        folder = write(tmp_path / name)
        more = {name: ("F32", (2,), bytes(8))}
        change_tensors(folder, lambda tensors, more=more: tensors.update(more))
        refused(folder, "has no place in a projector of type nemotron_v2_vl", UnsupportedError)


def test_the_text_model(tmp_path: Path) -> None:
    """Is what it is without encoders; a note says that there are some."""
    files = []
    for whole in (False, True):
        folder = tmp_path / str(whole)
        checkpoint = seeded_checkpoints.write(TEXT, folder / "checkpoint")
        if whole:
            config = read_json(checkpoint / "config.json")
            (checkpoint / "config.json").write_text(json.dumps(omni.config() | {"llm_config": config}))

            def beside(tensors: Tensors) -> None:
                for key in list(tensors):
                    tensors[f"language_model.{key}"] = tensors.pop(key)
                for key, value in (omni.picture_state() | omni.sound_state()).items():
                    tensors[key] = "F32", value.shape, np.asarray(value, np.float32).tobytes()

            change_tensors(checkpoint, beside)
        conversion = Conversion(checkpoint, ConvertOptions(outtype="f32", outfile=str(folder / "text.gguf")))
        assert any("--mmproj" in note for note in conversion.notes) == whole
        conversion.write()
        files.append(GGUFFile.open(str(folder / "text.gguf")))
    assert set(files[0].tensors) == set(files[1].tensors)
    for target, info in files[0].tensors.items():
        np.testing.assert_array_equal(files[0].data(info), files[1].data(files[1].tensors[target]), err_msg=target)
