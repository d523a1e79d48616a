"""`ikpy convert --mmproj` of conformers of sound: tensors, keys, rows, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import Conversion, ConvertOptions, ProjectorConversion
from ikpy.errors import FileFormatError, IkpyError, UnsupportedError
from ikpy.gguf.reader import GGUFFile
from ikpy.sound.projector import known_encoders, open_sound_projector
from ikpy.vision.projector import open_projector
from tests.cpu.convert import gemma3n_tower_checkpoint as pictures
from tests.cpu.convert import seeded_checkpoints
from tests.cpu.convert.checkpoints import Tensors, amend, change_tensors, copy, read_json
from tests.cpu.convert.conformer_checkpoints import BOTH, CHECKPOINTS, DOTS3NOTE, GEMMA, write
from tests.cpu.convert.seeded_kinds import KINDS as SEEDED
from tests.cpu.convert.test_convert import types
from tests.cpu.media import mobilenet_tower
from tests.cpu.media.sound_kinds import GOLDEN_ROWS, GOLDENS, TOWERS, golden_sound
from tests.cpu.media.test_vision_deepseek_ocr import picture, worst

NAMES = ("granite_speech", "granite_speech_plus", "lfm2a", "gemma3na", "dots3note_a")
KINDS = {**TOWERS, "gemma3na": GEMMA, "dots3note_a": DOTS3NOTE}
LFM2 = next(kind for kind in SEEDED if kind.name == "lfm2")
every_kind = pytest.mark.parametrize("name", NAMES)


def converted(folder: Path, outtype: str = "f32") -> GGUFFile:
    """The projector file of a checkpoint, beside it."""
    path = folder.parent / "mmproj.gguf"
    ProjectorConversion(folder, ConvertOptions(outtype=outtype, outfile=str(path))).write()
    return GGUFFile.open(str(path))


def rows_of(name: str, file: GGUFFile) -> np.ndarray:
    """Of the sound that transformers heard."""
    projector = open_sound_projector(file.path, n_embd=KINDS[name].text, n_threads=1, log=print)
    return np.concatenate(
        [piece.values for piece in projector.encode(golden_sound(name)) if not isinstance(piece, str)]
    )


@every_kind
def test_files_are_those_of_the_tests(name: str, tmp_path: Path) -> None:
    """Tensors with their shapes, and keys, which engines read; norms over batches are folded."""
    tower = KINDS[name]
    file, weights = converted(write(tmp_path / "checkpoint", name)), tower.weights()
    found = {target for target in file.tensors if target.startswith(("a.", "mm.a."))}
    assert found == set(weights)
    for target, values in weights.items():
        info = file.tensors[target]
        assert tuple(info.shape)[: values.ndim] == values.shape[::-1], target
        stored = file.data(info).view(np.float32).reshape(values.shape)
        np.testing.assert_allclose(stored, values, rtol=3e-7 if "conv_norm" in target else 0, err_msg=target)
    for key, value in tower.keys.items():
        full = "clip.audio.projector_type" if name in BOTH and key == "clip.projector_type" else key
        assert np.all(
            file.metadata[full] == pytest.approx(value) if isinstance(value, float) else file.metadata[full] == value
        )


@every_kind
def test_rows_of_transformers(name: str, tmp_path: Path) -> None:
    if KINDS[name].text != TOWERS[name].text:
        pytest.skip("its text model is that of the pictures; tensors are compared")
    rows, wanted = rows_of(name, converted(write(tmp_path / "checkpoint", name))), np.load(GOLDENS / f"{name}.npz")
    assert len(rows) == wanted["n"]
    assert np.abs(rows[list(GOLDEN_ROWS)] - wanted["rows"]).max() < 1e-5 * np.abs(wanted["rows"]).max()


def test_gemma_has_both_encoders(tmp_path: Path) -> None:
    file = converted(write(tmp_path / "checkpoint", "gemma3na"))
    assert known_encoders(file) == {"vision", "audio"}
    keys = file.metadata
    assert (keys["clip.vision.projector_type"], keys["clip.audio.projector_type"]) == ("gemma3nv", "gemma3na")
    image = picture(pictures.TOWER.side, pictures.TOWER.side)
    found = open_projector(file.path, n_embd=GEMMA.text, n_threads=1, log=print).rows(image).values
    assert worst(found, mobilenet_tower.rows(pictures.TOWER, pictures.TOWER.weights(), image)) < 5e-3
    assert rows_of("gemma3na", file).shape == (188, GEMMA.text)


def test_dots3_has_both_encoders(tmp_path: Path) -> None:
    """Without sizes of the encoder of sound there is a note instead."""
    folder = write(tmp_path / "checkpoint", "dots3note_a")
    file = converted(folder)
    assert known_encoders(file) == {"vision", "audio"}
    keys = file.metadata
    assert (keys["clip.vision.projector_type"], keys["clip.audio.projector_type"]) == ("dots3note_v", "dots3note_a")
    assert keys["clip.use_silu"] and rows_of("dots3note_a", file).shape == (53, DOTS3NOTE.text)
    assert not ProjectorConversion(folder).notes
    amend(folder, audio_config={"adapter_out_dim": DOTS3NOTE.text})
    assert any("sound is left out" in note for note in ProjectorConversion(folder).notes)


@pytest.mark.parametrize("outtype", ["f16", "bf16", "q8_0"])
@every_kind
def test_types(name: str, outtype: str, tmp_path: Path) -> None:
    """Tables and channels' filters stay f32; rows are those of f32, nearly."""
    folder = write(tmp_path / "checkpoint", name)
    file = converted(folder, outtype)
    found = types(file)
    assert found.get("a.blk.0.conv_dw.weight", "f32") == "f32" and found["a.blk.0.ffn_up.weight"] == outtype
    rows = [rows_of(name, each) for each in (file, converted(folder))]
    assert np.abs(rows[0] - rows[1]).max() < 0.06 * np.abs(rows[1]).max()


