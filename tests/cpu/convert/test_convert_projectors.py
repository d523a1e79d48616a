"""`ikpy convert --mmproj`: rows of the files against those of transformers, keys, types and names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.cli import main
from ikpy.convert import ConvertOptions, ProjectorConversion
from ikpy.convert.projectors import PROJECTORS
from ikpy.convert.words import e4m3_values
from ikpy.errors import FileFormatError, IkpyError
from ikpy.gguf.reader import GGUFFile
from ikpy.vision.projector import Projector, open_projector
from tests.cpu.convert import later_tower_checkpoints as later
from tests.cpu.convert import native_tower_checkpoints as native
from tests.cpu.convert import square_tower_checkpoints as square
from tests.cpu.convert.checkpoints import Tensors, amend, change_tensors
from tests.cpu.convert.test_convert import types
from tests.cpu.convert.test_convert_sound import MODEL_TYPES
from tests.cpu.convert.tower_checkpoints import HEARING_ALONE, TOWERS, write
from tests.cpu.media.tower_parts import BREAK, GOLDEN_ROWS, LAYERS, TEXT, N, TowerCheckpoint

BY_NAME = {tower.name: tower for tower in TOWERS}
all_towers = pytest.mark.parametrize("tower", TOWERS, ids=lambda tower: tower.name)


def converted(folder: Path, outtype: str = "f32") -> GGUFFile:
    """The projector file of a checkpoint, beside it."""
    path = folder.parent / "mmproj.gguf"
    ProjectorConversion(folder, ConvertOptions(outtype=outtype, outfile=str(path))).write()
    return GGUFFile.open(str(path))


def opened(file: GGUFFile) -> Projector:
    """The encoder."""
    return open_projector(file.path, n_embd=TEXT, n_threads=1, log=lambda text: None)


def refused(folder: Path, pattern: str, error: type[IkpyError] = FileFormatError, **options: Any) -> None:
    """Nothing is planned, and nothing was written."""
    before = sorted(folder.parent.rglob("*"))
    with pytest.raises(error, match=pattern) as found:
        ProjectorConversion(folder, ConvertOptions(**options))
    assert "\n" not in str(found.value)
    assert sorted(folder.parent.rglob("*")) == before


@all_towers
def test_rows_of_transformers(tower: TowerCheckpoint, tmp_path: Path) -> None:
    """Of Pixtral without the breaks of lines, which the text model's embedding holds."""
    rows = opened(converted(write(tower, tmp_path / "checkpoint"))).rows(tower.picture()).values
    expected = np.load(tower.golden)["rows"]
    error = np.abs(rows[list(GOLDEN_ROWS)] - expected).max(axis=1) / np.abs(expected).max()
    assert error.max() <= tower.tolerance, f"row {GOLDEN_ROWS[error.argmax()]} is off by {error.max():.1e}"


@all_towers
def test_keys_say_what_the_encoder_is(tower: TowerCheckpoint, tmp_path: Path) -> None:
    keys = ProjectorConversion(write(tower, tmp_path / "checkpoint")).metadata
    n_layer = LAYERS - (tower in (square.LLAVA, square.LLAVA_NEXT))
    expected = {
        "general.architecture": "clip",
        "general.type": "mmproj",
        "clip.has_vision_encoder": True,
        "clip.vision.projection_dim": TEXT,
        "clip.vision.block_count": n_layer,
        "clip.vision.image_mean": tower.colours["image_mean"],
        "clip.vision.image_std": tower.colours["image_std"],
    }
    assert {name: keys[name] for name in expected} == expected


