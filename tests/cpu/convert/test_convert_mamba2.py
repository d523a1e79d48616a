"""`ikpy convert` of checkpoints with layers of Mamba-2: what files hold, names and configurations, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import Conversion
from ikpy.errors import IkpyError
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert import mamba2_checkpoints as mamba2
from tests.cpu.convert import seeded_checkpoints as tiny
from tests.cpu.convert.checkpoints import convert
from tests.cpu.convert.mamba2_checkpoints import (
    FALCON_H1,
    GRANITE_HYBRID,
    GRANITE_HYBRID_MOE,
    GRANITE_SHARED,
    MAMBA2,
    NEMOTRON_H,
    NEMOTRON_H_MOE,
)
from tests.cpu.convert.test_convert_seeded import converted, logits_of

# Nemotron-H


def test_nemotron_h_as_llama_cpp_has_it(tmp_path: Path) -> None:
    file = converted(NEMOTRON_H_MOE, tmp_path)
    keys = {name.removeprefix("nemotron_h_moe."): value for name, value in file.metadata.items()}
    assert keys["attention.head_count_kv"].tolist() == [0, 0, 0, tiny.KV, 0]
    assert keys["feed_forward_length"].tolist() == [0, tiny.FF_EXPERT, 0, 0, tiny.FF_EXPERT]
    assert (keys["ssm.inner_size"], keys["ssm.time_step_rank"], keys["ssm.group_count"]) == (128, 8, 2)
    assert (keys["moe_latent_size"], keys["expert_shared_feed_forward_length"]) == (mamba2.LATENT, mamba2.FF_SHARED)
    assert keys["attention.layer_norm_epsilon"] == keys["attention.layer_norm_rms_epsilon"]
    shapes = {
        "blk.0.ssm_conv1d.weight": (4, 256),
        "blk.0.ssm_conv1d.bias": (256,),
        "blk.0.ssm_a": (1, 8),
        "blk.0.ssm_d": (1, 8),
        "blk.0.ssm_norm.weight": (64, 2),
        "blk.1.ffn_up_exps.weight": (mamba2.LATENT, tiny.FF_EXPERT, tiny.N_EXPERT),
    }
    assert {name: file.tensors[name].shape for name in shapes} == shapes


def test_nemotron_h_of_transformers(tmp_path: Path) -> None:
    """Kinds of layers and names as transformers 5 writes them, experts of a layer in one tensor."""
    official = converted(NEMOTRON_H_MOE, tmp_path / "official")
    (tmp_path / "other").mkdir()
    names = {"M": "linear_attention", "*": "full_attention", "E": "moe"}
    kinds = [names[letter] for letter in mamba2.EXPERT_PATTERN]
    folder = tiny.write(NEMOTRON_H_MOE, tmp_path / "other" / "checkpoint", layers_block_type=kinds)
    made.amend(folder, drop=("hybrid_override_pattern", "num_hidden_layers"))

    def rename(tensors: made.Tensors) -> None:
        for name in list(tensors):
            if name.startswith("backbone."):
                tensors[name.replace("backbone.", "model.", 1)] = tensors.pop(name)
        for il in (1, 4):
            for part in ("up_proj", "down_proj"):
                stem = f"model.layers.{il}.mixer.experts"
                entries = [tensors.pop(f"{stem}.{e}.{part}.weight") for e in range(tiny.N_EXPERT)]
                shape = (tiny.N_EXPERT, *entries[0][1])
                tensors[f"{stem}.{part}"] = (entries[0][0], shape, b"".join(entry[2] for entry in entries))

    made.change_tensors(folder, rename)
    again = convert(folder, tmp_path / "other", outtype="f32")
    np.testing.assert_array_equal(logits_of(again), logits_of(official))


@pytest.mark.parametrize(
    ("what", "config"),
    [
        ("layers of kind 'X'", {"hybrid_override_pattern": "M-X*-"}),
        ("4 kinds of 5 layers", {"hybrid_override_pattern": "M-M*"}),
        ("dense layers beside layers of experts", {"hybrid_override_pattern": "M-ME*"}),
        ("activation 'silu'", {"mlp_hidden_act": "silu"}),
        ("activation 'gelu' of recurrent layers", {"mamba_hidden_act": "gelu"}),
        ("layer 1 lacks blk.1.ssm_in.weight", {"hybrid_override_pattern": "MMM*-"}),
    ],
)
def test_what_no_file_of_nemotron_h_can_say(what: str, config: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny.write(NEMOTRON_H, tmp_path / "checkpoint", **config)
    with pytest.raises(IkpyError, match=what) as error:
        Conversion(folder)
    assert "\n" not in str(error.value)


def test_routing_within_groups_is_refused(tmp_path: Path) -> None:
    folder = tiny.write(NEMOTRON_H_MOE, tmp_path / "checkpoint", n_group=4, topk_group=2)
    with pytest.raises(IkpyError, match="n_group 4"):
        Conversion(folder)


# Granite 4.0


def test_granite_hybrid_as_llama_cpp_has_it(tmp_path: Path) -> None:
    for kind in (GRANITE_HYBRID, GRANITE_HYBRID_MOE):
        file = converted(kind, tmp_path / kind.name)
        keys = {name.removeprefix("granitehybrid."): value for name, value in file.metadata.items()}
        assert keys["attention.head_count_kv"].tolist() == [0, tiny.KV, 0]
        assert keys["rope.scaling.finetuned"] is False
        experts = kind is GRANITE_HYBRID_MOE
        assert keys["feed_forward_length"] == (tiny.FF_EXPERT if experts else mamba2.FF_SHARED)
        assert keys.get("expert_shared_feed_forward_length") == (mamba2.FF_SHARED if experts else None)
        assert file.tensors["blk.0.ssm_norm.weight"].shape == (128, 1)
        shared = "_shexp" if experts else ""
        assert file.tensors[f"blk.1.ffn_up{shared}.weight"].shape == (tiny.D, mamba2.FF_SHARED)


def test_granite_without_recurrent_layers(tmp_path: Path) -> None:
    file = converted(GRANITE_SHARED, tmp_path)
    assert file.metadata["general.architecture"] == "granite"
    assert file.metadata["granite.rope.scaling.finetuned"] is True


@pytest.mark.parametrize(
    ("what", "config"),
    [
        ("layers of kind 'conv'", {"layer_types": ["conv", "attention", "mamba"]}),
        ("2 kinds of layers", {"layer_types": ["mamba", "attention"]}),
        ("8 heads of 32 beside 128 elements", {"mamba_d_head": 32}),
        ("layer 1 lacks blk.1.ssm_in.weight", {"layer_types": None}),
    ],
)
def test_what_no_file_of_granite_can_say(what: str, config: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny.write(GRANITE_HYBRID, tmp_path / "checkpoint", **config)
    with pytest.raises(IkpyError, match=what):
        Conversion(folder)


# Falcon-H1


def test_falcon_h1_as_llama_cpp_has_it(tmp_path: Path) -> None:
    """Factors are part of the weights; the second norm has no suffix."""
    plain = {name: 1.0 for name in FALCON_H1.config if name.endswith("_multiplier")}
    plain |= {"mlp_multipliers": None, "ssm_multipliers": None}
    file, without = converted(FALCON_H1, tmp_path / "factors"), converted(FALCON_H1, tmp_path / "none", **plain)
    assert file.tensors["blk.0.ffn_norm"].shape == (tiny.D,)
    assert "blk.0.ssm_norm.weight" not in file.tensors

    def ratios(name: str) -> np.ndarray:
        """Of each row to what it is without factors."""
        a, b = (f.data(f.tensors[name]).view(np.float32).reshape(f.tensors[name].shape[::-1]) for f in (file, without))
        np.testing.assert_allclose(a / b, (a / b)[:, :1] * np.ones_like(a), rtol=1e-5)
        return (a / b)[:, 0]

    rows = np.repeat(1.5 * np.array([0.9, 1.2, 0.7, 0.6, 1.1]), (128, 128, 64, 64, 8))
    np.testing.assert_allclose(ratios("blk.1.ssm_in.weight"), rows, rtol=1e-5)
    factors = {"attn_k": 1.25 * 0.5, "attn_output": 0.75, "ffn_gate": 0.8, "ffn_up": 1.0, "ffn_down": 0.4}
    for name, factor in factors.items():
        np.testing.assert_allclose(ratios(f"blk.1.{name}.weight"), factor, rtol=1e-5)


@pytest.mark.parametrize(
    ("what", "config"),
    [
        ("tied embeddings", {"tie_word_embeddings": True}),
        ("a norm before the gate", {"mamba_rms_norm": True, "mamba_norm_before_gate": True}),
        (r"mlp_multipliers \[1.0\]", {"mlp_multipliers": [1.0]}),
        ("tensor 'blk.0.ssm_in.weight' has wrong shape", {"mamba_n_groups": 4}),
        ("'mamba_d_ssm' is 2147483648", {"mamba_d_ssm": 1 << 31}),
        ("'mamba_d_state' is ", {"mamba_n_groups": 1 << 31}),
        ("'mamba_n_heads' is ", {"mamba_n_heads": 1 << 31}),
    ],
)
def test_what_no_file_of_falcon_h1_can_say(what: str, config: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny.write(FALCON_H1, tmp_path / "checkpoint", **config)
    with pytest.raises(IkpyError, match=what):
        Conversion(folder)


# Mamba-2 alone


def test_mamba2_as_llama_cpp_has_it(tmp_path: Path) -> None:
    file = converted(MAMBA2, tmp_path)
    keys = {name.removeprefix("mamba2."): value for name, value in file.metadata.items()}
    zero = ("attention.head_count", "feed_forward_length")
    assert [keys[name] for name in zero] == [0, 0] and "attention.head_count_kv" not in keys
    assert (keys["ssm.inner_size"], keys["ssm.time_step_rank"], keys["context_length"]) == (128, 8, 1 << 20)


def test_biases_of_mamba2_are_refused(tmp_path: Path) -> None:
    folder = tiny.write(MAMBA2, tmp_path / "checkpoint", use_bias=True)
    change = {"backbone.layers.0.mixer.out_proj.bias": made.bf16(np.zeros(tiny.D, np.float32))}
    made.change_tensors(folder, lambda tensors: tensors.update(change))
    with pytest.raises(IkpyError, match=r"architecture mamba2 has no bias"):
        Conversion(folder)


@pytest.mark.parametrize("limit", [None, [0.0, float("inf")], [0.0, {"__float__": "Infinity"}], [0, "Infinity"]])
def test_steps_without_bounds(limit: list[Any] | None, tmp_path: Path) -> None:
    Conversion(tiny.write(MAMBA2, tmp_path / "checkpoint", time_step_limit=limit))


@pytest.mark.parametrize("limit", [[0.001, float("inf")], [0.0, 0.1], [0.0], "x"])
def test_bounds_of_steps_are_refused(limit: Any, tmp_path: Path) -> None:
    folder = tiny.write(MAMBA2, tmp_path / "checkpoint", time_step_limit=limit)
    with pytest.raises(IkpyError, match=r"steps between|values that it cannot have") as error:
        Conversion(folder)
    assert "\n" not in str(error.value)
