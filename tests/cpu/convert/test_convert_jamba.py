"""`ikpy convert` of Jamba, Mamba and Falcon Mamba: logits that transformers recorded, what files hold, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import Conversion
from ikpy.errors import IkpyError
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert import seeded_checkpoints as tiny
from tests.cpu.convert.checkpoints import convert
from tests.cpu.convert.seeded_checkpoints import FF_EXPERT, N_EXPERT, D, Tiny
from tests.cpu.convert.shelf_checkpoints import FALCON_MAMBA, JAMBA, JAMBA_KV, JAMBA_TAPS, MAMBA, RANK, STATE
from tests.cpu.convert.test_convert import types
from tests.cpu.convert.test_convert_seeded import converted

KINDS = (JAMBA, MAMBA, FALCON_MAMBA)


def test_jamba_as_llama_cpp_has_it(tmp_path: Path) -> None:
    file = converted(JAMBA, tmp_path)
    keys = {name.removeprefix("jamba."): value for name, value in file.metadata.items()}
    assert keys["attention.head_count_kv"].tolist() == [0, JAMBA_KV, 0, 0, JAMBA_KV]
    sizes = {"conv_kernel": JAMBA_TAPS, "inner_size": 2 * D, "state_size": STATE, "time_step_rank": RANK}
    assert {name: keys[f"ssm.{name}"] for name in sizes} == sizes
    assert (keys["expert_count"], keys["expert_used_count"]) == (N_EXPERT, tiny.USED)
    shapes = {
        "blk.0.ssm_a": (STATE, 2 * D),
        "blk.0.ssm_d": (2 * D,),
        "blk.0.ssm_conv1d.weight": (JAMBA_TAPS, 2 * D),
        "blk.0.ssm_dt.bias": (2 * D,),
        "blk.0.ssm_b_norm.weight": (STATE,),
        "blk.1.ffn_up_exps.weight": (D, FF_EXPERT, N_EXPERT),
    }
    assert {name: file.tensors[name].shape for name in shapes} == shapes


def test_experts_stored_together_and_names_of_first_files(tmp_path: Path) -> None:
    official = converted(JAMBA, tmp_path / "official")
    (tmp_path / "other").mkdir()
    folder = tiny.write(JAMBA, tmp_path / "other" / "checkpoint")
    weights = tiny.weights(JAMBA)

    def change(tensors: made.Tensors) -> None:
        for il in (1, 3):
            p = f"model.layers.{il}.feed_forward.experts"

            def stack(name: str, p: str = p) -> np.ndarray:
                for e in range(N_EXPERT):
                    del tensors[f"{p}.{e}.{name}_proj.weight"]
                return np.stack([weights[f"{p}.{e}.{name}_proj.weight"] for e in range(N_EXPERT)])

            tensors[f"{p}.gate_up_proj"] = made.bf16(np.concatenate([stack("gate"), stack("up")], axis=1))
            tensors[f"{p}.down_proj"] = made.bf16(stack("down"))
        for name in [name for name in tensors if "pre_ff_layernorm" in name]:
            tensors[name.replace("pre_ff", "pre_moe")] = tensors.pop(name)

    made.change_tensors(folder, change)
    file = convert(folder, tmp_path / "other", outtype="f32")
    assert file.tensors.keys() == official.tensors.keys()
    for name, info in official.tensors.items():
        assert np.array_equal(file.data(file.tensors[name]), official.data(info)), name


def test_mamba_as_llama_cpp_has_it(tmp_path: Path) -> None:
    file = converted(FALCON_MAMBA, tmp_path)
    keys = {name.removeprefix("mamba."): value for name, value in file.metadata.items()}
    assert keys["ssm.dt_b_c_rms"] is True and keys["attention.head_count"] == keys["feed_forward_length"] == 0
    assert "ssm.dt_b_c_rms" not in converted(MAMBA, tmp_path / "plain").metadata
    assert "output.weight" not in file.tensors


@pytest.mark.parametrize("outtype", ["bf16", "q8_0"])
def test_types(outtype: str, tmp_path: Path) -> None:
    found = types(converted(JAMBA, tmp_path, outtype))
    small = ("norm.weight", ".bias", "ffn_gate_inp.weight", "ssm_a", "ssm_d", "ssm_conv1d.weight")
    for name, kind in found.items():
        narrow = outtype == "q8_0" and name.endswith("ssm_dt.weight")  # rows of RANK elements
        assert kind == ("f32" if name.endswith(small) else "bf16" if narrow else outtype), name


def test_epsilon_of_falcon_mamba_is_told(tmp_path: Path) -> None:
    folder = tiny.write(FALCON_MAMBA, tmp_path / "checkpoint", layer_norm_epsilon=1e-5)
    assert any(
        "normed with the epsilon of the other norms, 1e-05 instead of 1e-06" in n for n in Conversion(folder).notes
    )


BAD: list[tuple[Tiny, dict[str, Any], str]] = [
    (JAMBA, {"mamba_dt_rank": 5}, "tensor 'blk.0.ssm_x.weight' has wrong shape"),
    (JAMBA, {"mamba_dt_rank": "none"}, "'mamba_dt_rank' is \"none\", not an integer"),
    (JAMBA, {"attn_layer_offset": 2}, "layer 1 lacks"),
    (JAMBA, {"hidden_act": "relu"}, "activation 'relu'"),
    (MAMBA, {"hidden_act": "relu"}, "activation 'relu'"),
    (MAMBA, {"state_size": 8}, "has wrong shape"),
    (MAMBA, {"expand": 3}, "has wrong shape"),
]


@pytest.mark.parametrize(("kind", "values", "message"), BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_what_cannot_be_expressed(kind: Tiny, values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(IkpyError, match=message):
        Conversion(tiny.write(kind, tmp_path / "checkpoint", **values))


def test_convolutions_without_biases(tmp_path: Path) -> None:
    folder = tiny.write(MAMBA, tmp_path / "checkpoint", use_conv_bias=False)

    def drop(tensors: made.Tensors) -> None:
        for name in [name for name in tensors if name.endswith("conv1d.bias")]:
            del tensors[name]

    made.change_tensors(folder, drop)
    with pytest.raises(IkpyError, match=r"architecture mamba needs blk\.0\.ssm_conv1d\.bias"):
        Conversion(folder)
