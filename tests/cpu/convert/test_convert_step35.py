"""`ikpy convert` of Step 3.5 and 3.7: what files hold, spellings of configurations, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import Conversion
from ikpy.errors import IkpyError
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert import ling_checkpoints as ling
from tests.cpu.convert import seeded_checkpoints as tiny
from tests.cpu.convert.checkpoints import convert
from tests.cpu.convert.ling_checkpoints import STEP37
from tests.cpu.convert.test_convert_seeded import converted, logits_of

TEXT: dict[str, Any] = STEP37.config["text_config"]


def test_step_as_llama_cpp_has_it(tmp_path: Path) -> None:
    file = converted(STEP37, tmp_path)
    keys = {name.removeprefix("step35."): value for name, value in file.metadata.items()}
    lists = {
        "attention.head_count": [2, 3, 3, 2],
        "attention.head_count_kv": [1] * 4,
        "attention.sliding_window_pattern": [0, 1, 1, 0],
        "swiglu_clamp_exp": [0.0, 0.0, 0.5, 0.0],
        "swiglu_clamp_shexp": [0.0, 0.0, 0.0, float(np.float32(0.7))],
    }
    assert {name: keys[name].tolist() for name in lists} == lists
    numbers = {
        "attention.sliding_window": ling.STEP_SEEN,
        "rope.dimension_count": ling.STEP_HEAD,
        "rope.freq_base": 5e6,
        "rope.freq_base_swa": 1e4,
        "leading_dense_block_count": 1,
        "expert_count": tiny.N_EXPERT,
        "expert_used_count": tiny.USED,
        "expert_shared_feed_forward_length": tiny.FF_EXPERT,
        "expert_weights_scale": 2.0,
        "expert_gating_func": 2,
    }
    assert {name: keys[name] for name in numbers} == numbers
    factors = file.data(file.tensors["rope_freqs.weight"]).view(np.float32)
    assert factors.shape == (16,) and 1 < factors[0] < factors[1] < factors[2] == 2 and (factors[8:] == 1).all()
    norm = tiny.weights(STEP37)["model.layers.0.input_layernorm.weight"]
    np.testing.assert_array_equal(file.data(file.tensors["blk.0.attn_norm.weight"]).view(np.float32), norm + 1)
    assert not any("vision" in name or "vit" in name for name in file.tensors)


def as_text(folder: Path, **config: Any) -> Path:
    """A checkpoint of the language model alone, with its configuration changed; None takes a value away."""
    tiny.write(STEP37, folder)
    text = {"architectures": ["Step3p5ForCausalLM"], **TEXT, **config}
    (folder / "config.json").write_text(json.dumps({name: value for name, value in text.items() if value is not None}))
    return folder


SPELLINGS: dict[str, dict[str, Any]] = {
    "of Step 3.5": {},
    "of transformers": {
        **dict.fromkeys(("num_attention_groups", "moe_num_experts", "moe_top_k", "moe_layers_enum", "rope_theta")),
        **dict.fromkeys(("partial_rotary_factors", "rope_scaling", "attention_other_setting")),
        "num_key_value_heads": 1,
        "n_routed_experts": tiny.N_EXPERT,
        "num_experts_per_tok": tiny.USED,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "num_sliding_attention_heads": 3,
        "rope_parameters": {
            "full_attention": {**TEXT["rope_scaling"], "rope_theta": 5e6, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    },
    "scaling among the parameters of RoPE": {"rope_scaling": None, "rope_parameters": TEXT["rope_scaling"]},
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_of_configurations(name: str, tmp_path: Path) -> None:
    file = convert(as_text(tmp_path / "checkpoint", **SPELLINGS[name]), tmp_path, outtype="f32")
    np.testing.assert_array_equal(logits_of(file), logits_of(converted(STEP37, tmp_path / "other")))


REFUSED: dict[str, dict[str, Any]] = {
    "gating per-element": {"gating": "per-element"},
    "moe_router_activation softmax": {"moe_router_activation": "softmax"},
    "dense layers among the expert layers": {"moe_layers_enum": "1,3"},
    "moe_layers_enum 'one'": {"moe_layers_enum": "one"},
    "layer_types of 4 layers": {"layer_types": ["full_attention"]},
    "rope_theta .* of 4 layers": {"rope_theta": [1.0]},
    "rope_theta and partial_rotary_factors that differ among full_attention layers": {
        "rope_theta": [1e4, 1e4, 1e4, 5e6]
    },
    "partial_rotary_factor 0.25 of full_attention layers": {"partial_rotary_factors": [0.25, 1.0, 1.0, 0.25]},
    "RoPE scaling 'yarn' of full_attention layers": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    "query_pre_attn_scalar 16 with heads of 32": {"query_pre_attn_scalar": 16},
    "attention_other_setting.head_dim 16 with heads of 32": {"attention_other_setting": {"head_dim": 16}},
    "swiglu_limits .* of 4 layers": {"swiglu_limits": [0.5]},
    "rope_parameters that are no object": {"rope_parameters": [1]},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_file_can_say(what: str, tmp_path: Path) -> None:
    folder = as_text(tmp_path / "checkpoint", **REFUSED[what])
    with pytest.raises(IkpyError, match=what) as error:
        Conversion(folder)
    assert "\n" not in str(error.value)


def test_heads_that_the_tensors_do_not_have(tmp_path: Path) -> None:
    folder = as_text(tmp_path / "checkpoint", num_sliding_attention_heads=2)
    with pytest.raises(IkpyError, match=r"tensor 'blk.1.attn_q.weight' has wrong shape"):
        Conversion(folder)


def test_a_tensor_that_is_missing(tmp_path: Path) -> None:
    folder = as_text(tmp_path / "checkpoint")
    made.change_tensors(folder, lambda tensors: tensors.pop("model.layers.2.self_attn.g_proj.weight"))
    with pytest.raises(IkpyError, match=r"layer 2 lacks attn_gate.weight"):
        Conversion(folder)
