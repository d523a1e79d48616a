"""`ikpy convert --mmproj`: what no projector file can say is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import ProjectorConversion
from ikpy.errors import FileFormatError, IkpyError, UnsupportedError, UsageError
from tests.cpu.convert import later_tower_checkpoints as later
from tests.cpu.convert import native_tower_checkpoints as native
from tests.cpu.convert import square_tower_checkpoints as square
from tests.cpu.convert.checkpoints import Tensors, amend, bf16, change_tensors, copy
from tests.cpu.convert.test_convert_projectors import all_towers, converted, refused
from tests.cpu.convert.tower_checkpoints import write
from tests.cpu.media.tower_parts import TowerCheckpoint, V


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
        (square.INTERNVL, {"min_patches": 4}, "pictures of 4 to 12 tiles"),
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
    left_out = "head. layers.2. post_layernorm image_newline language_model. vit_merger audio_bos_eos_token".split()
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