@pytest.mark.parametrize("outtype", ["f16", "bf16", "q8_0"])
@all_towers
def test_types(tower: TowerCheckpoint, outtype: str, tmp_path: Path) -> None:
    """What is convolved is f32 or f16, what is added f32; files of all types are opened and give finite rows."""
    file = converted(write(tower, tmp_path / "checkpoint"), outtype)
    found = types(file)
    floats = "f16" if outtype == "f16" else "f32"
    assert {found[name] for name in found if "patch_embd.weight" in name} == {floats}
    assert {found[name] for name in found if name.startswith(("v.position_embd", "v.class_embd"))} <= {"f32"}
    assert found["v.blk.0.attn_out.weight"] == outtype
    assert found["v.blk.0.attn_out.bias"] == "f32" if "v.blk.0.attn_out.bias" in found else True
    rows = opened(file).rows(tower.picture()).values[list(GOLDEN_ROWS)]
    expected = np.load(tower.golden)["rows"]
    assert np.abs(rows - expected).max() <= 0.06 * np.abs(expected).max()


def test_breaks_of_lines_are_rows_of_the_embedding(tmp_path: Path) -> None:
    folder = write(native.PIXTRAL, tmp_path / "checkpoint")
    file = converted(folder)
    found = file.data(file.tensors["v.token_embd.img_break"]).view(np.float32)
    conversion = ProjectorConversion(folder)
    rows = conversion.weights.load("language_model.model.embed_tokens.weight").astype(np.uint32) << 16
    np.testing.assert_array_equal(found, rows.view(np.float32)[BREAK])


def test_tiles_of_llava(tmp_path: Path) -> None:
    """Of a larger picture, in front of the whole; the sizes are written width first."""
    folder = write(square.LLAVA_NEXT, tmp_path / "checkpoint", image_grid_pinpoints=[[56, 112], [168, 56]])
    assert any("image_newline" in note for note in ProjectorConversion(folder).notes)
    file = converted(folder)
    assert list(file.metadata["clip.vision.image_grid_pinpoints"]) == [112, 56, 56, 168]
    picture = square.LLAVA_NEXT.picture()
    wide = opened(file).tiles(np.concatenate([picture, picture[::-1]], axis=1))
    assert len(wide) == 3
    np.testing.assert_array_equal(wide[:2], [picture, picture[::-1]])
    tall = opened(file).tiles(np.concatenate([picture] * 3))
    assert len(tall) == 4
    np.testing.assert_array_equal(tall[:3], [picture] * 3)


def test_longest_edge_of_lightonocr(tmp_path: Path) -> None:
    """Is the side of the encoder's pictures, unless the processor says otherwise; no row ends a line."""
    folder = write(native.LIGHTONOCR, tmp_path / "checkpoint")
    file = converted(folder)
    assert "v.token_embd.img_break" not in file.tensors
    assert file.metadata["clip.vision.preproc_image_size"] == 84
    amend(folder, "preprocessor_config.json", size={"longest_edge": 56})
    assert "clip.vision.preproc_image_size" not in ProjectorConversion(folder).metadata


def test_colours_that_step3_has_in_its_code(tmp_path: Path) -> None:
    """CLIP's, where no file says how pictures are prepared."""
    folder = write(later.STEP3, tmp_path / "checkpoint")
    (folder / "preprocessor_config.json").unlink()
    keys = ProjectorConversion(folder).metadata
    assert keys["clip.vision.image_mean"][0] == 0.48145466
    assert keys["clip.vision.image_std"][2] == 0.27577711
    assert keys["clip.vision.preproc_image_size"] == 3024


@pytest.mark.parametrize(("mode", "factor"), [("16x", 4), ("4x", 2), (None, 4)])
def test_where_minicpmv_makes_one_of_squares(mode: str | None, factor: int, tmp_path: Path) -> None:
    """The side of a tile is that of the processor, not that of the table of positions."""
    folder = write(later.MINICPMV46, tmp_path / "checkpoint", downsample_mode=mode)
    keys = ProjectorConversion(folder).metadata
    assert (keys["clip.vision.image_size"], keys["clip.vision.projector.scale_factor"]) == (56, factor)
    assert list(keys.get("clip.vision.wa_layer_indexes", [])) == ([1] if factor == 4 else [])


