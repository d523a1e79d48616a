"""`ikpy convert` of Tencent's and poolside's mixtures: what files hold, names and configurations, errors."""

from __future__ import annotations

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
from tests.cpu.tencent_checkpoints import FF_EXPERT, HY_V3, N_EXPERT, N_HY_V3
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
