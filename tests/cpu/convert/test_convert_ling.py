"""`ikpy convert` of Ling 3.0: what files hold, names and configurations, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import Conversion
from ikpy.convert.config import Config
from ikpy.convert.families.bailing_hybrid import BailingHybrid
from ikpy.errors import IkpyError
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert import ling_checkpoints as ling
from tests.cpu.convert import seeded_checkpoints as tiny
from tests.cpu.convert.checkpoints import convert
from tests.cpu.convert.ling_checkpoints import BAILING_HYBRID
from tests.cpu.convert.test_convert_seeded import converted, logits_of


def test_ling_as_llama_cpp_has_it(tmp_path: Path) -> None:
    file = converted(BAILING_HYBRID, tmp_path)
    keys = {name.removeprefix("bailingmoe3."): value for name, value in file.metadata.items()}
    assert keys["attention.head_count_kv"].tolist() == [0, 1, 0, 1]
    sizes = {"key_length": 96, "value_length": 64, "key_length_mla": 64, "value_length_mla": 32, "kv_lora_rank": 64}
    assert {name: keys[f"attention.{name}"] for name in sizes} == sizes
    assert (keys["kda.head_dim"], keys["ssm.conv_kernel"], keys["expert_gating_func"]) == (32, 4, 2)
    assert keys["kda.safe_gate"] and keys["kda.gate_lower_bound"] == -5.0
    assert (keys["expert_group_count"], keys["expert_group_used_count"]) == (ling.GROUPS, ling.USED_GROUPS)
    assert (keys["expert_shared_feed_forward_length"], keys["rope.freq_base"]) == (tiny.FF_EXPERT, 10000.0)
    shapes = {
        "blk.0.ssm_conv1d_k.weight": (4, 1, 128),
        "blk.0.ssm_a": (1, 4),
        "blk.0.ssm_f_a.weight": (64, 128),
        "blk.0.ssm_g_a.weight": (64, 128),
        "blk.1.attn_gate.weight": (64, 4),
        "blk.1.attn_k_b.weight": (32, 64, 4),
    }
    assert {name: file.tensors[name].shape for name in shapes} == shapes
    assert not {"blk.1.attn_kv_b.weight", "blk.0.attn_gate.weight"} & set(file.tensors)
    logarithms = tiny.weights(BAILING_HYBRID)["model.layers.0.attention.A_log"]
    np.testing.assert_array_equal(file.data(file.tensors["blk.0.ssm_a"]).view("<f4").reshape(-1), np.exp(logarithms))


def test_names_of_transformers(tmp_path: Path) -> None:
    """Kinds of layers, and sizes under the names that transformers 5 writes beside those of the repository."""
    official = converted(BAILING_HYBRID, tmp_path / "official")
    (tmp_path / "other").mkdir()
    folder = tiny.write(BAILING_HYBRID, tmp_path / "other" / "checkpoint")
    kinds = ["linear_attention", "full_attention"] * 2
    others = {"layer_types": kinds, "linear_head_dim": tiny.SIZE, "head_dim": tiny.ROT + 2, "num_local_experts": 8}
    made.amend(folder, drop=("layer_group_size", "num_experts"), **others)
    again = convert(folder, tmp_path / "other", outtype="f32")
    np.testing.assert_array_equal(logits_of(again), logits_of(official))


def test_bounds_of_networks(tmp_path: Path) -> None:
    """One per layer, and for prediction layers, which are left out."""
    limits = {"expert_swiglu_limit_list": [None, 0, 0.25, 0.5, 7.0], "share_expert_swiglu_limit_list": [0, 0, 0.5, 1]}
    file = converted(BAILING_HYBRID, tmp_path / "limited", **limits)
    assert file.metadata["bailingmoe3.swiglu_clamp_exp"].tolist() == [0, 0, 0.25, 0.5]
    assert file.metadata["bailingmoe3.swiglu_clamp_shexp"].tolist() == [0, 0, 0.5, 1]
    moved = np.abs(logits_of(file) - logits_of(converted(BAILING_HYBRID, tmp_path / "free")))
    assert moved.max() > 0.1


def test_layers_behind_the_last_whole_group_attend() -> None:
    for size, attends in ((2, [False, True, False, True]), (3, [False, False, True, True]), (5, [True] * 4)):
        values = {**BAILING_HYBRID.config, "layer_group_size": size}
        assert BailingHybrid(Config(values, Path("config.json"))).attends == attends


REFUSED: dict[str, dict[str, Any]] = {
    "kda_safe_gate False": {"kda_safe_gate": False},
    "no_kda_lora False": {"no_kda_lora": False},
    "gated_attention_proj_granularity_type element_wise": {"gated_attention_proj_granularity_type": "element_wise"},
    "kda_lower_bound 0": {"kda_lower_bound": 0.0},
    "layer_group_size 0": {"layer_group_size": 0},
    "RoPE scaling 'yarn'": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "layers of Ling 2.5, another linear attention": {"architectures": ["BailingMoeV2_5ForCausalLM"]},
    "expert_swiglu_limit_list": {"expert_swiglu_limit_list": [0.5]},
    "share_expert_swiglu_limit_list": {"share_expert_swiglu_limit_list": ["a"] * 4},
    "activation 'gelu'": {"hidden_act": "gelu"},
    "rope_interleave false": {"rope_interleave": False},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_file_can_say(what: str, tmp_path: Path) -> None:
    folder = tiny.write(BAILING_HYBRID, tmp_path / "checkpoint", **REFUSED[what])
    with pytest.raises(IkpyError, match=what) as error:
        Conversion(folder)
    assert "\n" not in str(error.value)


def test_a_tensor_that_is_missing(tmp_path: Path) -> None:
    folder = tiny.write(BAILING_HYBRID, tmp_path / "checkpoint")
    made.change_tensors(folder, lambda tensors: tensors.pop("model.layers.1.attention.g_proj.weight"))
    with pytest.raises(IkpyError, match=r"lacks blk.1.attn_gate.weight \(from 'attention.g_proj'\)"):
        Conversion(folder)
