"""`ikpy convert` of GLM-5.3 Flash: what files hold, names and configurations, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import Conversion
from ikpy.convert.config import Config
from ikpy.convert.families.glm5_next import Glm5Next
from ikpy.errors import IkpyError
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert import glm5_next_checkpoints as glm
from tests.cpu.convert import seeded_checkpoints as tiny
from tests.cpu.convert.checkpoints import convert
from tests.cpu.convert.glm5_next_checkpoints import GLM5_NEXT, TEXT
from tests.cpu.convert.test_convert_seeded import converted, logits_of


def test_as_llama_cpp_has_it(tmp_path: Path) -> None:
    file = converted(GLM5_NEXT, tmp_path)
    keys = {name.removeprefix("glm5-next."): value for name, value in file.metadata.items()}
    assert keys["attention.head_count_kv"].tolist() == [0, 1, 0, 1, 0]
    sizes = {"key_length": 64, "value_length": 64, "key_length_mla": 32, "value_length_mla": 32, "kv_lora_rank": 64}
    assert {name: keys[f"attention.{name}"] for name in sizes} == sizes
    assert (keys["rope.dimension_count"], keys["kda.head_dim"], keys["ssm.conv_kernel"]) == (0, 32, 4)
    assert (keys["kda.gate_lower_bound"], keys["leading_dense_block_count"]) == (-5, 1)
    pooled = {"kpool": glm.POOL, "top_k": glm.TOP_K, "head_count": glm.INDEX_HEADS, "kpool_select_tail": True}
    assert {name: keys[f"attention.indexer.{name}"] for name in pooled} == pooled
    assert "attention.indexer.types" not in keys
    assert keys["swiglu_clamp_exp"].tolist() == keys["swiglu_clamp_shexp"].tolist() == [1] * glm.N_LAYER
    shapes = {
        "blk.0.ssm_conv1d_k.weight": (4, 1, 128),
        "blk.0.ssm_a": (4,),
        "blk.1.attn_k_b.weight": (32, 64, 4),
        "blk.1.indexer_compressor_ape.weight": (32, 4),
        "blk.1.indexer_compressor_gate.weight": (64, 32),
        "blk.2.hc_ffn_fn.weight": (256, 24),
    }
    assert {name: file.tensors[name].shape for name in shapes} == shapes
    assert "blk.1.attn_kv_b.weight" not in file.tensors


@pytest.mark.parametrize(("inside", "outside"), [(True, False), (False, True), (True, None)])
def test_the_whole_says_whether_embeddings_are_tied(inside, outside, tmp_path: Path) -> None:
    """As in transformers: the text part's value does not count, and what is not said is false."""
    text = {**TEXT, "tie_word_embeddings": inside}
    folder = tiny.write(GLM5_NEXT, tmp_path / "checkpoint", text_config=text, tie_word_embeddings=outside)
    assert "output.weight" in convert(folder, tmp_path).tensors
    made.change_tensors(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "lm_head" in name])
    if outside:
        assert "output.weight" not in convert(folder, tmp_path).tensors
    else:
        with pytest.raises(IkpyError, match=r"the output matrix \(lm_head.weight\) is missing"):
            Conversion(folder)


def test_other_spellings(tmp_path: Path) -> None:
    """A configuration without text_config, of kinds that older files name, with the KDA layers in a part of its own."""
    first = converted(GLM5_NEXT, tmp_path / "first")
    (tmp_path / "other").mkdir()
    folder = tiny.write(GLM5_NEXT, tmp_path / "other" / "checkpoint", text_config=None, vision_config=None)
    kinds = [kind.replace("indexed", "full") for kind in TEXT["layer_types"]]  # type: ignore[attr-defined]
    own = {"head_dim": glm.SIZE, "num_heads": 4, "short_conv_kernel_size": glm.TAPS, "gate_lower_bound": None}
    drop = ("linear_", "indexer_types", "mlp_layer_types", "layer_types", "model_type", "vocab_size")
    flat = {name: value for name, value in TEXT.items() if not name.startswith(drop)}
    given = {"layer_types": kinds, "linear_attn_config": own, "index_topk_freq": 1, "first_k_dense_replace": 1}
    made.amend(folder, **flat, **given)

    def rename(tensors: made.Tensors) -> None:
        for name in [name for name in tensors if "language_model." in name]:
            tensors[name.replace("language_model.", "")] = tensors.pop(name)
        tensors["visual.merger.proj.weight"] = made.bf16(np.ones((4, 4), np.float32))
        tensors[f"model.layers.{glm.N_LAYER}.eh_proj.weight"] = made.bf16(np.ones((4, 4), np.float32))

    made.change_tensors(folder, rename)
    other = convert(folder, tmp_path / "other", outtype="f32", prediction="none")
    np.testing.assert_array_equal(logits_of(other), logits_of(first))


