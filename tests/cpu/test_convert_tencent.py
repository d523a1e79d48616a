"""`ikpy convert` of Tencent's and poolside's mixtures: what files hold, names and configurations, errors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import Conversion
from ikpy.errors import IkpyError
from ikpy.gguf.reader import GGUFFile
from tests.cpu import checkpoints as made
from tests.cpu import seeded_checkpoints as tiny
from tests.cpu.checkpoints import convert
from tests.cpu.seeded_checkpoints import Tiny
from tests.cpu.tencent_checkpoints import (
    FF_EXPERT,
    FF_SHARED,
    HEAD,
    HY_V3,
    KINDS,
    LAGUNA,
    LAGUNA_HEADS,
    LAGUNA_PER_ELEMENT,
    LAGUNA_ROPE,
    N_EXPERT,
    N_HY_V3,
    N_LAGUNA,
    WINDOW,
)
from tests.cpu.test_convert_deepseek4 import assert_same
from tests.cpu.test_convert_seeded import converted


def keys_of(file: GGUFFile) -> dict[str, Any]:
    """Keys without the architecture."""
    arch = file.metadata["general.architecture"]
    return {name.removeprefix(f"{arch}."): value for name, value in file.metadata.items()}


def join_experts(tensors: made.Tensors) -> None:
    """The experts of a layer in two tensors, as transformers keeps them."""
    for il in range(64):
        p = f"model.layers.{il}.mlp.experts"
        if f"{p}.0.gate_proj.weight" not in tensors:
            continue

        def taken(name: str, p: str = p) -> list[bytes]:
            return [tensors.pop(f"{p}.{e}.{name}_proj.weight")[2] for e in range(N_EXPERT)]

        gates, ups = taken("gate"), taken("up")
        both = b"".join(part for pair in zip(gates, ups, strict=True) for part in pair)
        tensors[f"{p}.gate_up_proj"] = "BF16", (N_EXPERT, 2 * FF_EXPERT, tiny.D), both
        tensors[f"{p}.down_proj"] = "BF16", (N_EXPERT, tiny.D, FF_EXPERT), b"".join(taken("down"))


def renamed(tensors: made.Tensors, names: dict[str, str]) -> None:
    """Every part of a name that is a key becomes its value."""
    for name in list(tensors):
        new = name
        for old, other in names.items():
            new = new.replace(old, other)
        tensors[new] = tensors.pop(name)


def check_refused(kind: Tiny, what: str, config: dict[str, Any], folder: Path) -> None:
    """One line that says what no file can express."""
    checkpoint = tiny.write(kind, folder / "checkpoint", **config)
    with pytest.raises(IkpyError, match=what) as error:
        Conversion(checkpoint)
    assert "\n" not in str(error.value)


# Hy3


def test_hy_v3_as_llama_cpp_has_it(tmp_path: Path) -> None:
    file = converted(HY_V3, tmp_path)
    keys = keys_of(file)
    assert (keys["expert_gating_func"], keys["expert_weights_norm"], keys["leading_dense_block_count"]) == (2, True, 1)
    assert (keys["expert_feed_forward_length"], keys["expert_shared_feed_forward_length"]) == (FF_EXPERT, FF_EXPERT)
    assert keys["expert_weights_scale"] == pytest.approx(2.826)
    assert keys["rope.freq_base"] == pytest.approx(11158840.0)
    assert file.tensors["blk.1.exp_probs_b"].shape == (N_EXPERT,)
    assert "blk.0.exp_probs_b" not in file.tensors


def test_hy_v3_of_transformers(tmp_path: Path) -> None:
    """Its names, the experts of a layer together, and a configuration that says no more than it has to."""
    (tmp_path / "other").mkdir()
    folder = tiny.write(HY_V3, tmp_path / "other" / "checkpoint")
    names = {"router.gate": "gate", "expert_bias": "e_score_correction_bias", "shared_mlp": "shared_experts"}

    def change(tensors: made.Tensors) -> None:
        renamed(tensors, names)
        join_experts(tensors)

    made.change_tensors(folder, change)
    left_out = ("first_k_dense_replace", "rope_parameters", "num_shared_experts", "qk_norm", "route_norm")
    made.amend(folder, drop=left_out)
    assert_same(convert(folder, tmp_path / "other", outtype="f32"), converted(HY_V3, tmp_path))


def test_prediction_layers_are_left_out(tmp_path: Path) -> None:
    folder = tiny.write(HY_V3, tmp_path / "checkpoint", num_nextn_predict_layers=1)

    def add(tensors: made.Tensors) -> None:
        for name in list(tensors):
            if name.startswith("model.layers.1."):
                tensors[name.replace("layers.1", f"layers.{N_HY_V3}")] = tensors[name]
        tensors[f"model.layers.{N_HY_V3}.final_layernorm.weight"] = made.bf16(np.ones(tiny.D, np.float32))

    made.change_tensors(folder, add)
    plan = Conversion(folder)
    assert any("prediction layers (MTP) are left out" in note for note in plan.notes)
    assert not any(tensor.output.name.startswith(f"blk.{N_HY_V3}.") for tensor in plan.tensors)


def test_a_missing_bias_is_found(tmp_path: Path) -> None:
    folder = tiny.write(HY_V3, tmp_path / "checkpoint")
    made.change_tensors(folder, lambda tensors: tensors.pop("model.layers.1.mlp.expert_bias"))
    with pytest.raises(IkpyError, match="layer 1 lacks exp_probs_b, which layer 2 has"):
        Conversion(folder)


HY_V3_REFUSED: dict[str, dict[str, Any]] = {
    "qk_norm false": {"qk_norm": False},
    "moe_router_use_sigmoid false": {"moe_router_use_sigmoid": False},
    "num_shared_experts 0": {"num_shared_experts": 0},
    "activation 'gelu'": {"hidden_act": "gelu"},
    "partial_rotary_factor 0.5": {"partial_rotary_factor": 0.5},
    "dense layers among the expert layers": {"mlp_layer_types": ["sparse", "dense", "sparse"]},
    "RoPE scaling 'dynamic' is not supported": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}},
    "'moe_intermediate_size' is missing": {"moe_intermediate_size": None, "expert_hidden_dim": None},
}


@pytest.mark.parametrize("what", HY_V3_REFUSED)
def test_what_no_file_of_hy_v3_can_say(what: str, tmp_path: Path) -> None:
    check_refused(HY_V3, what, HY_V3_REFUSED[what], tmp_path)


# Laguna


def test_laguna_as_llama_cpp_has_it(tmp_path: Path) -> None:
    file = converted(LAGUNA, tmp_path)
    keys = keys_of(file)
    assert keys["attention.head_count"].tolist() == LAGUNA_HEADS
    assert (keys["attention.sliding_window"], keys["rope.dimension_count"], keys["rope.dimension_count_swa"]) == (
        WINDOW,
        HEAD // 2,
        HEAD,
    )
    assert "attention.sliding_window_pattern" not in keys, (
        "the usual one: every fourth layer is full, from the first on"
    )
    assert (keys["rope.freq_base"], keys["rope.freq_base_swa"]) == (500000.0, 10000.0)
    assert (keys["rope.scaling.yarn_beta_fast"], keys["rope.scaling.factor"]) == (64.0, 8.0)
    # The configuration asks for a magnitude of 1, files are run with 1 + 0.1 ln(factor) times their own.
    assert keys["rope.scaling.attn_factor"] == pytest.approx(1 / (1 + 0.1 * np.log(8)))
    assert (keys["expert_gating_func"], keys["expert_weights_norm"], keys["leading_dense_block_count"]) == (2, True, 1)
    assert keys["expert_shared_feed_forward_length"] == FF_SHARED
    assert file.tensors["blk.1.attn_gate.weight"].shape == (tiny.D, LAGUNA_HEADS[1])
    other = converted(LAGUNA_PER_ELEMENT, tmp_path / "other")
    assert keys_of(other)["attention.sliding_window_pattern"].tolist() == [True, True, True, False, False]
    assert other.tensors["blk.1.attn_gate.weight"].shape == (tiny.D, LAGUNA_HEADS[1] * HEAD)


def test_laguna_of_transformers(tmp_path: Path) -> None:
    """Its names, and the experts of a layer together."""
    (tmp_path / "other").mkdir()
    folder = tiny.write(LAGUNA, tmp_path / "other" / "checkpoint")
    names = {"experts.e_score_correction_bias": "gate.e_score_correction_bias", "shared_expert.": "shared_experts."}

    def change(tensors: made.Tensors) -> None:
        renamed(tensors, names)
        join_experts(tensors)

    made.change_tensors(folder, change)
    made.amend(folder, drop=("mlp_layer_types", "gating"))
    assert_same(convert(folder, tmp_path / "other", outtype="f32"), converted(LAGUNA, tmp_path))


def test_laguna_without_windows(tmp_path: Path) -> None:
    """As M.1: equal heads, no window, no scaling that the usual magnitude would have."""
    rope = {"full_attention": {**LAGUNA_ROPE["full_attention"], "attention_factor": 1 + 0.1 * math.log(8)}}
    folder = tiny.write(LAGUNA, tmp_path / "checkpoint", layer_types=None, sliding_window=None, rope_parameters=rope)
    keys = keys_of(convert(folder, tmp_path, outtype="f32"))
    absent = ("attention.sliding_window", "rope.freq_base_swa", "rope.dimension_count_swa", "rope.scaling.attn_factor")
    assert not keys.keys() & set(absent)


LAGUNA_REFUSED: dict[str, dict[str, Any]] = {
    "moe_router_logit_softcapping 5.0": {"moe_router_logit_softcapping": 5.0},
    "moe_apply_router_weight_on_input True": {"moe_apply_router_weight_on_input": True},
    "swa_attention_sink_enabled True": {"swa_attention_sink_enabled": True},
    "norm_topk_prob false": {"norm_topk_prob": False},
    r"gating \['False'\]": {"gating": False},
    r"gating \['per-token'\]": {"gating_types": ["per-token"] * N_LAGUNA},
    "4 kinds of 5 layers": {"layer_types": KINDS[:4]},
    "2 numbers of heads of 5 layers": {"num_attention_heads_per_layer": [4, 6]},
    r"layers of kind \['chunked_attention'\]": {"layer_types": ["chunked_attention", *KINDS[1:]]},
    "a window of 0 tokens": {"sliding_window": 0},
    "'sliding_attention' of 'rope_parameters' is missing": {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
    "'full_attention' of 'rope_parameters' is missing": {
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}
    },
    "'rope_parameters' is missing": {"rope_parameters": None},
    "RoPE scaling 'linear' of layers with a window": {
        "rope_parameters": {**LAGUNA_ROPE, "sliding_attention": {"rope_type": "linear", "factor": 2.0}}
    },
    "YaRN with mscale": {
        "rope_parameters": {**LAGUNA_ROPE, "full_attention": {**LAGUNA_ROPE["full_attention"], "mscale": 1.0}}
    },
    "dense layers among the expert layers": {"mlp_layer_types": ["sparse", "dense", *["sparse"] * 3]},
}


@pytest.mark.parametrize("what", LAGUNA_REFUSED)
def test_what_no_file_of_laguna_can_say(what: str, tmp_path: Path) -> None:
    check_refused(LAGUNA, what, LAGUNA_REFUSED[what], tmp_path)


def test_a_gate_of_another_width(tmp_path: Path) -> None:
    folder = tiny.write(LAGUNA, tmp_path / "checkpoint")
    gate = made.bf16(np.ones((3, tiny.D), np.float32))
    made.change_tensors(folder, lambda tensors: tensors.update({"model.layers.2.self_attn.g_proj.weight": gate}))
    with pytest.raises(IkpyError, match=r"self_attn\.g_proj"):
        Conversion(folder)
