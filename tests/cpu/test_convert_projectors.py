"""`ikpy convert --mmproj`: rows of the files against those of transformers, keys, types, names, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.cli import main
from ikpy.convert import ConvertOptions, ProjectorConversion
from ikpy.convert.projectors import PROJECTORS
from ikpy.convert.weights import e4m3_values
from ikpy.errors import FileFormatError, IkpyError, UnsupportedError, UsageError
from ikpy.gguf.reader import GGUFFile
from ikpy.vision.projector import Projector, open_projector
from tests.cpu import later_tower_checkpoints as later
from tests.cpu import native_tower_checkpoints as native
from tests.cpu import square_tower_checkpoints as square
from tests.cpu.checkpoints import Tensors, amend, bf16, change_tensors, copy
from tests.cpu.test_convert import types
from tests.cpu.tower_checkpoints import TOWERS, write
from tests.cpu.tower_parts import BREAK, GOLDEN_ROWS, LAYERS, TEXT, N, TowerCheckpoint, V

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


# what is refused


@pytest.mark.parametrize("name", ["deepseek-v3", "gemma3"])
def test_models_without_pictures(name: str, tmp_path: Path) -> None:
    folder = copy(name, tmp_path)
    refused(folder, "no known projector of a model of type", UnsupportedError)
    amend(folder, model_type="gemma3")
    refused(folder, "there is no 'vision_config'; the model takes no pictures")


VALUES = [
    (square.GEMMA3, {"hidden_act": "gelu"}, "activation 'gelu'"),
    (square.GEMMA3, {"num_attention_heads": 5}, "5 heads in 64"),
    (square.GEMMA3, {"num_channels": 1}, "pictures of 1 colours"),
    (square.LLAVA, {"model_type": "siglip_vision_model"}, "model_type siglip_vision_model"),
    (square.INTERNVL, {"norm_type": "rms_norm"}, "norm_type 'rms_norm'"),
    (square.INTERNVL, {"use_qk_norm": True}, "use_qk_norm True"),
    (square.INTERNVL, {"image_size": [56, 70]}, r"image_size \[56, 70\]"),
    (square.INTERNVL, {"use_mean_pooling": False}, "use_mean_pooling False"),
    (square.LLAMA4, {"pixel_shuffle_ratio": 0.4}, "pixel_shuffle_ratio 0.4"),
    (square.LLAMA4, {"rope_theta": 500.0}, "rope_theta 500 instead of 10000"),
    (native.QWEN2_VL, {"hidden_size": 80}, "hidden_size 80"),
    (native.QWEN2_VL, {"temporal_patch_size": 1}, "temporal_patch_size 1"),
    (native.QWEN25_VL, {"window_size": 64}, "window_size 64"),
    (native.QWEN25_VL, {"fullatt_block_indexes": [0, 2]}, r"fullatt_block_indexes \[0, 2\]"),
    (native.QWEN25_VL, {"spatial_merge_size": 4}, "spatial_merge_size 4"),
    (native.QWEN3_VL, {"deepstack_visual_indexes": [2, 0]}, r"deepstack_visual_indexes \[2, 0\]"),
    (native.QWEN3_VL, {"deepstack_visual_indexes": [7]}, r"deepstack_visual_indexes \[7\]"),
    (native.QWEN3_VL, {"num_position_embeddings": 63}, "num_position_embeddings 63"),
    (native.PIXTRAL, {"rope_theta": 1e6}, "rope_theta 1e\\+06 instead of 10000"),
    (native.PIXTRAL, {"head_dim": 16}, "head_dim 16"),
    (native.GEMMA4, {"num_key_value_heads": 1}, "num_key_value_heads 1"),
    (native.GEMMA4, {"attention_bias": True}, "attention_bias true"),
    (later.EXAONE45, {"num_key_value_heads": 3}, "num_key_value_heads 3 of 2 heads"),
    (later.GLM5, {"swiglu_limit": 0.0}, "swiglu_limit 0"),
    (later.GLM5, {"swiglu_limit": float("inf")}, "swiglu_limit inf"),
    (square.GEMMA3, {"layer_norm_eps": float("nan")}, "'layer_norm_eps' is nan; a finite number from 0 on is possible"),
    (native.KIMI_K25, {"projector_ln_eps": -1.0}, "'projector_ln_eps' is -1; a finite number from 0 on is possible"),
    (later.MINIMAX_M3, {"temporal_patch_size": 1}, "temporal_patch_size 1"),
    (later.DOTS3, {"pyramid_num_routed": [-1, 4]}, "pyramid_num_routed for other than 3 layers"),
    (later.DOTS3, {"capacity_factor": 9}, "9 experts used of 4"),
    (later.DOTS3, {"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types"),
    (later.MINICPMV46, {"image_size": 448}, "32 x 32 positions"),
    (later.MINICPMV46, {"layer_norm_eps": 1e-5}, "layer_norm_eps 1e-05"),
    (later.STEP3, {"use_ln_post": True}, "use_ln_post True"),
    (later.STEP3, {"mlp_ratio": float("inf")}, "mlp_ratio inf"),
    (later.DOTS_OCR, {"use_bias": True}, "use_bias True"),
    (later.DOTS_OCR, {"post_norm": False}, "post_norm False"),
    (later.DOTS_OCR, {"hidden_size": 96}, "hidden_size 96"),
    (native.KIMI_VL, {"merge_kernel_size": [1, 2]}, r"merge_kernel_size \[1, 2\]"),
    (native.KIMI_VL, {"init_pos_emb_width": 4}, "a table of 8 x 4 positions"),
]


@pytest.mark.parametrize(("tower", "values", "pattern"), VALUES, ids=lambda value: str(value)[:30])
def test_encoders_that_no_file_can_say(
    tower: TowerCheckpoint, values: dict[str, Any], pattern: str, tmp_path: Path
) -> None:
    vision = {**tower.config["vision_config"], **values}
    refused(write(tower, tmp_path / "checkpoint", vision_config=vision), pattern)


@pytest.mark.parametrize(
    ("tower", "values", "pattern"),
    [
        (square.GEMMA3, {"mm_tokens_per_image": 3}, "mm_tokens_per_image 3"),
        (square.SMOLVLM, {"scale_factor": 3}, "scale_factor 3 of 4 patches"),
        (square.LLAVA, {"vision_feature_layer": [-2, -1]}, r"vision_feature_layer \[-2, -1\]"),
        (square.LLAVA, {"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy full"),
        (square.LLAVA_NEXT, {"image_grid_pinpoints": [[56, 112, 56]]}, r"image_grid_pinpoints \[\[56, 112, 56\]\]"),
        (square.LLAVA_NEXT, {"image_grid_pinpoints": [[56, 0]]}, r"image_grid_pinpoints \[\[56, 0\]\]"),
        (square.LLAVA_NEXT, {"image_grid_pinpoints": 56}, "image_grid_pinpoints 56"),
        (square.INTERNVL, {"downsample_ratio": 0.3}, "downsample_ratio 0.3"),
        (later.MINICPMV46, {"downsample_mode": "8x"}, "downsample_mode 8x"),
        (later.MINICPMV46, {"insert_layer_id": 3}, "insert_layer_id 3"),
        (later.MINICPMV46, {"merge_kernel_size": [1, 1]}, r"merge_kernel_size \[1, 1\]"),
        (later.STEP3, {"understand_projector_stride": 1}, "understand_projector_stride 1"),
        (native.PIXTRAL, {"vision_feature_layer": -2}, "vision_feature_layer -2"),
        (native.PIXTRAL, {"projector_hidden_act": "relu"}, "projector_hidden_act relu"),
        (native.LFM2, {"vision_feature_layer": 1}, "vision_feature_layer 1"),
        (native.LFM2, {"projector_hidden_size": 80}, "as config.json says"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_models_that_no_file_can_say(
    tower: TowerCheckpoint, values: dict[str, Any], pattern: str, tmp_path: Path
) -> None:
    refused(write(tower, tmp_path / "checkpoint", **values), pattern)


@pytest.mark.parametrize(
    ("tower", "values", "pattern"),
    [
        (square.GEMMA3, {"rescale_factor": 1.0}, "rescale_factor 1"),
        (square.GEMMA3, {"size": {"height": 112, "width": 112}}, "size 112 instead of 56"),
        (square.GEMMA3, {"image_mean": [0.5]}, "'image_mean' is"),
        (square.GEMMA3, {"image_std": [0.5, 0.0, 0.5]}, "image_std"),
        (square.SMOLVLM, {"max_image_size": {"longest_edge": 512}}, "max_image_size 512 instead of 56"),
        (square.SMOLVLM, {"size": {"longest_edge": "large"}}, "not a number of pixels"),
        (square.LLAVA_NEXT, {"crop_size": {"height": 28, "width": 28}}, "crop_size 28 instead of 56"),
        (square.LLAVA_NEXT, {"image_grid_pinpoints": [[56, 112]]}, r"image_grid_pinpoints \[\[56, 112\]\]"),
        (native.LFM2, {"resample": 0}, "resample 0"),
        (square.INTERNVL, {"min_patches": 13, "max_patches": 0}, "pictures of 13 to 0 tiles"),
        (later.MINICPMV46, {"max_slice_nums": 4}, "max_slice_nums 4"),
        (later.EXAONE45, {"size": {}}, "'min_pixels' is None, not a number of pixels"),
        (later.EXAONE45, {"min_pixels": 200000}, "'min_pixels' 200000 is more than 'max_pixels' 100352"),
        (later.GLM5, {"patch_expand_factor": 2}, "patch_expand_factor 2"),
        (later.GLM5, {"max_image_tokens": 3}, "pictures of 16 to 3 tokens"),
        (later.GLM5, {"min_image_tokens": 0}, "pictures of 0 to 8000 tokens"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_pictures_that_no_file_can_say(
    tower: TowerCheckpoint, values: dict[str, Any], pattern: str, tmp_path: Path
) -> None:
    folder = write(tower, tmp_path / "checkpoint")
    amend(folder, "preprocessor_config.json", **values)
    refused(folder, pattern)


def test_options_of_texts(tmp_path: Path) -> None:
    folder = write(square.GEMMA3, tmp_path / "checkpoint")
    refused(folder, "--pre is of no use", UsageError, pre="qwen2")
    refused(folder, "--chat-template-file is of no use", UsageError, chat_template_file="x")
    refused(folder, "a projector file is never split", UsageError, split_max_tensors=10)
    refused(folder, "unknown output type 'q4_0'", UsageError, outtype="q4_0")


@all_towers
def test_every_tensor_is_missed(tower: TowerCheckpoint, tmp_path: Path) -> None:
    """All of them, but those that are left out."""
    folder = write(tower, tmp_path / "checkpoint")
    used = {part.source for tensor in ProjectorConversion(folder).tensors for part in tensor.output.parts}
    unused = tower.shapes().keys() - used
    left_out = ("head.", "layers.2.", "post_layernorm", "image_newline", "language_model.", "vit_merger")
    assert all(any(part in name for part in left_out) for name in unused)
    for name in sorted(used)[:: max(1, len(used) // 12)]:
        change_tensors(folder, lambda tensors, name=name: tensors.update({f"text.{name}": tensors.pop(name)}))
        refused(folder, "is missing; the checkpoint is incomplete")
        change_tensors(folder, lambda tensors, name=name: tensors.update({name: tensors.pop(f"text.{name}")}))


@all_towers
def test_tensors_of_other_shapes_and_without_a_place(tower: TowerCheckpoint, tmp_path: Path) -> None:
    folder = write(tower, tmp_path / "checkpoint")
    used = [part.source for tensor in ProjectorConversion(folder).tensors for part in tensor.output.parts]
    name = next(name for name in used if len(tower.shapes()[name]) > 1)
    shape = tower.shapes()[name]
    change_tensors(folder, lambda tensors: tensors.update({name: bf16(np.ones((shape[0] + 1, *shape[1:])))}))
    refused(folder, "as config.json says")
    change_tensors(folder, lambda tensors: tensors.update({name: bf16(np.ones(shape))}))
    strange = f"{name.rpartition('.')[0]}.strange"
    change_tensors(folder, lambda tensors: tensors.update({strange: bf16(np.ones(4))}))
    refused(folder, "has no place in a projector of type", UnsupportedError)


def test_numbers_that_are_none(tmp_path: Path) -> None:
    """Found while writing: no file is left."""
    folder = write(native.QWEN3_VL, tmp_path / "checkpoint")

    def spoil(tensors: Tensors) -> None:
        dtype, shape, data = tensors["model.visual.merger.norm.weight"]
        tensors["model.visual.merger.norm.weight"] = dtype, shape, b"\xff\x7f" + data[2:]

    change_tensors(folder, spoil)
    conversion = ProjectorConversion(folder)
    with pytest.raises(FileFormatError, match=r"merger.norm.weight' contains NaN"):
        conversion.write()
    assert list(folder.glob("*.gguf*")) == []


def test_a_tokenizer_without_breaks(tmp_path: Path) -> None:
    folder = write(native.MISTRAL3, tmp_path / "checkpoint")
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 5, "content": "[IMG_BREAK]"}]}))
    (folder / "tokenizer_config.json").unlink()
    converted(folder)
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": V, "content": "[IMG_BREAK]"}]}))
    refused(folder, f"token {V} of {V}")
    (folder / "tokenizer.json").unlink()
    refused(folder, "the tokenizer has no .IMG_BREAK.")


ODD: list[Any] = [None, True, -1, 0, 3, 1 << 40, 2.5, float("nan"), "x", [], [1], {}, {"a": 1}]


@all_towers
def test_values_of_any_kind_end_in_one_line(tower: TowerCheckpoint, tmp_path: Path) -> None:
    """A plan, or an error of one line: never a traceback."""
    folder = write(tower, tmp_path / "checkpoint")
    original = json.loads((folder / "config.json").read_text())
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    places = [(name,) for name in original] + [("vision_config", name) for name in original["vision_config"]]
    inner = [name for name in original if name in ("text_config", "llm_config")]
    places += [(part, name) for part in inner for name in ("hidden_size", "vocab_size")]
    for place in places:
        for value in ODD:
            changed = json.loads(json.dumps(original))
            (changed if len(place) == 1 else changed[place[0]])[place[-1]] = value
            (folder / "config.json").write_text(json.dumps(changed))
            plan_or_line(folder)
    (folder / "config.json").write_text(json.dumps(original))
    for name in processor:
        for value in ODD:
            (folder / "preprocessor_config.json").write_text(json.dumps({**processor, name: value}))
            plan_or_line(folder)


def plan_or_line(folder: Path) -> None:
    """Plans, or refuses with a line."""
    try:
        ProjectorConversion(folder)
    except IkpyError as error:
        assert "\n" not in str(error)


def test_all_model_types_have_a_tiny_checkpoint() -> None:
    """Or share the class of one that has."""
    covered = {PROJECTORS[tower.config["model_type"]] for tower in TOWERS}
    assert {*PROJECTORS.values()} == covered