def config_of(folder: Path, **values: Any) -> Glm5Next:
    base = {**GLM5_NEXT.config, "text_config": {**TEXT, **values}}
    return Glm5Next(Config({name: value for name, value in base.items() if value is not None}, folder / "config.json"))


@pytest.mark.parametrize(
    ("values", "bound"),
    [
        ({"linear_lower_bound": -3.0}, -3.0),
        ({"linear_lower_bound": None}, None),
        ({"linear_attn_config": {"gate_lower_bound": -2}}, -2.0),
        ({"linear_attn_config": {"gate_lower_bound": None}}, -5.0),
        ({"linear_attn_config": {"gate_lower_bound": None, "safe_gate": False}}, None),
    ],
)
def test_bounds_of_decays(values: dict[str, Any], bound: float | None, tmp_path: Path) -> None:
    """As transformers reads them; without one, decays are those of Kimi Linear."""
    keys = config_of(tmp_path, **values).keys()
    assert keys.get("kda.gate_lower_bound") == bound


def test_layers_where_nothing_is_listed(tmp_path: Path) -> None:
    made_of = config_of(tmp_path, layer_types=None, mlp_layer_types=None, indexer_types=None, num_hidden_layers=9)
    assert made_of.attends == [il in (3, 7) for il in range(9)]
    keys = made_of.keys()
    assert keys["leading_dense_block_count"] == 3 and "attention.indexer.types" not in keys


def test_shared_choices(tmp_path: Path) -> None:
    """The second layer that attends takes the choice of the first; its indexer is not in the checkpoint."""
    kinds = ["full", "full", "full", "shared", "full"]
    folder = tiny.write(GLM5_NEXT, tmp_path / "checkpoint", text_config={**TEXT, "indexer_types": kinds})

    def drop(tensors: made.Tensors) -> None:
        for name in [name for name in tensors if "layers.3.self_attn.indexer" in name]:
            del tensors[name]

    made.change_tensors(folder, drop)
    file = convert(folder, tmp_path, outtype="f32")
    assert file.metadata["glm5-next.attention.indexer.types"].tolist() == [True, True, True, False, True]
    assert np.isfinite(logits_of(file)).all()


REFUSED: dict[str, dict[str, Any]] = {
    "index_kpool_always_select_tail false": {"index_kpool_always_select_tail": False},
    "qk_rope_head_dim 16": {"qk_rope_head_dim": 16},
    "2 heads of KDA layers beside 4 others": {"linear_num_heads": 2},
    "2 KV heads of 4": {"num_key_value_heads": 2},
    "another kind of layers": {"layer_types": ["mamba"] * glm.N_LAYER},
    "4 kinds of layers": {"layer_types": ["linear_attention"] * 4},
    "no q_lora_rank": {"q_lora_rank": None},
    "activation 'gelu'": {"hidden_act": "gelu"},
    "dense layers among the expert layers": {"mlp_layer_types": ["sparse", *["dense"] * 4]},
    "first_k_dense_replace 2 of 1 dense layers": {"first_k_dense_replace": 2},
    "'rms_norm_eps' is -1e-05": {"rms_norm_eps": -1e-5},
    "'linear_lower_bound' is \"low\", not a number": {"linear_lower_bound": "low"},
    "16 chosen cells in pools of 3": {"index_kpool": 3},
    "none is before it": {"indexer_types": ["shared"] * glm.N_LAYER},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_file_can_say(what: str, tmp_path: Path) -> None:
    folder = tiny.write(GLM5_NEXT, tmp_path / "checkpoint", text_config={**TEXT, **REFUSED[what]})
    with pytest.raises(IkpyError, match=what) as error:
        Conversion(folder)
    assert "\n" not in str(error.value)


def test_a_tensor_that_is_missing(tmp_path: Path) -> None:
    folder = tiny.write(GLM5_NEXT, tmp_path / "checkpoint")
    name = "model.language_model.layers.3.self_attn.indexer.index_kpool_compress_gate"
    made.change_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(IkpyError, match=r"layer 3 lacks blk.3.indexer_compressor_gate.weight"):
        Conversion(folder)


@pytest.mark.parametrize("shape", [(64, 256), (256 * 64,), (128, 128)], ids=str)
def test_heads_of_another_shape(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Of as many elements, whose rows would be those of no head."""
    folder = tiny.write(GLM5_NEXT, tmp_path / "checkpoint")

    def change(tensors: made.Tensors) -> None:
        name = next(name for name in tensors if name.endswith("layers.1.self_attn.kv_b_proj.weight"))
        kind, old, data = tensors[name]
        assert old == (256, 64)
        tensors[name] = (kind, shape, data)

    made.change_tensors(folder, change)
    with pytest.raises(IkpyError, match=r"of tensor '.*kv_b_proj.weight' does not fit config.json"):
        Conversion(folder)