def refused(folder: Path, message: str, error: type[IkpyError] = FileFormatError) -> None:
    with pytest.raises(error, match=message) as caught:
        ProjectorConversion(folder, ConvertOptions())
    assert "\n" not in str(caught.value)


def test_statistics_of_batches(tmp_path: Path) -> None:
    """Are part of the factors and of what is added."""
    folder, name = write(tmp_path / "checkpoint", "granite_speech"), "encoder.layers.1.conv.batch_norm"
    random, n = np.random.default_rng(3), 2 * TOWERS["granite_speech"].d
    values = {part: random.uniform(0.5, 2, n).astype(np.float32) for part in ("running_mean", "running_var")}
    old = {}

    def change(tensors: Tensors) -> None:
        for part in ("weight", "bias"):
            old[part] = np.frombuffer(tensors[f"{name}.{part}"][2], np.float32)
        for part, value in values.items():
            tensors[f"{name}.{part}"] = "F32", value.shape, value.tobytes()

    change_tensors(folder, change)
    file = converted(folder)
    stored = {
        part: file.data(file.tensors[f"a.blk.1.conv_norm.{part}"]).view(np.float32) for part in ("weight", "bias")
    }
    x = random.normal(0, 1, n)
    wanted = (x - values["running_mean"]) / np.sqrt(values["running_var"] + 1e-5) * old["weight"] + old["bias"]
    np.testing.assert_allclose(x * stored["weight"] + stored["bias"], wanted, atol=1e-6)
    for part, value, message in (
        ("running_var", np.full(n, -1, np.float32), "running_var' has a variance below 0"),
        ("running_mean", np.zeros(n - 1, np.float32), r"running_mean' has shape \[127\], not \[128\]"),
        ("bias", None, "batch_norm.bias' is missing"),
    ):
        damaged = write(tmp_path / part, "granite_speech")

        def damage(tensors: Tensors, part: str = part, value: np.ndarray | None = value) -> None:
            tensors.pop(f"{name}.{part}")
            if value is not None:
                tensors[f"{name}.{part}"] = "F32", value.shape, value.tobytes()

        change_tensors(damaged, damage)
        refused(damaged, message)


OTHERS: list[tuple[str, str, dict[str, Any], str]] = [
    ("granite_speech", "encoder_config", {"dim_head": 16}, "dim_head 16"),
    ("granite_speech", "encoder_config", {"context_size": 41}, "context_size 41 of max_pos_emb 40"),
    ("granite_speech", "encoder_config", {"conv_kernel_size": 8}, "conv_kernel_size 8"),
    ("granite_speech", "encoder_config", {"num_heads": 3}, "3 heads in 64"),
    ("granite_speech", "encoder_config", {"input_dim": 63}, "input_dim 63"),
    ("granite_speech", "encoder_config", {"output_dim": 4097}, "output_dim 4097"),
    ("granite_speech", "encoder_config", {"num_layers": 4}, "encoder.layers.3"),
    ("granite_speech_plus", "encoder_config", {"cat_hidden_layers": [1]}, r"cat_hidden_layers \[1\]"),
    ("granite_speech_plus", "encoder_config", {"cat_hidden_layers": [0]}, "encoder_hidden_size 192"),
    ("granite_speech", "projector_config", {"cross_attention_frequency": 2}, "cross_attention_frequency 2"),
    ("granite_speech", "projector_config", {"layer_norm_eps": 1e-5}, "layer_norm_eps 1e-05"),
    ("granite_speech", "projector_config", {"hidden_act": "relu"}, "hidden_act relu"),
    ("granite_speech", "projector_config", {"num_attention_heads": 5}, "5 heads in 64"),
    ("lfm2a", "encoder", {"subsampling_factor": 4}, "subsampling_factor 4"),
    ("lfm2a", "encoder", {"xscaling": True}, "xscaling True"),
    ("lfm2a", "encoder", {"att_context_size": [70, 1]}, r"att_context_size \[70, 1\]"),
    ("lfm2a", "encoder", {"conv_context_size": "causal"}, "conv_context_size causal"),
    ("lfm2a", "encoder", {"d_model": "wide"}, "'d_model' is \"wide\""),
    ("lfm2a", "preprocessor", {"normalize": "all_features"}, "normalize all_features"),
    ("lfm2a", "preprocessor", {"features": 64}, "features 64"),
    ("gemma3na", "audio_config", {"conf_reduction_factor": 2}, "conf_reduction_factor 2"),
    ("gemma3na", "audio_config", {"sscp_conv_channel_size": 6}, "sscp_conv_channel_size 6"),
    ("gemma3na", "audio_config", {"conf_num_attention_heads": 5}, "5 heads in 64"),
    ("gemma3na", "audio_config", {"conf_conv_kernel_size": 7}, r"has shape \[64, 1, 5\], not \[64, 1, 7\]"),
]


