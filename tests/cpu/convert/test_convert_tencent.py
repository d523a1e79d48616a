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
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert import seeded_checkpoints as tiny
from tests.cpu.convert.checkpoints import convert
from tests.cpu.convert.seeded_checkpoints import Tiny
from tests.cpu.convert.tencent_checkpoints import (
    FF_EXPERT,
    FF_SHARED,
    HEAD,
    HY_V3,
    HY_V4,
    INDEXERS,
    KINDS,
    LAGUNA,
    LAGUNA_HEADS,
    LAGUNA_PER_ELEMENT,
    LAGUNA_ROPE,
    N_EXPERT,
    N_HY_V3,
    N_HY_V4,
    N_LAGUNA,
    NOPE,
    RANK,
    ROT,
    TOP_K,
    VALUE,
    WINDOW,
)
from tests.cpu.convert.test_convert_deepseek4 import assert_same
from tests.cpu.convert.test_convert_seeded import converted, logits_of


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
    "'rms_norm_eps' is inf": {"rms_norm_eps": float("inf")},
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


# Hy4


def test_hy_v4_as_llama_cpp_has_it(tmp_path: Path) -> None:
    file = converted(HY_V4, tmp_path)
    keys = keys_of(file)
    wanted = {
        "attention.head_count_kv": 1,
        "attention.key_length": RANK + ROT,
        "attention.value_length": RANK,
        "attention.key_length_mla": NOPE + ROT,
        "attention.value_length_mla": VALUE,
        "attention.indexer.top_k": TOP_K,
        "expert_gating_func": 2,
        "leading_dense_block_count": 1,
        "hyper_connection.count": 3,
    }
    assert {name: keys[name] for name in wanted} == wanted
    assert keys["attention.indexer.types"].tolist() == [kind == "full" for kind in INDEXERS]
    assert keys["swiglu_clamp_exp"].tolist() == pytest.approx([0.7] * N_HY_V4)
    assert keys["hyper_connection.magnitude"] == pytest.approx(1.8)
    shapes = {
        "blk.1.attn_k_b.weight": (NOPE, RANK, tiny.HEADS),
        "blk.1.attn_v_b.weight": (RANK, VALUE, tiny.HEADS),
        "blk.1.attn_gate.weight": (tiny.D, tiny.HEADS * VALUE),
        "blk.1.hc_attn_fn.weight": (3 * tiny.D, 6),
        "output_hc_scale.weight": (1,),
    }
    assert {name: file.tensors[name].shape for name in shapes} == shapes
    assert not {"blk.1.attn_kv_b.weight", "blk.2.indexer.proj.weight"} & set(file.tensors)


def test_hy_v4_of_transformers(tmp_path: Path) -> None:
    """Its names, and a configuration that leaves out what its class knows."""
    (tmp_path / "other").mkdir()
    folder = tiny.write(HY_V4, tmp_path / "other" / "checkpoint")
    names = {
        ".hc_pre.hc_": ".hc_",
        ".learnable_sink_param": ".sinks",
        ".linear_gate": ".gate_proj",
        ".hc_attn_layer.hc_": ".attn_hc.",
        ".hc_mlp_layer.hc_": ".ffn_hc.",
        ".hc_head_": ".hc_",
    }
    made.change_tensors(folder, lambda tensors: renamed(tensors, names))
    left_out = ("first_k_dense_replace", "norm_topk_prob", "routed_scaling_factor", "learnable_sink", "gating_type")
    made.amend(folder, drop=left_out, layer_types=["indexed_attention"] * N_HY_V4)
    assert_same(convert(folder, tmp_path / "other", outtype="f32"), converted(HY_V4, tmp_path))


def test_hy_v4_without_indexers(tmp_path: Path) -> None:
    """Layers that attend to everything: no keys of indexers, and none that bounds nothing."""
    folder = tiny.write(HY_V4, tmp_path / "checkpoint", layer_types=["full_attention"] * N_HY_V4, swiglu_limit=0.0)

    def remove(tensors: made.Tensors) -> None:
        for name in [name for name in tensors if ".indexer." in name]:
            del tensors[name]

    made.change_tensors(folder, remove)
    file = convert(folder, tmp_path, outtype="f32")
    assert not [name for name in keys_of(file) if ".indexer." in name or name == "swiglu_clamp_exp"]
    assert np.isfinite(logits_of(file)).all()


def test_hy_v4_prediction_layers_are_left_out(tmp_path: Path) -> None:
    folder = tiny.write(HY_V4, tmp_path / "checkpoint", num_nextn_predict_layers=1)
    more = {"model.mtp_layers.0.eh_proj.weight": made.bf16(np.ones((tiny.D, 2 * tiny.D), np.float32))}
    made.change_tensors(folder, lambda tensors: tensors.update(more))
    assert any("1 tensors of prediction layers (MTP) are left out" in note for note in Conversion(folder).notes)


HY_V4_REFUSED: dict[str, dict[str, Any]] = {
    "RoPE scaling 'yarn'": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e7,
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 64,
        }
    },
    "n_group 2": {"n_group": 2},
    "learnable_sink false": {"learnable_sink": False},
    "gated_mla false": {"gated_mla": False},
    "gating_type 'headwise'": {"gating_type": "headwise"},
    "no indexer in the first layer": {"indexer_types": ["shared", "full", "shared", "full"]},
    "3 indexer types of 4 layers": {"indexer_types": INDEXERS[:3]},
    r"indexer_types \['full', 'none'\]": {"indexer_types": ["full", "full", "none", "full"]},
    r"layers of kinds \['full_attention', 'indexed_attention'\]": {
        "layer_types": ["full_attention", *["indexed_attention"] * 3]
    },
    "dense layers among the expert layers": {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]},
    "9 residual streams are not possible": {"hc_mult": 9},
    "'kv_lora_rank' is missing": {"kv_lora_rank": None},
}


@pytest.mark.parametrize("what", HY_V4_REFUSED)
def test_what_no_file_of_hy_v4_can_say(what: str, tmp_path: Path) -> None:
    check_refused(HY_V4, what, HY_V4_REFUSED[what], tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("self_attn.learnable_sink_param", "attn_sinks"),
        ("self_attn.indexer.wk.weight", "indexer"),
        ("hc_mlp_layer.hc_pre.hc_base", "hc_ffn_base"),
        ("self_attn.indexer.k_norm.bias", "indexer.k_norm.bias"),
    ],
)
def test_incomplete_checkpoints_of_hy_v4(name: str, message: str, tmp_path: Path) -> None:
    folder = tiny.write(HY_V4, tmp_path / "checkpoint")
    made.change_tensors(folder, lambda tensors: tensors.pop(f"model.layers.1.{name}"))
    with pytest.raises(IkpyError, match=message) as error:
        Conversion(folder)
    assert "\n" not in str(error.value)
