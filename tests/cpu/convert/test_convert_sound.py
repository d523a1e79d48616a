"""`ikpy convert --mmproj` of models that take sound: tensors, keys, rows, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.cli import main
from ikpy.convert import ConvertOptions, ProjectorConversion
from ikpy.convert.projectors.gemma4_audio import BOUNDS
from ikpy.errors import FileFormatError, IkpyError, UnsupportedError
from ikpy.gguf.reader import GGUFFile
from ikpy.sound.projector import known_encoders, open_sound_projector
from ikpy.vision.projector import open_projector
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert import native_tower_checkpoints as native
from tests.cpu.convert.checkpoints import Tensors, amend, change_tensors
from tests.cpu.convert.test_convert import types
from tests.cpu.convert.tower_checkpoints import write as write_tower
from tests.cpu.media.sound_kinds import GEMMA, GEMMA_LAYER, GOLDEN_ROWS, GOLDENS, TOWERS, golden_sound
from tests.cpu.media.sound_towers import SoundTower
from tests.cpu.media.tower_parts import GOLDEN_ROWS as TOWER_ROWS
from tests.cpu.media.tower_parts import TEXT
from tests.sound_models import tone

MODEL_TYPES = {
    "qwen2a": "qwen2_audio",
    "musicflamingo": "audioflamingo3",
    "voxtral": "voxtral",
    "ultravox": "ultravox",
    "meralion": "meralion2",
}
KINDS = {
    **TOWERS,
    "voxtral": dataclasses.replace(TOWERS["voxtral"], ff=4 * 80),
    "meralion": dataclasses.replace(TOWERS["meralion"], ff=4 * 80),
}
KINDS = {name: KINDS[name] for name in MODEL_TYPES}
LAYER = {
    "ln1": "self_attn_layer_norm",
    "ln2": "final_layer_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "fc1",
    "ffn_down": "fc2",
}
NAMES = {
    "a.conv1d.1": "audio_tower.conv1",
    "a.conv1d.2": "audio_tower.conv2",
    "a.post_ln": "audio_tower.layer_norm",
    "a.position_embd": "audio_tower.embed_positions",
    "mm.a.fc": "multi_modal_projector.linear",
    "mm.a.mlp.1": "multi_modal_projector.linear_1",
    "mm.a.mlp.2": "multi_modal_projector.linear_2",
    "mm.a.norm_pre": "multi_modal_projector.ln_pre",
    "mm.a.norm_mid": "multi_modal_projector.ln_mid",
}
MERALION = {
    "mm.a.norm_pre": "ln_speech",
    "mm.a.mlp.0": "speech_audio_adapter.mlp_adapter.0",
    "mm.a.mlp.1": "speech_audio_adapter.gate_proj",
    "mm.a.mlp.2": "speech_audio_adapter.pool_proj",
    "mm.a.mlp.3": "speech_audio_adapter.out_proj",
}
every_kind = pytest.mark.parametrize("name", KINDS)


def source_of(name: str, kind: str) -> str:
    """Name in the checkpoint."""
    if kind == "meralion":
        head, _, tail = name.rpartition(".")
        other = "" if head in MERALION else source_of(name, "").replace("audio_tower", "speech_encoder")
        return other or f"{MERALION[head]}.{tail}"
    head, _, tail = name.rpartition(".")
    if head in NAMES:
        return f"{NAMES[head]}.{tail}"
    _, _, il, part = head.split(".")
    return f"audio_tower.layers.{il}.{LAYER[part]}.{tail}"


def config_of(tower: SoundTower) -> dict[str, Any]:
    """config.json."""
    audio = {"num_mel_bins": tower.mel, "activation_function": "gelu"}
    if tower.kind in ("qwen2a", "ultravox", "meralion"):
        audio |= {"d_model": tower.d, "encoder_layers": tower.layers, "encoder_attention_heads": tower.heads}
        audio |= {"encoder_ffn_dim": tower.ff}
    else:
        audio |= {"hidden_size": tower.d, "num_hidden_layers": tower.layers, "num_attention_heads": tower.heads}
        audio |= {"intermediate_size": tower.ff}
    config = {"model_type": MODEL_TYPES[tower.kind], "audio_config": audio}
    if tower.kind == "ultravox":
        more = {"stack_factor": tower.stack, "projector_act": "swiglu", "projector_ln_mid": True}
        return config | more | {"hidden_size": 2 * tower.ff}
    if tower.kind == "meralion":
        config = {"model_type": "meralion2", "speech_config": audio, "speech_mlp_scale_factor": tower.stack}
    return config | {"text_config": {"model_type": "qwen2", "hidden_size": tower.text}}


def write(folder: Path, name: str) -> Path:
    """A checkpoint whose tensors are those of a file of the tests."""
    tower = KINDS[name]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_of(tower)))
    tensors = {}
    for target, values in tower.weights().items():
        flat = values.reshape(-1) if target.startswith("a.conv1d") and target.endswith("bias") else values
        tensors[source_of(target, tower.kind)] = "F32", flat.shape, np.ascontiguousarray(flat).tobytes()
    made.write_tensors(folder / "model.safetensors", tensors)
    return folder


def converted(folder: Path, outtype: str = "f32") -> GGUFFile:
    """The projector file of a checkpoint, beside it."""
    path = folder.parent / "mmproj.gguf"
    ProjectorConversion(folder, ConvertOptions(outtype=outtype, outfile=str(path))).write()
    return GGUFFile.open(str(path))


@every_kind
def test_files_are_those_of_the_tests(name: str, tmp_path: Path) -> None:
    """Tensors with their shapes, and keys, which engines read."""
    tower = KINDS[name]
    file = converted(write(tmp_path / "checkpoint", name))
    weights = tower.weights()
    assert set(file.tensors) == set(weights)
    for target, values in weights.items():
        info = file.tensors[target]
        assert info.shape == values.shape[::-1], target
        np.testing.assert_array_equal(file.data(info).view(np.float32).reshape(values.shape), values)
    for key, value in tower.keys.items():
        assert file.metadata[key] == pytest.approx(value) if isinstance(value, float) else file.metadata[key] == value


@pytest.mark.parametrize("name", ["qwen2a", "musicflamingo"])
def test_rows_of_transformers(name: str, tmp_path: Path) -> None:
    path = converted(write(tmp_path / "checkpoint", name)).path
    projector = open_sound_projector(path, n_embd=KINDS[name].text, n_threads=1, log=print)
    rows = next(piece for piece in projector.encode(golden_sound(name)) if not isinstance(piece, str)).values
    wanted = np.load(GOLDENS / f"{name}.npz")["rows"]
    assert np.abs(rows[list(GOLDEN_ROWS)] - wanted).max() < 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("outtype", ["f16", "bf16", "q8_0"])
@every_kind
def test_types(name: str, outtype: str, tmp_path: Path) -> None:
    """What is convolved is f32 or f16, what is added f32; rows are those of f32, nearly."""
    folder = write(tmp_path / "checkpoint", name)
    file = converted(folder, outtype)
    found = types(file)
    assert {found[f"a.conv1d.{i}.weight"] for i in (1, 2)} == {"f16" if outtype == "f16" else "f32"}
    assert {found[f"a.conv1d.{i}.bias"] for i in (1, 2)} | {found["a.position_embd.weight"]} == {"f32"}
    narrow = outtype == "q8_0" and KINDS[name].d % 32
    assert found["a.blk.0.ffn_up.weight"] in (("f16", "bf16", "f32") if narrow else (outtype,))
    rows = []
    for path in (file.path, converted(folder).path):
        projector = open_sound_projector(path, n_embd=KINDS[name].text, n_threads=1, log=print)
        rows.append(next(p for p in projector.encode(tone(0.2)) if not isinstance(p, str)).values)
    assert np.abs(rows[0] - rows[1]).max() < 0.06 * np.abs(rows[1]).max()


def refused(folder: Path, message: str, error: type[IkpyError] = FileFormatError) -> None:
    with pytest.raises(error, match=message) as caught:
        ProjectorConversion(folder, ConvertOptions())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"audio_config": None}, "there is no 'audio_config'"),
        ({"activation_function": "relu"}, "activation_function relu"),
        ({"scale_embedding": True}, "scale_embedding True"),
        ({"max_source_positions": 750}, "max_source_positions 750"),
        ({"encoder_attention_heads": 3}, "3 heads in 64"),
        ({"num_mel_bins": 300}, "num_mel_bins 300"),
        ({"encoder_layers": 3}, r"audio_tower.layers.2.self_attn_layer_norm.weight.* is missing"),
        ({"encoder_ffn_dim": 95}, r"has shape \[96, 64\], not \[95, 64\]"),
        ({"d_model": "wide"}, "'d_model' is \"wide\""),
    ],
)
def test_other_configurations(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint", "qwen2a")
    config = json.loads((folder / "config.json").read_text())
    inner = {"audio_config": None} if "audio_config" in changes else {"audio_config": config["audio_config"] | changes}
    amend(folder, **inner)
    refused(folder, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"projector_act": "gelu"}, "projector_act gelu"),
        ({"projector_ln_mid": False}, "projector_ln_mid false"),
        ({"stack_factor": 0}, "stack_factor 0"),
        ({"hidden_size": 191}, "hidden_size 191"),
        ({"stack_factor": 4}, r"ln_pre.weight' has shape \[640\], not \[320\]"),
    ],
)
def test_other_ultravoxes(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint", "ultravox")
    amend(folder, **changes)
    refused(folder, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speech_config": None}, "there is no 'audio_config'"),
        ({"speech_mlp_scale_factor": 0}, "speech_mlp_scale_factor 0"),
        ({"speech_mlp_scale_factor": 14}, r"mlp_adapter.0.weight' has shape \[80, 1200\], not \[80, 1120\]"),
        ({"speech_mlp_use_projection": False}, "speech_mlp_use_projection False"),
    ],
)
def test_other_meralions(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint", "meralion")
    assert any("norms the states of a row together" in note for note in ProjectorConversion(folder).notes)
    amend(folder, **changes)
    refused(folder, message)


def test_odd_tensors(tmp_path: Path) -> None:
    folder = write(tmp_path / "ultravox", "ultravox")

    def drop(tensors: Tensors) -> None:
        tensors.pop("multi_modal_projector.linear_2.weight")

    change_tensors(folder, drop)
    refused(folder, "'multi_modal_projector.linear_2.weight' is missing")
    folder = write(tmp_path / "voxtral", "voxtral")

    def add(tensors: Tensors) -> None:
        tensors["audio_tower.extra.weight"] = "F32", (2,), bytes(8)

    change_tensors(folder, add)
    refused(folder, "tensor 'audio_tower.extra.weight' has no place in a projector of type voxtral", UnsupportedError)
    folder = write(tmp_path / "wide", "voxtral")
    config = json.loads((folder / "config.json").read_text())
    amend(folder, audio_config=config["audio_config"] | {"intermediate_size": 90})
    refused(folder, "intermediate_size 90 of 80")


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "checkpoint", "qwen2a")
    assert main(["convert", str(folder), "--mmproj", "--outtype", "f16"]) == 0
    assert (folder / "mmproj-checkpoint-F16.gguf").is_file(), capsys.readouterr()


# Gemma 4, whose file has both encoders

GEMMA_SOUND = dataclasses.replace(TOWERS["gemma4a"], text=TEXT)


def gemma_source(name: str) -> str:
    """Name in a checkpoint of Gemma 4."""
    head, _, tail = name.rpartition(".")
    if name == "mm.a.input_projection.weight":
        return "embed_audio.embedding_projection.weight"
    if head in GEMMA:
        return f"audio_tower.{GEMMA[head]}.{tail}"
    _, _, il, part = head.split(".")
    module = "self_attn.per_dim_scale" if part == "per_dim_scale" else f"{GEMMA_LAYER[part]}.{tail}"
    return f"audio_tower.layers.{il}.{module if tail == 'weight' else module.replace('.linear.', '.')}"


def gemma_checkpoint(folder: Path, **changes: Any) -> Path:
    """One with encoders of pictures and of sound."""
    tower = GEMMA_SOUND
    sizes = {"hidden_size": tower.d, "num_hidden_layers": tower.layers, "num_attention_heads": tower.heads}
    sizes |= {"subsampling_conv_channels": [tower.mel, 4], "output_proj_dims": tower.d + 32}
    write_tower(native.GEMMA4, folder, audio_config=sizes | changes)
    tensors: Tensors = {}
    for name, values in tower.weights().items():
        full = f"model.{gemma_source(name)}"
        stored = np.log(np.expm1(values)) if full.endswith("per_dim_scale") else values
        shape = () if full.endswith(("_min", "_max")) else values.shape
        shape = (len(values), 1, values.shape[1]) if "depthwise" in full else shape
        tensors[full] = "F32", shape, np.ascontiguousarray(stored, np.float32).tobytes()
        module = full.removesuffix(".linear.weight")
        for bound, value in zip(BOUNDS if module != full else (), (-np.inf, np.inf) * 2, strict=False):
            tensors.setdefault(f"{module}.{bound}", ("F32", (), np.float32(value).tobytes()))
    change_tensors(folder, lambda found: found.update(tensors))
    return folder


def test_gemma_has_both_encoders(tmp_path: Path) -> None:
    """Rows of pictures and of sound are those of transformers; infinite bounds are the largest numbers."""
    file = converted(gemma_checkpoint(tmp_path / "checkpoint"))
    assert known_encoders(file) == {"vision", "audio"}
    keys = file.metadata
    assert (keys["clip.vision.projector_type"], keys["clip.audio.projector_type"]) == ("gemma4v", "gemma4a")
    assert "clip.projector_type" not in keys
    pictures = open_projector(file.path, n_embd=TEXT, n_threads=1, log=print)
    rows = pictures.rows(native.GEMMA4.picture()).values[list(TOWER_ROWS)]
    expected = np.load(native.GEMMA4.golden)["rows"]
    assert np.abs(rows - expected).max() < native.GEMMA4.tolerance * np.abs(expected).max()
    sounds = open_sound_projector(file.path, n_embd=TEXT, n_threads=1, log=print)
    found = next(piece for piece in sounds.encode(golden_sound("gemma4a")) if not isinstance(piece, str)).values
    expected = np.load(GOLDENS / "gemma4a.npz")["rows"]
    assert np.abs(found[list(GOLDEN_ROWS)] - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_context_left": 7}, "attention_context_left 7"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"subsampling_conv_channels": [30, 4]}, r"subsampling_conv_channels \[30, 4\]"),
        ({"subsampling_conv_channels": 5}, "subsampling_conv_channels 5"),
        ({"num_attention_heads": 3}, "3 heads in 64"),
        ({"conv_kernel_size": 7}, r"has shape \[64, 1, 5\], not \[64, 1, 7\]"),
    ],
)
def test_other_gemmas(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    refused(gemma_checkpoint(tmp_path / "checkpoint", **changes), message)