@pytest.mark.parametrize(("name", "part", "changes", "message"), OTHERS)
def test_other_configurations(name: str, part: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint", name)
    amend(folder, **{part: read_json(folder / "config.json")[part] | changes})
    refused(folder, message)


@pytest.mark.parametrize(
    ("name", "part"),
    [("granite_speech", "encoder_config"), ("granite_speech", "projector_config"), ("lfm2a", "preprocessor")],
)
def test_missing_parts(name: str, part: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint", name)
    amend(folder, **{part: None})
    refused(folder, f"there is no '{part}'")


def test_other_ears_of_gemma(tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint", "gemma3na")
    amend(folder, "preprocessor_config.json", per_bin_mean=[1.0])
    refused(folder, "per_bin_mean")
    amend(folder, "preprocessor_config.json", per_bin_mean=None)
    amend(folder, audio_soft_tokens_per_image=100)
    refused(folder, "audio_soft_tokens_per_image 100")


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("granite_speech", "encoder.layers.0.attn.to_kv.weight"),
        ("granite_speech", "projector.query"),
        ("lfm2a", "conformer.pre_encode.conv.2.weight"),
        ("lfm2a", "audio_embedding.embedding.weight"),
        ("gemma3na", "model.audio_tower.conformer.0.attention.attn.per_dim_scale"),
        ("gemma3na", "model.embed_audio.embedding.weight"),
        ("dots3note_a", "audio_encoder.audio_adapter.proj.3.weight"),
    ],
)
def test_odd_tensors(name: str, missing: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint", name)
    change_tensors(folder, lambda tensors: tensors.pop(missing))
    refused(folder, missing.removeprefix("model."))
    other = write(tmp_path / "other", name)
    change_tensors(other, lambda tensors: tensors.update({f"{missing}.more": ("F32", (2,), bytes(8))}))
    refused(other, "has no place in a projector of type", UnsupportedError)


def test_config_that_names_no_type(tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint", "lfm2a")
    assert "model_type" not in json.loads((folder / "config.json").read_text())
    assert ProjectorConversion(folder).projector.kind == "lfm2a"


# text models


def beside(folder: Path, name: str, part: str, prefix: str) -> None:
    """Makes a text model that of a checkpoint with an encoder of sound: its values and tensors become a part."""
    config, (sound, state) = read_json(folder / "config.json"), CHECKPOINTS[name](name)
    (folder / "config.json").write_text(json.dumps({**sound, part: config}))

    def change(tensors: Tensors) -> None:
        for key in list(tensors):
            tensors[f"{prefix}{key}" if prefix == "language_model." else key.replace("model.", prefix, 1)] = (
                tensors.pop(key)
            )
        tensors.update(
            {key: ("F32", value.shape, np.asarray(value, np.float32).tobytes()) for key, value in state.items()}
        )

    change_tensors(folder, change)


@pytest.mark.parametrize(
    ("name", "part", "prefix"),
    [("granite_speech", "text_config", "language_model."), ("lfm2a", "lfm", "lfm.")],
)
def test_text_models(name: str, part: str, prefix: str, tmp_path: Path) -> None:
    """Are what they are without an encoder of sound; a note says that there is one."""
    files = []
    for whole in (False, True):
        folder = tmp_path / str(whole)
        folder.mkdir()
        if name == "lfm2a":
            checkpoint = seeded_checkpoints.write(LFM2, folder / "checkpoint")
        else:
            checkpoint = copy("granite", folder)
        if whole:
            beside(checkpoint, name, part, prefix)
        conversion = Conversion(checkpoint, ConvertOptions(outtype="f32", outfile=str(folder / "text.gguf")))
        assert any("--mmproj" in note for note in conversion.notes) == whole
        conversion.write()
        files.append(GGUFFile.open(str(folder / "text.gguf")))
    assert set(files[0].tensors) == set(files[1].tensors)
    for target, info in files[0].tensors.items():
        np.testing.assert_array_equal(files[0].data(info), files[1].data(files[1].tensors[target]), err_msg=target)
