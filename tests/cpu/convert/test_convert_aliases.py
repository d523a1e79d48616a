"""`ikpy convert` of model types whose checkpoints are those of another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import Conversion, ConvertOptions
from ikpy.convert.config import Config
from ikpy.convert.families import family
from ikpy.errors import IkpyError
from ikpy.gguf.reader import GGUFFile
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert import picture_text_checkpoints as picture_text
from tests.cpu.convert import seeded_checkpoints as tiny
from tests.cpu.convert.checkpoints import convert
from tests.cpu.convert.ling_checkpoints import SARVAM_MLA, SARVAM_MOE
from tests.cpu.convert.test_convert_seeded import converted, logits_of

WINDOW = {"sliding_window": 100, "max_position_embeddings": 256}


def hold_equal(ours: GGUFFile, plain: GGUFFile) -> None:
    """Two files say the same."""
    said, expected = ({key: np.asarray(value).tolist() for key, value in f.metadata.items()} for f in (ours, plain))
    assert said == expected
    assert set(ours.tensors) == set(plain.tensors)
    for name, info in plain.tensors.items():
        np.testing.assert_array_equal(ours.data(ours.tensors[name]), plain.data(info), name)


@pytest.mark.parametrize(
    ("model_type", "values"),
    [("iquestcoder", {"clip_qkv": None, "use_sliding_window": False}), ("ministral", {})],
)
def test_files_of_llama(model_type: str, values: dict[str, Any], tmp_path: Path) -> None:
    """The window of IQuest Coder is not used; of Ministral 8B it is left out as of Mistral 7B, which is said."""
    files, notes = [], []
    for name, config in (("mistral", {}), (model_type, values)):
        (tmp_path / name).mkdir()
        folder = made.copy("mistral", tmp_path / name)
        made.amend(folder, **{"model_type": name, **WINDOW, **config})
        conversion = Conversion(folder, ConvertOptions(outfile=str(tmp_path / f"{name}.gguf"), model_name="model"))
        notes.append([note for note in conversion.notes if "window" in note])
        conversion.write()
        files.append(GGUFFile.open(tmp_path / f"{name}.gguf"))
    hold_equal(*files)
    assert notes == [notes[0], notes[0] if model_type == "ministral" else []] and notes[0]


@pytest.mark.parametrize(
    ("what", "config"),
    [("clip_qkv 8", {"clip_qkv": 8}), ("use_sliding_window true", {"use_sliding_window": True})],
)
def test_what_iquest_coder_does_not_have(what: str, config: dict[str, Any], tmp_path: Path) -> None:
    folder = made.copy("mistral", tmp_path)
    made.amend(folder, model_type="iquestcoder", **config)
    with pytest.raises(IkpyError, match=what):
        Conversion(folder)


def test_text_of_exaone_4_5(tmp_path: Path) -> None:
    """The language model of a checkpoint with images and a prediction layer is EXAONE 4, under either name."""
    plain = convert(made.CHECKPOINTS / "exaone4", tmp_path, model_name="exaone")
    for model_type in ("exaone4", "exaone4_5_text"):
        (tmp_path / model_type).mkdir()
        folder = made.copy("exaone4", tmp_path / model_type)
        inner = json.loads((folder / "config.json").read_text())
        outer = {"model_type": "exaone4_5", "architectures": ["Exaone4_5_ForConditionalGeneration"]}
        text = {**inner, "model_type": model_type}
        (folder / "config.json").write_text(json.dumps({**outer, "text_config": text}))

        def wrap(tensors: made.Tensors) -> None:
            for name in [name for name in tensors if name.startswith("model.")]:
                tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
            other = made.bf16(np.ones((4, 4), np.float32))
            tensors["model.visual.patch_embed.proj.weight"] = tensors["mtp.fc.weight"] = other

        made.change_tensors(folder, wrap)
        hold_equal(convert(folder, tmp_path / model_type, model_name="exaone"), plain)


# Text parts of models that take pictures


def test_dots_ocr(tmp_path: Path) -> None:
    """Qwen2 whose configuration is not within another; it has an encoder besides."""
    folder = made.copy("qwen2", tmp_path)
    plain = convert(folder, tmp_path, model_name="model")
    made.amend(folder, model_type="dots_ocr", vision_config={"model_type": "dots_vit", "hidden_size": 8})
    encoder = {"vision_tower.blocks.0.attn.qkv.weight": made.bf16(np.ones((4, 4), np.float32))}
    made.change_tensors(folder, lambda tensors: tensors.update(encoder))
    hold_equal(convert(folder, tmp_path, model_name="model"), plain)
    assert any("--mmproj" in note for note in Conversion(folder).notes)


@pytest.mark.parametrize(
    ("name", "outer", "part", "text", "picture"),
    [
        ("llama", {"model_type": "llava"}, "text_config", "language_model.model.", "vision_tower.x.weight"),
        ("mistral", {"model_type": "llava_next"}, "text_config", "language_model.model.", "image_newline"),
        ("mistral", {"model_type": "mistral3"}, "text_config", "model.language_model.", "model.vision_tower.x.weight"),
        ("llama", {"model_type": "idefics3"}, "text_config", "model.text_model.", "model.connector.proj.weight"),
        ("qwen3", {"model_type": "minicpmv4_6"}, "text_config", "model.language_model.", "model.merger.mlp.0.x.weight"),
        ("qwen3", {"model_type": "step_robotics"}, "text_config", "model.", "vit_large_projector.weight"),
        ("qwen2", {"model_type": "internvl_chat"}, "llm_config", "language_model.model.", "mlp1.0.weight"),
    ],
)
def test_text_parts(name: str, outer: dict[str, Any], part: str, text: str, picture: str, tmp_path: Path) -> None:
    """Are the language models that they would be alone."""
    plain = convert(made.CHECKPOINTS / name, tmp_path, model_name="model")
    folder = made.copy(name, tmp_path)
    inner = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**outer, part: inner, "vision_config": {"hidden_size": 32}}))

    def wrap(tensors: made.Tensors) -> None:
        for old in [name for name in tensors if name.startswith("model.")]:
            tensors[old.replace("model.", text, 1)] = tensors.pop(old)
        tensors[picture] = made.bf16(np.ones((4, 4), np.float32))

    made.change_tensors(folder, wrap)
    hold_equal(convert(folder, tmp_path, model_name="model"), plain)
    assert any("--mmproj writes the encoder of pictures" in note for note in Conversion(folder).notes)


@pytest.mark.parametrize(("inside", "outside"), [(False, True), (True, False)])
@pytest.mark.parametrize("has_output", [True, False])
def test_a_whole_model_that_says_otherwise_of_its_output(
    inside: bool, outside: bool, has_output: bool, tmp_path: Path
) -> None:
    """Whether there is an output matrix tells then."""
    folder = made.copy("llama", tmp_path)
    inner = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": inside}
    config = {"model_type": "llava", "tie_word_embeddings": outside, "text_config": inner}
    (folder / "config.json").write_text(json.dumps(config))
    if not has_output:
        made.change_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert ("output.weight" in convert(folder, tmp_path).tensors) == has_output


@pytest.mark.parametrize(("model_type", "width", "n_kv"), [("llama", 11008, 32), ("mistral", 14336, 8)])
def test_what_text_parts_leave_out(model_type: str, width: int, n_kv: int, tmp_path: Path) -> None:
    """LLaVA 1.5 and Pixtral leave out values that transformers has by itself; models of text alone must not."""
    text = {"model_type": model_type, "vocab_size": 384, "max_position_embeddings": 4096}
    config = Config({"model_type": "llava", "text_config": text}, tmp_path / "config.json")
    keys = family(config).keys()
    assert (keys["block_count"], keys["embedding_length"], keys["attention.head_count"]) == (32, 4096, 32)
    assert (keys["feed_forward_length"], keys["attention.head_count_kv"], keys["context_length"]) == (width, n_kv, 4096)
    with pytest.raises(IkpyError, match="'num_attention_heads' is missing"):
        family(Config(text, tmp_path / "config.json"))


def test_dynamic_scaling_of_internvl(tmp_path: Path) -> None:
    """Sets in beyond the context: left out, which is said."""
    folder = made.copy("qwen2", tmp_path)
    made.amend(folder, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    plain = convert(folder, tmp_path, model_name="model")
    made.amend(folder, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6})
    conversion = Conversion(folder)
    assert any("scales RoPE by the length of the text" in note for note in conversion.notes)
    hold_equal(convert(folder, tmp_path, model_name="model"), plain)


@pytest.mark.parametrize(
    ("kind", "scaling", "pattern"),
    [
        (picture_text.QWEN2_VL, {"mrope_section": [2, 3, 4]}, r"mrope_section \[2, 3, 4\] of 16 rotated elements"),
        (picture_text.QWEN3_VL, {"mrope_section": None}, "mrope_section None"),
        (picture_text.QWEN3_VL, {"mrope_interleaved": False}, "mrope_interleaved false"),
        (picture_text.GLM4V, {"mrope_section": [1, 1, 1]}, r"mrope_section \[1, 1, 1\] of 8 rotated elements"),
    ],
)
def test_sections_that_do_not_fit(kind: tiny.Tiny, scaling: dict[str, Any], pattern: str, tmp_path: Path) -> None:
    config = kind.config
    inner = config.get("text_config", config)
    changed = {**inner, "rope_scaling": {**inner["rope_scaling"], **scaling}}
    values = {"text_config": changed} if "text_config" in config else changed
    with pytest.raises(IkpyError, match=pattern):
        Conversion(tiny.write(kind, tmp_path / "checkpoint", **values))


def test_glm_4v_without_a_text_config(tmp_path: Path) -> None:
    """Its first repository has the values outside."""
    kind = picture_text.GLM4V
    plain = convert(tiny.write(kind, tmp_path / "plain"), tmp_path, model_name="model")
    folder = tiny.write(kind, tmp_path / "flat", **{**kind.config["text_config"], "model_type": "glm4v"})
    made.amend(folder, drop=("text_config",))
    hold_equal(convert(folder, folder, model_name="model"), plain)


def test_keys_of_sections(tmp_path: Path) -> None:
    file = converted(picture_text.QWEN3_VL, tmp_path)
    assert np.asarray(file.get("qwen3vl.rope.dimension_sections")).tolist() == [4, 2, 2, 0]
    assert file.get("qwen3vl.n_deepstack_layers") == len(picture_text.DEEP)


def test_experts_that_transformers_has_saved(tmp_path: Path) -> None:
    """Their last two dimensions are swapped."""
    kind = picture_text.QWEN3_VL_MOE
    plain = convert(tiny.write(kind, tmp_path / "plain"), tmp_path, outtype="f32", model_name="model")
    folder = tiny.write(kind, tmp_path / "saved")
    values = {n: v.swapaxes(1, 2) for n, v in tiny.weights(kind).items() if ".experts." in n}
    made.change_tensors(folder, lambda tensors: tensors.update({n: made.bf16(v) for n, v in values.items()}))
    hold_equal(convert(folder, folder, outtype="f32", model_name="model"), plain)


# Sarvam


def test_sarvam_105b(tmp_path: Path) -> None:
    """Its configuration is that of DeepSeek V3 in other words."""
    file = converted(SARVAM_MLA, tmp_path / "sarvam")
    keys = {name.removeprefix("deepseek2."): value for name, value in file.metadata.items()}
    assert (keys["rope.scaling.type"], keys["rope.scaling.factor"]) == ("yarn", 4.0)
    assert (keys["expert_gating_func"], keys["expert_weights_scale"], keys["attention.q_lora_rank"]) == (2, 2.5, 0)
    assert keys["attention.key_length"] == tiny.NOPE + tiny.ROT
    (tmp_path / "other").mkdir()
    folder = tiny.write(SARVAM_MLA, tmp_path / "other" / "checkpoint", model_type="deepseek_v3")
    scaling = {**SARVAM_MLA.config["rope_scaling"], "type": "yarn"}
    counts = {"n_routed_experts": tiny.N_EXPERT, "n_shared_experts": 1}
    made.amend(folder, drop=("num_experts", "num_shared_experts"), rope_scaling=scaling, **counts)
    again = convert(folder, tmp_path / "other", outtype="f32")
    np.testing.assert_array_equal(logits_of(again), logits_of(file))


def test_sarvam_30b_rotates_whole_heads(tmp_path: Path) -> None:
    file = converted(SARVAM_MOE, tmp_path)
    keys = {name.removeprefix("bailingmoe2."): value for name, value in file.metadata.items()}
    assert keys["rope.dimension_count"] == keys["attention.key_length"] == tiny.HEAD
    assert (keys["rope.freq_base"], keys["expert_gating_func"], keys["leading_dense_block_count"]) == (8e6, 2, 1)


@pytest.mark.parametrize(
    ("what", "config"),
    [("use_qk_norm false", {"use_qk_norm": False}), ("partial_rotary_factor 0.5", {"partial_rotary_factor": 0.5})],
)
def test_what_no_file_of_sarvam_can_say(what: str, config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(IkpyError, match=what):
        Conversion(tiny.write(SARVAM_MOE, tmp_path / "checkpoint", **config))


@pytest.mark.parametrize("given", [{}, {"mrope_section": [16, 8, 8]}])
def test_qwen35_has_sections(given: dict[str, list[int]], tmp_path: Path) -> None:
    """Those of its definition where the configuration has none: llama.cpp asks for the key."""
    folder = made.copy("qwen35", tmp_path)
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0, **given}
    made.amend(folder, head_dim=64, rope_parameters=rope)
    rows = {"q_proj": (512, 64), "k_proj": (128, 64), "v_proj": (128, 64), "o_proj": (64, 256), "q_norm": (64,)}
    shapes = {f"{name}.weight": shape for name, shape in {**rows, "k_norm": (64,)}.items()}
    own = {f"model.layers.3.self_attn.{name}": made.bf16(np.ones(shape)) for name, shape in shapes.items()}
    made.change_tensors(folder, lambda tensors: tensors.update(own))
    file = convert(folder, tmp_path)
    sections = given.get("mrope_section", [11, 11, 10])
    assert np.asarray(file.get("qwen35.rope.dimension_sections")).tolist() == [*sections, 0]