def test_matrices_in_fp8(tmp_path: Path) -> None:
    """Rows of q, k and v that are stored together, with a scale for each."""
    folder = write(native.QWEN2_VL, tmp_path / "checkpoint")
    name, codes = "visual.blocks.1.attn.qkv.weight", np.random.default_rng(1).integers(0, 100, (3 * N, N), np.uint8)
    scales = np.linspace(0.5, 2, 3 * N, dtype=np.float32)[:, None]

    def pack(tensors: Tensors) -> None:
        tensors[name] = "F8_E4M3", codes.shape, codes.tobytes()
        tensors[f"{name}_scale"] = "F32", scales.shape, scales.tobytes()

    change_tensors(folder, pack)
    file = converted(folder)
    parts = [file.data(file.tensors[f"v.blk.1.attn_{part}.weight"]).view(np.float32) for part in "qkv"]
    np.testing.assert_array_equal(np.concatenate(parts).reshape(3 * N, N), e4m3_values()[codes] * scales)
    change_tensors(folder, lambda tensors: tensors.pop(f"{name}_scale"))
    refused(folder, "has no scale")


def test_names_of_files(tmp_path: Path) -> None:
    """mmproj- comes first, by which the files are found beside a model."""
    folder = write(square.GEMMA3, tmp_path / "tiny")
    assert ProjectorConversion(folder).path == str(folder / "mmproj-tiny-BF16.gguf")
    given = {"model_name": "other", "outtype": "q8_0"}
    assert ProjectorConversion(folder, ConvertOptions(**given)).path == str(folder / "mmproj-other-Q8_0.gguf")
    for outfile in ("out.gguf", "mmproj-out.gguf"):
        path = ProjectorConversion(folder, ConvertOptions(outfile=str(tmp_path / outfile))).path
        assert path == str(tmp_path / "mmproj-out.gguf")


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(square.SMOLVLM, tmp_path / "tiny")
    assert main(["convert", "--mmproj", str(folder), "--dry-run"]) == 0
    assert "mm.model.fc.weight" in capsys.readouterr().out
    assert main(["convert", "--mmproj", str(folder)]) == 0
    assert GGUFFile.open(str(folder / "mmproj-tiny-BF16.gguf")).get("clip.vision.preproc_image_size") == 112
    assert main(["convert", "--mmproj", str(folder), "--pre", "qwen2"]) == 1
    assert "--pre is of no use with --mmproj" in capsys.readouterr().err


def test_a_processor_of_transformers_5(tmp_path: Path) -> None:
    """processor_config.json holds what preprocessor_config.json had."""
    folder = write(square.SMOLVLM, tmp_path / "checkpoint")
    old = folder / "preprocessor_config.json"
    expected = ProjectorConversion(folder).metadata
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": json.loads(old.read_text())}))
    old.unlink()
    assert ProjectorConversion(folder).metadata == expected
    (folder / "processor_config.json").unlink()
    refused(folder, "preprocessor_config.json: no such file")


def test_all_model_types_have_a_tiny_checkpoint() -> None:
    """Or share the class of one that has."""
    model_types = {tower.config["model_type"] for tower in (*TOWERS, *HEARING_ALONE)} | {*MODEL_TYPES.values()}
    # test_convert_conformers.py, test_convert_deepseek_ocr.py, test_convert_gemma3n_pictures.py,
    # test_convert_glm_edge.py, test_convert_granite4_vision.py, test_convert_hunyuan_vl.py, test_convert_minicpmv.py,
    # test_convert_nemotron_omni.py, test_convert_omni.py
    model_types |= {"deepseek_vl_v2", "gemma3n", "granite4_vision", "granite_speech", "hunyuan_vl", "lfm2_audio"}
    model_types |= {"glm", "minicpmv", "nemotron_h_omni", "qwen3_asr"}
    covered = {PROJECTORS[model_type] for model_type in model_types}
    assert {*PROJECTORS.values()} == covered
